"""The keys of `train`: the optimization, and what is saved."""

from __future__ import annotations

from dataclasses import field
from typing import Literal

from pydantic import model_validator
from pydantic.dataclasses import dataclass

from nemo_oprd.config.types import (
    STRICT,
    Decay,
    Fraction,
    Free,
    Learned,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
)


@dataclass(config=STRICT)
class TrainConfig:
    """The optimization, and what is saved."""

    steps: Learned[PositiveInt] = 500
    """number of steps"""
    prompts_per_step: Learned[PositiveInt] = 8
    """prompts of a step"""
    updates_per_rollout: Learned[PositiveInt] = 1
    """updates on the same rollouts

    With sampled_token every update after the first weighs a token by the ratio of its probability to that under the
    student that sampled it (docs/losses.md).
    """
    tokens_per_microbatch: Free[PositiveInt] = 16384
    """tokens of a packed microbatch"""
    lr: Learned[PositiveFloat] = 1e-5
    """learning rate after warm-up"""
    min_lr: Learned[NonNegativeFloat] = 0.0
    """learning rate at the end of a cosine schedule"""
    schedule: Learned[Literal["constant", "cosine"]] = "constant"
    """of the learning rate"""
    warmup_fraction: Learned[Fraction] = 0.0
    """share of the steps with a rising learning rate"""
    weight_decay: Learned[NonNegativeFloat] = 0.01
    """of matrices; vectors have none"""
    betas: Learned[tuple[Decay, Decay]] = (0.9, 0.999)
    """of AdamW"""
    adam_eps: Learned[PositiveFloat] = 1e-8
    """of AdamW"""
    clip_grad: Learned[NonNegativeFloat] = 1.0
    """largest gradient norm; 0: no clipping"""
    distributed_optimizer: Free[Literal["auto"] | bool] = "auto"
    """divide the optimizer's state over the data-parallel ranks

    `auto` does so from two data-parallel ranks on (context-parallel ranks count), and for `bridge.train=true` in bf16.
    Over one rank it would only move the gradients and the weights once more. A checkpoint resumes with either.
    """
    save_every: Free[NonNegativeInt] = 0
    """steps between checkpoints; 0: none"""
    save_minutes: Free[NonNegativeFloat] = 0.0
    """also save after the first step that ends so long after the last save; 0: never"""
    keep_checkpoints: Free[NonNegativeInt] = 2
    """newest checkpoints that are kept; 0: all"""
    keep_best: Free[str | None] = None
    """validation metric whose best checkpoint is kept, too"""
    stop_after_skipped: Free[PositiveInt] = 3
    """steps in a row with a skipped update that end the run"""
    export_hf: Free[bool] = True
    """export the student to OUTPUT/hf at the end"""
    allow_changes: Free[list[str]] = field(default_factory=list)
    """keys, or groups of them, with which a run may go on although they change what is learned"""

    @model_validator(mode="after")
    def _check(self) -> TrainConfig:
        if self.min_lr > self.lr:
            raise ValueError(f"train.min_lr={self.min_lr} is above train.lr={self.lr}; expected at most that: lower it")
        return self
