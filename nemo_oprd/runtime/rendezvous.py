"""Joins the ranks of a job into a process group, in the way of torch's `env://`, but without silent waits.

The first rank, or torchrun on its behalf, holds the job's key-value store at MASTER_ADDR:MASTER_PORT. Each rank
registers in the store, so that waiting ranks can name the missing ones; then all ranks connect to each other.
"""

from __future__ import annotations

import datetime
import hashlib
import os
import socket
import threading
import time
from dataclasses import dataclass
from typing import Any

from nemo_oprd.runtime import gpus, waiting
from nemo_oprd.runtime.messages import ranges
from nemo_oprd.runtime.waiting import wait_for
from nemo_oprd.runtime.watchdog import attempt

# how often a waiting rank checks whether all are registered, and which ones are missing
_ASK_EVERY_S, _LOOK_EVERY_S = 0.2, 1.0
_PROBE_S = 2.0


@dataclass(frozen=True)
class Job:
    """The job in this process's environment: torchrun's variables, which other launchers set, too."""

    rank: int
    world: int
    host: str
    port: int

    @classmethod
    def here(cls) -> Job:
        """Reads the job of this process; a process without these variables is a job of one rank.

        Raises:
            ValueError: the variables contradict each other.
        """
        for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "0")):
            os.environ.setdefault(name, value)
        rank, world, port = (_number(name) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
        if rank >= world:
            raise ValueError(
                f"RANK={rank} with WORLD_SIZE={world}; expected a rank of 0 to {world - 1}: start the ranks with "
                "torchrun or srun, which set both"
            )
        if world > 1 and port == 0:
            raise ValueError(
                f"WORLD_SIZE={world} without MASTER_PORT: waiting for rank(s) {ranges({*range(world)} - {rank})} would "
                "never end, because they could not find this one; expected a port: start the ranks with torchrun or "
                "srun, or unset WORLD_SIZE"
            )
        if port >= 1 << 16:
            raise ValueError(f"MASTER_PORT={port}: expected 1 to 65535; set another one, the same for all ranks")
        return cls(rank, world, os.environ["MASTER_ADDR"], port)

    @property
    def launcher_has_store(self) -> bool:
        """Returns whether torchrun holds the store; otherwise the first rank does."""
        return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"

    @property
    def address(self) -> str:
        """Returns the address of the store, for messages."""
        return f"MASTER_ADDR:MASTER_PORT = {self.host}:{self.port}"


def join(backend: str, timeout: datetime.timedelta, device: int | None = None) -> None:
    """Joins the process group of the job; every rank calls this and returns when all of them have joined.

    Args:
        timeout: of every step of joining, and of the group's collectives.
        device: the CUDA device of this rank.

    Raises:
        ValueError: the job's variables are wrong, its port is in use, a rank was missing for too long, or two ranks
            have one device.
        Stopped, NeighbourFailed: see `wait_for`.
    """
    job, limit_s = Job.here(), timeout.total_seconds()
    with _Speaker(job) as speaker:
        store = wait_for(lambda: _open_store(job, timeout), lambda: speaker.says(_no_store(job)), limit_s)
        if job.world > 1:
            if device is not None:
                _take_device(job, store, gpus.identity(device))
            meeting = _Meeting(job, store)
            wait_for(lambda: meeting.wait(limit_s), lambda: meeting.missing, limit_s)
            _check_devices(job, store)

        def connect() -> None:
            import torch
            import torch.distributed as dist

            if device is not None:  # a thread has a current device of its own
                torch.cuda.set_device(device)
            dist.init_process_group(backend, store=store, rank=job.rank, world_size=job.world, timeout=timeout)
            # NCCL connects at the first collective, which must include all ranks (transfers among some of them come
            # later)
            dist.barrier()

        network = "NCCL_SOCKET_IFNAME" if backend == "nccl" else "GLOO_SOCKET_IFNAME"
        unconnected = (
            f"connections among the {job.world} rank(s) over {backend}: all of them are there, and some can't reach "
            f"others; is {network} the network between the machines?"
        )
        wait_for(connect, lambda: speaker.says(unconnected), limit_s)


def _open_store(job: Job, timeout: datetime.timedelta) -> Any:
    """Returns a connection to the job's store, which the first rank makes unless torchrun has it."""
    import torch.distributed as dist

    is_master = job.rank == 0 and not job.launcher_has_store
    try:
        return dist.TCPStore(
            job.host,
            job.port,
            job.world,
            is_master=is_master,
            timeout=timeout,
            wait_for_workers=False,
            multi_tenant=not job.launcher_has_store,
            use_libuv=os.environ.get("USE_LIBUV", "1") == "1",
        )
    except RuntimeError as error:  # torch.distributed's errors
        if not is_master or "failed to listen" not in str(error):
            raise
        in_use = "in use" in str(error).lower()
        why = "is in use by another program of this machine, or by another rank 0" if in_use else "can't be listened on"
        raise ValueError(
            f"MASTER_PORT={job.port} {why}; expected a free port of {socket.gethostname()}: set another one, the same "
            "for all ranks; `torchrun --standalone` chooses one"
        ) from None


def _take_device(job: Job, store: Any, identity: str) -> None:
    """Registers this rank's device in the store before the ranks meet, and the conflict if another rank has it."""
    own = f"rank {job.rank} on {socket.gethostname()}"
    other = store.compare_set(f"{attempt()}/device/{identity}", "", own).decode()
    if other != own:
        store.set(f"{attempt()}/device/shared", f"{other} and {own} have the same GPU ({identity})")


def _check_devices(job: Job, store: Any) -> None:
    """Raises the same ValueError on all ranks if two of them have one device, which NCCL would refuse in many lines."""
    if store.check([f"{attempt()}/device/shared"]):
        if job.rank == 0 and not job.launcher_has_store:
            time.sleep(5 * _ASK_EVERY_S)  # the store ends with this rank, and the others have to read it first
        raise ValueError(
            f"{store.get(f'{attempt()}/device/shared').decode()}; expected one GPU per rank: give every task a GPU of "
            "its own, or make all of them visible to all tasks (sbatch --gpus-per-node=N --ntasks-per-node=N)"
        )


def _no_store(job: Job) -> str:
    """Describes the wait of a rank without a connection to the store, and what answers at its address instead."""
    found = [f"nothing answers there within {_PROBE_S:.0f} s"]

    def probe() -> None:
        try:
            socket.create_connection((job.host, job.port), _PROBE_S).close()
            found.append("what listens there is not this job's store")
        except OSError as error:
            found.append(f"nothing listens there ({error.strerror or error})")

    thread = threading.Thread(target=probe, daemon=True)  # looking up a name may take long, and can't be interrupted
    thread.start()
    thread.join(_PROBE_S)
    who = "the launcher's store" if job.launcher_has_store else "rank(s) 0" if job.rank else "its own store"
    return (
        f"{who} at {job.address}: {found[-1]}; all ranks need the same MASTER_ADDR and MASTER_PORT (rank 0 waits for "
        "endpoints before it joins)"
    )


class _Meeting:
    """Registers this rank in the store and waits for the others.

    `missing`: the missing ranks and the fix, on the lowest registered rank; empty on others, and early in the wait.
    """

    def __init__(self, job: Job, store: Any) -> None:
        self._job, self._store, self._prefix = job, store, f"{attempt()}/here"
        self.missing = ""

    def wait(self, limit_s: float) -> None:
        """Waits until all ranks are registered. Raises ValueError if that takes longer than `limit_s` seconds."""
        notice, store, all_here = waiting.Notice(limit_s), self._store, f"{self._prefix}/all"
        own, looked_s = f"{os.getpid()}", 0.0
        is_new = store.compare_set(f"{self._prefix}/{self._job.rank}", "", own).decode() == own
        if is_new and store.add(f"{self._prefix}/number", 1) == self._job.world:
            store.set(all_here, "yes")
        while not store.check([all_here]):  # torch warns whenever its `wait` times out
            if notice.is_over:
                raise waiting.over_limit(limit_s, self.missing)
            waited_s = notice.waited_s
            if waited_s > waiting.SAY_AFTER_S / 2 and waited_s > looked_s + _LOOK_EVERY_S:
                self.missing, looked_s = self._missing(), waited_s
            time.sleep(min(waited_s / 10 + 0.001, _ASK_EVERY_S))

    def _missing(self) -> str:
        if any(self._is_here(rank) for rank in range(self._job.rank)):  # the first one of these reports it
            return ""
        missing = {rank for rank in range(self._job.world) if not self._is_here(rank)}
        return (
            f"rank(s) {ranges(missing)} of {self._job.world}: start them with {self._job.address} and "
            f"WORLD_SIZE={self._job.world}, or see why they ended (rank 0 waits for endpoints before it joins)"
        )

    def _is_here(self, rank: int) -> bool:
        return bool(self._store.check([f"{self._prefix}/{rank}"]))


class _Speaker:
    """Selects one rank of the machine to print a line about a common wait: the first that takes a name common to all.

    The name is that of a Unix socket, which the kernel frees when the process ends. It contains the parent's process
    id, which the ranks of one launcher share.
    """

    def __init__(self, job: Job) -> None:
        place = hashlib.sha256(f"{job.host}:{job.port}".encode()).hexdigest()[:32]  # a name has at most 108 bytes
        self._name = f"\0nemo_oprd/{os.getppid()}/{place}"
        self._socket = socket.socket(socket.AF_UNIX)
        self._speaks = False

    def says(self, what: str) -> str:
        """Returns `what` if this rank is the one that prints, otherwise ""."""
        try:
            self._socket.bind(self._name)
            self._speaks = True
        except OSError:  # taken, perhaps by this rank
            pass
        return what if self._speaks else ""

    def __enter__(self) -> _Speaker:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()


def _number(name: str) -> int:
    text = os.environ[name]
    if not text.strip().isdecimal():
        raise ValueError(f"{name}={text!r}; expected a whole number: set it, or start the ranks with torchrun or srun")
    return int(text)
