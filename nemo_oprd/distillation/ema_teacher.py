"""A teacher whose weights are the exponential moving average of the student's weights over the updates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from nemo_oprd.models.megatron.model import DistillingModel
from nemo_oprd.models.megatron.param_names import named_parameters


class EmaTeacher:
    """teacher <- decay * teacher + (1 - decay) * student, for this rank's parameters.

    The average is held in float32: in bfloat16, most changes at decay 0.999 would be lost to rounding. `chunks` are the
    teacher's on this rank, in the student's layout and with the student's weights; `decay` is in [0, 1).
    """

    def __init__(self, chunks: Sequence[DistillingModel], decay: float) -> None:
        self.chunks, self.decay = list(chunks), decay
        self.parameters = named_parameters(self.chunks)
        self.average = {
            name: p.data if p.dtype == torch.float32 else p.data.float() for name, p in self.parameters.items()
        }

    @torch.no_grad()
    def update(self, student: Sequence[DistillingModel]) -> None:
        """Adds the student's current parameters to the average; called after each update of the student."""
        student_parameters = named_parameters(student)
        for name, average in self.average.items():
            average.lerp_(student_parameters[name].float(), 1.0 - self.decay)
        self.copy_to_teacher()

    @contextmanager
    def in_float32(self) -> Iterator[None]:
        """In this context the teacher's parameters are the float32 average, which a checkpoint saves and loads."""
        original = {name: p.data for name, p in self.parameters.items()}
        for name, p in self.parameters.items():
            p.data = self.average[name]
        try:
            yield
        finally:
            for name, p in self.parameters.items():
                p.data = original[name]
            self.copy_to_teacher()

    @torch.no_grad()
    def copy_to_teacher(self) -> None:
        """Copies the average to the teacher's parameters, rounded to their precision."""
        for name, p in self.parameters.items():
            p.copy_(self.average[name])
