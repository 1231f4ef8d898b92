"""What the pool's workers run for test_exchange.py: ranks of pretended machines share items."""

from __future__ import annotations

import errno
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch.distributed as dist
from messages import messages
from object_bytes import object_bytes

from nemo_oprd.batch.types import Rollout
from nemo_oprd.megatron.parallel import everyones, first_ranks, init_distributed
from nemo_oprd.rollout.exchange import Exchange, first_ranks_rollouts


def item(key: int, tokens: int) -> dict[str, np.ndarray]:
    """Columns that only `key` and `tokens` determine; every third item has no log-probabilities, even ones routes."""
    draw = np.random.default_rng(key)
    columns = {"ids": draw.integers(0, 1000, tokens, np.int32), "finished": np.array([key % 2], np.uint8)}
    columns["versions"] = np.array([[key, 0, tokens]], np.int32)
    if key % 3:
        columns["logprobs"] = draw.random(tokens, np.float32)
    if key % 2 == 0:
        columns["routes"] = draw.integers(0, 8, (tokens + 1, 2, 3), np.int16)
    return columns


def same(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> bool:
    return found.keys() == wanted.keys() and all(
        (found[name].dtype, found[name].shape) == (array.dtype, array.shape) and (found[name] == array).all()
        for name, array in wanted.items()
    )


def left_in(folder: str) -> list[str]:
    """Names of files that exchanges have left, when all ranks are done with them."""
    dist.barrier()
    return [path.name for path in Path(folder).iterdir()]


@contextmanager
def on_machine(name: str) -> Iterator[None]:
    with mock.patch.dict(os.environ, {"SLURMD_NODENAME": name}):
        yield


def share(folder: str, machines: str, parts: list[dict[int, int]], preferred: tuple[int, ...] = ()) -> list[Any]:
    """Rank r, on machine `machines[r]`, shares items of so many tokens by their keys, `parts[r]`.

    Returns [the keys found, whether they are right on every rank, the leaders, files left, bytes sent as objects].
    """
    init_distributed()
    rank = dist.get_rank()
    own = {key: item(key, tokens) for key, tokens in parts[rank].items()}
    wanted = {key: tokens for part in parts for key, tokens in part.items()}
    with on_machine(machines[rank]):
        exchange = Exchange(preferred, Path(folder))
        with object_bytes() as sent:
            kept = [exchange.share(own) for _ in range(2)]
    right = all(
        found.keys() == wanted.keys() and all(same(found[key], item(key, tokens)) for key, tokens in wanted.items())
        for found in kept
    )
    fixed = not any(array.flags.writeable for found in kept for columns in found.values() for array in columns.values())
    files, everybody = left_in(folder), [None] * dist.get_world_size()
    dist.all_gather_object(everybody, right and (fixed or len(parts) == 1))
    return [sorted(kept[0]), all(everybody), exchange._leaders, files, sum(sent)]


def without_room(folder: str, machines: str, small: int, disk: str, full: tuple[str, ...]) -> dict[str, Any]:
    """Rank `small` has no room in the folders `full`, of shared memory and of temporary files (`disk`).

    Returns the "error" of the first exchange, which all ranks agree about; what was "said"; and of a second one, in
    which only the shared memory is full, whether the files were on disk, per rank.
    """
    init_distributed()
    rank, reserve = dist.get_rank(), os.posix_fallocate
    world = set(range(dist.get_world_size()))

    def refuse(file: int, start: int, size: int) -> None:
        place = os.readlink(f"/proc/self/fd/{file}")
        places.append(place)
        if rank == small and any(place.startswith(each) for each in refused):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        reserve(file, start, size)

    error, refused, places = "", full, list[str]()
    with (
        on_machine(machines[rank]),
        mock.patch.object(tempfile, "tempdir", disk),
        mock.patch.object(os, "posix_fallocate", refuse),
        messages("nemo_oprd.rollout") as said,
    ):
        exchange = Exchange(folder=Path(folder))
        try:
            found = exchange.share({rank: item(rank, 1000)})
            assert found.keys() == world and all(same(found[key], item(key, 1000)) for key in world)
        except ValueError as raised:
            error = str(raised)
        refused, places = (folder,), []
        found = exchange.share({rank: item(rank, 5)})
        assert found.keys() == world and all(same(found[key], item(key, 5)) for key in world)
    everybody: list[Any] = [None] * len(world)
    dist.all_gather_object(everybody, (error, said, places[-1].startswith(disk)))
    assert {theirs for theirs, _, _ in everybody} == {error} and not left_in(folder) and not left_in(disk)
    on_disk = [theirs for _, _, theirs in everybody]
    return {"error": error, "said": [line for _, lines, _ in everybody for line in lines], "on_disk": on_disk}


def in_little_memory(folder: str, tokens: int) -> list[str]:
    """Shares items in a `folder` that is smaller; what the first rank said. Nothing dies of it."""
    init_distributed()
    rank, world = dist.get_rank(), range(dist.get_world_size())
    with messages("nemo_oprd.rollout") as said:
        found = Exchange(folder=Path(folder)).share({rank: item(rank, tokens)})
    assert all(same(found[key], item(key, tokens)) for key in world) and not left_in(folder)
    return said


def not_shared(folder: str, machines: str) -> str:
    """The last rank can't open the file of its machine; the message."""
    init_distributed()
    rank = dist.get_rank()
    with on_machine(machines[rank]):
        exchange = Exchange(folder=Path(folder))
        if rank == dist.get_world_size() - 1:
            opens = Path.open
            elsewhere = mock.patch.object(Path, "open", lambda path, *a, **k: opens(Path(f"{path}_no"), *a, **k))
        else:
            elsewhere = mock.patch.dict(os.environ, {})
        try:
            with elsewhere:
                exchange.share({rank: item(rank, 10)})
        except ValueError as error:
            assert not left_in(folder)
            return str(error)
    return ""


def backends_over_nccl() -> list[str]:
    """Over which backends objects and items travel if the world's is NCCL."""
    init_distributed()
    rank, used, backend_of = dist.get_rank(), set(), dist.get_backend

    def noting(call: Any) -> Any:
        def noted(*arguments: Any, group: Any = None, **more: Any) -> Any:
            used.add("nccl" if group in (None, dist.group.WORLD) else backend_of(group))
            return call(*arguments, group=group, **more)

        return noted

    calls = {name: noting(getattr(dist, name)) for name in ("all_gather_object", "broadcast_object_list", "barrier")}
    with mock.patch.multiple(dist, get_backend=lambda group=None: "nccl", **calls):
        assert everyones(rank) == [*range(dist.get_world_size())]
        assert first_ranks(rank) == 0
        assert len(Exchange().share({rank: item(rank, 3)})) == dist.get_world_size()
    return sorted(used)


def rollouts_of_first_rank(machines: str) -> list[Any]:
    """[Whether every rank has what the first rank gave, bytes sent as objects] for short and for long responses."""
    init_distributed()
    rank, found = dist.get_rank(), []
    for tokens in (5, 5000):
        full = {"response_mask": [i % 2 == 0 for i in range(tokens)], "logprobs": [-0.5] * tokens}
        one = Rollout(
            [1, 2],
            [*range(tokens)],
            **full,
            prompt="a",
            weight_versions=[[3, 0, tokens]],
            expert_routes=item(2, tokens)["routes"],
        )
        given = {7: one, 2: Rollout([4], [5], finish_reason="stop", teacher_prompt_ids=[1])}
        with on_machine(machines[rank]), object_bytes() as sent:
            got = first_ranks_rollouts(given if rank == 0 else {9: given[2]})
        right = got == given and list(got) == [7, 2] and (got[7].expert_routes == one.expert_routes).all()
        everybody = [None] * dist.get_world_size()
        dist.all_gather_object(everybody, bool(right and got[2].expert_routes is None))
        found.append([all(everybody), sum(sent)])
    return found


def seconds(tokens: int, responses: int) -> dict[str, float]:
    """How long two machines of one rank each share so many tokens; all are the first rank's, then half of each."""
    init_distributed()
    rank, found = dist.get_rank(), {}
    length = tokens // responses
    for name, mine in (("one part", responses * (rank == 0)), ("two parts", responses // 2)):
        ids = np.arange(length, dtype=np.int32)
        own = {rank * responses + i: {"ids": ids, "logprobs": ids.astype(np.float32)} for i in range(mine)}
        with on_machine(str(rank)):
            exchange = Exchange()
            dist.barrier()
            began, cpu = time.monotonic(), time.process_time()
            shared = exchange.share(own)
        found[name], found[f"{name}, CPU"] = time.monotonic() - began, time.process_time() - cpu
        assert len(shared) == responses
    return found
