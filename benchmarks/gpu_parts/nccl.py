"""The part `nccl`: golden cases on two ranks, at the layouts that split a model, over NCCL, or gloo without a GPU.

On one GPU both ranks share it, which NCCL does not support: it takes them for two machines (NCCL_HOSTID) that talk over
loopback sockets. That it refuses or hangs there says nothing of this project, and the part is then skipped.
"""

from __future__ import annotations

import os
import socket
import time
from functools import partial

import torch

from benchmarks.gpu_parts.correctness import FP32_LIMIT, all_golden_cases, compare_with_golden, configure
from benchmarks.gpu_parts.forking import ForkedError, run_all_forked
from benchmarks.gpu_parts.outcome import Outcome, Settings
from nemo_oprd.run.preflight import preflight
from nemo_oprd.run.verify import verify
from nemo_oprd.runtime import gpus
from nemo_oprd.train import accumulate_gradients

RANKS = 2
# a golden case with losses on hidden states and on whole distributions
CASE = "composite_full_mu3"
LAYOUTS = {
    "TP2": ["student.parallel.tensor=2"],
    "TP2 + SP": ["student.parallel.tensor=2", "student.parallel.sequence=true"],
    "PP2": ["student.parallel.pipeline=2"],
    "CP2": ["student.parallel.context=2"],
    "DP2": [],
}
# two ranks on one GPU, for NCCL two machines
AS_TWO_MACHINES = {
    "NCCL_NET": "Socket",
    "NCCL_IB_DISABLE": "1",
    "NCCL_SOCKET_IFNAME": "lo",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_DEBUG": "WARN",
}


def nccl(settings: Settings, outcome: Outcome) -> None:
    """Compares a golden case in fp32 at each layout with its float64 numbers."""
    gpus = torch.cuda.device_count()
    shared = gpus == 1
    backend = "NCCL" if gpus else "gloo"
    where = "two ranks on one GPU, which NCCL does not support" if shared else f"{RANKS} GPUs" if gpus else "CPU"
    outcome.numbers |= {"backend": backend, "where": where}
    outcome.lines.append(f"{backend}, {where}")
    outcome.save()
    for name, overrides in LAYOUTS.items():
        start = time.perf_counter()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        output = settings.scratch / name.replace(" ", "")
        try:
            run_all_forked(
                [partial(_rank, number, port, output, overrides, shared=shared) for number in range(RANKS)],
                limit=settings.limit / len(LAYOUTS),
            )
        except ForkedError as error:
            if shared:  # whatever NCCL says there: it does not support it
                outcome.numbers.setdefault("refused", {})[name] = str(error)
                outcome.lines.append(f"{name}: {error}")
            else:
                outcome.problems.append(f"{name}: {error}")
            continue
        compare_with_golden(outcome, CASE, output, name)
        seconds, found = time.perf_counter() - start, outcome.numbers[name]
        outcome.lines.append(
            f"{name}: loss within {found['loss_deviation']:.1e}, gradients within "
            f"{found['worst_gradient_deviation']:.1e} of float64 (limit {FP32_LIMIT:.0e})"
        )
        outcome.row(name, seconds=seconds, note=backend)
    if not any(name in outcome.numbers for name in LAYOUTS) and not outcome.problems:
        outcome.skipped = f"NCCL refused two ranks on one GPU: {next(iter(outcome.numbers['refused'].values()))}"


def _rank(number: int, port: int, output: os.PathLike[str], overrides: list[str], *, shared: bool) -> None:
    """What one of the processes runs."""
    local = 0 if shared else number
    world = {"RANK": number, "LOCAL_RANK": local, "WORLD_SIZE": RANKS, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in world.items()})
    if shared:
        os.environ.update(AS_TWO_MACHINES, NCCL_HOSTID=f"machine{number}")
        gpus.identity = lambda index: f"GPU {index} of machine {number}"  # or the ranks would refuse to share it
    verify(preflight(configure(all_golden_cases()[CASE], output, *overrides), RANKS, "verify"), accumulate_gradients)  # type: ignore[arg-type]
    torch.distributed.destroy_process_group()
