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


@contextmanager
def in_process_writer() -> Iterator[None]:
    """Within it, `dist_checkpointing.save` starts no process."""
    results: queue.Queue[Any] = queue.Queue()
    with (
        mock.patch.object(filesystem_async, "_get_write_results_queue", return_value=results),
        mock.patch.object(FileSystemWriterAsync, "write_preloaded_data_multiproc", staticmethod(_write)),
    ):
        yield


def _write(transforms: list[Any], use_msc: bool, rank: int, buckets: list[Any], results: queue.Queue[Any]) -> None:
    """In place of Megatron's function of this signature: bucket by bucket, through its own code for one bucket."""
    written: dict[int, Any] = {}
    for number, bucket in enumerate(buckets):
        answers: queue.Queue[Any] = queue.Queue()
        waiting: queue.Queue[int] = queue.Queue()
        waiting.put(number)
        FileSystemWriterAsync.write_preloaded_data(transforms, number, bucket, answers, waiting, True, use_msc=use_msc)
        _, written[number] = answers.get_nowait()
        if isinstance(written[number], Exception):
            results.put(written[number])
            return
    results.put(written)
