"""Lets Megatron write a checkpoint's shards in the rank's own process, and digests them while they are written.

Megatron-core starts a manager process that lives as long as the rank, and up to 0.16 two writer processes per rank and
save. These processes outlive a rank that is killed: the manager for ever, the writers until they have written into a
directory that may by then belong to the restarted run. From 0.17 on the writers are threads. Nothing here saves in the
background, so writing one file after the other only loses the overlap of a rank's two files, and an error of the disk
arrives as it was raised.

Shards are written from their beginning to their end, tensor after tensor: torch.save, too, writes its archive in order.
So the digest of a file is that of the bytes as they go to the disk, and no file is read again.
"""

from __future__ import annotations

import queue
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from torch.distributed.checkpoint.api import CheckpointException

from nemo_oprd.models.megatron.versions import checkpoint_writer_names, quieten_checkpoints
from nemo_oprd.runtime.digests import DigestedFile


@contextmanager
def in_process_writer() -> Iterator[dict[str, str]]:
    """Within the context, `dist_checkpointing.save` starts no process.

    Yields what will be the SHA-256 of each file that this rank has written, by its name, at the end of the context.

    Raises:
        OSError, RuntimeError: this rank could not write its part; on the other ranks, that another rank could not.
    """
    quieten_checkpoints()
    results: queue.Queue[Any] = queue.Queue()
    failures: list[Exception] = []
    files: list[DigestedFile] = []
    digests: dict[str, str] = {}

    def opened(path: str, mode: str) -> DigestedFile:
        """Replaces Python's function in Megatron's writer."""
        assert mode == "wb", mode
        files.append(DigestedFile(path))
        return files[-1]

    def write(transforms: list[Any], use_msc: bool, rank: int, buckets: list[Any], results: queue.Queue[Any]) -> None:
        """Replaces Megatron's function of this signature."""
        answer = _write(transforms, buckets, use_msc)
        if isinstance(answer, Exception):
            failures.append(answer)
        results.put(answer)

    queue_maker, writer = checkpoint_writer_names()
    with (
        _replaced(filesystem_async, queue_maker, lambda *_: results),
        _replaced(FileSystemWriterAsync, writer, staticmethod(write)),
        _replaced(filesystem_async, "open", opened, before=open),
    ):
        try:
            yield digests
            digests.update({Path(str(file.name)).name: file.sha256 for file in files})
        except CheckpointException as error:  # not an Exception, and without a reason on most ranks
            if failures:
                raise failures[0] from None
            raise RuntimeError(f"another rank could not write its part of the checkpoint: {error}") from error


@contextmanager
def _replaced(owner: Any, name: str, value: Any, before: Any = None) -> Iterator[None]:
    """Within the context, `owner.name` is `value`. `owner` itself must have the name: a typing mistake is an error.

    `before`: what the name means in `owner` that doesn't have it, a function of Python's own.
    """
    before = vars(owner)[name] if before is None else before
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _write(transforms: list[Any], buckets: list[Any], use_msc: bool) -> dict[int, Any] | Exception:
    """Writes one bucket after the other with Megatron's own code; returns what was written per bucket, or the error."""
    written: dict[int, Any] = {}
    for number, bucket in enumerate(buckets):
        answers: queue.Queue[Any] = queue.Queue()
        waiting: queue.Queue[int] = queue.Queue()
        waiting.put(number)
        FileSystemWriterAsync.write_preloaded_data(transforms, number, bucket, answers, waiting, True, use_msc=use_msc)
        _, written[number] = answers.get_nowait()
        if isinstance(written[number], Exception):
            return written[number]
    return written
