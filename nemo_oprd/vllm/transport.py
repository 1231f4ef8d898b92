"""The trainer's side of a weight transfer: stream of tensors -> buckets -> servers; and the memory of shared GPUs.

    file     a controller writes a bucket into shared memory, its servers read it, the file is removed
    group    the world's first rank broadcasts buckets to the workers of servers on other machines
    ipc      a worker opens the bucket of the student's rank on the same GPU, by a handle (not yet run)

At most one bucket of whole tensors is in memory beside the model. `vllm/worker/nemo_oprd_worker.py` is the other side.
"""

from __future__ import annotations

import base64
import os
import re
import shutil
import socket
import subprocess
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from nemo_oprd.megatron.parallel import everyones
from nemo_oprd.runtime.signals import JOB_SIGNALS
from nemo_oprd.vllm.placement import ServerPlacement
from nemo_oprd.vllm.worker import nemo_oprd_guard as guard
from nemo_oprd.vllm.worker.nemo_oprd_buckets import Bucket, padded_bytes

BUCKET_BYTES = 256 << 20


def room(size: int, device: torch.device) -> torch.Tensor:
    """Allocates an uninitialised buffer, uint8 [size]."""
    return torch.empty(size, dtype=torch.uint8, device=device)


def buckets(
    weights: Iterable[tuple[str, torch.Tensor]],
    size: int = BUCKET_BYTES,
    allocate: Callable[[int, torch.device], torch.Tensor] = room,
) -> Iterator[Bucket]:
    """Yields the stream in buckets of at most `size` bytes, or of one larger tensor.

    Buckets share one buffer, so a bucket is valid until the caller requests the next one. The buffer is not cleared,
    because on a CPU that would allocate all its pages, even if a small model fills few of them.
    """
    bucket: Bucket | None = None
    for name, tensor in weights:
        needed = padded_bytes(tensor)
        if bucket is not None and bucket.used + needed > size:
            yield bucket.trimmed()
            bucket = Bucket([], bucket.data)
        if bucket is None or needed > len(bucket.data):
            bucket = Bucket([], allocate(max(size, needed), tensor.device))
        bucket.add(name, tensor)
    if bucket is not None:
        yield bucket.trimmed()


class SharedFolder:
    """A folder of this process in shared memory for buckets and for the sockets of its servers.

    No other user can enter it. If this process is killed, a server's guard or the one of `guard` removes the folder.
    """

    def __init__(self) -> None:
        host = re.sub(r"[^\w.-]", "_", socket.gethostname())[:16]  # the path of a socket has at most 107 bytes
        self.path = Path("/dev/shm") / f"nemo_oprd_{host}_{uuid.uuid4().hex[:12]}"
        self.path.mkdir(mode=0o700)  # fails if the name is in use
        self._count = 0
        self._guard: subprocess.Popen | None = None

    def guard(self) -> None:
        """Starts a guard for the life of this process: endpoints have none, and a server's own ends with the server."""
        if self._guard is None:
            self._guard = guard.start(["sleep", "infinity"], self.path, JOB_SIGNALS)

    def write(self, bucket: Bucket) -> Path:
        """Writes the bytes of a bucket to a new file; returns its path. ValueError if shared memory is too small."""
        self._count += 1
        path = self.path / f"bucket_{self._count}"
        try:
            with path.open("wb") as file:
                bucket.data.cpu().numpy().tofile(file)
        except OSError as error:
            path.unlink(missing_ok=True)
            raise ValueError(
                f"{path}: {len(bucket.data):,} bytes of weights don't fit into shared memory ({error.strerror}); "
                "expected room for a bucket: enlarge /dev/shm (docker --shm-size), or set rollout.vllm.transport=group"
            ) from error
        return path

    def close(self) -> None:
        """Removes the folder."""
        if self._guard is not None:
            assert self._guard.stdin is not None
            self._guard.stdin.close()
            self._guard.wait()
        shutil.rmtree(self.path, ignore_errors=True)


def shareable_room(size: int, device: torch.device) -> torch.Tensor:
    """Allocates a buffer for `ipc`: outside expandable segments, whose memory no other process can open."""
    torch.cuda.memory._set_allocator_settings("expandable_segments:False")
    try:
        return room(size, device)
    finally:
        given = (os.environ.get(name, "") for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"))
        if any("expandable_segments:True" in value for value in given):
            torch.cuda.memory._set_allocator_settings("expandable_segments:True")


def memory_handle(bucket: Bucket) -> tuple[str, list[Any]]:
    """Returns (UUID of this rank's GPU, handle of the bucket's memory) for `ipc`, with the handle's bytes in base64."""
    handle = bucket.data.untyped_storage()._share_cuda_()
    fields = [{"bytes": base64.b64encode(part).decode()} if isinstance(part, bytes) else part for part in handle]
    return str(torch.cuda.get_device_properties(bucket.data.device).uuid), fields


# GPU memory that servers share with the trainer (not yet run). Every rank calls these functions.


# seconds until the memory of a killed process is free
SETTLE_S = 10.0


def release() -> None:
    """Frees the unused memory that each rank's allocator keeps, before servers take memory. Every rank calls this."""
    torch.cuda.empty_cache()
    dist.barrier()


def lacking(places: list[ServerPlacement], share: float) -> list[str]:
    """Returns a line for each GPU at `places` with less than the fraction `share` free; the same on every rank."""
    found = []
    for place in places:
        if dist.get_rank() not in place.ranks:
            continue
        give_up = time.monotonic() + SETTLE_S
        free, total = torch.cuda.mem_get_info()
        while free < share * total and time.monotonic() < give_up:
            time.sleep(0.2)
            free, total = torch.cuda.mem_get_info()
        if free < share * total:
            found.append(
                f"vLLM server {place.number} can't be started again: of the {total / 1e9:.1f} GB of rank "
                f"{dist.get_rank()}'s GPU {free / 1e9:.1f} GB are free while nothing is computed, expected "
                f"{share * total / 1e9:.1f} GB for rollout.vllm.gpu_memory_utilization={share}: lower that, or use "
                "rollout.vllm.placement=dedicated"
            )
    return [problem for part in everyones(found) for problem in part]
