"""A teacher whose weights follow the student's: their exponential moving average over the updates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from nemo_oprd.megatron.model import DistillingModel
from nemo_oprd.megatron.param_names import named_parameters


class EmaTeacher:
    """teacher <- decay * teacher + (1 - decay) * student, on every rank for its own parameters.

    Kept in float32: at decay 0.999 most steps are below half of a bfloat16's last bit and would be lost.

    Args:
        chunks: the teacher's on this rank, of the student's layout and loaded with its weights.
        decay: in [0, 1).
    """

    def __init__(self, chunks: Sequence[DistillingModel], decay: float) -> None:
        self.chunks, self.decay = list(chunks), decay
        self.parameters = named_parameters(self.chunks)
        self.average = {
            name: p.data if p.dtype == torch.float32 else p.data.float() for name, p in self.parameters.items()
        }

    @torch.no_grad()
    def update(self, student: Sequence[DistillingModel]) -> None:
        """After an update of the student's parameters."""
        theirs = named_parameters(student)
        for name, average in self.average.items():
            average.lerp_(theirs[name].float(), 1.0 - self.decay)
        self.into_teacher()

    @contextmanager
    def in_float32(self) -> Iterator[None]:
        """Within, the teacher's parameters are the average itself, as a checkpoint saves and loads it."""
        own = {name: p.data for name, p in self.parameters.items()}
        for name, p in self.parameters.items():
            p.data = self.average[name]
        try:
            yield
        finally:
            for name, p in self.parameters.items():
                p.data = own[name]
            self.into_teacher()

    @torch.no_grad()
    def into_teacher(self) -> None:
        """Gives the teacher the average, in its own precision."""
        for name, p in self.parameters.items():
            p.copy_(self.average[name])
