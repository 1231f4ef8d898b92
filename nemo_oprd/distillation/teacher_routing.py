"""Whose responses are whose: each one has exactly one teacher, found by its prompt's `data_source`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from nemo_oprd.batch.token_table import TokenTable
from nemo_oprd.config.schema import TeacherSource


@dataclass(frozen=True)
class Routing:
    """The teachers in their order, which is their number everywhere."""

    teachers: tuple[TeacherSource, ...]

    def teachers_of(self, data_sources: Iterable[str | None]) -> list[int]:
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

    def check(self, data_sources: Iterable[str | None], where: str, *, all_used: bool = True) -> None:
        """Raises ValueError where a data source has no teacher; with `all_used` also where a named one is not there."""
        known = sorted(set(data_sources), key=str)
        try:
            used = set(self.teachers_of(known))
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
        for i, teacher in enumerate(self.teachers if all_used else ()):
            absent = [source for source in teacher.data_sources or () if source not in known]
            if absent or i not in used:
                what = f"{absent[0]!r}" if absent else "all that no other teacher has"
                raise ValueError(
                    f"teachers[{i}].data_sources={teacher.data_sources}: nothing in {where} is of {what}; expected "
                    f"some of {known}: correct the name, or remove it"
                )

    def example(self, teacher: int) -> str | None:
        """A data source of this teacher's."""
        return next(iter(self.teachers[teacher].data_sources or ()), None)

    def weigh(self, table: TokenTable, taught_by: list[int]) -> TokenTable:
        """The rows with the weights of their teachers."""
        weights = np.array([teacher.weight for teacher in self.teachers])
        return table.scaled(weights[np.asarray(taught_by, dtype=np.int64)[table.response]])
