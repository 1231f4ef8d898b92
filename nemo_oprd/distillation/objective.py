"""The losses of a run, resolved once against the models, and the losses of one update.

`Objective` is built at the start from the configuration and the models' architectures, with every check that needs
both. `StepObjective` holds the losses of one update with their weights in that update. It is immutable, built once per
update, and passed to the teachers and the student, which therefore always agree.

B responses, N supervised rows, n rows of one microbatch, D hidden size, R bridge rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from nemo_oprd.batch.token_table import TokenTable, make_rows, row_bins
from nemo_oprd.batch.types import Rollout
from nemo_oprd.bridge.artifact import open_bridge
from nemo_oprd.bridge.maps import FULL_WIDTH, Bridge, CapturePoint, ModelIdentity, full_width_bridge
from nemo_oprd.config.schema import Config, RepresentationLossConfig, TeacherSource
from nemo_oprd.config.weight_schedule import Weight, largest, vanishes, weight_at
from nemo_oprd.data.token_ids import TokenIds
from nemo_oprd.losses.output_loss import OutputLoss
from nemo_oprd.losses.registry import normalizes_rows, resolve_row_loss
from nemo_oprd.losses.representation import RowLoss
from nemo_oprd.models import ModelSpec


@dataclass(frozen=True)
class OutputTerm:
    """The output loss of one update: its divergence, its weight, and its rows.

    Attributes:
        sends_states: whether the teacher sends each row's final hidden state, from which the student rank computes its
            distribution, or two numbers: the log-probability of the sampled token, and the entropy.
        drawn_rows: 0 for a loss, which covers all response tokens. A positive number means that the divergence is only
            measured, on that many rows (`metrics/watched_metrics.py`).
        searched_rows: the number of rows in which the top sets are searched where they are only measured; 0: all.
        draw_key: the seed by which rows are drawn.
    """

    loss: OutputLoss
    weight: float
    aggregation: str
    chunk_tokens: int
    sends_states: bool
    drawn_rows: int = 0
    searched_rows: int = 0
    draw_key: tuple[int, ...] = ()

    @staticmethod
    def build(config: Config) -> OutputTerm | None:
        """Returns the configured output loss at its largest weight; None if the configuration has none."""
        output = config.loss.output
        if output.is_off:
            return None
        loss = OutputLoss.of(output, config.rollout.token_correction)
        return OutputTerm(
            loss,
            largest(output.weight),
            output.aggregation,
            output.chunk_tokens,
            sends_states=loss.needs_distribution,
            searched_rows=0 if loss.needs_support else config.logging.output_metrics_rows,
            draw_key=(config.seed,),
        )

    @property
    def only_watched(self) -> bool:
        """True if the divergence is measured without being part of the loss."""
        return self.drawn_rows > 0

    def rows(self, rollouts: list[Rollout]) -> TokenTable:
        """Returns a row per response token with mask 1, at the position that predicts it; drawn rows if `only_watched`.

        Errors as in `make_rows`; ValueError also if a response lacks the log-probabilities that a correction needs.
        """
        requested_by = "logging.output_metrics_every" if self.only_watched else f"loss.output.kind={self.loss.kind}"
        table = make_rows(
            rollouts,
            positions="all",
            k=1,
            position="predicting",
            aggregation=self.aggregation,
            requested_by=requested_by,
        )
        for i in np.unique(table.response).tolist() if self.loss.correction is not None else ():
            if rollouts[i].logprobs is None:
                raise ValueError(
                    f"response {i} has no logprobs, by which rollout.correction weighs the tokens; expected one "
                    "log-probability per response token: sample with an engine that reports them, or set "
                    "rollout.correction=off"
                )
        if self.only_watched:
            return table.draw(self.drawn_rows, self.draw_key)
        # the search costs an eighth of a full-vocabulary update, and what it measures are means over rows
        return table.search_in(self.searched_rows, self.draw_key) if self.searched_rows else table


@dataclass(frozen=True)
class TeacherMatch:
    """The comparison of one teacher's hidden states with the student's: layer pairs, bridge, and shared ids."""

    spec: ModelSpec
    layers: dict[int, int]  # supervised student layer -> teacher layer, both 1-based
    bridge: Bridge | None  # projects the states of both models before they are compared; None: no projection
    final_layer: int | None  # the teacher's last layer if its state is taken after the final norm
    shared: TokenIds  # the ids that both models know. Models of one family pad their vocabularies differently

    @property
    def width(self) -> int:
        """Numbers per supervised row and layer that the teacher sends."""
        return self.spec.hidden_size if self.bridge is None else self.bridge.rank

    @property
    def project(self) -> Callable[[int, torch.Tensor], torch.Tensor] | None:
        """(Student layer, teacher states [n, D]) -> float32 [n, R] to send; None: the teacher sends its states."""
        return None if self.bridge is None or self.bridge.full_width else self.bridge.project_teacher


@dataclass(frozen=True)
class Objective:
    """The losses of a run.

    The representation loss is sum_l w_l L_l / sum_l w_l over the supervised student layers l, with w_l =
    `layer_weights[l]`.

    Attributes:
        positions, k, position, aggregation: the supervised rows and their weights, see `make_rows`.
        weights: those of the representation loss and of the output loss.
        router_weights: of the load-balancing loss and of the z-loss of the student's routers (`router_losses.py`).
    """

    student: ModelSpec
    teachers: tuple[TeacherMatch, ...]
    layer_weights: dict[int, float]
    row_loss: RowLoss  # (student [n, D], teacher [n, D], dim_reduction) -> loss per row [n]
    dim_reduction: str
    final_norm: bool  # whether the state of each model's last layer is taken after the final norm
    positions: str
    k: int
    position: str
    aggregation: str
    output: OutputTerm | None  # the output loss at its largest weight; None if there is none
    trains_bridge: bool = False  # whether the student's side of the bridge is trained with the student
    weights: tuple[Weight, Weight] = (1.0, 0.0)
    router_weights: tuple[float, float] = (0.0, 0.0)
    sampled: TokenIds | None = None  # the ids that can be sampled, for a correction; None: all that are compared
    replays_routes: bool = False  # whether the student's tokens visit the experts that their rollouts have recorded

    @staticmethod
    def build(
        config: Config,
        student: ModelSpec,
        teachers: Sequence[tuple[ModelSpec, dict[int, int]]],
        layer_weights: dict[int, float],
        shared_ids: Callable[[int], TokenIds | None] = lambda number: None,
        *,
        fitting: bool = False,
    ) -> Objective:
        """Returns the losses that the configuration describes, for these models.

        Args:
            teachers: one per entry of `config.teacher_sources`, with its pairs: student layer -> teacher layer.
            layer_weights: student layer -> weight, as in `Objective`.
            shared_ids: teacher's number -> the ids that the student and this teacher know by their tokenizers; None if
                the teacher can't read the student's ids or a tokenizer is missing. With recorded rollouts or `fitting`
                it is called only if vocabulary sizes differ (perhaps by padding), and all common rows count.
            fitting: for fit-bridge: the models may differ in shape, all response tokens are rows, and there is no
                output loss.

        Raises:
            ValueError: the models cannot be compared as the configuration asks.
        """
        loss, identity = config.loss.representation, model_identity(student, config.student.path)
        matches = []
        for number, ((spec, pairs), source) in enumerate(zip(teachers, config.teacher_sources, strict=True)):
            only_rows = fitting or config.rollout.replay is not None
            by_tokenizer = None
            if config.teacher.reads == "ids" and not (only_rows and student.vocab_size == spec.vocab_size):
                by_tokenizer = shared_ids(number)
            shared = _shared(config, student, spec, by_tokenizer, only_rows=only_rows)
            matches.append(_match(loss, source, shared, identity, spec, pairs, fitting=fitting))
        for width in sorted({match.width for match in matches}):  # the loss is tried on rows of every width
            tried_width = None if fitting else width
            row_loss = resolve_row_loss(loss.kind, loss.kind_args, loss.dim_reduction, tried_width)
        return Objective(
            student=student,
            teachers=tuple(matches),
            layer_weights=layer_weights,
            row_loss=row_loss,
            dim_reduction=loss.dim_reduction,
            final_norm=loss.final_norm,
            positions="all" if fitting else loss.positions,
            k=loss.k,
            position=loss.position,
            aggregation=loss.aggregation,
            output=None if fitting else OutputTerm.build(config),
            trains_bridge=matches[0].bridge is not None and config.bridge.train,
            weights=(loss.weight, config.loss.output.weight),
            router_weights=(config.student.router_aux_loss, config.student.router_z_loss),
            replays_routes=config.student.router_replay,
        )

    def for_step(
        self,
        step: int | None,
        *,
        layer_weights: dict[int, float] | None = None,
        position_factors: np.ndarray | None = None,
    ) -> StepObjective:
        """Returns the objective of the updates after `step` steps; None: every loss at its largest weight.

        `layer_weights` replace those of this objective (`adaptive_weights.py`).
        """
        representation, output = (
            largest(weight) if step is None else weight_at(weight, step) for weight in self.weights
        )
        term = self.output
        if term is not None:
            term = replace(term, weight=output, draw_key=(*term.draw_key, 0 if step is None else step))
        weights = self.layer_weights if layer_weights is None else layer_weights
        return StepObjective(self, representation, weights, position_factors, term)

    def on(self, device: torch.device) -> Objective:
        """Returns the same objective with the bridges' frozen tensors on `device`; trained projectors are not moved."""
        frozen = not self.trains_bridge
        moved = [
            match if match.bridge is None else replace(match, bridge=match.bridge.to(device, student=frozen))
            for match in self.teachers
        ]
        return replace(self, teachers=tuple(moved))

    @property
    def layers(self) -> list[int]:
        """The supervised student layers, ascending."""
        return sorted(self.layer_weights)

    @property
    def trains_head(self) -> bool:
        """True if a loss trains the student's LM head in some update."""
        return largest(self.weights[1]) > 0 and self.output is not None

    @property
    def trains_in_parts(self) -> bool:
        """True if the parameters that only the output loss reaches are trained in some updates and not in others."""
        return self.trains_head and vanishes(self.weights[1])

    @property
    def trained_depth(self) -> int:
        """The deepest student layer that a gradient reaches."""
        return self.student.num_layers if self.trains_head else max(self.layers, default=0)

    @property
    def final_layer(self) -> int | None:
        """The student's last layer if it is supervised after the final norm; else None."""
        return self.student.num_layers if self.final_norm and self.student.num_layers in self.layer_weights else None

    def rows(self, rollouts: list[Rollout]) -> TokenTable:
        """Returns the rows of the representation loss in a batch; errors as in `make_rows`."""
        return make_rows(
            rollouts, positions=self.positions, k=self.k, position=self.position, aggregation=self.aggregation
        )


@dataclass(frozen=True)
class StepObjective:
    """The losses of one update: the run's objective with the weights of this update.

    Attributes:
        position_factors: [PROFILE_BINS], factors of the rows' weights by position in the response; None: 1 for all.
        output: the output loss at the weight of this update, which may be 0, or a divergence that is only measured;
            None if there is neither.
    """

    run: Objective  # the objective of the run
    weight: float  # the weight of the representation loss
    layer_weights: dict[int, float]  # student layer -> its weight within the representation loss
    position_factors: np.ndarray | None
    output: OutputTerm | None
    kept_responses: int = 0  # number of responses whose values per token are kept (`metrics/token_metrics.py`)

    @property
    def output_weight(self) -> float:
        """The weight of the output loss in the total loss; 0 without an output loss."""
        return 0.0 if self.output is None or self.output.only_watched else self.output.weight

    @property
    def layer_scale(self) -> dict[int, float]:
        """Student layer -> the factor of the layer's loss in the total loss."""
        total = sum(self.layer_weights.values())
        return {layer: self.weight * weight / total for layer, weight in self.layer_weights.items()}

    @property
    def depth(self) -> int:
        """The deepest student layer that this update computes."""
        return self.run.student.num_layers if self.output else max(self.run.layers)

    @property
    def reached_depth(self) -> int:
        """The deepest student layer that a gradient reaches in this update."""
        return self.run.student.num_layers if self.output_weight > 0 else max(self.run.layers, default=0)

    def weigh_positions(self, table: TokenTable) -> TokenTable:
        """Multiplies the rows' weights by `position_factors` and scales them to the same sum; returns the new rows."""
        if self.position_factors is None:
            return table
        factors = self.position_factors[row_bins(table, self.run.positions)]
        return table.scaled(factors * table.weight.sum() / (table.weight * factors).sum())

    def teacher_depth(self, number: int) -> int:
        """Returns the deepest layer of a teacher that this update needs."""
        match = self.run.teachers[number]
        return match.spec.num_layers if self.output else max(match.layers.values())


def model_identity(spec: ModelSpec, name: str = "", tokenizer: str | None = None) -> ModelIdentity:
    """Returns the properties by which a bridge recognizes its models; `tokenizer` is the tokenizer's fingerprint."""
    return ModelIdentity(spec.model_type, spec.num_layers, spec.hidden_size, spec.vocab_size, tokenizer, name=name)


def _shared(
    config: Config, student: ModelSpec, teacher: ModelSpec, by_tokenizer: TokenIds | None, *, only_rows: bool
) -> TokenIds:
    """Returns `TeacherMatch.shared`; ValueError if the teacher cannot read the student's ids.

    Args:
        by_tokenizer: the result of `shared_ids` of `Objective.build`.
        only_rows: take all ids for which both models have rows.
    """
    if config.teacher.reads == "ids" and student.vocab_size != teacher.vocab_size and by_tokenizer is None:
        raise ValueError(
            f"student and teacher have vocabularies of {student.vocab_size} and {teacher.vocab_size} ids; the "
            "teacher cannot read ids of another tokenizer: set teacher.reads=text, or choose a teacher "
            "with the student's tokenizer"
        )
    if only_rows or by_tokenizer is None:
        return TokenIds(min(student.vocab_size, teacher.vocab_size))
    return by_tokenizer


def _match(
    loss: RepresentationLossConfig,
    source: TeacherSource,
    shared: TokenIds,
    identity: ModelIdentity,
    teacher: ModelSpec,
    pairs: dict[int, int],
    *,
    fitting: bool,
) -> TeacherMatch:
    """Returns one teacher's layer pairs and bridge; ValueError if pairs, bridge and loss do not fit together."""
    bridge = None if fitting else _bridge(loss, source, identity, teacher, pairs)
    if bridge is not None:
        fitted_pairs = {layer: bridge.layers[layer] for layer in pairs}
        if loss.layer_map is not None and fitted_pairs != pairs:
            raise ValueError(
                f"loss.representation.layer_map={pairs} and {source.bridge} was fitted for {fitted_pairs}; "
                "expected the same pairs: leave layer_map out, or fit a bridge with it"
            )
        pairs = fitted_pairs
        if bridge.rank == 1 and normalizes_rows(loss.kind):
            raise ValueError(
                f"loss.representation.kind={loss.kind} with a bridge of rank 1 compares signs of single numbers, "
                "which have no gradient; expected rank 2 or more: fit again with a larger bridge.rank, or use mse"
            )
    after_norm = loss.final_norm and teacher.num_layers in pairs.values()
    return TeacherMatch(teacher, pairs, bridge, teacher.num_layers if after_norm else None, shared)


def _bridge(
    loss: RepresentationLossConfig,
    source: TeacherSource,
    student: ModelIdentity,
    teacher: ModelSpec,
    pairs: dict[int, int],
) -> Bridge | None:
    """Returns a teacher's bridge: from its directory, or at full width without tensors yet; None without a bridge."""
    if source.bridge is None:
        return None
    models = (student, model_identity(teacher, source.path))
    capture = CapturePoint(loss.position, loss.final_norm)
    if source.bridge == FULL_WIDTH:
        return full_width_bridge(pairs, *models, capture)
    return open_bridge(Path(source.bridge), student=models[0], teacher=models[1], layers=list(pairs), capture=capture)
