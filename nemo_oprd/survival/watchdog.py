"""Ends all ranks within seconds when one of them dies, and says why once.

A rank that fails leaves the others waiting in a collective: with NCCL until its timeout, hours later. So each rank has
a thread that talks to the job's key-value store over a connection of its own: it reports that its process is alive, and
ends the process when another rank has failed, or has been silent for too long.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import Any

INTERVAL_S = 1.0
# A process this silent is taken for dead. The thread needs the interpreter for moments only, so a long computation does
# not silence it.
SILENT_S = 30.0

# set by the command line: a process that runs one command and ends may be ended by its watchdog, a test's may not
enabled = False
_current: Watchdog | None = None


def start() -> None:
    """Starts this process's watchdog where one is wanted and there is somebody to watch; the group is joined."""
    import torch.distributed as dist

    global _current
    if enabled and _current is None and dist.get_world_size() > 1:
        _current = Watchdog(dist.get_rank(), dist.get_world_size(), SILENT_S)


def current() -> Watchdog | None:
    """This process's watchdog."""
    return _current


class Watchdog:
    """One rank's."""

    def __init__(self, rank: int, world: int, silent_s: float) -> None:
        import datetime

        import torch.distributed as dist

        self.rank, self.world, self.silent_s = rank, world, silent_s
        self._store: Any = dist.TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=False,
            timeout=datetime.timedelta(seconds=silent_s),
        )
        # a restarted job may meet the store of the attempt before it
        self._prefix = f"nemo_oprd/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        self._ended = threading.Event()
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def fail(self, message: str) -> None:
        """Tells the others that this rank ends because of `message`. The first failure is the one that counts."""
        self._ended.set()
        if self.failure() is None:
            self._store.set(f"{self._prefix}/failed", f"rank {self.rank}: {message}")

    def failure(self, wait_s: float = 0.0) -> str | None:
        """The job's first failure, in its rank's words; waits for one for up to `wait_s` seconds."""
        deadline = time.monotonic() + wait_s
        while True:
            found = self._read(f"{self._prefix}/failed")
            if found is not None or time.monotonic() >= deadline:
                return found
            time.sleep(0.1)

    def close(self) -> None:
        """Stops watching: this rank is done. Others may still be at work."""
        if not self._ended.is_set():
            self._ended.set()
            self._store.set(f"{self._prefix}/alive/{self.rank}", "done")

    def _read(self, key: str) -> str | None:
        try:
            return self._store.get(key).decode() if self._store.check([key]) else None
        except RuntimeError:  # torch.distributed's errors
            return "the process that holds the job's key-value store is gone"

    def _watch(self) -> None:
        # the first rank listens to all others; they listen to it by the store, which goes when it goes
        heard = {rank: ("", time.monotonic()) for rank in range(1, self.world)} if self.rank == 0 else {}
        beat = 0
        while not self._ended.wait(INTERVAL_S):
            beat += 1
            failure = self.failure()
            if failure is None:
                self._store.set(f"{self._prefix}/alive/{self.rank}", str(beat))
                failure = self._silent(heard)
            if failure is not None and not self._ended.is_set():
                # the main thread may hang in a collective for ever: there is nothing to unwind
                # a rank that failed has said so itself; one that was killed could not
                if self.rank == (1 if "is gone" in failure else 0) and not failure.startswith("rank "):
                    print(f"error: {failure}; all ranks end", file=sys.stderr, flush=True)
                os._exit(1)

    def _silent(self, heard: dict[int, tuple[str, float]]) -> str | None:
        """Notes who was heard of; tells the others if somebody was silent for too long."""
        for rank, (value, since) in heard.items():
            now = self._read(f"{self._prefix}/alive/{rank}") or ""
            if now not in (value, "done"):
                heard[rank] = (now, time.monotonic())
            elif now != "done" and time.monotonic() - since > self.silent_s:
                message = f"nothing was heard of rank {rank} for {self.silent_s:.0f} s: it has died"
                self._store.set(f"{self._prefix}/failed", message)
                return message
        return None
