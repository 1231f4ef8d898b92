"""Where the host waits for the device, by line: as torch warns of it on a GPU, and as a rehearsal counts it."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.gpu_parts.measure import is_cuda
from benchmarks.gpu_parts.outcome import Outcome
from benchmarks.gpu_parts.rehearsed import recorder
from nemo_oprd.tools.rehearse import unknown_waits
from nemo_oprd.tools.rehearse.places import CodeLocation, current_place

# of torch's warning, "called a synchronizing CUDA operation"
_SYNCHRONIZES = "synchroniz"


def waits_of(run: Callable[[], Any]) -> Counter[CodeLocation]:
    """The places of this project, or of Megatron, at which a call waits for the device, and how often."""
    rehearsal = recorder()
    if rehearsal is not None:
        with rehearsal.phase("waits"):
            run()
        found = Counter[CodeLocation]()
        for (place, _), count in rehearsal.phases["waits"].waits.items():
            found[place] += count
        return found
    return _warned(run)


def _warned(run: Callable[[], Any]) -> Counter[CodeLocation]:
    found = Counter[CodeLocation]()

    def note(message: Any, *_: Any, **__: Any) -> None:
        if _SYNCHRONIZES in str(message):  # the caller's frames are still there
            found[current_place()] += 1

    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.showwarning = note
            run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return found


def check_waits(outcome: Outcome, run: Callable[[], Any]) -> None:
    """Adds the waits of a step to the numbers; one at a place that is not known to wait is a problem."""
    if not is_cuda():
        return
    found = waits_of(run)
    outcome.numbers["waits"] = {str(place): count for place, count in found.most_common()}
    described = [
        {"file": place.file, "line": place.line, "below": place.below, "what": "as torch says", "count": count}
        | {"innermost": place.innermost}
        for place, count in sorted(found.items())
    ]
    for unknown in unknown_waits(described):
        outcome.problems.append(f"{unknown['file']}:{unknown['line']}: {unknown['text']}")
    shown = ", ".join(f"{place} x{count}" for place, count in found.most_common(6))
    outcome.lines.append(f"host waits in a step: {found.total()}{shown and f': {shown}'}")
