"""Runs of two forked ranks that a test or a benchmark watches and kills, and what is compared of two runs.

A start costs seconds of imports, so the benchmark's process imports everything once (`import_everything`) and forks the
ranks, which run the real command line. The first rank installs a probe that sends lines through a pipe.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tests.support.default_signals import default_signals

RANKS = 2
ORPHANS_GONE_S = 5.0
ATTEMPT_S = 120.0
# the most tokens of a response
RESPONSE_TOKENS = 16
# metrics that differ between two runs of the same computation: times, and what was measured of the machine
OF_THE_MACHINE = ("time", "timing/", "perf/")


def toy_overrides(toy: Path, steps: int) -> list[str]:
    """The settings of both benchmarks: `quickstart` with the pair in `toy`, small steps, saving every second one."""
    return [
        "student.checkpoint=null", "teacher.checkpoint=null", f"student.hf_path={toy / 'student'}",
        f"teacher.hf_path={toy / 'teacher'}", f"data.train={toy / 'prompts' / 'train.jsonl'}",
        f"data.validation.heldout={toy / 'prompts' / 'heldout.jsonl'}", f"train.steps={steps}",
        "train.prompts_per_step=4", f"rollout.max_new_tokens={RESPONSE_TOKENS}", "train.save_every=2",
        "evaluation.every=2", "evaluation.limit=2", "evaluation.teacher=false", "logging.tensorboard=false",
        "train.keep_best=val/heldout/avg@2",
    ]  # fmt: skip


class ForkedRun:
    """One start of a run: its forked ranks, and the messages of the first rank's probe.

    Args:
        overrides: of the configuration `quickstart`.
        log: what the ranks print is appended to this file.
        install: called in the first rank before the command, with the descriptor of the pipe for messages.
        patience: seconds without a message after which the run counts as hung.
        command: of `nemo-oprd`.
    """

    def __init__(
        self,
        overrides: list[str],
        log: Path,
        install: Callable[[int], None],
        patience: float = ATTEMPT_S,
        command: str = "train",
    ) -> None:
        reader, writer = os.pipe()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        arguments = [command, "--config-name", "quickstart", *overrides]
        self.ranks = [_fork_rank(rank, port, arguments, log, install, writer) for rank in range(RANKS)]
        os.close(writer)
        self._pipe, self._unread, self._patience = reader, b"", patience

    def codes(self) -> list[int]:
        """Waits for the ranks to end; returns their exit statuses, negative for a signal."""
        os.close(self._pipe)
        return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in self.ranks]

    def has_said(self, seconds: float) -> bool:
        """Whether there is a message, or the first rank has ended; waits for it for `seconds`."""
        return b"\n" in self._unread or bool(select.select([self._pipe], [], [], seconds)[0])

    def line(self) -> str:
        """The first rank's next message; empty if the rank has ended, or sends nothing for too long."""
        while b"\n" not in self._unread:
            ready, _, _ = select.select([self._pipe], [], [], self._patience)
            said = os.read(self._pipe, 4096) if ready else b""
            if not said:
                return ""
            self._unread += said
        line, _, self._unread = self._unread.partition(b"\n")
        return line.decode()

    def kill(self) -> None:
        """SIGKILL to every rank."""
        for pid in self.ranks:
            os.kill(pid, signal.SIGKILL)
        self.codes()

    def orphans(self) -> list[str]:
        """Command lines of this attempt's processes that do not end in time; each rank started its own session."""
        deadline = time.monotonic() + ORPHANS_GONE_S
        while (left := _in_sessions(set(self.ranks))) and time.monotonic() < deadline:
            time.sleep(0.05)
        return left


def _in_sessions(sessions: set[int]) -> list[str]:
    found = []
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            fields = (directory / "stat").read_text().rsplit(")", 1)[1].split()
            state, session = fields[0], int(fields[3])
            if session in sessions and state != "Z":
                command = (directory / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                found.append(f"{directory.name} {command}")
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def import_everything(calls: Iterable[str]) -> None:
    """Imports all modules that a rank needs, before the fork; starts no thread.

    Args:
        calls: `module:name` of what the probe wraps.
    """
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    torch.set_num_threads(1)
    modules = ("train", "cli", "run.evaluate", "run.training_state", "megatron.cpu_patches")
    for name in ("transformers", *(f"nemo_oprd.{module}" for module in modules)):
        importlib.import_module(name)
    for call in calls:
        importlib.import_module(call.split(":")[0])
    from nemo_oprd.config.loading import load_config

    load_config("quickstart", ["output=unused"])  # Hydra and its parsers are imported, and warm
    gc.freeze()  # Megatron collects garbage before a save; objects shared with this process are excluded


def _fork_rank(rank: int, port: int, arguments: list[str], log: Path, install: Callable[[int], None], pipe: int) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setsid()
        default_signals()
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(out, 1)
        os.dup2(out, 2)
        os.environ.update(
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
        )
        if rank == 0:
            install(pipe)
        from nemo_oprd.cli import main

        sys.argv = ["nemo-oprd", *arguments]
        main()
        os._exit(0)
    except SystemExit as end:
        os._exit(end.code if isinstance(end.code, int) else 1)
    except BaseException:
        import traceback

        traceback.print_exc()
        os._exit(1)


def find_call(call: str) -> tuple[Any, str]:
    """(The object whose attribute the call `module:name` is, the attribute's name)."""
    module, path = call.split(":")
    owner: Any = importlib.import_module(module)
    *outer, name = path.split(".")
    for part in outer:
        owner = getattr(owner, part)
    return owner, name


def metrics(run: Path, left_out: tuple[str, ...] = OF_THE_MACHINE) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl without the metrics whose names begin with one of `left_out`."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith(left_out)} for line in lines]


def differences(one: Path, other: Path, left_out: tuple[str, ...] = OF_THE_MACHINE) -> list[str]:
    """The differences between two runs: in metrics, except for those left out, and in exported weights."""
    lines = [metrics(run, left_out) for run in (one, other)]
    found = [
        f"metrics.jsonl: {expected} in one run, {got} in the other"
        for expected, got in zip(*lines, strict=False)
        if expected != got
    ]
    lengths = [len(part) for part in lines]
    found += [f"metrics.jsonl has {lengths} lines"] if lengths[0] != lengths[1] else []
    files = [(run / "hf" / "model.safetensors").read_bytes() for run in (one, other)]
    return found + (["the exported weights"] if files[0] != files[1] else [])
