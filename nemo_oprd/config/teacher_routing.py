"""Routes responses to teachers: each response has exactly one teacher, chosen by the `data_source` of its prompt."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from nemo_oprd.config.schema import TeacherSource


@dataclass(frozen=True)
class Routing:
    """The teachers of a run. A teacher's number is its index in `teachers`."""

    teachers: tuple[TeacherSource, ...]

    def teachers_of(self, data_sources: Sequence[str | None]) -> list[int]:
        """Returns the number of each data source's teacher. Raises ValueError for a data source without one."""
        owner = {source: i for i, teacher in enumerate(self.teachers) for source in teacher.data_sources or ()}
        default = next((i for i, teacher in enumerate(self.teachers) if teacher.data_sources is None), None)
        numbers = [default if source is None else owner.get(source, default) for source in data_sources]
        if None in numbers:
            missing = data_sources[numbers.index(None)]
            raise ValueError(
                f"data_source={missing!r} has no teacher: expected one of {sorted(owner)}; add it to one teacher's "
                "data_sources, or set data_sources=null for the one teacher of all other sources"
            )
        return [number for number in numbers if number is not None]

    def check(self, data_sources: Collection[str | None], where: str, *, all_used: bool = True) -> None:
        """Checks the data sources that occur in a file of prompts or rollouts; messages name it `where`.

        Raises:
            ValueError: a data source has no teacher; or, with `all_used`, a data source that a teacher names does not
                occur, or none is left for the teacher of all others.
        """
        known = sorted(set(data_sources), key=str)
        try:
            used = set(self.teachers_of(known))
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
        for i, teacher in enumerate(self.teachers if all_used else ()):
            absent = [source for source in teacher.data_sources or () if source not in known]
            if absent or i not in used:
                what = f"data source {absent[0]!r}" if absent else "a data source that no other teacher names"
                raise ValueError(
                    f"teachers[{i}].data_sources={teacher.data_sources}: {where} has no entry with {what}; expected "
                    f"some of {known}: correct the name, or remove it"
                )

    def example(self, teacher: int) -> str | None:
        """Returns one of the data sources that a teacher names; None for a teacher that names none."""
        return next(iter(self.teachers[teacher].data_sources or ()), None)

    def weights(self, taught_by: list[int]) -> list[float]:
        """Returns the weight of each response's teacher; `taught_by`: the teachers' numbers."""
        return [self.teachers[number].weight for number in taught_by]
