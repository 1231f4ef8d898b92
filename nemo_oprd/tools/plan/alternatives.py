"""Finds settings that fit the GPUs, near a configuration that does not fit; the fastest come first.

Layouts are searched in two passes, so that the search takes seconds: the teacher's beside the student's smallest one,
then the student's beside the best of the teacher's. Student layouts and pairs whose model states alone do not fit are
not estimated. Other settings than layouts and recomputation are tried only where these do not suffice, because what
they cost is not in the estimated seconds: copies of an offloaded teacher, communication of an engine over several GPUs.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

from nemo_oprd.batch.layout import Layout
from nemo_oprd.config.checks import check
from nemo_oprd.config.schema import Config
from nemo_oprd.config.teacher_kinds import TEACHER_KINDS
from nemo_oprd.models import ModelSpec
from nemo_oprd.run.checks import check_layouts
from nemo_oprd.run.engine_kinds import ENGINES
from nemo_oprd.run.resolve import RunSpec
from nemo_oprd.tools.plan.estimate import Estimate, Lengths, Works, estimate_works, make_works
from nemo_oprd.tools.plan.gpus import ASSUMED, Cluster
from nemo_oprd.tools.plan.memory import student_state, teacher_weights

SIZES = (1, 2, 4, 8)
# teacher's layouts that the student's are combined with, beside the configured and the smallest one
TEACHERS = 3
# what a further change has to save of a step's seconds
GAIN = 0.01

Changes = dict[str, object]


@dataclass(frozen=True)
class Alternative:
    """Changed keys of a configuration, and the estimate with these changes."""

    changes: Changes
    estimate: Estimate

    @property
    def arguments(self) -> str:
        """The changes as arguments of the command line."""
        return " ".join(f"{key}={str(value).lower()}" for key, value in self.changes.items())

    @property
    def rank(self) -> tuple[float, float, int]:
        """The sort key, smaller is better: seconds of a step, then GB, both rounded to 0.1, then number of changes."""
        peak = self.estimate.kinds[0].memory.peak
        return round(self.estimate.step_seconds, 1), round(peak / 1e9, 1), len(self.changes)


@dataclass(frozen=True)
class _RoleLayout:
    """Changes of one role's layout, and the least bytes that the role holds on its fullest rank."""

    changes: Changes
    least: float


def alternatives(run: RunSpec, cluster: Cluster, lengths: Lengths, most: int = 3) -> list[Alternative]:
    """Returns at most `most` alternatives that fit: the fastest step first, then the least memory.

    Each passes the checks that a run makes of its configuration, and of its layouts against the models.
    """
    found = Search(run, cluster, lengths).fitting()
    found = [each for each in found if not any(_is_enough(other, each) for other in found)]
    # the best of those that differ in the teacher's layout only
    best: dict[tuple[tuple[str, object], ...], Alternative] = {}
    for each in sorted(found, key=lambda each: each.rank):
        best.setdefault(tuple(item for item in each.changes.items() if not item[0].startswith("teacher.")), each)
    return list(best.values())[:most]


def _is_enough(other: Alternative, each: Alternative) -> bool:
    """Returns whether `other` makes only some of the changes of `each`, and is almost as fast."""
    fewer = other.changes.items() < each.changes.items()
    return fewer and other.estimate.step_seconds <= (1 + GAIN) * each.estimate.step_seconds


class Search:
    """The search for alternatives around one run."""

    def __init__(self, run: RunSpec, cluster: Cluster, lengths: Lengths) -> None:
        self.config, self.cluster, self.lengths = run.config, cluster, lengths
        self.works = make_works(run.config, run.models, lengths)
        self.usable = cluster.gpu.memory - ASSUMED.reserve

    def fitting(self) -> list[Alternative]:
        """Returns all alternatives that fit; tries more than layouts and recomputation only if these do not suffice."""
        students, teachers = self._students(), self._teachers()
        if not students or not teachers:
            return []
        for options in (self._recompute(), self._options()):
            kept = self._best_teachers(min(students, key=lambda each: each.least), teachers, options[-1])
            candidates = (
                student.changes | teacher.changes | option
                for student, teacher in itertools.product(students, kept)
                for option in options
                if student.least + (0.0 if self._offloads(option) else teacher.least) <= self.usable
            )
            found = [each for each in self._estimates(candidates) if not each.estimate.problems]
            if found:
                return found
        return []

    def _estimates(self, candidates: Iterable[Changes]) -> Iterator[Alternative]:
        """Yields the valid candidates, fit or not; a change is only what differs from the configuration."""
        seen: set[frozenset[tuple[str, object]]] = {frozenset()}
        for wanted in candidates:
            changes = {name: value for name, value in wanted.items() if value != attrgetter(name)(self.config)}
            key = frozenset(changes.items())
            if key in seen:
                continue
            seen.add(key)
            try:
                candidate = changed(self.config, changes)
                check(candidate)
                # no key of the search has an influence on the work
                works = Works(replace(self.works.longest, config=candidate), replace(self.works.mean, config=candidate))
                yield Alternative(changes, estimate_works(works, self.cluster, self.lengths))
            except ValueError:  # sizes that do not fit the ranks or a model, or settings that exclude each other
                continue

    def _students(self) -> list[_RoleLayout]:
        """Returns the student's layouts whose weights, gradients and optimizer state fit."""
        work, found = self.works.longest, []
        for changes in self._sizes("student", work.student, SIZES):
            layouts = self._layouts(changes)
            if layouts is not None:
                stages = range(layouts[0].pipeline)
                least = max(sum(student_state(work, layouts[0], stage).values()) for stage in stages)
                found.append(_RoleLayout(changes, least))
        return [each for each in found if each.least <= self.usable]

    def _teachers(self) -> list[_RoleLayout]:
        """Returns the teacher's layouts, beside a student that fits any number of ranks."""
        if TEACHER_KINDS[self.config.teacher.weights].moves or not self.works.longest.own_teachers:
            return [_RoleLayout({}, 0.0)]
        work, found = self.works.longest, []
        for changes in self._sizes("teacher", work.own_teachers[0].spec, (self.config.teacher.parallel.pipeline,)):
            layouts = self._layouts(changes | {"student.parallel": type(self.config.student.parallel)()})
            if layouts is not None:
                stages = range(layouts[1].pipeline)
                found.append(_RoleLayout(changes, max(teacher_weights(work, layouts[1], stage) for stage in stages)))
        return found

    def _sizes(self, role: str, spec: ModelSpec, pipelines: Sequence[int]) -> Iterator[Changes]:
        """Yields the layouts to try for a role, as changes."""
        own = getattr(self.config, role).parallel
        tensors = sorted({own.tensor, *(size for size in SIZES if size <= self.cluster.gpus_per_node)})
        key = f"{role}.parallel"
        for tensor, pipeline in itertools.product(tensors, sorted({own.pipeline, *pipelines})):
            ranks = self.cluster.ranks // pipeline
            for expert, expert_tensor in self._expert_sizes(spec, ranks, (own.expert, own.expert_tensor)):
                yield {
                    f"{key}.tensor": tensor,
                    f"{key}.sequence": tensor > 1 if tensor != own.tensor else own.sequence,
                    f"{key}.pipeline": pipeline,
                    f"{key}.expert": expert,
                    f"{key}.expert_tensor": expert_tensor,
                }

    def _expert_sizes(self, spec: ModelSpec, ranks: int, own: tuple[int, int]) -> list[tuple[int, int]]:
        """Returns (expert, expert tensor) sizes: the configured ones, and powers of two up to all ranks of a stage."""
        if spec.experts is None:
            return [own]
        count = spec.experts.count
        sizes = [size for size in _powers_of_two(ranks) if count % size == 0]
        found = {own, *((size, 1) for size in sizes)}
        if sizes[-1] == count:  # an expert is split only where every rank would have a part of one
            found |= {(count, size) for size in _powers_of_two(ranks // count) if spec.experts.ffn_size % size == 0}
        return sorted(found)

    def _layouts(self, changes: Changes) -> tuple[Layout, Layout] | None:
        """Returns the layouts with these changes; None if they do not fit the ranks or a model."""
        work = self.works.longest
        try:
            candidate = changed(self.config, changes)
            check(candidate)
            return check_layouts(candidate, work.student, [each.spec for each in work.teachers], self.cluster.ranks)
        except ValueError:
            return None

    def _best_teachers(self, student: _RoleLayout, teachers: list[_RoleLayout], option: Changes) -> list[_RoleLayout]:
        """Returns the teacher's layouts that are fastest beside `student`, the smallest one, and the configured one."""
        tried = []
        for teacher in teachers:
            changes = student.changes | teacher.changes | option
            tried += [(teacher, replace(found, changes=changes)) for found in self._estimates([changes])]
        fits = sorted((pair for pair in tried if not pair[1].estimate.problems), key=lambda pair: pair[1].rank)
        kept = [teacher for teacher, _ in fits[:TEACHERS]]
        kept.append(min(teachers, key=lambda each: each.least))
        kept += [each for each in teachers if all(attrgetter(key)(self.config) == v for key, v in each.changes.items())]
        return [each for number, each in enumerate(kept) if each not in kept[:number]]

    def _recompute(self) -> list[Changes]:
        return [{"student.recompute": each} for each in dict.fromkeys((self.config.student.recompute, "full"))]

    def _options(self) -> list[Changes]:
        """Returns settings other than layouts that save memory; those that save most come last."""
        teacher, rollout = self.config.teacher, self.config.rollout
        own_weights = not TEACHER_KINDS[teacher.weights].moves and bool(self.works.longest.own_teachers)
        offload = [True] if teacher.offload else [False, True] if own_weights else [False]
        waves = [teacher.resident_microbatches] + (["auto"] if teacher.resident_microbatches is None else [])
        engine: list[tuple[int, int]] = [(rollout.tensor, rollout.expert)]
        if ENGINES[rollout.engine].in_process and rollout.replay is None:
            has_experts = self.works.longest.student.experts is not None
            engine += [(size, part) for size in SIZES for part in sorted({1, size if has_experts else 1})]
        return [
            {
                **again,
                "teacher.offload": moved,
                "teacher.resident_microbatches": resident,
                "rollout.tensor": tensor,
                "rollout.expert": expert,
            }
            for (tensor, expert), resident, moved, again in itertools.product(engine, waves, offload, self._recompute())
        ]

    def _offloads(self, option: Changes) -> bool:
        return bool(option.get("teacher.offload", self.config.teacher.offload))


def _powers_of_two(most: int) -> list[int]:
    """Returns 1, 2, 4, ... up to `most`."""
    return [1 << power for power in range(max(1, most).bit_length())]


def changed(config: Config, changes: Changes) -> Config:
    """Returns a copy of `config` with other values of some keys."""
    for key, value in changes.items():
        config = _replaced(config, key.split("."), value)
    return config


def _replaced(group: object, names: list[str], value: object) -> Config:
    inner = value if len(names) == 1 else _replaced(getattr(group, names[0]), names[1:], value)
    return dataclasses.replace(group, **{names[0]: inner})  # type: ignore[type-var, return-value]
