"""Whatever ends, and however: no process of a server is left, and no shared memory.

In place of vLLM runs a command that has mapped shared memory and has a child with some of its own.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from default_signals import default_signals

from nemo_oprd.runtime.signals import JOB_SIGNALS
from nemo_oprd.vllm.server_lifecycle import WORKER_FOLDER, LocalServer, ServerDied, ServerRefused
from nemo_oprd.vllm.worker import nemo_oprd_guard as guard

# Python's resource tracker would remove the shared memory, too, and hide that nobody else did.
COMMAND = """
import os, subprocess, sys, time
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
if "watched" in sys.argv:
    import nemo_oprd_serve
here, role = sys.argv[1:3]
memory = SharedMemory(create=True, size=4096)
resource_tracker.unregister(memory._name, "shared_memory")
if role == "parent":
    if "forks" in sys.argv:
        if os.fork() == 0:
            role = "child"
    else:
        subprocess.Popen([sys.executable, __file__, here, "child", *sys.argv[3:]])
bucket = os.path.join(here, "removable", "bucket")
if role == "child":
    import mmap
    with open(bucket, "r+b") as file:
        mapped = mmap.mmap(file.fileno(), 4096)
with open(os.path.join(here, role + ".part"), "w") as file:
    file.write(f"{os.getpid()} {memory.name}")
os.rename(file.name, os.path.join(here, role))
while not (role == "parent" and os.path.exists(os.path.join(here, "end"))):
    time.sleep(0.02)
os._exit(3)
"""
# longer than a guard waits before it looks again what the command has mapped, on a machine that is not busy
LOOK_S = 1.3
# what wants a server: it starts the guard as server_lifecycle.py does
PARENT = """
import subprocess, sys, time
process = subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE, start_new_session=True)
print(process.pid, flush=True)
time.sleep(600)
"""


def wait_until(condition: Callable[[], object], what: str, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def kill(process: int, number: int = signal.SIGKILL) -> None:
    os.kill(process, number)


class Bench:
    """A guard with its command; `removable` is the directory of the process that wants the server."""

    def __init__(self, root: Path) -> None:
        self.root, self.removable = root, root / "removable"
        self.removable.mkdir()
        (self.removable / "bucket").write_bytes(bytes(4096))
        (root / "command.py").write_text(COMMAND)
        self.group = 0
        self.memory: list[Path] = []

    def arguments(self, *options: str) -> list[str]:
        command = [sys.executable, str(self.root / "command.py"), str(self.root), "parent", *options]
        return guard.guarded_command(command, self.removable, JOB_SIGNALS)

    def start(self, *options: str) -> subprocess.Popen:
        environment = {**os.environ, "PYTHONPATH": str(WORKER_FOLDER)}
        settings: dict[str, Any] = {"stdin": subprocess.PIPE, "env": environment, "start_new_session": True}
        process = subprocess.Popen(self.arguments(*options), preexec_fn=default_signals, **settings)
        self.running(process.pid)
        return process

    def running(self, group: int) -> None:
        """Waits until both processes of the command are there."""
        self.group = group
        wait_until(lambda: (self.root / "child").exists() and (self.root / "parent").exists(), "the command started")
        self.memory = [Path("/dev/shm") / (self.root / role).read_text().split()[1] for role in ("parent", "child")]
        assert all(memory.exists() for memory in self.memory)

    @staticmethod
    def wait_for_a_look(process: subprocess.Popen) -> None:
        """Waits until the guard has looked once what the command has mapped, from beginning to end.

        It sleeps between two looks, so that a whole one lies between two times that it begins to.
        """

        def slept() -> int:
            lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
            return next(int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt_switches"))

        before = slept()
        wait_until(lambda: slept() >= before + 2, "the guard looks", 60.0)

    def pid(self, role: str) -> int:
        return int((self.root / role).read_text().split()[0])

    def check_nothing_is_left(self, *, removed: bool) -> None:
        """No process of the group, no shared memory; and whether the directory was removed."""
        wait_until(lambda: not guard.group_members(self.group), "processes are left")
        # the guard removes memory and the directory after the last process
        wait_until(lambda: not any(memory.exists() for memory in self.memory), "shared memory is left")
        assert self.removable.exists() is not removed
        assert removed or (self.removable / "bucket").exists()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    # vLLM's processes see the directory in shared memory
    root = Path("/dev/shm") / f"nemo_oprd_test_{os.getpid()}_{tmp_path.name}"
    root.mkdir()
    bench = Bench(root)
    try:
        yield bench
    finally:
        if bench.group:
            guard.clean_up(bench.group, {str(memory) for memory in bench.memory})
        for path in sorted(root.rglob("*"), reverse=True):
            path.unlink() if path.is_file() else path.rmdir()
        root.rmdir()


def test_the_command_ends_by_itself(bench: Bench) -> None:
    """Its child does not outlive it. The buckets of the trainer, which lives on, stay: other servers read them."""
    process = bench.start()
    bench.wait_for_a_look(process)
    (bench.root / "end").touch()
    process.wait(20)
    bench.check_nothing_is_left(removed=False)


def test_the_command_is_killed(bench: Bench) -> None:
    process = bench.start()
    bench.wait_for_a_look(process)
    kill(bench.pid("parent"))
    process.wait(20)
    bench.check_nothing_is_left(removed=False)


def test_stdin_is_closed(bench: Bench) -> None:
    """The command gets SIGTERM and obeys: nothing waits for the end of the grace period."""
    process, started = bench.start(), time.monotonic()
    assert process.stdin is not None
    process.stdin.close()
    process.wait(20)
    assert time.monotonic() - started < guard.GRACE_S
    bench.check_nothing_is_left(removed=True)


def test_an_intentional_close_leaves_the_directory(bench: Bench) -> None:
    process = bench.start()
    assert process.stdin is not None
    process.stdin.write(b"e")
    process.stdin.close()
    process.wait(20)
    bench.check_nothing_is_left(removed=False)


def test_the_parent_is_killed(bench: Bench) -> None:
    program = [sys.executable, "-c", PARENT, *bench.arguments()]
    parent = subprocess.Popen(program, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert parent.stdout is not None
    bench.running(int(parent.stdout.readline()))
    parent.kill()
    parent.communicate()
    wait_until(lambda: not bench.removable.exists(), "the directory is left")
    bench.check_nothing_is_left(removed=True)


def test_the_guard_is_killed_and_the_parent_cleans_up(bench: Bench) -> None:
    """Without the watch nobody else would do it."""
    process = bench.start()
    process.kill()
    process.wait()
    time.sleep(0.3)
    assert {bench.pid("parent"), bench.pid("child")} <= set(guard.group_members(bench.group))
    guard.clean_up(bench.group, set(), str(bench.removable))
    bench.check_nothing_is_left(removed=False)


@pytest.mark.parametrize("way", ["spawns", "forks"])
def test_the_guard_is_killed_and_the_server_watches(bench: Bench, way: str) -> None:
    """Every process of the server ends, also one whose own parent has gone before."""
    process = bench.start("watched", way)
    kill(process.pid, signal.SIGSTOP)  # it must not see the end of the command
    kill(bench.pid("parent"))
    time.sleep(0.3)
    assert bench.pid("child") in guard.group_members(bench.group)
    process.kill()
    process.wait()
    wait_until(lambda: not guard.group_members(bench.group), "the child outlived the guard", seconds=5)


def test_a_watching_server_removes_memory_of_any_name(bench: Bench) -> None:
    """All processes end at once, so nobody can be asked later what they had mapped."""
    process = bench.start("watched")
    process.kill()
    process.wait()
    bench.check_nothing_is_left(removed=False)


def test_a_guard_that_is_gone_before_the_watch_begins(bench: Bench) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    program = "import nemo_oprd_serve, time; time.sleep(600)"
    environment = {**os.environ, "PYTHONPATH": str(WORKER_FOLDER), "NEMO_OPRD_GUARD": str(gone.pid)}
    late = subprocess.Popen([sys.executable, "-c", program], env=environment, start_new_session=True)
    assert late.wait(20) == -signal.SIGKILL


def test_signals_to_the_guard_do_not_end_it(bench: Bench) -> None:
    """A launcher sends them to all processes of a job; the trainer still wants to save what it has."""
    process = bench.start()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
        kill(process.pid, number)
    time.sleep(LOOK_S)
    assert process.poll() is None
    assert {bench.pid("parent"), bench.pid("child")} < set(guard.group_members(bench.group))
    assert process.stdin is not None
    process.stdin.close()
    process.wait(20)
    bench.check_nothing_is_left(removed=True)


def test_other_processes_may_have_any_name() -> None:
    """Bytes that are no text, such as a long name that was cut within a letter."""
    program = "open('/proc/self/comm', 'wb').write(b'caf\\xc3'); print(flush=True); import time; time.sleep(60)"
    other = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, start_new_session=True)
    assert other.stdout is not None
    try:
        other.stdout.readline()
        assert Path(f"/proc/{other.pid}/comm").read_bytes() == b"caf\xc3\n"
        assert guard.group_members(other.pid) == [other.pid]
    finally:
        other.kill()
        other.communicate()


class TestLocalServer:
    @pytest.fixture
    def server(self, bench: Bench) -> Iterator[LocalServer]:
        """A server whose interpreter is a script that runs the command."""
        python = bench.root / "python"
        python.write_text(f"#!/bin/sh\nexec {sys.executable} {bench.root}/command.py {bench.root} parent\n")
        python.chmod(0o700)
        server = LocalServer(0, 1, python=python, log=bench.root / "log", directory=bench.removable, max_restarts=1)
        server.start()
        assert server._process is not None
        bench.running(server._process.pid)
        server.check_alive()
        yield server
        server.close()

    def test_close(self, bench: Bench, server: LocalServer) -> None:
        server.close()
        bench.check_nothing_is_left(removed=False)
        with pytest.raises(ServerDied, match="server 0 has ended"):
            server.check_alive()

    def test_its_last_words_are_said_once(self, server: LocalServer) -> None:
        """The reason of a death has them already, or they came after it."""
        server.log.write_text("\n--- start 2: command\nRuntimeError: no such device\n")
        server.generation = 2
        for why in ("server 0 has ended" + server.last_words(), "no answer"):
            with pytest.raises(ServerRefused, match=r"died 2 times, the last time because: .*RuntimeError") as refused:
                server.check_deaths(why)
            assert str(refused.value).count("it said: RuntimeError: no such device") == 1

    def test_guard_and_server_are_killed(self, bench: Bench, server: LocalServer) -> None:
        """Only what was noted before is known then; the buckets of the trainer are not among it."""
        server.remember_shared_memory()
        for member in guard.group_members(bench.group):
            kill(member)
        assert server._process is not None
        server._process.wait()
        with pytest.raises(ServerDied):
            server.check_alive()
        assert all(memory.exists() for memory in bench.memory)
        server.close()
        bench.check_nothing_is_left(removed=False)

    def test_the_guard_is_killed(self, bench: Bench, server: LocalServer) -> None:
        assert server._process is not None
        server._process.kill()
        server._process.wait()
        server.close()
        bench.check_nothing_is_left(removed=False)
