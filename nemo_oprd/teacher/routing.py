"""Whose responses are whose: each one has exactly one teacher, found by its prompt's `data_source`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from nemo_oprd.config import TeacherSource
from nemo_oprd.losses.rows import RowTable


@dataclass(frozen=True)
class Routing:
    """The teachers in their order, which is their number everywhere."""

    teachers: tuple[TeacherSource, ...]

    def of(self, data_sources: Iterable[str | None]) -> list[int]:
        """The teacher of each data source.

        Raises:
            ValueError: nobody teaches one of them.
        """
        owner = {source: i for i, teacher in enumerate(self.teachers) for source in teacher.data_sources or ()}
        others = next((i for i, teacher in enumerate(self.teachers) if teacher.data_sources is None), None)
        asked = list(data_sources)
        found = [others if source is None else owner.get(source, others) for source in asked]
        if None in found:
            missing = asked[found.index(None)]
            raise ValueError(
                f"data_source={missing!r} has no teacher: expected one of {sorted(owner)}; add it to one teacher's "
                "data_sources, or set those of one teacher to null for all the rest"
            )
        return [i for i in found if i is not None]

    def check(self, data_sources: Iterable[str | None], where: str) -> None:
        """Raises ValueError where a data source has no teacher, or a teacher no data source."""
        known = sorted(set(data_sources), key=str)
        try:
            used = set(self.of(known))
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
        idle = sorted(set(range(len(self.teachers))) - used)
        if idle:
            raise ValueError(
                f"teachers[{idle[0]}].data_sources={self.teachers[idle[0]].data_sources}: nothing in {where} is of "
                f"these; expected some of {known}: correct the names, or remove the teacher"
            )

    def example(self, teacher: int) -> str | None:
        """A data source of this teacher's."""
        return next(iter(self.teachers[teacher].data_sources or ()), None)

    def weigh(self, table: RowTable, taught_by: list[int]) -> RowTable:
        """The rows with the weights of their teachers."""
        weights = np.array([teacher.weight for teacher in self.teachers])
        return table.times(weights[np.asarray(taught_by, dtype=np.int64)[table.response]])
