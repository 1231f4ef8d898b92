"""Settings near a configuration that does not fit, and that do."""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass

from nemo_oprd.capacity.estimate import Estimate, Lengths, estimate
from nemo_oprd.capacity.gpus import Cluster
from nemo_oprd.config.checks import check
from nemo_oprd.config.schema import Config

TENSOR, PIPELINE = (1, 2, 4, 8), (1, 2, 4)


@dataclass(frozen=True)
class Alternative:
    """Changed keys of a configuration that fits with them, and its estimate."""

    changes: dict[str, object]
    estimate: Estimate

    @property
    def arguments(self) -> str:
        """The changes as arguments of the command line."""
        return " ".join(f"{key}={str(value).lower()}" for key, value in self.changes.items())


def alternatives(config: Config, cluster: Cluster, lengths: Lengths, most: int = 3) -> list[Alternative]:
    """At most `most` alternatives that fit: few changes first, among equally many the fastest step first."""
    found: list[Alternative] = []
    for changes in _candidates(config):
        try:
            candidate = changed(config, changes)
            check(candidate)
            tried = estimate(candidate, cluster, lengths)
        except ValueError:  # sizes that do not fit the ranks or a model, or settings that exclude each other
            continue
        if not tried.problems:
            found.append(Alternative(changes, tried))
    found.sort(key=lambda each: (len(each.changes), each.estimate.step_seconds))
    return found[:most]


def _candidates(config: Config) -> list[dict[str, object]]:
    student, teacher = config.student, config.teacher
    recompute = [student.recompute] + [each for each in ("full",) if each != student.recompute]
    offload = [teacher.offload] if teacher.offload else [False, True]
    waves = [teacher.resident_microbatches] + (["auto"] if teacher.resident_microbatches is None else [])
    rollout = [config.rollout.tensor] if config.rollout.engine == "vllm" else TENSOR
    everything = itertools.product(TENSOR, PIPELINE, recompute, TENSOR, rollout, offload, waves)
    candidates = []
    for tensor, pipeline, again, teacher_tensor, rollout_tensor, moved, resident in everything:
        wanted: dict[str, object] = {
            "student.parallel.tensor": tensor,
            "student.parallel.sequence": tensor > 1,
            "student.parallel.pipeline": pipeline,
            "student.recompute": again,
            "teacher.parallel.tensor": teacher_tensor,
            "rollout.tensor": rollout_tensor,
            "teacher.offload": moved,
            "teacher.resident_microbatches": resident,
        }
        changes = {key: value for key, value in wanted.items() if value != _value(config, key)}
        if "student.parallel.tensor" not in changes and "student.parallel.pipeline" not in changes:
            changes.pop("student.parallel.sequence", None)
        candidates.append(changes)
    return [changes for number, changes in enumerate(candidates) if changes and changes not in candidates[:number]]


def _value(config: Config, key: str) -> object:
    value: object = config
    for name in key.split("."):
        value = getattr(value, name)
    return value


def changed(config: Config, changes: dict[str, object]) -> Config:
    """A copy of `config` with other values of some keys."""
    for key, value in changes.items():
        config = _replaced(config, key.split("."), value)
    return config


def _replaced(group: object, names: list[str], value: object) -> Config:
    inner = value if len(names) == 1 else _replaced(getattr(group, names[0]), names[1:], value)
    return dataclasses.replace(group, **{names[0]: inner})  # type: ignore[type-var, return-value]
