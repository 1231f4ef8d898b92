"""Ends all ranks within seconds when one of them dies, and prints the reason once.

A rank that fails leaves the others waiting in a collective; with NCCL, until its timeout, hours later. So each rank has
a thread that uses the job's key-value store over a connection of its own, and ends the process when another rank has
failed. A rank that fails reports it in the store. A rank that was killed can't: the kernel tells the ranks of the same
machine (by a file descriptor of the process), and a machine that fails as a whole is detected by its silence.

Why a launcher isn't enough: torchrun watches the ranks of its own machine only, where each prints a traceback before it
is ended; `srun` ends the other ranks only with `--kill-on-bad-exit`, with whatever exit codes they happen to have. With
the watchdog, one rank prints one reason, and exit codes say whether a user's mistake, a stop or an error ended the job.
"""

from __future__ import annotations

import os
import select
import socket
import sys
import threading
import time
from contextlib import suppress
from typing import Any

from nemo_oprd.runtime import launcher

INTERVAL_S = 1.0
# A process that is silent for this long counts as dead. The thread holds the interpreter only briefly, so a long
# computation doesn't silence it.
SILENT_S = 30.0
_STORE_GONE = "the process that holds the job's key-value store is gone"

# Set by the command line: the watchdog may end a process that runs a single command, but not a test process.
enabled = False
_current: Watchdog | None = None


def start() -> None:
    """Starts this process's watchdog if it is enabled and the job has several ranks. Needs a joined process group."""
    import torch.distributed as dist

    global _current
    if enabled and _current is None and dist.get_world_size() > 1:
        _current = Watchdog(dist.get_rank(), dist.get_world_size(), SILENT_S)


def attempt() -> str:
    """Returns the prefix of this attempt's keys: a job that torchrun restarts may find the previous attempt's store."""
    return f"nemo_oprd/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


def current() -> Watchdog | None:
    """Returns this process's watchdog, None if there is none."""
    return _current


class Watchdog:
    """The watchdog of one rank: a thread that ends the process when another rank has failed or died.

    After `silent_s` seconds without a heartbeat a rank counts as dead.
    """

    def __init__(self, rank: int, world: int, silent_s: float) -> None:
        import datetime

        import torch.distributed as dist

        self.rank, self.world, self.silent_s = rank, world, silent_s
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        timeout = datetime.timedelta(seconds=silent_s)
        self._store: Any = dist.TCPStore(host, port, is_master=False, timeout=timeout)
        self._prefix = attempt()
        self._ended = threading.Event()
        # ranks of this machine: rank -> file descriptor of its process, readable once the process has ended
        self._neighbours: dict[int, int] = {}
        self._died_early: list[int] = []
        self._store.set(f"{self._prefix}/process/{rank}", f"{_machine()} {os.getpid()}")
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def fails_first(self) -> bool:
        """Returns whether this rank prints why the job ends: no rank has failed before, or no other rank remains."""
        self._ended.set()
        try:
            return self._claim()
        except RuntimeError:  # torch.distributed's errors: no other rank is left
            return True

    def tell_failure(self, message: str) -> None:
        """Makes the other ranks end, after `fails_first`; `message` goes to them through the store.

        Waits a few seconds at most until they have read it: otherwise they could report this process as killed.
        """
        with suppress(RuntimeError):
            self._store.set(f"{self._prefix}/failed", f"rank {self.rank}: {message}")
            deadline = time.monotonic() + 3 * INTERVAL_S
            while self._store.add(f"{self._prefix}/heard", 0) < self.world - 1 and time.monotonic() < deadline:
                time.sleep(0.05)

    def failure(self, wait_s: float = 0.0) -> str | None:
        """Returns the message of the job's first failure, None if there is none within `wait_s` seconds."""
        deadline = time.monotonic() + wait_s
        while (found := self._read("failed")) is None and time.monotonic() < deadline:
            time.sleep(0.1)
        return found

    def close(self) -> None:
        """Stops watching, because this rank has finished. Other ranks may still be working.

        The thread has ended when this returns: a thread that comes back from a call of the store while the interpreter
        shuts down ends the process with SIGABRT ("terminate called without an active exception").
        """
        if not self._ended.is_set():
            self._ended.set()
            self._store.set(f"{self._prefix}/alive/{self.rank}", "done")
            self._store.add(f"{self._prefix}/closed", 1)
            self._thread.join(self.silent_s)

    def wait_for_others(self) -> None:
        """Waits after `close` until all ranks have closed; on the first rank only, whose process may hold the store."""
        deadline = time.monotonic() + self.silent_s
        while self.rank == 0 and time.monotonic() < deadline:
            if self._store.add(f"{self._prefix}/closed", 0) >= self.world:
                return
            time.sleep(0.02)

    def _claim(self) -> bool:
        """Returns whether this rank prints why the job ends: the first rank that calls this does."""
        return self._store.compare_set(f"{self._prefix}/speaker", "", str(self.rank)).decode() == str(self.rank)

    def _read(self, name: str) -> str | None:
        key = f"{self._prefix}/{name}"
        try:
            return self._store.get(key).decode() if self._store.check([key]) else None
        except RuntimeError:  # torch.distributed's errors
            return _STORE_GONE

    def _watch(self) -> None:
        failure, ours = None, False
        try:
            self._find_neighbours()
            # the first rank watches all others; they watch it through the store, which ends with its process
            heard = {rank: ("", time.monotonic()) for rank in range(1, self.world)} if self.rank == 0 else {}
            beat = 0
            while failure is None and not self._ended.wait(INTERVAL_S):
                gone = self._gone()  # read before "failed": a failing rank reports it first and ends afterwards
                failure = self._read("failed")
                if failure is None:
                    beat += 1
                    self._store.set(f"{self._prefix}/alive/{self.rank}", str(beat))
                    failure = gone or self._silent(heard)
                    ours = failure is not None and self._claim()
            if ours:
                self._say(str(failure))
                ours = False
                self._store.set(f"{self._prefix}/failed", failure)
            elif failure not in (None, _STORE_GONE):
                self._store.add(f"{self._prefix}/heard", 1)
        except RuntimeError:
            failure = failure or _STORE_GONE
        if failure is None or self._ended.is_set():
            return
        if failure == _STORE_GONE:  # one rank per machine prints it: there is no store to agree on one
            dead = self._dead()
            ours = self.rank == min({self.rank, *self._neighbours} - set(dead))
            failure = _gone_message(dead) if dead else failure
            if ours:
                self._say(failure)
        # the main thread may hang in a collective for ever, so it can't unwind
        os._exit(launcher.exit_code_after_neighbour())

    def _say(self, failure: str) -> None:
        print(f"error: {failure}; all ranks end", file=sys.stderr, flush=True)
        launcher.report(f"{failure}; all ranks end")

    def _find_neighbours(self) -> None:
        for rank in range(self.world):
            if rank != self.rank:
                machine, pid = self._store.get(f"{self._prefix}/process/{rank}").decode().rsplit(" ", 1)
                if machine == _machine():
                    try:
                        self._neighbours[rank] = os.pidfd_open(int(pid))
                    except ProcessLookupError:
                        self._died_early.append(rank)
                    except OSError:  # a kernel or a sandbox without pidfd: only the silence shows a death
                        return

    def _dead(self) -> list[int]:
        """Returns the ranks of this machine whose process has ended."""
        poll = select.poll()
        for descriptor in self._neighbours.values():
            poll.register(descriptor, select.POLLIN)
        ready = {descriptor for descriptor, _ in poll.poll(0)}
        return self._died_early + [rank for rank, descriptor in self._neighbours.items() if descriptor in ready]

    def _gone(self) -> str | None:
        """Returns the message about neighbours that ended before they had finished; None if there are none."""
        dead = [rank for rank in self._dead() if self._read(f"alive/{rank}") != "done"]
        return _gone_message(dead) if dead else None

    def _silent(self, heard: dict[int, tuple[str, float]]) -> str | None:
        """Updates `heard` (rank -> last heartbeat, its time); returns the message about a rank silent for too long."""
        for rank, (value, since) in heard.items():
            now = self._read(f"alive/{rank}") or ""
            if now not in (value, "done"):
                heard[rank] = (now, time.monotonic())
            elif now != "done" and time.monotonic() - since > self.silent_s:
                return f"rank {rank} gave no sign of life for {self.silent_s:.0f} s: it has died"
        return None


def _gone_message(ranks: list[int]) -> str:
    who = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
    return f"{who} on {socket.gethostname()} died without a message (killed, or out of memory?)"


def _machine() -> str:
    """Returns a name of the machine and the PID namespace to which this process's id belongs."""
    return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"
