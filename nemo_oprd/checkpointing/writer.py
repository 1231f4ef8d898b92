"""Lets Megatron write a checkpoint's shards in the rank's own process.

Megatron-core starts two writer processes per rank and save, and a manager process that lives as long as the rank. They
outlive a rank that is killed: the manager for ever, the writers until they have written into what may by then be the
directory of the run that was started again. They also inherit the run's lock. Nothing here saves in the background, so
writing in turn loses nothing but the overlap of two files of a rank, and an error of the disk arrives as it was raised.
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
    """Within it, `dist_checkpointing.save` starts no process.

    Raises:
        OSError, RuntimeError: what this rank could not write; on other ranks, that another one could not.
    """
    results: queue.Queue[Any] = queue.Queue()
    failures: list[Exception] = []

    def write(transforms: list[Any], use_msc: bool, rank: int, buckets: list[Any], results: queue.Queue[Any]) -> None:
        """In place of Megatron's function of this signature."""
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
        except CheckpointException as error:  # no Exception, and on most ranks without a reason
            if failures:
                raise failures[0] from None
            raise RuntimeError(f"another rank could not write its part of the checkpoint: {error}") from error


def _write(transforms: list[Any], buckets: list[Any], use_msc: bool) -> dict[int, Any] | Exception:
    """Bucket by bucket, through Megatron's own code for one bucket; what was written, or why it wasn't."""
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
