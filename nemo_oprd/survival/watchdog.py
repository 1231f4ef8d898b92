"""Ends all ranks within seconds when one of them dies.

A rank that fails leaves the others waiting in a collective: with NCCL until its timeout, hours later. So each rank has a
thread that talks to the job's key-value store over a connection of its own: it reports that its process is alive, and
ends the process when another rank has failed, or has been silent for too long.
"""

from __future__ import annotations

import datetime
import os
import sys
import threading
import time

import torch.distributed as dist

INTERVAL_S = 1.0
# A process this silent is taken for dead. Its thread needs the interpreter only for moments, so a long computation does
# not silence it.
SILENT_S = 30.0
_FAILED = "nemo_oprd/failed"


class Watchdog:
    """Started by a command once the process group is joined; a lone process has none to watch."""

    def __init__(self, silent_s: float = SILENT_S) -> None:
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.silent_s = silent_s
        self._ended = threading.Event()
        if self.world == 1:
            return
        self._store = dist.TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=False,
            timeout=datetime.timedelta(seconds=silent_s),
        )
        # a restarted job may meet the store of the attempt before it
        self._prefix = f"nemo_oprd/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def fail(self, message: str) -> None:
        """Tells the others that this rank ends because of `message`; the first rank to say so is the one quoted."""
        if self.world > 1 and not self._ended.is_set():
            self._ended.set()
            if not self._failure():
                self._store.set(f"{self._prefix}/failed", f"rank {self.rank}: {message}")

    def failure_of_another(self, wait_s: float = 0.0) -> str | None:
        """What another rank said before it ended, waiting for it for `wait_s` seconds."""
        if self.world == 1:
            return None
        deadline = time.monotonic() + wait_s
        while True:
            failure = self._failure()
            if failure is not None or time.monotonic() >= deadline:
                return failure
            time.sleep(0.1)

    def close(self) -> None:
        """Stops watching; this rank is done. The others may still be at work, or done before."""
        if self.world > 1 and not self._ended.is_set():
            self._ended.set()
            self._store.set(self._alive(self.rank), "done")

    def _alive(self, rank: int) -> str:
        return f"{self._prefix}/alive/{rank}"

    def _failure(self) -> str | None:
        key = f"{self._prefix}/failed"
        try:
            return self._store.get(key).decode() if self._store.check([key]) else None
        except RuntimeError:  # the store's process is gone, and with it the job
            return "the job's key-value store is gone; its process has died"

    def _watch(self) -> None:
        heard = {rank: (b"", time.monotonic()) for rank in range(self.world) if self.rank == 0 and rank}
        beat = 0
        while not self._ended.wait(INTERVAL_S):
            beat += 1
            try:
                self._store.set(self._alive(self.rank), str(beat))
                for rank, (value, since) in heard.items():
                    now = self._store.get(self._alive(rank)) if self._store.check([self._alive(rank)]) else b""
                    if now != value or now == b"done":
                        heard[rank] = (now, time.monotonic())
                    elif time.monotonic() - since > self.silent_s:
                        self._store.set(f"{self._prefix}/failed", f"rank {rank} is gone (silent for {self.silent_s:.0f} s)")
            except RuntimeError:
                pass  # said below
            failure = self._failure()
            if failure is not None and not self._ended.is_set():
                # the main thread may hang in a collective for ever: there is nothing left to unwind
                print(f"rank {self.rank} ends: {failure}", file=sys.stderr, flush=True)
                os._exit(1)
