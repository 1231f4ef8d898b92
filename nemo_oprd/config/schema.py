"""The configuration schema, and how a configuration is put together: schema <- YAML in conf/ <- command line.

Hydra composes the YAML (so `defaults:` lists and groups work) and parses overrides; after `load_config` everything is
plain dataclasses. Unknown keys and contradictory values are errors that name the key, before anything is loaded.
Checks that need a model (layers in range, sizes that divide) sit where the model is built.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from nemo_oprd.config.weight_schedule import WeightStage
from nemo_oprd.layout import Layout


@dataclass
class ParallelConfig:
    """Parallel sizes of one role; data parallel is what is left of the role's ranks."""

    tensor: int = 1
    sequence: bool = False
    pipeline: int = 1
    virtual_pipeline: int = 1
    context: int = 1
    first_stage_layers: int | None = None
    last_stage_layers: int | None = None

    def layout(self, ranks: int, first_rank: int, role: str) -> Layout:
        """The role's layout on `ranks` consecutive ranks.

        Raises:
            ValueError: the sizes don't fit the ranks.
        """
        needed = self.tensor * self.pipeline * self.context
        if ranks % needed:
            raise ValueError(
                f"{role}.parallel: tensor={self.tensor} * pipeline={self.pipeline} * context={self.context} = {needed} "
                f"does not divide the {ranks} rank(s) of this role; start a multiple of {needed} ranks or change sizes"
            )
        return Layout(
            self.tensor,
            self.context,
            ranks // needed,
            self.pipeline,
            self.virtual_pipeline,
            self.sequence and self.tensor > 1,
            first_rank,
            self.first_stage_layers,
            self.last_stage_layers,
        )


@dataclass
class ModelSource:
    """Where a model comes from: an HF directory, or a Megatron checkpoint made by checkpoint_tools. One of the two."""

    hf_path: str | None = None
    checkpoint: str | None = None

    @property
    def path(self) -> str:
        """The one that is given."""
        return str(self.hf_path or self.checkpoint)


@dataclass
class ModelConfig(ModelSource):
    """A model and its layout."""

    parallel: ParallelConfig = field(default_factory=ParallelConfig)


@dataclass
class StudentConfig(ModelConfig):
    """The trained model."""

    recompute: Literal["none", "selective", "full"] = "none"
    recompute_method: Literal["uniform", "block"] = "uniform"
    recompute_num_layers: int = 1


@dataclass
class TeacherConfig(ModelConfig):
    """The model that is learned from. `dedicated` gives it the last `ranks` ranks for itself.

    It reads the student's token `ids` as they are, or the response's `text` in tokens and a chat template of its own
    (`alignment`), which is the only way where the tokenizers differ.

    With a `prompt` it reads another prompt than the student: the last message is replaced by this template, in which
    {prompt} stands for that message, {answer} and {hint} for those fields of the prompt file.

    `weights` other than its `own` make it the student itself (self-distillation): the `student` at its current weights,
    without a second copy of them; their moving average over the updates, `ema`, with decay `ema_decay`; or the
    `initial` ones, frozen. The first two have the student's layout.

    `resident_microbatches` is how many of the student's microbatches have their targets in memory at a time (null: all
    of a step). `offload` keeps the weights in pinned host memory while the teacher isn't reading.
    """

    placement: Literal["colocated", "dedicated"] = "colocated"
    ranks: int | None = None
    reads: Literal["ids", "text"] = "ids"
    prompt: str | None = None
    weights: Literal["own", "student", "ema", "initial"] = "own"
    ema_decay: float = 0.999
    resident_microbatches: int | None = None
    offload: bool = False


@dataclass
class TeacherSource(ModelSource):
    """One of several teachers: its model, and whose responses it teaches.

    Those to prompts of its `data_sources`; null takes all that no other teacher has. Their losses are multiplied by
    `weight`. `bridge` is its bridge, null where it has the student's shape. `name` is what metrics call it; its data
    sources if null.
    """

    data_sources: list[str] | None = None
    weight: float = 1.0
    bridge: str | None = None
    name: str | None = None

    @property
    def label(self) -> str:
        """Its name in metrics and messages."""
        return self.name or "+".join(self.data_sources or ["others"])


@dataclass
class AdaptiveConfig:
    """Weights of layers, and of positions, by the measured gap between student and teacher (`losses/adaptive.py` has
    the formula); `decay` is that of its moving average over the updates.
    """

    layers: bool = False
    positions: bool = False
    decay: float = 0.9


@dataclass
class RepresentationLossConfig:
    """The hidden-state term (DESIGN: loss semantics). `weight` is the paper's mu, or its schedule over the updates:
    a list of stages such as [{until: 100, weight: 0}, {until: 500, start: 0, weight: 1}], see `WeightStage`.

    `kind` is the distance between two hidden states: mse, normalized_mse, cosine, or MODULE:FUNCTION for a function of
    your own, which is called with the arguments `kind_args` (docs/losses.md).

    `layers: none` leaves the term out altogether, measurement included, for runs on output-space terms alone.

    `layer_map` names the teacher layer of every supervised student layer, {student: teacher}, in place of the paper's
    rule; a bridge is fitted between these pairs.

    `layer_weights` w_l make the term sum_l w_l L_l / sum_l w_l instead of the plain mean over the supervised layers
    (null): a list with one weight per supervised layer, or {layer: weight}, where the other layers have 1.
    """

    weight: float | list[WeightStage] = 1.0
    kind: str = "mse"
    kind_args: dict[str, Any] = field(default_factory=dict)
    layers: Literal["all", "last", "even", "odd", "none"] | list[int] = "all"
    positions: Literal["all", "last_k", "first_k"] = "last_k"
    k: int = 2000
    position: Literal["token", "predicting"] = "token"
    final_norm: bool = True
    aggregation: Literal["sequence_mean", "token_mean"] = "sequence_mean"
    dim_reduction: Literal["mean", "sum"] = "mean"
    layer_weights: list[float] | dict[str, float] | None = None
    layer_map: dict[str, int] | None = None
    adaptive: AdaptiveConfig = field(default_factory=AdaptiveConfig)


@dataclass
class OutputLossConfig:
    """The output-space term (DESIGN: loss semantics; `losses/divergences.py` has the equations). `weight` is the
    paper's weight of OPD in the composition, or its schedule (`WeightStage`).

    `kind` is none, sampled_token, top_k, full_vocab, forward_kl or jsd (docs/losses.md).

    `k`, `support`, `normalizer` and `support_weight` are for top_k; for the other kinds, `k` is the size of the top
    sets whose overlap is measured, and `support` the set whose mass is. `clip` is for sampled_token with
    train.updates_per_rollout > 1: PPO's epsilon, or [low, high], on the ratio to the student that sampled; null doesn't
    clip. `chunk_tokens` bounds the rows whose logits exist at a time.
    """

    weight: float | list[WeightStage] = 0.0
    kind: str = "none"
    k: int = 16
    chunk_tokens: int = 1024
    aggregation: Literal["sequence_mean", "token_mean"] = "sequence_mean"
    temperature: float = 1.0
    support: Literal["student", "teacher", "union", "intersection"] = "student"
    normalizer: Literal["renormalized", "full"] = "renormalized"
    support_weight: Literal["student", "teacher"] = "student"
    jsd_beta: float = 0.5
    clip: float | tuple[float, float] | None = None


@dataclass
class LossConfig:
    """The terms of the total loss."""

    representation: RepresentationLossConfig = field(default_factory=RepresentationLossConfig)
    output: OutputLossConfig = field(default_factory=OutputLossConfig)


@dataclass
class BridgeConfig:
    """The bridge between models of different shape or origin: `path` is a directory that `fit-bridge` made.

    With `train` the student's projectors start from it and are trained together with the student (an ablation: the
    paper's are frozen). `path: full_width` needs no directory: matrices [d_T, d_S], drawn from the seed, learned with
    the student, who is then compared with the teacher's whole states (`train: true`). See docs/bridge.md.

    The others are for fit-bridge: `prompts` are sampled (each `rollout.per_prompt` times), of whose responses
    `held_out` is kept for testing and as much for choices. `baselines` adds the baselines to the report in bridge.json.
    """

    path: str = "none"
    train: bool = False
    rank: Literal["auto"] | int = 8
    fit: Literal["ridge", "adamw"] = "ridge"
    center_student: bool = False
    held_out: float = 0.1
    prompts: int = 512
    baselines: bool = False


@dataclass
class AlignmentConfig:
    """Which of the teacher's states stands for which of the student's, where the teacher reads text.

    That of the last token which ends at or before the end of the student's token; with `exact` only pairs that end on
    the same byte are kept. A batch of which less than `min_coverage` of the tokens has a partner ends the run.
    """

    exact: bool = False
    min_coverage: float = 0.5


@dataclass
class RolloutConfig:
    """How the student samples.

    `tensor` is the tensor-parallel size of the in-process engine; `max_batch` and `max_cache_tokens` bound how many
    sequences, and how many tokens of KV cache, one of its data-parallel ranks holds at a time.
    """

    engine: Literal["megatron", "vllm"] = "megatron"
    temperature: float = 1.0
    top_p: float = 1.0
    max_new_tokens: int = 1024
    per_prompt: int = 1
    replay: str | None = None
    save: bool = False
    tensor: int = 1
    max_batch: int = 256
    max_cache_tokens: int = 524288


@dataclass
class DataConfig:
    """Prompt files: for training, and any number of named sets for validation.

    `train` may be a list of files. Training prompts of more than `max_prompt_tokens` tokens are left out (null: all are
    kept).
    """

    train: str | list[str] | None = None
    max_prompt_tokens: int | None = None
    validation: dict[str, str] = field(default_factory=dict)


@dataclass
class TrainConfig:
    """The optimization.

    The newest `keep_checkpoints` are kept (0: all), and besides the one with the highest `keep_best`, a validation
    metric such as val/heldout/avg@4. An update whose loss or gradient is not finite is skipped; `stop_after_skipped`
    steps in a row with such an update end the run. A step makes `updates_per_rollout` updates on the same rollouts;
    with sampled_token those after the first weigh a token by its ratio to the student that sampled
    (`losses/divergences.py`).
    """

    steps: int = 500
    prompts_per_step: int = 8
    updates_per_rollout: int = 1
    tokens_per_microbatch: int = 16384
    lr: float = 1e-5
    min_lr: float = 0.0
    schedule: Literal["constant", "cosine"] = "constant"
    warmup_fraction: float = 0.0
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.999)
    adam_eps: float = 1e-8
    clip_grad: float = 1.0
    distributed_optimizer: bool = True
    save_every: int = 0
    keep_checkpoints: int = 2
    keep_best: str | None = None
    stop_after_skipped: int = 3
    export_hf: bool = True


@dataclass
class EvaluationConfig:
    """Sampling on the validation sets every `every` steps (0: never), before the first and after the last step."""

    every: int = 0
    samples: int = 4
    temperature: float = 0.7
    top_p: float = 1.0
    max_new_tokens: int | None = None
    limit: int | None = None
    teacher: bool = False


@dataclass
class LoggingConfig:
    """Where metrics go besides metrics.jsonl and the progress line. `wandb` is a project name.

    A term whose size is above `spike_factor` times the median of its last values is reported, and the rollouts kept
    (0: never).

    Without an output-space term, its metrics (entropies, top-k overlap, KL) are measured on `output_metrics_rows`
    response tokens, drawn anew in the first and in every `output_metrics_every`-th update (0: never), with temperature,
    k and chunk_tokens of loss.output. The teacher then has all its layers, and the student the teacher's head. With
    `sampled_token` they are measured in the same updates on all response tokens: the teacher sends its final hidden
    states instead of log-probabilities there. Other terms measure them in every update.

    The gradient's signal and noise are measured before the first and every `gradient_noise_every`-th update (0: never),
    by one more pass over the batch, in halves; copies of both halves' gradients are held meanwhile.
    """

    tensorboard: bool = True
    wandb: str | None = None
    every: int = 1
    spike_factor: float = 10.0
    output_metrics_every: int = 0
    output_metrics_rows: int = 1024
    gradient_noise_every: int = 0


@dataclass
class Config:
    """A complete run.

    `teachers` are several teachers in place of `teacher.hf_path`; the other settings of `teacher` hold for all of them.
    With `teacher.offload` one at a time is in device memory, else all are.
    """

    output: str = "runs/run"
    precision: Literal["fp32", "bf16"] = "bf16"
    seed: int = 0
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
        """The teachers: the several ones, or the only one, which has all responses."""
        if self.teachers:
            return self.teachers
        model = self.teacher if self.teacher.weights == "own" else self.student
        bridge = None if self.bridge.path == "none" else self.bridge.path
        return [TeacherSource(model.hf_path, model.checkpoint, bridge=bridge)]
