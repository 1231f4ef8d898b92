"""Differences between the versions of Megatron-core that the project runs on, from 0.16.1 to 0.19.

Everything else calls Megatron in one way, which all of these versions understand: by keywords, so that a parameter that
moved is not taken for another one. `tests/unit/megatron/test_megatron_calls.py` compares calls with the signatures of
both ends of the range. Where a version has another name for a thing, this module asks for the name and not for the
version, because the versions in between have some of the changes and not others.
"""

from __future__ import annotations

import inspect
import logging
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch.distributed as dist


def _installed() -> str:
    """Returns Megatron-core's version; a source tree on Python's path has it in its code, and no metadata."""
    try:
        return version("megatron-core")
    except PackageNotFoundError:
        from megatron.core import __version__

        return __version__


CORE_VERSION = _installed()
# major and minor, such as (0, 19)
CORE = tuple(int(part) for part in CORE_VERSION.split(".")[:2])

# Modules that name CUDA devices in some versions only; `cpu_patches.py` changes them. Up to 0.16, there are experts
# whose weights are allocated on CUDA; from 0.19 on, the gated delta net is a package, and calls
# `torch.cuda.current_device()` where it makes parameters and indices.
MODULES_ASKING_FOR_CUDA = (
    *(("megatron.core.transformer.moe.experts",) if CORE < (0, 17) else ()),
    *(("megatron.core.ssm.gated_delta_net.common", "megatron.core.ssm.gated_delta_net.gdn") if CORE >= (0, 19) else ()),
)

# The messages of Megatron-core 0.19 at every save and load about its own calls.
_SAID_AT_EVERY_CHECKPOINT = {
    "megatron.core.dist_checkpointing.strategies.common": "load_common is deprecated",
    "megatron.core.dist_checkpointing.strategies.torch": "MCore's async save is deprecated",
}


def batch_on_this_cp_rank(batch: dict[str, Any], group: dist.ProcessGroup) -> dict[str, Any]:
    """Returns the part of each sequence that is this rank's in `group`, by Megatron's `get_batch_on_this_cp_rank`.

    From 0.18 on, the second parameter is `is_hybrid_cp`. A group in its place would be taken for True, and the
    sequences would be divided among the whole world, without an error.

    Args:
        batch: tensors [B, S] by name.
        group: the context-parallel ranks.
    """
    from megatron.core.utils import get_batch_on_this_cp_rank

    if "is_hybrid_cp" in inspect.signature(get_batch_on_this_cp_rank).parameters:
        return get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=group)
    return get_batch_on_this_cp_rank(batch, cp_group=group)


def checkpoint_writer_names() -> tuple[str, str]:
    """Returns two names in `strategies.filesystem_async`: of the function that makes the queue of results, and of the
    method of `FileSystemWriterAsync` that starts writers.

    0.17 renamed both; its writers are threads, earlier ones processes. The queue is still served by a process.
    """
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    if hasattr(filesystem_async, "get_write_results_queue"):
        return "get_write_results_queue", "write_preloaded_data_multithread"
    return "_get_write_results_queue", "write_preloaded_data_multiproc"


def reads_common_state_in_shards() -> bool:
    """Returns whether Megatron's loader finds the state that all ranks share inside the checkpoint's shards.

    From 0.19 on, it is written there; the loader also understands the file common.pt of earlier versions.
    """
    from megatron.core import dist_checkpointing

    return "common_strategy" not in inspect.signature(dist_checkpointing.load).parameters


@cache
def quieten_checkpoints() -> None:
    """Drops the messages about deprecation that Megatron logs at every save and load. Another call changes nothing."""
    for name, start in _SAID_AT_EVERY_CHECKPOINT.items():
        logging.getLogger(name).addFilter(partial(_begins_otherwise, start))


def _begins_otherwise(start: str, record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(start)
