"""The configuration schema: one dataclass per group of keys, with the type, range and default of every key.

A key is documented below its field, and the type around it holds the rule for resumed runs; `keys.py` reads both.
Pydantic checks types and ranges, and a group's own validator the rules between keys of that group. Rules between
groups are in `checks.py`; rules that need the models' config.json are in `run/checks.py`.
"""

from __future__ import annotations

from dataclasses import dataclass as frozen_dataclass
from dataclasses import field
from typing import Any, Literal

from pydantic import model_validator
from pydantic.dataclasses import dataclass

from nemo_oprd.batch.layout import Layout
from nemo_oprd.config.model_schema import ModelSource, ParallelConfig, StudentConfig, TeacherConfig, TeacherSource
from nemo_oprd.config.rollout_schema import RolloutConfig, ServerConfig, VllmConfig
from nemo_oprd.config.teacher_kinds import SERVED, TEACHER_KINDS
from nemo_oprd.config.types import (
    STRICT,
    Decay,
    FilePath,
    Fixed,
    Fraction,
    Free,
    HeldOut,
    Learned,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ProbabilityMass,
    SetAside,
)
from nemo_oprd.config.weight_schedule import Weight, largest
from nemo_oprd.data.prompts import HELD_OUT
from nemo_oprd.losses.output_loss import DivergenceOptions
from nemo_oprd.losses.registry import check_row_loss

# The keys of `bridge` and `alignment`: models of different shape, and models with different tokenizers.


@dataclass(config=STRICT, frozen=True)
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


@dataclass(config=STRICT, frozen=True)
class AlignmentConfig:
    """The alignment of the student's tokens with the teacher's, if the teacher reads text.

    The partner of a student's token is the last token of the teacher that ends at or before the end of the student's
    token.
    """

    exact: Learned[bool] = False
    """keep only pairs of tokens that end on the same byte"""
    min_coverage: Free[Fraction] = 0.5
    """least fraction of response tokens with a partner; a batch below it ends the run"""


# The keys of `train`: the optimization and the saved files.


@dataclass(config=STRICT, frozen=True)
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


# The keys of `data`: the prompts for training and for validation.


@dataclass(config=STRICT, frozen=True)
class DataConfig:
    """Prompt files: those for training, and any number of named sets for validation (docs/data.md)."""

    train: FilePath | list[FilePath] | dict[FilePath, PositiveFloat] | None = None
    """file of training prompts, several files as one pool, or files with weights

    A file's share of the prompts of every step is its share of the weights.
    """
    suffix: str | None = None
    """text at the end of the last message of every prompt that does not have it; null: none"""
    chat_template: FilePath | None = None
    """Jinja file in place of the chat template of the student's tokenizer; null: its own"""
    chat_template_args: dict[str, Any] = field(default_factory=dict)
    """variables for the chat templates, e.g. {enable_thinking: false}"""
    max_prompt_tokens: PositiveInt | None = None
    """largest number of tokens of a training prompt; null: any"""
    over_long: Literal["drop", "refuse", "truncate_left"] = "drop"
    """what happens to longer training prompts: left out, an error, or cut at the beginning"""
    deduplicate: bool = False
    """drop training prompts that repeat an earlier one"""
    held_out: SetAside = 0.0
    """share of the training problems that is set aside as the validation set `held_out`"""
    contamination: Literal["warn", "drop", "refuse"] = "warn"
    """what happens to training prompts that contain a problem of a validation set"""
    validation: dict[str, FilePath] = field(default_factory=dict)
    """name of a validation set -> its file"""

    @property
    def train_files(self) -> tuple[str, ...]:
        """Returns the files with training prompts; none if `train` is null."""
        return (self.train,) if isinstance(self.train, str) else tuple(self.train or ())

    @property
    def sets(self) -> tuple[str, ...]:
        """Returns the names of all validation sets, the held-out one last."""
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


# The keys of `evaluation` and `logging`: measurements besides the losses, and the targets of metrics.


@dataclass(config=STRICT, frozen=True)
class EvaluationConfig:
    """Sampling on validation sets every `every` steps, before the first and after the last (docs/evaluation.md)."""

    every: NonNegativeInt = 0
    """steps between evaluations; 0: none"""
    samples: PositiveInt = 4
    """responses per problem"""
    temperature: NonNegativeFloat = 0.7
    """of sampling"""
    top_p: ProbabilityMass = 1.0
    """of sampling"""
    max_new_tokens: PositiveInt | None = None
    """most tokens of a response; null: `rollout.max_new_tokens`"""
    limit: PositiveInt | None = None
    """problems per set; null: all"""
    teacher: bool = False
    """evaluate the teacher once, before training"""
    graders: dict[str, str] = field(default_factory=dict)
    """set: its grader, a name or MODULE:FUNCTION (docs/evaluation.md); others: by data source or form of answers"""
    judge: Literal["math_verify", "text"] = "math_verify"
    """what compares answers that differ as text: math-verify, or `text`: nothing, they differ"""


@dataclass(config=STRICT, frozen=True)
class LoggingConfig:
    """Metrics: where they go besides metrics.jsonl, and measurements that are not made in every step."""

    tensorboard: bool = True
    """write TensorBoard files"""
    wandb: str | None = None
    """name of a W&B project; null: none"""
    every: PositiveInt = 1
    """steps between progress lines"""
    spike_factor: NonNegativeFloat = 10.0
    """report a term above so many times its median; 0: never

    The median is that of the term's latest values. The rollouts of that step are kept.
    """
    output_metrics_every: NonNegativeInt = 0
    """steps between measurements of the output space; 0: none

    Entropies, top-k overlap and KL, with the temperature, k, support and chunk_tokens of loss.output, in the first
    step, too. Without an output-space term they are measured on rows that are drawn anew each time; the teacher then
    has all of its layers, and the student holds a copy of the teacher's head. With `sampled_token` they are measured on
    all response tokens, for which the teacher sends its final hidden states instead of log-probabilities. The other
    kinds measure them in every update.
    """
    output_metrics_rows: PositiveInt = 1024
    """response tokens of such a measurement

    Drawn anew for each step, the same ones in every layout. With an output-space term other than top_k, the top sets
    of `val-topk/*` are searched in so many tokens of each update; the other metrics are those of all tokens.
    """
    gradient_noise_every: NonNegativeInt = 0
    """steps between measurements of the gradient's noise; 0: none

    Before the first step, too, by one more pass over the batch, in halves. Copies of the gradients of both halves are
    in memory meanwhile.
    """
    token_metrics: NonNegativeInt = 0
    """responses per logged step whose values are kept token by token; 0: none

    In rollouts/token_metrics_*.jsonl for the report to colour: of the first step, of every step with a progress line
    and of the last one.
    """

    def keeps_token_metrics(self, step: int | None, steps: int) -> bool:
        """Returns whether the step after `step` others, of `steps` in all, keeps values per token; False for None."""
        return step is not None and (step == 0 or (step + 1) % self.every == 0 or step + 1 == steps)


# The keys of `loss`: the terms, their weights and the states that they compare (docs/design.md, "Loss semantics").


@dataclass(config=STRICT, frozen=True)
class AdaptiveConfig:
    """Weights of layers and of positions that follow the measured gap between student and teacher.

    `distillation/adaptive_weights.py` has the formula.
    """

    layers: bool = False
    """weigh layers by their measured gap"""
    positions: bool = False
    """weigh positions by their measured gap"""
    decay: Decay = 0.9
    """decay of the gap's moving average over the updates"""


@dataclass(config=STRICT, frozen=True)
class RepresentationLossConfig:
    """The hidden-state term."""

    weight: Weight = 1.0
    """weight of the hidden-state term (the paper's mu), or its schedule over the steps

    A schedule is a list of stages such as [{until: 100, weight: 0}, {until: 500, start: 0, weight: 1}] (docs/runs.md,
    "Schedules").
    """
    kind: str = "mse"
    """the distance between two hidden states: a name that docs/losses.md lists, or MODULE:FUNCTION of your own"""
    kind_args: dict[str, Any] = field(default_factory=dict)
    """further arguments of the distance"""
    layers: Literal["all", "last", "even", "odd", "none"] | list[int] = "all"
    """supervised student layers, counted from 1

    `none` removes the term and its measurement, for runs that have output-space terms only.
    """
    positions: Literal["all", "last_k", "first_k"] = "last_k"
    """which response tokens: all, or the last or first `k` with mask 1"""
    k: PositiveInt = 2000
    """number of these tokens per response"""
    position: Literal["token", "predicting"] = "token"
    """state where the token is the input, or one earlier, where it is predicted"""
    final_norm: bool = True
    """take the last layer's state after the final norm"""
    aggregation: Literal["sequence_mean", "token_mean"] = "sequence_mean"
    """mean per response and then over responses, or over all tokens"""
    dim_reduction: Literal["mean", "sum"] = "mean"
    """mean or sum over the width"""
    layer_weights: list[float] | dict[str, float] | None = None
    """weights of the layers in their mean; null: equal ones

    One weight per supervised layer, or {layer: weight}, where all other layers have weight 1. With weights w_l the term
    is sum_l w_l L_l / sum_l w_l.
    """
    layer_map: dict[str, int] | None = None
    """teacher layer of each student layer; null: the paper's rule

    {student: teacher} for every supervised layer. A bridge is fitted between these pairs.
    """
    adaptive: AdaptiveConfig = field(default_factory=AdaptiveConfig)

    @model_validator(mode="after")
    def _check(self) -> RepresentationLossConfig:
        check_row_loss(self.kind, self.kind_args)
        given = self.layer_weights or []
        for weight in given.values() if isinstance(given, dict) else given:
            if weight <= 0:
                raise ValueError(
                    f"loss.representation.layer_weights holds {weight}: expected numbers above 0; leave a layer that "
                    "must not count out of loss.representation.layers"
                )
        if self.layers == "none" and (self.adaptive.layers or self.adaptive.positions):
            raise ValueError(
                f"loss.representation.adaptive.layers={str(self.adaptive.layers).lower()} and positions="
                f"{str(self.adaptive.positions).lower()} with loss.representation.layers=none: nothing has weights to "
                "adapt; expected false: set both, or choose layers"
            )
        return self


@dataclass(config=STRICT, frozen=True)
class OutputLossConfig(DivergenceOptions):
    """The output-space term: a divergence (`losses/output_loss.py` has its keys), its weight, and its computation."""

    k: PositiveInt = 16
    weight: Weight = 0.0
    """weight of the output-space term, or its schedule over the steps"""
    chunk_tokens: Free[PositiveInt] = 1024
    """rows whose logits are in memory at a time"""
    aggregation: Literal["sequence_mean", "token_mean"] = "sequence_mean"
    """as `loss.representation.aggregation`, over all response tokens"""

    @model_validator(mode="after")
    def _check(self) -> OutputLossConfig:
        if self.is_off and largest(self.weight) > 0:
            given = "a schedule" if isinstance(self.weight, list) else self.weight
            raise ValueError(f"loss.output.weight={given} with loss.output.kind=none; choose a kind, or weight 0")
        return self


@dataclass(config=STRICT, frozen=True)
class LossConfig:
    """The terms of the total loss."""

    representation: Learned[RepresentationLossConfig] = field(default_factory=RepresentationLossConfig)
    output: Learned[OutputLossConfig] = field(default_factory=OutputLossConfig)

    @model_validator(mode="after")
    def _check(self) -> LossConfig:
        if self.representation.layers == "none" and self.output.is_off:
            raise ValueError(
                "loss.representation.layers=none and loss.output.kind=none: expected something to learn; choose layers "
                "or a kind"
            )
        return self


__all__ = [
    "AdaptiveConfig",
    "Config",
    "EvaluationConfig",
    "LoggingConfig",
    "ModelSource",
    "OutputLossConfig",
    "ParallelConfig",
    "RepresentationLossConfig",
    "RolloutConfig",
    "ServerConfig",
    "StudentConfig",
    "TeacherConfig",
    "TeacherSource",
    "TrainConfig",
    "VllmConfig",
]


@frozen_dataclass(frozen=True)
class OwnConversation:
    """The settings of the conversation that a teacher reads, from the keys with these names.

    Attributes:
        chat_template_args: all variables of the teacher's chat template, those of `data` included.
        is_set: whether `teacher` or the teacher's entry in `teachers` sets any of the three keys.
    """

    system_prompt: str | None
    chat_template: str | None
    chat_template_args: dict[str, Any]
    is_set: bool


@dataclass(config=STRICT, frozen=True)
class Config:
    """The configuration of a run."""

    output: Free[FilePath] = "runs/run"
    """directory of the run"""
    precision: Fixed[Literal["fp32", "bf16"]] = "bf16"
    """of both models and of what is sent between them; optimizer states and gradients are float32"""
    seed: Fixed[NonNegativeInt] = 0
    """of sampling, the order of prompts and everything else that is random"""
    student: StudentConfig = field(default_factory=StudentConfig)
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    teachers: Learned[list[TeacherSource]] = field(default_factory=list)
    """several teachers, each with its responses; replaces `teacher.hf_path`"""
    bridge: BridgeConfig = field(default_factory=BridgeConfig)
    alignment: AlignmentConfig = field(default_factory=AlignmentConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    data: Learned[DataConfig] = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    evaluation: Free[EvaluationConfig] = field(default_factory=EvaluationConfig)
    logging: Free[LoggingConfig] = field(default_factory=LoggingConfig)

    @property
    def response_limit(self) -> tuple[str, int]:
        """Returns the key that limits the sampled training responses, and the maximum tokens of one."""
        k, limit = self.loss.representation.k, self.rollout.max_new_tokens
        stops = self.rollout.stop_after == "supervised" and k < limit
        return ("loss.representation.k", k) if stops else ("rollout.max_new_tokens", limit)

    @property
    def teacher_sources(self) -> list[TeacherSource]:
        """Returns the list of several teachers, or the only teacher, which has all responses."""
        if self.teachers:
            return self.teachers
        model = self.teacher if TEACHER_KINDS[self.teacher.weights].own_model else self.student
        bridge = None if self.bridge.path == "none" else self.bridge.path
        return [TeacherSource(model.hf_path, model.checkpoint, model.provider, bridge=bridge)]

    def distributes_optimizer(self, student: Layout) -> bool:
        """Returns whether the state of the student's optimizer is divided over its data-parallel ranks."""
        chosen = self.train.distributed_optimizer
        if chosen == "auto":
            # Megatron's plain bf16 optimizer can't save projectors, which are float32
            return student.data * student.context > 1 or (self.bridge.train and self.precision == "bf16")
        return chosen

    def conversation_of(self, number: int) -> OwnConversation:
        """Returns teacher `number`'s settings: its own keys, else those of `teacher`; template variables are merged."""
        shared, own = self.teacher, self.teacher_sources[number]
        system_prompt = own.system_prompt if own.system_prompt is not None else shared.system_prompt
        chat_template = own.chat_template or shared.chat_template
        variables = {**shared.chat_template_args, **own.chat_template_args}
        is_set = system_prompt is not None or chat_template is not None or bool(variables)
        return OwnConversation(
            system_prompt, chat_template, {**self.data.chat_template_args, **variables}, is_set=is_set
        )

    def has_own_prompt(self, number: int) -> bool:
        """Returns whether teacher `number` reads another prompt than the student, before the student's response ids."""
        return self.teacher.prompt is not None or self.conversation_of(number).is_set

    @property
    def own_prompts(self) -> list[int]:
        """Returns the numbers of the teachers that read another prompt than the student."""
        return [number for number in range(len(self.teacher_sources)) if self.has_own_prompt(number)]

    def is_served(self, source: TeacherSource) -> bool:
        """Returns whether vLLM servers compute this teacher's states."""
        return SERVED[source.engine or self.teacher.engine]

    @property
    def served_teachers(self) -> list[int]:
        """Returns the numbers (from 0) of the teachers whose states vLLM servers compute."""
        return [number for number, source in enumerate(self.teacher_sources) if self.is_served(source)]

    @property
    def started_teachers(self) -> list[int]:
        """Returns the numbers of the teachers whose vLLM servers this run starts."""
        return [number for number in self.served_teachers if not self.teacher_endpoints(number)]

    @property
    def has_own_teachers(self) -> bool:
        """Returns whether ranks of this job compute the states of any teacher."""
        return len(self.served_teachers) < len(self.teacher_sources)

    @property
    def teacher_server_share(self) -> float:
        """Returns the fraction of a GPU's memory for one teacher's server; colocated teachers divide that of `auto`."""
        settings = self.teacher.vllm
        if settings.gpu_memory_utilization != "auto" or settings.placement == "dedicated":
            return settings.memory_share
        return settings.memory_share / max(1, len(self.started_teachers))

    def teacher_endpoints(self, number: int) -> list[str]:
        """Returns the addresses of the external servers of teacher `number`; empty: this run starts them."""
        own = self.teacher_sources[number].endpoints
        return self.teacher.vllm.endpoints if own is None else own
