"""What the rollouts of a step cost one rank, from the servers' answers to the first microbatch, at large sizes.

    python -m benchmarks.rollout_scale [--sizes 256x4096 1024x16384] [--ranks 8 64] [--controllers 1 8] [--json FILE]

The measured rank is the world's first one: a controller, on a machine with its share of the ranks. It asks a server
whose answers have real sizes and cost next to nothing (`payload_server.py`). The other ranks are forked and do nothing
but take part in the exchange; the controllers among them have their share of the responses at once.
Then the rank does what a step does until its first microbatch: it exchanges the responses, keeps them for a run that
resumes, draws the tokens of the sampling check, and plans the update (the last 512 tokens of each response; student
TP2 + SP, PP2, the rest data parallel). No model computes.

Seconds are CPU seconds of the rank's main thread, and in the exchange of all its threads, because elapsed ones depend
on what else runs; `*_elapsed_seconds` are beside them; both are the least of three passes. `aside_seconds` are the CPU
seconds of the thread that writes the kept responses meanwhile, `client_seconds` those of the controller's threads that
ask the servers while these sample, `pack_seconds` those in which the servers pack these answers. `host_bytes_per_rank`
is the largest growth of the rank's resident memory, shared pages counted whole, less 8 bytes per token of the batch for
the tokens themselves; `client_bytes` is the growth of a controller while it asks. Nothing is on a device: the exchange
is over gloo.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import multiprocessing
import os
import re
import signal
import socket
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.payload_server import VOCABULARY, payload_server
from benchmarks.rollout_table import HEAD, line
from nemo_oprd.batch.layout import Layout
from nemo_oprd.batch.plan import StepPlan
from nemo_oprd.batch.token_table import TokenTable, make_rows
from nemo_oprd.batch.types import Rollout
from nemo_oprd.data.token_ids import TokenIds
from nemo_oprd.distillation import sampling_check
from nemo_oprd.megatron.parallel import everyones, init_distributed
from nemo_oprd.rollout.engine import Request, SamplingParams
from nemo_oprd.rollout.exchange import Exchange
from nemo_oprd.rollout.response import Response
from nemo_oprd.rollout.resume_cache import ResumeCache
from nemo_oprd.vllm.client import Client
from nemo_oprd.vllm.rounds import LengthEstimate, rollout_of
from nemo_oprd.vllm.sampler import Job, Round, RoundSummary, Sampler, Task
from nemo_oprd.vllm.server_lifecycle import Server

SIZES = ("64x1024", "256x4096", "1024x4096", "1024x16384")
RANKS, CONTROLLERS = (8, 64), (1, 8)
PROMPT, LAST_K, BUDGET, CHECK_TOKENS, IN_FLIGHT = 128, 512, 16384, 1024, 256
VERSION, STEP = "1-benchmark", 1
PASSES = 3
# the measured rank has the first core for itself, as far as this benchmark is concerned
CORES = sorted(os.sched_getaffinity(0))
OTHER_CORES = CORES[1:] or CORES


@dataclass(frozen=True)
class Case:
    """One row: a batch, the ranks of the world, and how many of them, on machines of their own, have servers."""

    responses: int
    tokens: int
    ranks: int
    controllers: int

    @property
    def part(self) -> int:
        """Responses of one controller."""
        return self.responses // self.controllers

    @property
    def leaders(self) -> range:
        """The controllers; each is the first rank of its machine."""
        return range(0, self.ranks, self.ranks // self.controllers)


class Phases:
    """CPU seconds and elapsed ones by phase, those of other threads, and the largest growth of the resident memory."""

    def __init__(self) -> None:
        self.cpu: dict[str, float] = {}
        self.elapsed: dict[str, float] = {}
        self.aside, self.bytes = 0.0, 0
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")  # the peak is now what is resident
        self._resident = status_bytes("VmRSS")

    def run(self, name: str, work: Callable[[], Any], clock: Callable[[], float] = time.thread_time) -> Any:
        """What `work` returns. `clock`: of the CPU seconds, those of this thread or of the whole process."""
        elapsed, cpu = time.perf_counter(), clock()
        result = work()
        self.cpu[name], self.elapsed[name] = clock() - cpu, time.perf_counter() - elapsed
        return result

    def end(self, aside: float) -> None:
        """Notes the peak; `aside`: the CPU seconds of other threads."""
        self.aside, self.bytes = aside, status_bytes("VmHWM") - self._resident


def status_bytes(key: str, process: int | str = "self") -> int:
    """A number of a process in /proc, such as its peak of resident memory (VmHWM)."""
    return 1024 * int(re.findall(rf"{key}:\s+(\d+)", Path(f"/proc/{process}/status").read_text())[0])


def sample(count: int, tokens: int) -> tuple[dict[int, Response], dict[str, float]]:
    """One controller's responses, as its sampler takes them, and what that cost."""
    task = Task([Request([7] * PROMPT)] * count, sampling_of(tokens), 1 << 20, (1,), TokenIds(VOCABULARY), 600.0)
    order, result, client = iter(range(count)), Round(), Client()
    sampler = Sampler(client)
    with payload_server(tokens, VERSION, OTHER_CORES) as (path, answer_bytes, pack_seconds):
        server = Server(0, IN_FLIGHT, pushed=VERSION, socket=path)
        job = Job(task, VERSION, STEP, lambda: next(order, None), IN_FLIGHT)
        # one response first, which imports
        sampler.start(Job(task, VERSION, STEP, iter([0, None]).__next__, 1), [server], Round()).result()
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")
        resident, before = status_bytes("VmRSS"), time.process_time()
        sampler.start(job, [server], result).result()
        found = {"client_seconds": time.process_time() - before, "pack_seconds": pack_seconds * count}
        found["client_bytes"] = status_bytes("VmHWM") - resident
        found["answer_bytes_per_token"] = answer_bytes / tokens
    sampler.close()
    client.close()
    assert result.error is None and len(result.sampled) == count, (result.error, result.died)
    return result.sampled, found


def sampling_of(tokens: int) -> SamplingParams:
    """How all responses are sampled."""
    return SamplingParams(1.0, 1.0, tokens, (0, 1, STEP))


@dataclass(frozen=True)
class MeasuredRank:
    """What the measured rank has in a step: the requests, its own responses, and where all responses go."""

    case: Case
    requests: list[Request]
    sampled: dict[int, Response]
    exchange: Exchange
    cache: ResumeCache
    lengths: LengthEstimate

    def step(self) -> tuple[Phases, TokenTable]:
        """From the last response to the first microbatch: (what it cost, the tokens that the check has drawn)."""
        phases, sampling = Phases(), sampling_of(self.case.tokens)
        rollouts: list[Rollout] = phases.run("gather", self.gather, clock=time.process_time)
        keep, before = dict(enumerate(rollouts)), time.process_time() - time.thread_time()
        phases.run("cache", lambda: self.cache.put(STEP, keep, sampling, len(keep)))
        drawn = phases.run("check", lambda: sampling_check._draw(rollouts, CHECK_TOKENS, 0, STEP))
        phases.run("plan", lambda: plan(rollouts, self.case.ranks))
        self.cache.finish()
        phases.end(aside=time.process_time() - time.thread_time() - before)
        return phases, drawn

    def gather(self) -> list[Rollout]:
        """As `VllmEngine.generate` does after its last round."""
        RoundSummary.joined(everyones(RoundSummary.of(Round(self.sampled), False)))
        shared = self.exchange.share({i: response.columns() for i, response in self.sampled.items()})
        found = {i: rollout_of(self.requests[i], Response.of(columns)) for i, columns in shared.items()}
        self.lengths.learn(self.requests, {i: len(rollout.response_ids) for i, rollout in found.items()})
        return [found[i] for i in range(len(self.requests))]


def measure(case: Case, sampled: dict[int, Response], folder: Path) -> dict[str, Any]:
    """What the measured rank does; the numbers of its row."""
    requests = [Request([7] * PROMPT) for _ in range(case.responses)]
    cache, passes = ResumeCache(folder, {}), []
    rank = MeasuredRank(case, requests, sampled, Exchange(case.leaders), cache, LengthEstimate())
    for _ in range(PASSES):
        dist.barrier()
        phases, drawn = rank.step()
        passes.append(phases)
    best = min(passes, key=lambda phases: sum(phases.cpu.values()))
    return {
        "host_bytes_per_rank": max(phases.bytes for phases in passes) - 8 * case.responses * case.tokens,
        "device_bytes_per_rank": 0,
        "rank0_seconds": sum(best.cpu.values()),
        "check_seconds": best.cpu["check"],
        "gather_seconds": best.cpu["gather"],
        "cache_seconds": best.cpu["cache"],
        "plan_seconds": best.cpu["plan"],
        "aside_seconds": best.aside,
        "rank0_elapsed_seconds": min(sum(phases.elapsed.values()) for phases in passes),
        "gather_elapsed_seconds": min(phases.elapsed["gather"] for phases in passes),
        "check_tokens": len(drawn),
        "check_forwarded_tokens": sum(drawn.needed_tokens(case.responses)),
        "measured": True,
    }


def plan(rollouts: list[Rollout], ranks: int) -> StepPlan:
    """The update's plan, as `Distiller.plan` makes it for one teacher."""
    table = make_rows(rollouts, positions="last_k", k=LAST_K, position="token", aggregation="sequence_mean")
    student = Layout(tensor=2, sequence=True, pipeline=2, data=ranks // 4)
    table = table.scale_responses([1.0] * len(rollouts))
    return StepPlan.build(table, None, len(rollouts), student, BUDGET, [0] * len(rollouts))


def take_part(case: Case, rank: int) -> None:
    """What another rank does; a controller has its part of the responses, without a server."""
    own: dict[int, Response] = {}
    if rank in case.leaders:
        random, first = np.random.default_rng(rank), case.leaders.index(rank) * case.part
        for i in range(first, first + case.part):
            ids = random.integers(VOCABULARY, size=case.tokens, dtype=np.int32)
            versions = np.array([[STEP, 0, case.tokens]], np.int32)
            own[i] = Response(ids, False, random.random(case.tokens, np.float32), versions)
    exchange = Exchange(case.leaders)
    for _ in range(PASSES):
        dist.barrier()
        everyones(RoundSummary.of(Round(own), False))
        exchange.share({i: response.columns() for i, response in own.items()})


def run_rank(case: Case, rank: int, port: int, sampled: dict[int, Response], folder: Path, told: Connection) -> None:
    """A forked process: one rank of the world. The measured one sends its numbers."""
    os.sched_setaffinity(0, OTHER_CORES if rank else CORES[:1])
    machine = rank // (case.ranks // case.controllers)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(case.ranks), "MASTER_ADDR": "127.0.0.1"}
    os.environ |= {"MASTER_PORT": str(port), "SLURMD_NODENAME": f"machine{machine}"}
    torch.set_num_threads(1)
    if rank:
        told.close()  # its end says that the measured rank has ended
    init_distributed()
    if rank == 0:
        told.send(measure(case, sampled, folder))
    else:
        take_part(case, rank)
    signal.pause()  # until all are killed; ranks that left one by one would report each other


def world(case: Case, sampled: dict[int, Response]) -> dict[str, Any]:
    """The row of a case, without what `sample` has measured."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    here, there = multiprocessing.Pipe(duplex=False)
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        arguments = [(case, rank, port, sampled, Path(folder), there) for rank in range(case.ranks)]
        processes = [context.Process(target=run_rank, args=each, daemon=True) for each in arguments]
        for process in processes:
            process.start()
        there.close()
        try:
            found = here.recv()
        finally:
            for process in processes:
                process.kill()
                process.join()
    names = {"responses": case.responses, "tokens": case.tokens, "ranks": case.ranks, "controllers": case.controllers}
    return names | found


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", default=SIZES, metavar="RESPONSESxTOKENS", help="batches")
    parser.add_argument("--ranks", nargs="+", type=int, default=RANKS, help="of the world")
    parser.add_argument("--controllers", nargs="+", type=int, default=CONTROLLERS, help="machines with servers")
    parser.add_argument("--json", metavar="FILE", help="also write the rows there")
    options = parser.parse_args()
    for ranks, controllers in itertools.product(options.ranks, options.controllers):
        if ranks % 4 or ranks % controllers:
            parser.error(f"--ranks {ranks} with --controllers {controllers}: expected a multiple of 4 and of these")
    print(HEAD)
    rows = []
    for responses, tokens in (map(int, size.split("x")) for size in options.sizes):
        for controllers in options.controllers:
            sampled, cost = sample(responses // controllers, tokens)
            gc.collect()
            gc.freeze()  # what forked ranks share stays shared
            for ranks in options.ranks:
                rows.append(world(Case(responses, tokens, ranks, controllers), sampled) | cost)
                print(line(rows[-1]), flush=True)
            del sampled
            gc.unfreeze()
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
