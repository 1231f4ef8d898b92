"""The phase of `gpu_check` that splits a model over two GPUs with NCCL, or without a GPU over two processes."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.correctness import all_golden_cases, compare_with_golden, configure, worst_line
from benchmarks.outcome import Outcome, Settings
from nemo_oprd.commands.verify.step import verify
from nemo_oprd.runtime.messages import show
from nemo_oprd.setup.models import world_size
from nemo_oprd.setup.preflight import preflight

RANKS = 2
# a golden case with losses on hidden states and on whole distributions
CASE = "composite_full_mu3"
LAYOUTS = {"TP2": "student.parallel.tensor=2", "PP2": "student.parallel.pipeline=2"}


def two_ranks(settings: Settings) -> Outcome:
    """Compares a golden case in fp32 at TP2 and PP2 with its float64 numbers."""
    gpus = torch.cuda.device_count()
    if torch.cuda.is_available() and gpus < RANKS:
        return Outcome(skipped="one GPU")
    scratch = settings.scratch / "two_ranks"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    try:
        # children of this process, in its process group, so that a time limit ends them, too
        mp.spawn(_rank, (port, scratch), nprocs=RANKS)
    except mp.ProcessRaisedException as error:
        raise RuntimeError(str(error).strip().splitlines()[-1]) from error
    outcome = Outcome()
    for layout in LAYOUTS:
        compare_with_golden(outcome, CASE, scratch / layout, layout)
    backend = "NCCL" if torch.cuda.is_available() else "gloo"
    outcome.lines.append(worst_line(outcome, f"{CASE} at {' and '.join(LAYOUTS)} with {backend}"))
    return outcome


def _rank(rank: int, port: int, scratch: Path) -> None:
    """What one of the processes runs."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(RANKS),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    show()
    for layout, override in LAYOUTS.items():
        verify(preflight(configure(all_golden_cases()[CASE], scratch / layout, override), world_size(), "verify"))
    dist.destroy_process_group()
