"""Exchange of sampled responses: packed arrays of single ranks -> every rank, through host memory only.

Each machine gets every array once, in one file of its shared memory that all of its ranks map, or on its disk if the
shared memory is too small for it. Every byte is reserved before it is touched: where there is no room for a page of a
mapped file, touching it ends the process (SIGBUS). Between machines the bytes go over gloo, from one rank per machine
to the others, one broadcast per machine and without padding. Only the sizes are pickled, and no byte passes
through a GPU. `first_ranks_rollouts` sends the rollouts that the first rank has read from a file to all ranks.

A rank's plan needs some of the responses only, but the plans of the student and of the teachers, whose layouts differ,
need different ones, and all ranks compute the plans from all responses. A token takes 8 bytes (id and log-probability),
so a million tokens take 8 MB per machine, whatever its number of ranks: too little for a selection to pay.
"""

from __future__ import annotations

import logging
import mmap
import os
import socket
import tempfile
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import numpy as np
import torch
import torch.distributed as dist

from nemo_oprd.batch.types import TOKEN_FIELDS, Rollout
from nemo_oprd.megatron.parallel import everyones, first_ranks, host_group
from nemo_oprd.runtime.signals import agree

logger = logging.getLogger(__name__)

# the arrays of one item, by name; arrays of one name have the same dtype, and shapes that differ in the first dimension
Columns: TypeAlias = "dict[str, np.ndarray]"
SHARED_MEMORY = Path("/dev/shm")
# the largest number of bytes of one broadcast
PIECE_BYTES = 256 << 20
_EXPECTED = (
    "; expected room for all responses of a step, once per machine, in shared memory or on disk: enlarge /dev/shm "
    "(docker --shm-size), set TMPDIR to a larger place, or lower train.prompts_per_step, rollout.per_prompt or "
    "rollout.max_new_tokens"
)
# arrays begin at multiples of this
_ALIGNMENT = 16


def machine_name() -> str:
    """Returns host name and Slurm node, equal on all ranks of a machine; nodes of a test cluster share a host name."""
    return f"{socket.gethostname()} {os.environ.get('SLURMD_NODENAME', '')}"


@dataclass(frozen=True)
class PackedArray:
    """Place of an array in a part: `start` counts bytes from the beginning of the part."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int

    @property
    def end(self) -> int:
        """The first byte after the array, counted from the beginning of the part."""
        return self.start + int(np.prod(self.shape)) * np.dtype(self.dtype).itemsize


@dataclass(frozen=True)
class Part:
    """Layout of one rank's `count` items, each column of which is one array.

    The arrays are the items' keys, int32 [count]; per column the lengths of its items, int32 [count], -1 for an item
    without this column; and per column the rows of all items, one after another.
    """

    count: int = 0
    arrays: tuple[PackedArray, ...] = ()

    @property
    def size(self) -> int:
        """Bytes of the part."""
        return _aligned(self.arrays[-1].end) if self.arrays else 0


@dataclass(frozen=True)
class _Offer:
    """Message of a rank before the exchange: its part; from a leader also its machine's file, or its error.

    `on_disk`: the file is not in shared memory.
    """

    part: Part
    file: str | None = None
    on_disk: bool = False
    problem: str | None = None


class Exchange:
    """Shares items among all ranks. Every rank of the world builds one and makes the same calls.

    Args:
        preferred: ranks that lead their machine; a machine without one is led by its first rank.
        folder: where a leader makes its file; removing this folder removes the files of a killed rank. If it has no
            room, the leader makes this file and all later ones in a new folder among the machine's temporary files
            (TMPDIR).
    """

    def __init__(self, preferred: Iterable[int] = (), folder: Path | None = None) -> None:
        self._machines, self._folder = everyones(machine_name()), folder or SHARED_MEMORY
        self._on_disk = False
        wanted = set(preferred)
        order = sorted(range(len(self._machines)), key=lambda rank: (rank not in wanted, rank))
        leaders: dict[str, int] = {}
        for rank in order:
            leaders.setdefault(self._machines[rank], rank)
        self._leader_of = [leaders[machine] for machine in self._machines]  # per rank
        self._leaders = sorted(leaders.values())
        self._group = host_group(self._leaders) if len(self._leaders) > 1 else None
        self._rank = dist.get_rank()

    @property
    def _leads(self) -> bool:
        return self._leader_of[self._rank] == self._rank

    def share(self, own: dict[int, Columns]) -> dict[int, Columns]:
        """Returns the items of all ranks; no two ranks may use the same key.

        The arrays are read-only views of one mapping, which lives as long as one of them; a single rank gets `own`.

        Raises:
            ValueError: a machine has no room for them, or its ranks share no memory; raised on every rank.
        """
        if len(self._machines) == 1:
            return own
        part, arrays = pack(own)
        shared = None
        while shared is None:
            shared = self._share(part, arrays)
        return shared

    def _share(self, part: Part, arrays: list[np.ndarray]) -> dict[int, Columns] | None:
        """Does the work of `share`; returns None on every rank if a machine had no room and chose the disk."""
        offers = everyones(self._offer(part))
        own_file = offers[self._rank].file
        if own_file is not None and any(offer.problem for offer in offers):
            self._remove(Path(own_file))
        _check(offer.problem for offer in offers)
        order = sorted(range(len(offers)), key=lambda rank: (self._leader_of[rank], rank))
        ends = np.cumsum([offers[rank].part.size for rank in order]).tolist()
        starts = dict(zip(order, [0, *ends[:-1]], strict=True))
        ranges = {rank: (starts[rank], offers[rank].part.size) for rank in order}
        offer = offers[self._leader_of[self._rank]]
        path = Path(str(offer.file))
        with self._open(path) as file:
            problem = self._fill(file.fileno(), part, arrays, ranges)
            if problem is not None:  # what is on disk is in a folder of its own
                problem = f"{path.parents[offer.on_disk]} of {machine_name().strip()}: {problem}"
            if failed := _of_all(problem):
                whose = list(zip(failed, self._leader_of, strict=True))
                _check(why and why + _EXPECTED for why, leader in whose if offers[leader].on_disk)
                self._go_to_disk([why for why, leader in whose if leader == self._rank])
                return None
            mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_WRITE if self._leads else mmap.ACCESS_READ)
        if len(self._leaders) > 1:
            self._broadcast(mapping, ranges)
            dist.barrier(group=host_group())
        items: dict[int, Columns] = {}
        for rank in order:
            items |= unpack(offers[rank].part, mapping, starts[rank])
        return items

    def _offer(self, part: Part) -> _Offer:
        """Makes the offer; a leader creates its machine's file, empty until the machine's ranks have opened it."""
        if not self._leads:
            return _Offer(part)
        folder = self._folder
        try:
            if self._on_disk:  # of mode 0700
                folder = Path(tempfile.mkdtemp(prefix="nemo_oprd_shared_"))
            path = folder / f"nemo_oprd_shared_{uuid.uuid4().hex}"
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
        except OSError as error:
            where = "the directory of temporary files (TMPDIR)" if self._on_disk else str(folder)
            return _Offer(part, problem=f"{where}: no file can be made ({error.strerror}); expected a writable one")
        return _Offer(part, str(path), self._on_disk)

    def _remove(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        if self._on_disk:
            path.parent.rmdir()

    def _open(self, path: Path) -> BinaryIO:
        """Opens the file of this rank's machine and removes its name; ValueError on all ranks if one can't open it."""
        file, problem = None, None
        try:
            file = path.open("r+b", buffering=0)
        except OSError as error:
            problem = (
                f"rank {self._rank} can't open {path}, which rank {self._leader_of[self._rank]} of the same machine "
                f"({machine_name().strip()}) has made ({error.strerror}); expected the ranks of a machine to share "
                "/dev/shm: start them in one container, or give each container a host name of its own"
            )
        problems = _of_all(problem)
        if self._leads:
            self._remove(path)
        _check(problems)
        assert file is not None
        return file

    def _fill(self, file: int, part: Part, arrays: list[np.ndarray], ranges: dict[int, tuple[int, int]]) -> str | None:
        """Writes this rank's part; a leader reserves the other machines' bytes. Returns the error, if there is one.

        The ranks do this at the same time: each of them reserves bytes that no other rank touches.
        """
        try:
            if self._leads:
                os.ftruncate(file, max(1, *map(sum, ranges.values())))  # which reserves nothing
            for rank, (start, size) in ranges.items():
                of_others = self._leads and self._leader_of[rank] != self._rank
                if size and (rank == self._rank or of_others):
                    os.posix_fallocate(file, start, size)
            for place, array in zip(part.arrays, arrays, strict=True):
                _write(file, array, ranges[self._rank][0] + place.start)
        except OSError as error:
            size = sum(size for _, size in ranges.values())
            return f"{size:,} bytes of sampled responses don't fit ({error.strerror})"
        return None

    def _go_to_disk(self, failed: list[str | None]) -> None:
        """Lets a leader make its next files on disk if one of the ranks of its machine has `failed`."""
        why = next(filter(None, failed), None)
        if why is not None:
            self._on_disk = True
            logger.warning(
                f"{why}; from here on they are in a temporary file (TMPDIR): enlarge /dev/shm (docker --shm-size) to "
                "keep them in memory"
            )

    def _broadcast(self, mapping: mmap.mmap, ranges: dict[int, tuple[int, int]]) -> None:
        """Broadcasts each machine's bytes from its leader; `ranges`: rank -> (start, size), machine after machine."""
        if self._group is None or not self._leads:
            return
        for leader in self._leaders:
            of_machine = [ranges[rank] for rank in ranges if self._leader_of[rank] == leader]
            start, end = of_machine[0][0], sum(of_machine[-1])
            for at in range(start, end, PIECE_BYTES):
                count = min(PIECE_BYTES, end - at)
                piece = torch.frombuffer(mapping, dtype=torch.uint8, offset=at, count=count)
                dist.broadcast(piece, src=leader, group=self._group)


def pack(items: dict[int, Columns]) -> tuple[Part, list[np.ndarray]]:
    """Packs a rank's items; returns the part and its arrays in the order of `Part.arrays`; empty ones take no bytes."""
    if not items:
        return Part(), []
    names = sorted({name for columns in items.values() for name in columns})
    named = [("", np.fromiter(items, np.int32, len(items)))]
    for name in names:
        lengths = [len(columns[name]) if name in columns else -1 for columns in items.values()]
        named.append((f"{name}/lengths", np.array(lengths, np.int32)))
        named.append((name, np.concatenate([columns[name] for columns in items.values() if name in columns])))
    places, start = [], 0
    for name, array in named:
        place = PackedArray(name, array.dtype.str, array.shape, start)
        places.append(place)
        start = _aligned(place.end)
    return Part(len(items), tuple(places)), [array for _, array in named]


def unpack(part: Part, data: mmap.mmap, start: int) -> dict[int, Columns]:
    """Returns the items of a part that begins at byte `start` of `data`, as read-only views."""
    if not part.count:
        return {}
    arrays = {}
    for place in part.arrays:
        count = int(np.prod(place.shape))
        array = np.frombuffer(data, place.dtype, count, start + place.start) if count else np.empty(0, place.dtype)
        array.flags.writeable = False
        arrays[place.name] = array.reshape(place.shape)
    keys = arrays.pop("").tolist()
    items: dict[int, Columns] = {key: {} for key in keys}
    for name in [name for name in arrays if not name.endswith("/lengths")]:
        at, rows = 0, arrays[name]
        for key, length in zip(keys, arrays[f"{name}/lengths"].tolist(), strict=True):
            if length >= 0:
                items[key][name] = rows[at : at + length]
                at += length
    return items


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _write(file: int, array: np.ndarray, start: int) -> None:
    left = memoryview(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    while left:
        written = os.pwrite(file, left, start)
        left, start = left[written:], start + written


def _of_all(problem: str | None) -> list[str | None]:
    """Returns the problem of each rank; [] if no rank has one, which takes only one short collective."""
    (any_failed,) = agree(torch.device("cpu"), problem is not None, group=host_group())
    return everyones(problem) if any_failed else []


def _check(problems: Iterable[str | None]) -> None:
    """Raises ValueError with the first problem of a rank; all ranks pass the same problems."""
    problem = next((found for found in problems if found is not None), None)
    if problem is not None:
        raise ValueError(problem)


# Broadcast of rollouts that the world's first rank has read from a file.


_ARRAYS = {*TOKEN_FIELDS, "weight_versions", "expert_routes"}


def first_ranks_rollouts(rollouts: dict[int, Rollout]) -> dict[int, Rollout]:
    """Returns the first rank's rollouts on every rank; ignores those of the others. Every rank calls this."""
    own = rollouts if dist.get_rank() == 0 else {}
    plain: dict[int, dict[str, Any]] = {
        i: {name: value for name, value in vars(own[i]).items() if name not in _ARRAYS} for i in own
    }
    arrays = {i: {name: vars(own[i])[name] for name in _ARRAYS if vars(own[i])[name] is not None} for i in own}
    told, shared = first_ranks(plain), Exchange().share(arrays)
    return {i: Rollout(**(fields | shared[i])) for i, fields in told.items()}
