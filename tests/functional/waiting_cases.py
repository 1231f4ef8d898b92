"""What the pool's workers run for test_waiting.py."""

from __future__ import annotations

import datetime
import os
import re
import select
import signal
import socket
import time
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist
from bad_input_case import Place
from default_signals import default_signals
from messages import messages
from torch.distributed.distributed_c10d import _get_default_store

from nemo_oprd import cli
from nemo_oprd.batch.layout import Layout
from nemo_oprd.megatron import parallel
from nemo_oprd.runtime import waiting
from nemo_oprd.runtime.exits import run_as_command


def wait_for_the_late(late_s: float) -> dict[str, Any]:
    """Meets twice; the last rank is late for the second meeting, and the others get signals while they wait.

    What else the connection is asked has a tenth of that time.
    """
    parallel.init_distributed()
    parallel.wait_for_all()
    store = parallel._meetings["store"]
    usual = store.timeout
    store.set_timeout(datetime.timedelta(seconds=late_s / 10))
    heard: list[int] = []
    before = signal.signal(signal.SIGALRM, lambda number, _: heard.append(number))
    signal.setitimer(signal.ITIMER_REAL, late_s / 4, late_s / 4)
    began = time.monotonic()
    if dist.get_rank() == dist.get_world_size() - 1:
        while time.monotonic() - began < late_s:
            time.sleep(0.01)
    parallel.wait_for_all()
    waited = time.monotonic() - began
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)
    store.set_timeout(usual)
    return {"waited_s": waited, "signals": len(heard)}


def keys_after(meetings: list[int]) -> list[int]:
    """How many keys the store has after so many more meetings each."""
    parallel.init_distributed()
    counts = []
    for more in meetings:
        for _ in range(more):
            parallel.wait_for_all()
        dist.barrier()  # the first rank has tidied up
        counts.append(_get_default_store().num_keys())
        dist.barrier()
    return counts


def timeouts() -> list[float]:
    """Seconds that a collective may wait: of the world, then of a role's groups."""
    parallel.init_distributed()
    role = parallel.make_role("student", Layout(tensor=dist.get_world_size()))
    groups = [dist.group.WORLD, role.groups.tp, role.groups.dp]  # type: ignore[attr-defined, union-attr]
    return [group._get_backend(parallel.device()).options._timeout.total_seconds() for group in groups]


def ended_by(signal_name: str, rank: int, log: Path, foreign: str | None = None) -> dict[str, Any]:
    """A command that joins a job of 3 ranks, of which only `rank` is there; it gets the signal once it says a line.

    Args:
        foreign: "mute" or "http": what listens at the job's address, if anything does.
    """
    address = socket.create_server(("127.0.0.1", 0))
    port = address.getsockname()[1]
    if foreign is None:
        address.close()
    pid = os.fork()
    if pid == 0:
        _join_as_command(rank, port, log)
    deadline, taken = time.monotonic() + 30, []
    while "waiting for" not in log.read_text() and time.monotonic() < deadline:
        if foreign is not None and select.select([address], [], [], 0)[0]:
            taken.append(address.accept()[0])
            if foreign == "http":
                taken[-1].sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" + b"." * 64)
        if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            break
        time.sleep(0.02)
    began = time.monotonic()
    os.kill(pid, signal.Signals[signal_name])
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    said = log.read_text().replace(f":{port}", ":PORT").replace(f"={port}", "=PORT").splitlines()
    # torch prints warnings of its own here, because this process imported it before the command could forbid them
    said = [line for line in said if re.match(r"(rank \d: )?(waiting|stopped|error|Traceback)", line)]
    for each in (address, *taken):
        each.close()
    return {"code": code, "seconds": time.monotonic() - began, "said": said}


def _join_as_command(rank: int, port: int, log: Path) -> NoReturn:
    """What the process of a rank does, which was forked off this one."""
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    default_signals()
    os.environ.update(RANK=str(rank), WORLD_SIZE="3", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    waiting.SAY_AFTER_S = 0.3
    try:
        run_as_command(lambda: parallel.init_distributed() or 0)
    except SystemExit as end:
        os._exit(int(end.code or 0))
    os._exit(0)


def all_alone(directory: Path) -> dict[str, dict[str, Any]]:
    """`ended_by` for ranks that wait for different things."""
    found = {}
    cases = {
        "first": ("SIGTERM", 0),
        "first, Slurm": ("SIGUSR1", 0),
        "first, Ctrl-C": ("SIGINT", 0),
        "other": ("SIGTERM", 1),
        "other, mute": ("SIGINT", 2, "mute"),
        "other, http": ("SIGTERM", 2, "http"),
        "in use": ("SIGTERM", 0, "mute"),
    }
    for name, (number, rank, *foreign) in cases.items():
        log = directory / f"{name}.log"
        log.touch()
        found[name] = ended_by(number, rank, log, *foreign)
    return found


def without_endpoint(command: str, directory: Path) -> dict[str, Any]:
    """A command whose server does not answer within its limit of a second.

    Returns:
        {"code": exit status, "said": its lines that name the server, "joined": whether it came as far as joining ranks}
    """
    place, log = Place(directory), directory / "log"
    place.make()
    (directory / "token").touch(0o600)
    (directory / "token").write_text("t" * 40)
    teaches = command == "doctor"  # which samples without the servers of `rollout.vllm`, because a run may use them
    group, engine = ("teacher.vllm", "teacher.engine") if teaches else ("rollout.vllm", "rollout.engine")
    overrides = [f"student.hf_path={place.student}", f"teacher.hf_path={place.teacher}", f"data.train={place.prompts}"]
    overrides += [f"data.validation={{held: {place.prompts}}}", f"output={place.output}", "rollout.max_new_tokens=4"]
    overrides += [f"{engine}=vllm", f"{group}.endpoints=['http://127.0.0.1:9']", f"{group}.start_timeout=1"]
    overrides += [f"{group}.token_file={directory / 'token'}"]
    log.touch()
    pid = os.fork()
    if pid == 0:
        descriptor = os.open(log, os.O_WRONLY | os.O_APPEND)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        default_signals()
        for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            os.environ.pop(name, None)
        dist.init_process_group = lambda *_, **__: os.write(descriptor, b"JOINED\n")
        try:
            cli.main([command, "--config-name", "verify", *overrides])
        except SystemExit as end:
            os._exit(int(end.code or 0))
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    lines = log.read_text().splitlines()
    print(*lines, sep="\n")
    return {"code": code, "said": [line for line in lines if ":9" in line], "joined": "JOINED" in lines}


def late(late_s: float) -> list[str]:
    """What the first of four ranks says while the last two are late."""
    waiting.SAY_AFTER_S = late_s / 4
    if int(os.environ["RANK"]) > 1:
        time.sleep(late_s)
    with messages("nemo_oprd.runtime") as said:
        parallel.init_distributed()
    everyone = parallel.everyones(said)
    # on a busy machine the second rank is there before the first one listens
    assert all(line.startswith("waiting for rank(s) 0 at ") for line in everyone[1]), everyone
    assert everyone[2:] == [[]] * 2, everyone
    return said
