"""Placement of servers on machines, and the transport of weights to each: arithmetic on ranks alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from nemo_oprd.config.schema import ServerConfig, VllmConfig

LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True)
class ServerPlacement:
    """One server of a run.

    Attributes:
        number: index among the servers of the run.
        controller: the rank that starts the server, calls it and sends it weights. It is on the server's machine, so
            that a Unix socket connects them; the first rank controls endpoints.
        workers: processes that hold a shard of the model: `rollout.vllm.tensor`.
        transport: `file`, `group` or `ipc`.
        devices: CUDA devices of its machine; None without CUDA.
        sleeps: whether it gives GPU memory back between calls that sample, because the trainer uses the same GPUs.
        url: address of an endpoint; None for a server that this run starts.
        ranks: the ranks with which it shares GPUs.
    """

    number: int
    controller: int
    workers: int
    transport: str
    devices: tuple[str, ...] | None = None
    sleeps: bool = False
    url: str | None = None
    ranks: tuple[int, ...] = ()


def place_servers(
    config: VllmConfig, machines: Sequence[str], devices: Sequence[str | None], students: range
) -> list[ServerPlacement]:
    """Places the servers of a run, the same on every rank.

    Args:
        machines: per rank of the world, a name of its machine.
        devices: per rank, its CUDA device as `CUDA_VISIBLE_DEVICES` names it; None without CUDA.
        students: the ranks that have the weights.

    Raises:
        ValueError: a server would need GPUs of two machines or more GPUs than exist, or `rollout.vllm.transport` is
            impossible for a server.
    """
    if config.endpoints:
        return [_endpoint(config, number, url) for number, url in enumerate(config.endpoints)]
    cuda = devices[students[0]] is not None
    places, colocated = [], config.placement == "colocated"
    for number, group in enumerate(rank_groups(config, machines, devices, students)):
        machine = machines[group[0]]
        controller = next((rank for rank in students if machines[rank] == machine), machines.index(machine))
        names = tuple(str(devices[rank]) for rank in group) if cuda else None
        transport = _transport(config, number, has_weights=controller in students, ipc=cuda and colocated, cuda=cuda)
        beside = tuple(group) if cuda and colocated else ()
        places.append(
            ServerPlacement(number, controller, config.tensor, transport, names, sleeps=bool(beside), ranks=beside)
        )
    return places


def dedicated_ranks(config: ServerConfig) -> int:
    """Returns the number of dedicated ranks, the last ones of the job, which hold servers and no model."""
    if config.placement == "colocated":
        return 0
    return (config.replicas or 1) * config.tensor


def rank_groups(
    config: ServerConfig,
    machines: Sequence[str],
    devices: Sequence[str | None],
    students: range,
    key: str = "rollout",
) -> list[list[int]]:
    """Returns per server the ranks on whose machine, and with CUDA on whose GPUs, it runs.

    Args:
        machines, devices, students: as in `place_servers`.
        key: the owner of the servers, `rollout` or `teacher`.

    Raises:
        ValueError: a server would need GPUs of two machines or more GPUs than there are.
    """
    cuda = devices[students[0]] is not None
    if cuda and len(set(zip(machines, devices, strict=True))) < len(machines):
        raise ValueError(
            f"{key}.engine=vllm: ranks of one machine name the same CUDA device ({', '.join(map(str, devices))}); "
            "expected a different one for each: make all GPUs of a machine visible to every rank (--gpus-per-node "
            "without --gpus-per-task)"
        )
    groups = _rank_groups(config, machines, students, cuda, key)
    for number, group in enumerate(groups):
        on_machines = {machines[rank] for rank in group}
        if len(on_machines) > 1:
            raise ValueError(
                f"{key}.vllm.tensor={config.tensor}: server {number} would have ranks {list(group)}, which are on "
                f"{len(on_machines)} machines; expected one: choose a divisor of the ranks per machine"
            )
    return groups


def _rank_groups(
    config: ServerConfig, machines: Sequence[str], students: range, cuda: bool, key: str
) -> list[list[int]]:
    size = config.tensor
    if config.placement == "dedicated":
        first = len(machines) - dedicated_ranks(config)
        return [list(range(start, start + size)) for start in range(first, len(machines), size)]
    if cuda:
        replicas = config.replicas or len(students) // size
        if not 0 < replicas * size <= len(students):
            raise ValueError(
                f"{key}.vllm.replicas={config.replicas} servers on {key}.vllm.tensor={size} GPUs each need "
                f"{max(replicas, 1) * size} GPUs, but the student has {len(students)}; expected at most that: lower "
                "one of the two, or start more ranks"
            )
        return [list(students[start : start + size]) for start in range(0, replicas * size, size)]
    first_ranks = list({machines[rank]: rank for rank in reversed(students)}.values())[::-1]
    return [[first_ranks[number % len(first_ranks)]] for number in range(config.replicas or 1)]


def _endpoint(config: VllmConfig, number: int, url: str) -> ServerPlacement:
    is_local = urlsplit(url).scheme == "unix" or urlsplit(url).hostname in LOOPBACK
    transport = _transport(config, number, has_weights=is_local, ipc=False, cuda=False)
    return ServerPlacement(number, 0, config.tensor, transport, url=url)


def _transport(config: VllmConfig, number: int, *, has_weights: bool, ipc: bool, cuda: bool) -> str:
    """Chooses a server's transport; `has_weights`: whether the trainer's weights are on the server's machine."""
    if config.transport == "auto":
        if ipc:
            return "ipc"
        return "file" if has_weights and not cuda else "group"
    if ipc and config.transport == "group":
        raise ValueError(
            f"rollout.vllm.transport=group for server {number}, which shares GPUs with the student: NCCL has no two "
            "members on one GPU; expected ipc, file or auto: set it"
        )
    if (config.transport == "file" and not has_weights) or (config.transport == "ipc" and not ipc):
        needs = "the student on the server's machine" if config.transport == "file" else "the student on the same GPUs"
        raise ValueError(
            f"rollout.vllm.transport={config.transport} for server {number} needs {needs}; expected group or auto "
            "where that is not so: set it"
        )
    return config.transport
