"""The keys of `bridge` and `alignment`: models of different shape, and models with different tokenizers."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator
from pydantic.dataclasses import dataclass

from nemo_oprd.config.types import STRICT, FilePath, Fraction, Free, HeldOut, Learned, PositiveInt


@dataclass(config=STRICT)
class BridgeConfig:
    """The bridge between models of different shape or origin (docs/bridge.md).

    `path` and `train` are for training, the other keys for fit-bridge.
    """

    path: Learned[FilePath] = "none"
    """directory of a fitted bridge, `none`, or `full_width` for learned matrices

    At full width the projectors are matrices [d_T, d_S], drawn from the seed and trained, and the projected student is
    compared with the teacher's whole hidden states.
    """
    train: Learned[bool] = False
    """train the student's projectors together with the student

    They start from the bridge in `path`. This is an ablation: the paper's projectors are frozen.
    """
    rank: Free[Literal["auto"] | PositiveInt] = 8
    """width of the shared space that fit-bridge makes"""
    fit: Free[Literal["ridge", "adamw"]] = "ridge"
    """closed form, or AdamW as in the paper's code"""
    center_student: Free[bool] = False
    """subtract the student's mean before projecting"""
    held_out: Free[HeldOut] = 0.1
    """fraction of responses for testing, and the same for choosing the rank"""
    prompts: Free[PositiveInt] = 512
    """prompts that fit-bridge samples"""
    baselines: Free[bool] = False
    """add five baselines to bridge.json"""

    @model_validator(mode="after")
    def _check(self) -> BridgeConfig:
        if self.path == "full_width" and not self.train:
            raise ValueError(
                "bridge.path=full_width with bridge.train=false would compare through frozen random matrices; expected "
                "bridge.train=true: set it, or fit a bridge and name its directory"
            )
        if self.path == "none" and self.train:
            raise ValueError(
                "bridge.train=true with bridge.path=none: expected a bridge to train; set bridge.path to a directory "
                "that fit-bridge made, or to full_width"
            )
        return self


@dataclass(config=STRICT)
class AlignmentConfig:
    """Which hidden state of the teacher is compared with which one of the student, where the teacher reads text.

    The partner of a student's token is the last token of the teacher that ends at or before the end of the student's
    token.
    """

    exact: Learned[bool] = False
    """keep only pairs of tokens that end on the same byte"""
    min_coverage: Free[Fraction] = 0.5
    """least fraction of response tokens with a partner; a batch below it ends the run"""
