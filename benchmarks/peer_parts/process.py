"""What a measured process of `benchmarks.peers` notes about itself: seconds, memory, and what it computed.

`Measurement.finish` ends the process, because the usual end of one with Gloo's threads may hang or abort. A process is
started with the name of a file that says what to do, and writes its measurements to another file. Nothing heavy is
imported here, so that a start has the cost of its product alone.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import psutil

# updates before the measured ones: the second still takes new pages, of which a longer run has none
WARM_UPS = 2
# seconds that a rank waits for the others at the end: they do the same work
OTHERS_S = 60.0


def stamp() -> dict[str, float]:
    """CPU seconds of this process and its ended children and wall seconds, since its start; its own peak memory.

    The memory of children is left out: a forked child's begins with that of its parent.
    """
    own, children = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return {
        "cpu_seconds": own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime,
        "wall_seconds": time.time() - psutil.Process().create_time(),
        "peak_rss_mb": own.ru_maxrss / 1024,
    }


class Measurement:
    """The measurements of this process.

    Attributes:
        spec: what to compute: the fields of a case, the paths of models and rollouts, the number of updates.
        losses, norms: of each update, the first one included; the processes of several ranks hold the same numbers.
    """

    def __init__(self) -> None:
        """Reads what to do."""
        source, self._target = (Path(given) for given in sys.argv[1:])
        self.spec: dict[str, Any] = json.loads(source.read_text())
        self.losses: list[float] = []
        self.norms: list[float] = []
        self._found: dict[str, Any] = {"updates": []}
        self._begun: dict[str, float] = {}
        self._ended = 0

    def ready(self) -> None:
        """Notes that the next thing is the first update."""
        self._found["ready"] = stamp()

    def begin(self) -> None:
        """Notes the beginning of an update."""
        self._begun = stamp()

    def end(self) -> None:
        """Notes the end of an update. The first ones warm up (`WARM_UPS`)."""
        now = stamp()
        self._found.setdefault("first", now)
        self._ended += 1
        if self._ended > WARM_UPS:
            spent = {name: now[name] - self._begun[name] for name in ("cpu_seconds", "wall_seconds")}
            self._found["updates"].append(spent)

    @contextmanager
    def update(self) -> Iterator[None]:
        """Measures one update."""
        self.begin()
        yield
        self.end()

    def finish(self, *, parameters: int, version: str) -> NoReturn:
        """Writes all of it, and ends the process when all ranks have written theirs.

        The usual end of a process may wait for ever or abort (both seen with torch 2.13): Gloo's thread needs the
        interpreter's lock to free a tensor, but a reducer of DistributedDataParallel holds it while it waits for this
        thread, or the interpreter is gone.

        Args:
            parameters: the numbers that the optimizer changes, over all ranks.
        """
        computed = {"losses": self.losses, "norms": self.norms, "parameters": parameters, "version": version}
        peak = stamp()["peak_rss_mb"]
        self._target.write_text(json.dumps({**self._found, **computed, "peak_rss_mb": peak}))
        # a rank that left earlier would break the connections of those that still compute
        ranks = [self._target.with_name(f"rank{number}.json") for number in range(self.spec["ranks"])]
        deadline = time.monotonic() + OTHERS_S
        while not all(map(Path.is_file, ranks)) and time.monotonic() < deadline:
            time.sleep(0.01)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
