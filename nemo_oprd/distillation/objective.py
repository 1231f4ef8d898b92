"""What a run trains on, resolved once against the models; and what one update trains on.

`Objective` is made at start from the configuration and the models' shapes, and holds every check that needs them.
`StepObjective` is what one update is about: the terms at their weights in that update. It is immutable, made once per
update, and handed to teachers and student alike, so neither resolves anything again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from nemo_oprd.batch.position_bins import row_bins
from nemo_oprd.batch.token_table import TokenTable, make_rows
from nemo_oprd.batch.types import Rollout
from nemo_oprd.bridge.artifact import open_bridge
from nemo_oprd.bridge.full_width import FULL_WIDTH, full_width_bridge
from nemo_oprd.bridge.maps import Bridge, CapturePoint, ModelIdentity
from nemo_oprd.config.schema import Config, OutputLossConfig, TeacherSource
from nemo_oprd.config.weight_schedule import Weight, largest, vanishes, weight_at
from nemo_oprd.losses.divergences import OutputLoss
from nemo_oprd.losses.layer_mapping import layer_pairs, supervised_layers, weights_of_layers
from nemo_oprd.losses.registry import resolve_row_loss
from nemo_oprd.losses.representation import RowLoss
from nemo_oprd.models import ModelSpec, check_same_shape


@dataclass(frozen=True)
class OutputTerm:
    """The output-space term of one update: which divergence, at which weight, over which rows.

    `sends_states` says what the teacher sends per row: its final hidden state, from which its distribution follows, or
    two numbers (log-probability of the sampled token, entropy). A term with `drawn_rows` is only measured, on so many
    rows that `draw_key` chooses (`watched_metrics.py`); 0 is a term of the loss, on all response tokens.
    """

    loss: OutputLoss
    weight: float
    aggregation: str
    chunk_tokens: int
    sends_states: bool
    drawn_rows: int = 0
    draw_key: tuple[int, ...] = ()

    @staticmethod
    def build(config: OutputLossConfig) -> OutputTerm | None:
        """The loss's term at its largest weight; None where the configuration has none."""
        if config.kind == "none":
            return None
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
        sends_states = config.kind != "sampled_token"
        return OutputTerm(loss, largest(config.weight), config.aggregation, config.chunk_tokens, sends_states)

    @property
    def only_watched(self) -> bool:
        """Whether it is measured without being a term of the loss."""
        return self.drawn_rows > 0

    def rows(self, rollouts: list[Rollout]) -> TokenTable:
        """One row per response token with mask 1, at the position that predicts it; some of them where drawn."""
        asks = "logging.output_metrics_every" if self.only_watched else f"loss.output.kind={self.loss.kind}"
        table = make_rows(
            rollouts, positions="all", k=1, position="predicting", aggregation=self.aggregation, requested_by=asks
        )
        return table.draw(self.drawn_rows, self.draw_key) if self.only_watched else table


@dataclass(frozen=True)
class TeacherMatch:
    """How one teacher is compared with the student.

    `layers` maps supervised student layers to the teacher's (1-based). With a `bridge` the projections of both sides
    are compared. `final_layer` is the teacher's last layer where it is taken after the final norm, else None.
    """

    spec: ModelSpec
    layers: dict[int, int]
    bridge: Bridge | None
    final_layer: int | None
    shared_vocab: int  # ids below it are known to both models: models of one family pad their vocabularies differently

    @property
    def width(self) -> int:
        """Numbers per supervised row and layer that the teacher sends."""
        return self.spec.hidden_size if self.bridge is None else self.bridge.rank

    @property
    def project(self) -> Callable[[int, torch.Tensor], torch.Tensor] | None:
        """(Student layer, [n, D] of the teacher) -> float32 [n, R] that it sends; None where it sends its states."""
        return None if self.bridge is None or self.bridge.full_width else self.bridge.project_teacher


@dataclass(frozen=True)
class Objective:
    """What a run trains the student on.

    The representation term is sum_l w_l L_l / sum_l w_l over the supervised student layers, with w_l =
    `layer_weights[l]`. The last layer of each model is taken after its final norm where `final_norm` is set.
    `trains_bridge` says that the student's side of the bridge is learned, too. `weights` are those of the
    representation and of the output term as configured: numbers, or schedules over the updates. `output` has its
    largest weight.
    """

    student: ModelSpec
    teachers: tuple[TeacherMatch, ...]
    layer_weights: dict[int, float]
    row_loss: RowLoss
    dim_reduction: str
    final_norm: bool
    positions: str
    k: int
    position: str
    aggregation: str
    output: OutputTerm | None
    reads_ids: bool = True
    trains_bridge: bool = False
    weights: tuple[Weight, Weight] = (1.0, 0.0)

    @staticmethod
    def build(
        config: Config,
        student: ModelSpec,
        teachers: Sequence[ModelSpec],
        same_tokenizer: Callable[[int], bool] = lambda number: False,
        *,
        fitting: bool = False,
    ) -> Objective:
        """Raises ValueError where the models can't be compared as the configuration asks.

        Args:
            teachers: one per entry of `config.teacher_sources`.
            same_tokenizer: teacher's number -> whether its tokenizer is the student's; asked where the models know
                different numbers of ids, which may be padding.
            fitting: a bridge between the two models is to be made: shapes may differ, all response tokens count.
        """
        loss = config.loss.representation
        matches = []
        for number, (spec, source) in enumerate(zip(teachers, config.teacher_sources, strict=True)):
            if config.teacher.reads == "ids" and student.vocab_size != spec.vocab_size and not same_tokenizer(number):
                raise ValueError(
                    f"student and teacher have vocabularies of {student.vocab_size} and {spec.vocab_size} ids; ids of "
                    "one tokenizer mean nothing to a model of another: set teacher.reads=text, or choose a teacher "
                    "with the student's tokenizer"
                )
            matches.append(_match(config, source, student, spec, fitting=fitting))
        for width in sorted({match.width for match in matches}):  # tried on rows of every width that occurs
            tried = None if fitting else width
            row_loss = resolve_row_loss(loss.kind, loss.kind_args, loss.dim_reduction, tried)
        return Objective(
            student=student,
            teachers=tuple(matches),
            layer_weights=weights_of_layers(loss.layer_weights, loss.layers, student.num_layers),
            row_loss=row_loss,
            dim_reduction=loss.dim_reduction,
            final_norm=loss.final_norm,
            positions="all" if fitting else loss.positions,
            k=loss.k,
            position=loss.position,
            aggregation=loss.aggregation,
            output=None if fitting else OutputTerm.build(config.loss.output),
            reads_ids=config.teacher.reads == "ids",
            trains_bridge=matches[0].bridge is not None and config.bridge.train,
            weights=(loss.weight, config.loss.output.weight),
        )

    def for_step(
        self,
        step: int | None,
        *,
        layer_weights: dict[int, float] | None = None,
        position_factors: np.ndarray | None = None,
    ) -> StepObjective:
        """The objective of the update after `step` others; None: all terms at their largest weights.

        Args:
            layer_weights: in place of `self.layer_weights`, by the measured gap (`adaptive_weights.py`).
            position_factors: see `StepObjective`.
        """
        representation, output = (
            largest(weight) if step is None else weight_at(weight, step) for weight in self.weights
        )
        term = None if self.output is None else replace(self.output, weight=output)
        weights = self.layer_weights if layer_weights is None else layer_weights
        return StepObjective(self, representation, weights, position_factors, term)

    def on(self, device: torch.device) -> Objective:
        """The same with the bridges' tensors on `device`; trained ones only where they are trained."""
        moved = [
            match if match.bridge is None else replace(match, bridge=match.bridge.to(device, student=self._frozen))
            for match in self.teachers
        ]
        return replace(self, teachers=tuple(moved))

    @property
    def _frozen(self) -> bool:
        return not self.trains_bridge

    @property
    def layers(self) -> list[int]:
        """The supervised student layers, ascending."""
        return sorted(self.layer_weights)

    @property
    def vocab_limit(self) -> int:
        """Ids below this one may be sampled: the student knows them, and so does every teacher that reads them."""
        shared = [match.shared_vocab for match in self.teachers] if self.reads_ids else []
        return min([self.student.vocab_size, *shared])

    @property
    def trains_head(self) -> bool:
        """Whether a loss reaches the student's LM head."""
        return largest(self.weights[1]) > 0 and self.output is not None

    @property
    def scheduled(self) -> bool:
        """Whether a weight changes over the updates."""
        return any(isinstance(weight, list) for weight in self.weights)

    @property
    def trains_in_parts(self) -> bool:
        """Whether what only the output term reaches is trained in some updates and left alone in others."""
        return self.trains_head and vanishes(self.weights[1])

    @property
    def trained_depth(self) -> int:
        """The deepest student layer that a gradient reaches."""
        return self.student.num_layers if self.trains_head else max(self.layers, default=0)

    @property
    def final_layer(self) -> int | None:
        """The student's last layer if it is supervised after the final norm."""
        return self.student.num_layers if self.final_norm and self.student.num_layers in self.layer_weights else None

    def rows(self, rollouts: list[Rollout]) -> TokenTable:
        """The supervised rows of a batch."""
        return make_rows(
            rollouts, positions=self.positions, k=self.k, position=self.position, aggregation=self.aggregation
        )


@dataclass(frozen=True)
class StepObjective:
    """What one update trains on and measures: the run's objective with the weights of this update.

    `weight` is that of the representation term. `position_factors` [PROFILE_BINS] multiply the rows' weights by their
    place in the response; None: 1 for all. `output` is a term of the loss with its weight (0 where it is only measured
    in this update), or one that is only watched.
    """

    run: Objective
    weight: float
    layer_weights: dict[int, float]
    position_factors: np.ndarray | None
    output: OutputTerm | None

    @property
    def output_weight(self) -> float:
        """The weight of the output term in the total; 0 where there is none."""
        return 0.0 if self.output is None or self.output.only_watched else self.output.weight

    @property
    def layer_scale(self) -> dict[int, float]:
        """Student layer -> what its loss is multiplied by in the total."""
        total = sum(self.layer_weights.values())
        return {layer: self.weight * weight / total for layer, weight in self.layer_weights.items()}

    @property
    def depth(self) -> int:
        """The deepest student layer that a term looks at."""
        return self.run.student.num_layers if self.output else max(self.run.layers)

    def weigh_positions(self, table: TokenTable) -> TokenTable:
        """The rows of a batch with `position_factors` in their weights, whose sum stays."""
        if self.position_factors is None:
            return table
        factors = self.position_factors[row_bins(table, self.run.positions)]
        return table.scaled(factors * table.weight.sum() / (table.weight * factors).sum())

    def teacher_depth(self, number: int) -> int:
        """The deepest layer of a teacher that this update needs."""
        match = self.run.teachers[number]
        return match.spec.num_layers if self.output else max(match.layers.values())


def model_identity(spec: ModelSpec, name: str = "", tokenizer: str | None = None) -> ModelIdentity:
    """What of a model must agree with a bridge; `tokenizer` is the fingerprint of the model's tokenizer."""
    return ModelIdentity(spec.model_type, spec.num_layers, spec.hidden_size, spec.vocab_size, tokenizer, name=name)


def _match(
    config: Config, source: TeacherSource, student: ModelSpec, teacher: ModelSpec, *, fitting: bool
) -> TeacherMatch:
    """Which layers of one teacher are compared with the student's, and how."""
    loss = config.loss.representation
    layers = supervised_layers(loss.layers, student.num_layers)
    pairs = layer_pairs(layers, student.num_layers, teacher.num_layers, loss.layer_map)
    bridge = None if fitting else _bridge(config, source, student, teacher, pairs)
    if bridge is None:
        if layers and not fitting:
            check_same_shape(student, teacher)
    else:
        made_for = {layer: bridge.layers[layer] for layer in layers}
        if loss.layer_map is not None and made_for != pairs:
            raise ValueError(
                f"loss.representation.layer_map={pairs} and {source.bridge} was fitted for {made_for}; "
                "expected the same pairs: leave layer_map out, or fit a bridge with it"
            )
        pairs = made_for
        if bridge.rank == 1 and loss.kind in ("normalized_mse", "cosine"):
            raise ValueError(
                f"loss.representation.kind={loss.kind} with a bridge of rank 1 compares signs of single numbers, "
                "which have no gradient; expected rank 2 or more: fit again with a larger bridge.rank, or use mse"
            )
    after_norm = loss.final_norm and teacher.num_layers in pairs.values()
    shared_vocab = min(student.vocab_size, teacher.vocab_size)
    return TeacherMatch(teacher, pairs, bridge, teacher.num_layers if after_norm else None, shared_vocab)


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
