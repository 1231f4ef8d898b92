"""The objective of a run, resolved against the two models: which layers, matched to which, measured how.

Made once at start from the configuration and both `ModelSpec`s; all checks that need both models are here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from nemo_oprd.batch.token_table import TokenTable, make_rows
from nemo_oprd.batch.types import Rollout
from nemo_oprd.bridge.artifact import open_bridge
from nemo_oprd.bridge.full_width import FULL_WIDTH, full_width_bridge
from nemo_oprd.bridge.maps import Bridge, CapturePoint, ModelIdentity
from nemo_oprd.config.schema import Config, LoggingConfig, OutputLossConfig, TeacherSource
from nemo_oprd.config.weight_schedule import Weight, largest, vanishes, weight_at
from nemo_oprd.losses.divergences import OutputLoss
from nemo_oprd.losses.layer_mapping import layer_pairs
from nemo_oprd.losses.representation import ROW_LOSSES, RowLoss, supervised_layers, weights_of_layers
from nemo_oprd.models import ModelSpec

# what the teacher sends for each output row with sampled_token: log-probability of the token, entropy
SAMPLED_COLUMNS = 2


@dataclass(frozen=True)
class OutputObjective:
    """The output-space term: which divergence, its weight in the total, and over how much of the vocabulary.

    `vocab_size` is that of the ids both models know: models of one family pad theirs differently.

    With `watch_rows` it is no term of the objective, but only measured, in the first and in every `watch_every`-th
    update, on so many rows that `draw` chooses. A sampled token's term is watched in those updates, too: the teacher
    then sends its final hidden states for all rows (`whole`) instead of two numbers, from which the same term and the
    metrics of whole distributions follow.
    """

    loss: OutputLoss
    weight: float
    aggregation: str
    chunk_tokens: int
    vocab_size: int
    watch_every: int = 0
    watch_rows: int = 0
    draw: tuple[int, ...] = ()
    whole: bool = False

    @staticmethod
    def build(config: OutputLossConfig, vocab_size: int, logging: LoggingConfig, seed: int) -> OutputObjective | None:
        """None where there is no such term, and nothing to watch."""
        if config.kind == "none":
            if not logging.output_metrics_every:
                return None
            watched = OutputLoss("full_vocab", config.k, config.temperature)
            watch = logging.output_metrics_every, logging.output_metrics_rows, (seed,)
            return OutputObjective(watched, 0.0, "token_mean", config.chunk_tokens, vocab_size, *watch)
        loss = OutputLoss(
            config.kind,
            config.k,
            config.temperature,
            config.support,
            config.normalizer,
            config.support_weight,
            config.jsd_beta,
            config.clip,
        )
        every = logging.output_metrics_every if config.kind == "sampled_token" else 0
        return OutputObjective(
            loss, largest(config.weight), config.aggregation, config.chunk_tokens, vocab_size, watch_every=every
        )

    @property
    def sampled(self) -> bool:
        """Whether the teacher says only two numbers per token, and not its whole final hidden state."""
        return self.loss.kind == "sampled_token" and not self.whole

    @property
    def ever_needs_states(self) -> bool:
        """Whether in some steps the teacher sends its final hidden states, which take its head to make use of."""
        return self.loss.kind != "sampled_token" or self.watch_every > 0

    @property
    def only_watched(self) -> bool:
        """Whether it is no term of the objective."""
        return self.watch_rows > 0

    def rows(self, rollouts: list[Rollout]) -> TokenTable:
        """One row per response token with mask 1, where its distribution is predicted; some of them to watch."""
        asks = "logging.output_metrics_every" if self.only_watched else f"loss.output.kind={self.loss.kind}"
        table = make_rows(
            rollouts, positions="all", k=1, position="predicting", aggregation=self.aggregation, requested_by=asks
        )
        return table.draw(self.watch_rows, self.draw) if self.only_watched else table

    def for_step(self, step: int, weight: float, *, watch: bool = True) -> OutputObjective | None:
        """The term in the update after `step` others, None where it is only watched and the update is not its turn.

        Args:
            watch: False leaves out what is only watched.
        """
        turn = watch and self.watch_every > 0 and (step == 0 or (step + 1) % self.watch_every == 0)
        if not self.only_watched:
            return replace(self, weight=weight, whole=turn)
        return replace(self, draw=(*self.draw, step)) if turn else None


@dataclass(frozen=True)
class Objective:
    """What the student is trained on.

    `layers` maps student layers to teacher layers (1-based); the term is sum_l w_l L_l / sum_l w_l over the student's,
    with w_l = `layer_weights[l]`. The last layer of each model is taken after its final norm where `final_norm` is set.
    With a `bridge`, what is compared are the projections of both; `trains_bridge` says that the student's side is
    learned, too.

    `weights` are those of the representation and of the output term as configured; `at` gives the objective of one
    step. Made by `of`, `weight` and `output.weight` are the largest of all steps: what is built, and what the guard
    tries before the first step.
    """

    layers: dict[int, int]
    layer_weights: dict[int, float]
    weight: float
    row_loss: RowLoss
    dim_reduction: str
    final_norm: bool
    positions: str
    k: int
    position: str
    aggregation: str
    student: ModelSpec
    teacher: ModelSpec
    output: OutputObjective | None
    bridge: Bridge | None
    reads_ids: bool = True
    trains_bridge: bool = False
    weights: tuple[Weight, Weight] = (1.0, 0.0)

    @staticmethod
    def build(
        config: Config,
        student: ModelSpec,
        teacher: ModelSpec,
        same_tokenizer: Callable[[], bool] = lambda: False,
        *,
        source: TeacherSource | None = None,
        fitting: bool = False,
    ) -> Objective:
        """Raises ValueError where the two models can't be compared as asked for.

        Args:
            source: where the teacher comes from, one of `config.teacher_sources`; None: the only one.
            same_tokenizer: asked where the models know different numbers of ids, which may be padding.
            fitting: a bridge between the two is to be made: shapes may differ, and all response tokens count.
        """
        loss = config.loss.representation
        reads_ids = config.teacher.reads == "ids"
        if reads_ids and student.vocab_size != teacher.vocab_size and not same_tokenizer():
            raise ValueError(
                f"student and teacher have vocabularies of {student.vocab_size} and {teacher.vocab_size} ids; ids "
                "of one tokenizer mean nothing to a model of another: set teacher.reads=text, or choose a teacher with "
                "the student's tokenizer"
            )
        layers = supervised_layers(loss.layers, student.num_layers)
        pairs = layer_pairs(layers, student.num_layers, teacher.num_layers, loss.layer_map)
        source = source or config.teacher_sources[0]
        bridge = None if fitting else _bridge(config, source, student, teacher, pairs)
        if bridge is None:
            if layers and not fitting:
                _check_same_shape(student, teacher)
        else:
            made_for = {layer: bridge.layers[layer] for layer in layers}
            if loss.layer_map is not None and made_for != pairs:
                raise ValueError(
                    f"loss.representation.layer_map={pairs} and {source.bridge} was fitted for {made_for}; "
                    "expected the same pairs: leave layer_map out, or fit a bridge with it"
                )
            pairs = made_for
            if bridge.rank == 1 and loss.kind != "mse":
                raise ValueError(
                    f"loss.representation.kind={loss.kind} with a bridge of rank 1 compares signs of single numbers, "
                    "which have no gradient; expected rank 2 or more: fit again with a larger bridge.rank, or use mse"
                )
        return Objective(
            layers=pairs,
            layer_weights=weights_of_layers(loss.layer_weights, loss.layers, student.num_layers),
            weight=largest(loss.weight),
            row_loss=ROW_LOSSES[loss.kind],
            dim_reduction=loss.dim_reduction,
            final_norm=loss.final_norm,
            positions="all" if fitting else loss.positions,
            k=loss.k,
            position=loss.position,
            aggregation=loss.aggregation,
            student=student,
            teacher=teacher,
            output=None
            if fitting
            else OutputObjective.build(
                config.loss.output, min(student.vocab_size, teacher.vocab_size), config.logging, config.seed
            ),
            bridge=bridge,
            reads_ids=reads_ids,
            trains_bridge=bridge is not None and config.bridge.train,
            weights=(loss.weight, config.loss.output.weight),
        )

    def for_step(self, step: int, *, watch: bool = True) -> Objective:
        """The objective of the update after `step` others; without `watch` nothing but the terms of the loss."""
        representation, output = (weight_at(weight, step) for weight in self.weights)
        term = None if self.output is None else self.output.for_step(step, output, watch=watch)
        return replace(self, weight=representation, output=term)

    def on(self, device: torch.device) -> Objective:
        """The same with its bridge's tensors on `device`; trained ones only where they are trained."""
        if self.bridge is None:
            return self
        return replace(self, bridge=self.bridge.to(device, student=not self.trains_bridge))

    @property
    def vocab_limit(self) -> int:
        """Ids below this one may be sampled: they are known to the student, and to a teacher that reads them."""
        return min(self.student.vocab_size, self.teacher.vocab_size) if self.reads_ids else self.student.vocab_size

    @property
    def trains_head(self) -> bool:
        """Whether a loss reaches the student's LM head."""
        return self.output is not None and self.output.weight > 0

    @property
    def scheduled(self) -> bool:
        """Whether a weight changes over the steps."""
        return any(isinstance(weight, list) for weight in self.weights)

    @property
    def trains_in_parts(self) -> bool:
        """Whether what only the output term reaches is trained in some steps and left alone in others."""
        return self.trains_head and vanishes(self.weights[1])

    @property
    def depth(self) -> int:
        """The deepest student layer that a term looks at."""
        return self.student.num_layers if self.output else max(self.layers)

    @property
    def trained_depth(self) -> int:
        """The deepest student layer that a gradient reaches."""
        return self.student.num_layers if self.trains_head else max(self.layers, default=0)

    @property
    def teacher_depth(self) -> int:
        """The deepest teacher layer that is needed."""
        return self.teacher.num_layers if self.output else max(self.layers.values())

    @property
    def student_final(self) -> int | None:
        """The student's last layer if it is supervised after the final norm."""
        return self.student.num_layers if self.final_norm and self.student.num_layers in self.layers else None

    @property
    def teacher_final(self) -> int | None:
        """The teacher's last layer if it is asked for after the final norm."""
        wanted = self.final_norm and self.teacher.num_layers in self.layers.values()
        return self.teacher.num_layers if wanted else None

    @property
    def target_width(self) -> int:
        """Numbers per supervised row and layer that the teacher sends."""
        return self.teacher.hidden_size if self.bridge is None else self.bridge.rank

    @property
    def project_teacher(self) -> Callable[[int, torch.Tensor], torch.Tensor] | None:
        """(Student layer, [n, d_T]) -> float32 [n, r] that the teacher sends; None where it sends its states."""
        return None if self.bridge is None or self.bridge.full_width else self.bridge.project_teacher

    def rows(self, rollouts: list[Rollout]) -> TokenTable:
        """The supervised rows of a batch."""
        return make_rows(
            rollouts, positions=self.positions, k=self.k, position=self.position, aggregation=self.aggregation
        )


def model_identity(spec: ModelSpec, name: str = "", tokenizer: str | None = None) -> ModelIdentity:
    """What of a model must agree with a bridge; `tokenizer` is its fingerprint."""
    return ModelIdentity(spec.model_type, spec.num_layers, spec.hidden_size, spec.vocab_size, tokenizer, name=name)


def _bridge(
    config: Config, source: TeacherSource, student: ModelSpec, teacher: ModelSpec, pairs: dict[int, int]
) -> Bridge | None:
    """A teacher's bridge, from its directory or, at full width, without tensors yet; None where there is none."""
    if source.bridge is None:
        return None
    loss = config.loss.representation
    models = (
        model_identity(student, config.student.path),
        model_identity(teacher, source.path),
    )
    capture = CapturePoint(loss.position, loss.final_norm)
    if source.bridge == FULL_WIDTH:
        return full_width_bridge(pairs, *models, capture)
    return open_bridge(Path(source.bridge), student=models[0], teacher=models[1], layers=list(pairs), capture=capture)


def _check_same_shape(student: ModelSpec, teacher: ModelSpec) -> None:
    if student.hidden_size != teacher.hidden_size or student.num_layers != teacher.num_layers:
        raise ValueError(
            f"student ({student.num_layers} layers, width {student.hidden_size}) and teacher ({teacher.num_layers} "
            f"layers, width {teacher.hidden_size}) differ in shape; hidden states can be matched directly only "
            "between models of the same depth and width: fit a bridge and set bridge.path (of one of several teachers, "
            "teachers[i].bridge), or choose a teacher of the student's shape"
        )
