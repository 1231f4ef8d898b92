"""The parts of `gpu_check`, in order of value. Only the standard library is imported here."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Part:
    """A part of the check: a function of a module of this package, called as `function(settings, outcome)`.

    Attributes:
        limit: seconds after which it is killed on a GPU.
        stage: parts of the same stage run at the same time; timings run alone, in a stage of their own.
        needed: a check that has no time for it has failed.
        memory: it measures memory that can be predicted, so that a rehearsal runs it, too.
        packages: import names of what only this part needs; without one of them it is skipped.
    """

    name: str
    module: str
    limit: float = 75.0
    stage: str = ""
    function: str = ""
    needed: bool = False
    memory: bool = False
    packages: tuple[str, ...] = ()

    def missing(self) -> list[str]:
        """Its own packages that are not installed."""
        return [name for name in self.packages if importlib.util.find_spec(name) is None]

    def load(self) -> Callable[..., None]:
        """The function; imports its module."""
        module: Any = importlib.import_module(f"benchmarks.gpu_parts.{self.module}")
        return getattr(module, self.function or self.name)  # type: ignore[no-any-return]


def _correct(name: str, limit: float, packages: tuple[str, ...] = ()) -> Part:
    return Part(name, "correctness", limit, "correctness", needed=True, packages=packages)


def _step(name: str, *, needed: bool = False) -> Part:
    return Part(name, "update_step", needed=needed, memory=True)


_ALL = (
    Part("device", "device", 60, needed=True),
    _correct("golden_fp32", 90),
    _correct("golden_bf16", 120),
    _correct("guard", 60),
    _correct("decoding", 60),
    _correct("training", 90),
    _correct("save_resume", 120, ("psutil",)),  # Megatron saves checkpoints with it
    _step("oprd", needed=True),
    _step("backbone"),
    _step("sampled_token"),
    _step("full_vocab"),
    _step("top_16"),
    Part("head", "head", memory=True),
    Part("nccl", "nccl", 90),
    Part("plain", "plain"),
    Part("decode", "decode", 90),
    Part("te", "te", 120),
    _step("oprd_no_recompute"),
    _step("oprd_all_tokens"),
    _step("oprd_top_16"),
    Part("toy", "toy", 120, packages=("psutil", "sentencepiece")),
)
PARTS = {part.name: part for part in _ALL}


def stages(names: list[str]) -> Iterator[list[Part]]:
    """The named parts in order of value, those that run at the same time together."""
    stage: list[Part] = []
    for part in (PARTS[name] for name in PARTS if name in names):
        if stage and not (part.stage and part.stage == stage[-1].stage):
            yield stage
            stage = []
        stage.append(part)
    if stage:
        yield stage
