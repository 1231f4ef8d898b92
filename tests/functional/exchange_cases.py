"""What the pool's workers run for test_exchange.py: ranks of pretended machines share items."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch.distributed as dist
from object_bytes import object_bytes

from nemo_oprd.models.megatron.parallel import init_distributed
from nemo_oprd.rollout.exchange import Exchange


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


def shared_files() -> list[str]:
    """Names of files in shared memory that exchanges have left."""
    return [path.name for path in Path("/dev/shm").glob("nemo_oprd_shared_*")]


@contextmanager
def on_machine(name: str) -> Iterator[None]:
    with mock.patch.dict(os.environ, {"SLURMD_NODENAME": name}):
        yield


def share(machines: str, parts: list[dict[int, int]], preferred: tuple[int, ...] = (), calls: int = 2) -> list[Any]:
    """Rank r, on machine `machines[r]`, shares items of so many tokens by their keys, `parts[r]`.

    Returns [the keys found, whether they are right on every rank, the leaders, files left, bytes sent as objects].
    """
    init_distributed()
    rank = dist.get_rank()
    own = {key: item(key, tokens) for key, tokens in parts[rank].items()}
    wanted = {key: tokens for part in parts for key, tokens in part.items()}
    with on_machine(machines[rank]):
        exchange = Exchange(preferred)
        with object_bytes() as sent:
            kept = [exchange.share(own) for _ in range(calls)]
    right = all(
        found.keys() == wanted.keys() and all(same(found[key], item(key, tokens)) for key, tokens in wanted.items())
        for found in kept
    )
    fixed = not any(array.flags.writeable for found in kept for columns in found.values() for array in columns.values())
    files, everybody = shared_files(), [None] * dist.get_world_size()
    dist.all_gather_object(everybody, right and (fixed or len(parts) == 1))
    return [sorted(kept[0]), all(everybody), exchange._leaders, files, sent[0]]


def without_room(machines: str, small: int) -> str:
    """The shared memory of rank `small` has no room; the message, which all ranks agree about."""
    init_distributed()
    rank = dist.get_rank()

    def full(file: int, start: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    found = ""
    with on_machine(machines[rank]):
        exchange = Exchange()
        try:
            with mock.patch.object(os, "posix_fallocate", full if rank == small else os.posix_fallocate):
                exchange.share({rank: item(rank, 1000)})
        except ValueError as error:
            found = str(error)
        again = exchange.share({rank: item(rank, 5)})
    assert sorted(again) == list(range(dist.get_world_size()))
    everybody = [""] * dist.get_world_size()
    dist.all_gather_object(everybody, found)
    assert set(everybody) == {found} and not shared_files()
    return found


def not_shared(machines: str) -> str:
    """The last rank can't open the file of its machine; the message."""
    init_distributed()
    rank = dist.get_rank()
    with on_machine(machines[rank]):
        exchange = Exchange()
        if rank == dist.get_world_size() - 1:
            opens = Path.open
            elsewhere = mock.patch.object(Path, "open", lambda path, *a, **k: opens(Path(f"{path}_no"), *a, **k))
        else:
            elsewhere = mock.patch.dict(os.environ, {})
        try:
            with elsewhere:
                exchange.share({rank: item(rank, 10)})
        except ValueError as error:
            assert not shared_files()
            return str(error)
    return ""


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
