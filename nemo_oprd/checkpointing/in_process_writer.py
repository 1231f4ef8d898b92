"""Lets Megatron write a checkpoint's shards in the rank's own process.

Megatron-core starts two writer processes per rank and save, and a manager process that lives as long as the rank. These
processes outlive a rank that is killed: the manager for ever, the writers until they have written into a directory that
may by then belong to the restarted run. Nothing here saves in the background, so writing one file after the other only
loses the overlap of a rank's two files, and an error of the disk arrives as it was raised.
"""

from __future__ import annotations

import queue
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from torch.distributed.checkpoint.api import CheckpointException


@contextmanager
def in_process_writer() -> Iterator[None]:
    """Within the context, `dist_checkpointing.save` starts no process.

    Raises:
        OSError, RuntimeError: this rank could not write its part; on the other ranks, that another rank could not.
    """
    results: queue.Queue[Any] = queue.Queue()
    failures: list[Exception] = []

    def write(transforms: list[Any], use_msc: bool, rank: int, buckets: list[Any], results: queue.Queue[Any]) -> None:
        """Replaces Megatron's function of this signature."""
        answer = _write(transforms, buckets, use_msc)
        if isinstance(answer, Exception):
            failures.append(answer)
        results.put(answer)

    with (
        mock.patch.object(filesystem_async, "_get_write_results_queue", return_value=results),
        mock.patch.object(FileSystemWriterAsync, "write_preloaded_data_multiproc", staticmethod(write)),
    ):
        try:
            yield
        except CheckpointException as error:  # not an Exception, and without a reason on most ranks
            if failures:
                raise failures[0] from None
            raise RuntimeError(f"another rank could not write its part of the checkpoint: {error}") from error


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
