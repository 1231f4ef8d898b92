"""The objective of a run, resolved against the two models: which layers, matched to which, measured how.

Made once at start from the configuration and both `ModelSpec`s; all checks that need both models are here.
"""

from __future__ import annotations

from dataclasses import dataclass

from nemo_oprd.config import Config
from nemo_oprd.families import ModelSpec
from nemo_oprd.losses.representation import ROW_LOSSES, RowLoss, supervised_layers
from nemo_oprd.losses.rows import RowTable, make_rows
from nemo_oprd.teacher.layermap import layer_map
from nemo_oprd.types import Rollout


@dataclass(frozen=True)
class Objective:
    """What the student is trained on.

    `layers` maps student layers to teacher layers (1-based). The last layer of each model is taken after its final norm
    where `final_norm` is set.
    """

    layers: dict[int, int]
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

    @staticmethod
    def of(config: Config, student: ModelSpec, teacher: ModelSpec) -> Objective:
        """Raises ValueError where the two models can't be compared layer by layer."""
        loss = config.loss.representation
        if student.hidden_size != teacher.hidden_size or student.num_layers != teacher.num_layers:
            raise ValueError(
                f"student ({student.num_layers} layers, width {student.hidden_size}) and teacher ({teacher.num_layers} "
                f"layers, width {teacher.hidden_size}) differ in shape; hidden states can be matched directly only "
                "between models of the same depth and width: choose a teacher of the student's shape"
            )
        if student.vocab_size != teacher.vocab_size:
            raise ValueError(
                f"student and teacher have vocabularies of {student.vocab_size} and {teacher.vocab_size} ids; ids "
                "of one tokenizer mean nothing to a model of another, so both models must share a vocabulary: choose "
                "a teacher with that of the student"
            )
        layers = supervised_layers(loss.layers, student.num_layers)
        return Objective(
            layers=layer_map(layers, student.num_layers, teacher.num_layers),
            weight=loss.weight,
            row_loss=ROW_LOSSES[loss.kind],
            dim_reduction=loss.dim_reduction,
            final_norm=loss.final_norm,
            positions=loss.positions,
            k=loss.k,
            position=loss.position,
            aggregation=loss.aggregation,
            student=student,
            teacher=teacher,
        )

    @property
    def depth(self) -> int:
        """The deepest supervised student layer."""
        return max(self.layers)

    @property
    def student_final(self) -> int | None:
        """The student's last layer if it is supervised after the final norm."""
        return self.student.num_layers if self.final_norm and self.student.num_layers in self.layers else None

    @property
    def teacher_final(self) -> int | None:
        """The teacher's last layer if it is asked for after the final norm."""
        wanted = self.final_norm and self.teacher.num_layers in self.layers.values()
        return self.teacher.num_layers if wanted else None

    def rows(self, rollouts: list[Rollout]) -> RowTable:
        """The supervised rows of a batch."""
        return make_rows(
            rollouts, positions=self.positions, k=self.k, position=self.position, aggregation=self.aggregation
        )
