"""The configuration schema: one dataclass per group of keys, with the type, range and default of every key.

pydantic checks types and ranges, and a group's own validator the rules between keys of that group. Rules between groups
are in `checks.py`; rules that need the models' config.json are in `setup/preflight.py`.
"""

from __future__ import annotations

from dataclasses import field
from typing import Any, Literal

from pydantic import model_validator
from pydantic.dataclasses import dataclass

from nemo_oprd.config.logging_schema import LoggingConfig
from nemo_oprd.config.loss_schema import AdaptiveConfig, LossConfig, OutputLossConfig, RepresentationLossConfig
from nemo_oprd.config.model_schema import ModelConfig, ModelSource, ParallelConfig, StudentConfig
from nemo_oprd.config.rollout_schema import RolloutConfig, VllmConfig
from nemo_oprd.config.types import (
    STRICT,
    Decay,
    FilePath,
    Fraction,
    HeldOut,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ProbabilityMass,
    SetAside,
    Size,
)
from nemo_oprd.data.prompts import HELD_OUT

__all__ = [
    "AdaptiveConfig",
    "AlignmentConfig",
    "BridgeConfig",
    "Config",
    "DataConfig",
    "EvaluationConfig",
    "LoggingConfig",
    "LossConfig",
    "ModelConfig",
    "ModelSource",
    "OutputLossConfig",
    "ParallelConfig",
    "RepresentationLossConfig",
    "RolloutConfig",
    "StudentConfig",
    "TeacherConfig",
    "TeacherSource",
    "TrainConfig",
    "VllmConfig",
]


@dataclass(config=STRICT)
class TeacherConfig(ModelConfig):
    """The model that the student learns from.

    With `placement: dedicated` the last `ranks` ranks of the job hold nothing but the teacher.

    With `reads: ids` the teacher reads the student's token ids unchanged. With `reads: text` it reads the text of the
    response in its own tokens and its own chat template (see `AlignmentConfig`), which is the only choice where the
    tokenizers differ.

    With a `prompt` the teacher reads another prompt than the student: this template replaces the last message. In the
    template {prompt} stands for the replaced message, and {answer} and {hint} stand for those fields of the prompt
    file.

    With `weights` other than `own` the student is its own teacher (self-distillation): `student` are the student's
    current weights, of which no second copy is made; `ema` is their exponential moving average over the updates, with
    decay `ema_decay`; `initial` are the student's weights before training, frozen. With `student` and `ema` the teacher
    has the student's layout.

    `resident_microbatches` is the number of microbatches of the student whose targets are in memory at the same time
    (null: those of a whole step; auto: what memory allows, see `distillation/target_budget.py`). With `offload` the
    weights are in pinned host memory while the teacher computes nothing.
    """

    placement: Literal["colocated", "dedicated"] = "colocated"
    ranks: Size | None = None
    reads: Literal["ids", "text"] = "ids"
    prompt: str | None = None
    weights: Literal["own", "student", "ema", "initial"] = "own"
    ema_decay: Decay = 0.999
    resident_microbatches: Literal["auto"] | PositiveInt | None = None
    offload: bool = False

    @model_validator(mode="after")
    def _check(self) -> TeacherConfig:
        if self.prompt is not None and "{prompt}" not in self.prompt:
            raise ValueError(
                f"teacher.prompt={self.prompt!r}: expected a text with {{prompt}}, which stands for what the student "
                "reads; put it in"
            )
        if self.placement == "colocated" and self.ranks is not None:
            raise ValueError(f"teacher.ranks={self.ranks} is for teacher.placement=dedicated; set it to null")
        return self


@dataclass(config=STRICT)
class TeacherSource(ModelSource):
    """One of several teachers: its model, and the responses that it teaches.

    The teacher teaches the responses to prompts of its `data_sources`; null stands for all data sources that no other
    teacher has. `weight` multiplies the loss of these responses. `bridge` is the directory of the teacher's bridge, or
    null where the teacher has the student's shape. `name` is the teacher's name in metrics; null stands for its data
    sources.
    """

    data_sources: list[str] | None = None
    weight: PositiveFloat = 1.0
    bridge: FilePath | None = None
    name: str | None = None

    @property
    def label(self) -> str:
        """The teacher's name in metrics and messages."""
        return self.name or "+".join(self.data_sources or ["others"])


@dataclass(config=STRICT)
class BridgeConfig:
    """The bridge between models of different shape or origin. See docs/bridge.md.

    `path` is a directory that fit-bridge made. With `train` the student's projectors start from that bridge and are
    trained together with the student; this is an ablation, as the paper's projectors are frozen. `path: full_width`
    needs no directory and needs `train: true`: the projectors are matrices [d_T, d_S], drawn from the seed and learned
    with the student, and the projected student is compared with the teacher's whole hidden states.

    The other keys are for fit-bridge: it samples `prompts` prompts, `rollout.per_prompt` responses each. The fraction
    `held_out` of the responses is kept for testing, and the same fraction for choosing the rank. `baselines` adds the
    baselines to the report in bridge.json.
    """

    path: FilePath = "none"
    train: bool = False
    rank: Literal["auto"] | PositiveInt = 8
    fit: Literal["ridge", "adamw"] = "ridge"
    center_student: bool = False
    held_out: HeldOut = 0.1
    prompts: PositiveInt = 512
    baselines: bool = False

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
    token. With `exact` only pairs whose tokens end on the same byte are kept. A batch in which less than `min_coverage`
    of the student's tokens have a partner ends the run.
    """

    exact: bool = False
    min_coverage: Fraction = 0.5


@dataclass(config=STRICT)
class DataConfig:
    """Prompt files: those for training, and any number of named sets for validation (docs/data.md).

    `train` is one file, a list of files, which are one pool, or a mapping of files to weights: a file's share of the
    prompts of every step is its share of the weights.

    `suffix` is added to training and validation prompts that do not have it. `held_out` sets a share of the training
    prompts aside as the validation set `held_out`, by a hash of their text. `deduplicate` drops training prompts that
    repeat an earlier one. `contamination` says what happens to training prompts that contain a problem of a validation
    set. `chat_template` replaces the template of the student's tokenizer; `chat_template_args` are variables for the
    templates of all models.

    Training prompts of more than `max_prompt_tokens` tokens (null: any number) are treated as `over_long` says: left
    out, refused, or cut at the beginning of their last message.
    """

    train: FilePath | list[FilePath] | dict[FilePath, PositiveFloat] | None = None
    suffix: str | None = None
    chat_template: FilePath | None = None
    chat_template_args: dict[str, Any] = field(default_factory=dict)
    max_prompt_tokens: PositiveInt | None = None
    over_long: Literal["drop", "refuse", "truncate_left"] = "drop"
    deduplicate: bool = False
    held_out: SetAside = 0.0
    contamination: Literal["warn", "drop", "refuse"] = "warn"
    validation: dict[str, FilePath] = field(default_factory=dict)

    @property
    def train_files(self) -> tuple[str, ...]:
        """The files with training prompts; none if `train` is null."""
        return (self.train,) if isinstance(self.train, str) else tuple(self.train or ())

    @property
    def sets(self) -> tuple[str, ...]:
        """The names of all validation sets, the held-out one last."""
        return (*self.validation, HELD_OUT) if self.held_out else tuple(self.validation)

    @model_validator(mode="after")
    def _check(self) -> DataConfig:
        if self.train == [] or self.train == {}:
            raise ValueError(
                f"data.train={self.train}: expected a file of prompts, or several; name one, or set it to null"
            )
        if self.suffix is not None and not self.suffix.strip():
            raise ValueError(f"data.suffix={self.suffix!r}: expected text that is not blank; write it, or set null")
        if self.over_long != "drop" and self.max_prompt_tokens is None:
            raise ValueError(
                f"data.over_long={self.over_long} without a limit: expected data.max_prompt_tokens; set it, or leave "
                "data.over_long at drop"
            )
        if self.held_out and HELD_OUT in self.validation:
            raise ValueError(
                f"data.validation.{HELD_OUT}={self.validation[HELD_OUT]}: data.held_out={self.held_out} makes a set of "
                "that name; expected another one: rename the set, or set data.held_out=0"
            )
        return self


@dataclass(config=STRICT)
class TrainConfig:
    """The optimization.

    A checkpoint is saved every `save_every` steps (0: never), and after the first step that ends `save_minutes` or more
    after the last save (0: never), which bounds what a job that dies loses whatever a step takes.

    The newest `keep_checkpoints` checkpoints are kept (0: all of them), and also the checkpoint with the highest value
    of `keep_best`, a validation metric such as val/heldout/avg@4. An update whose loss or gradient is not finite is
    skipped; `stop_after_skipped` steps in a row with a skipped update end the run. A step makes `updates_per_rollout`
    updates on the same rollouts; with sampled_token every update after the first weights a token by the ratio of its
    probability to that under the student that sampled it (`losses/divergences.py`).

    `allow_changes` names the keys, or groups of keys such as loss.output, with which a run may go on although they
    change what is learned (docs/runs.md, "Changed settings").
    """

    steps: PositiveInt = 500
    prompts_per_step: PositiveInt = 8
    updates_per_rollout: PositiveInt = 1
    tokens_per_microbatch: PositiveInt = 16384
    lr: PositiveFloat = 1e-5
    min_lr: NonNegativeFloat = 0.0
    schedule: Literal["constant", "cosine"] = "constant"
    warmup_fraction: Fraction = 0.0
    weight_decay: NonNegativeFloat = 0.01
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    adam_eps: PositiveFloat = 1e-8
    clip_grad: NonNegativeFloat = 1.0
    distributed_optimizer: bool = True
    save_every: NonNegativeInt = 0
    save_minutes: NonNegativeFloat = 0.0
    keep_checkpoints: NonNegativeInt = 2
    keep_best: str | None = None
    stop_after_skipped: PositiveInt = 3
    export_hf: bool = True
    allow_changes: list[str] = field(default_factory=list)

    @model_validator(mode="after")
    def _check(self) -> TrainConfig:
        if self.min_lr > self.lr:
            raise ValueError(f"train.min_lr={self.min_lr} is above train.lr={self.lr}; expected at most that: lower it")
        return self


@dataclass(config=STRICT)
class EvaluationConfig:
    """Sampling on the validation sets every `every` steps (0: never), before the first and after the last step.

    `graders` maps a set in `data.validation` to a grader; the data source chooses for the other sets
    (docs/evaluation.md). `judge` says whether math-verify decides where two answers differ as text.
    """

    every: NonNegativeInt = 0
    samples: PositiveInt = 4
    temperature: NonNegativeFloat = 0.7
    top_p: ProbabilityMass = 1.0
    max_new_tokens: PositiveInt | None = None
    limit: PositiveInt | None = None
    teacher: bool = False
    graders: dict[str, str] = field(default_factory=dict)
    judge: Literal["math_verify", "text"] = "math_verify"


@dataclass(config=STRICT)
class Config:
    """A complete run.

    `teachers` is a list of several teachers, which replaces `teacher.hf_path`; the other keys of `teacher` apply to all
    of them. With `teacher.offload` one teacher at a time is in device memory, without it all of them are.
    """

    output: FilePath = "runs/run"
    precision: Literal["fp32", "bf16"] = "bf16"
    seed: NonNegativeInt = 0
    student: StudentConfig = field(default_factory=StudentConfig)
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    teachers: list[TeacherSource] = field(default_factory=list)
    bridge: BridgeConfig = field(default_factory=BridgeConfig)
    alignment: AlignmentConfig = field(default_factory=AlignmentConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)

    @property
    def teacher_sources(self) -> list[TeacherSource]:
        """The list of several teachers, or the only teacher, which has all responses."""
        if self.teachers:
            return self.teachers
        model = self.teacher if self.teacher.weights == "own" else self.student
        bridge = None if self.bridge.path == "none" else self.bridge.path
        return [TeacherSource(model.hf_path, model.checkpoint, model.provider, bridge=bridge)]
