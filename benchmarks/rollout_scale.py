"""What rollouts cost one rank at the sizes of a large run, between the servers' answers and the first microbatch.

    python -m benchmarks.rollout_scale [--sizes 256x4096 1024x16384] [--ranks 8 64] [--controllers 1 8] [--json FILE]
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import multiprocessing
import os
import pickle
import re
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from benchmarks.payload_server import VOCABULARY, payload_server
from nemo_oprd.batch.plan import StepPlan
from nemo_oprd.batch.token_table import make_rows
from nemo_oprd.batch.types import Rollout
from nemo_oprd.distillation.sampling_check import _draw
from nemo_oprd.layout import Layout
from nemo_oprd.rollout.engine import Request, SamplingParams
from nemo_oprd.rollout.resume_cache import ResumeCache
from nemo_oprd.rollout.vllm.client import Client
from nemo_oprd.rollout.vllm.engine import _rollout
from nemo_oprd.rollout.vllm.request_queue import LengthEstimate
from nemo_oprd.rollout.vllm.sampling import Round, Sampling, Task, joined
from nemo_oprd.rollout.vllm.server import Endpoint

SIZES = ("64x1024", "256x4096", "1024x4096", "1024x16384")
PROMPT, LAST_K, BUDGET, CHECK_TOKENS, IN_FLIGHT = 128, 512, 16384, 1024, 256
VERSION = "1-benchmark"
MOST_PARSED, MOST_WIRE_BYTES = 128, 3_000_000_000
RANK_CORE, OTHER_CORE = 0, 1


def _status(key: str) -> int:
    return 1024 * int(re.findall(rf"{key}:\s+(\d+)", Path("/proc/self/status").read_text())[0])


class Phases:
    """Wall and CPU seconds and peak memory by phase."""

    def __init__(self) -> None:
        gc.collect()
        self.found: dict[str, dict[str, float]] = {}
        self._base = _status("VmRSS")

    def run(self, name: str, work: Callable[[], Any]) -> Any:
        Path("/proc/self/clear_refs").write_text("5")
        wall, cpu = time.perf_counter(), time.process_time()
        result = work()
        found = {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}
        self.found[name] = found | {"peak": _status("VmHWM") - self._base}
        print(f"    {name}: " + ", ".join(f"{k} {v:.3g}" for k, v in self.found[name].items()), flush=True)
        return result


def wire_rounds(size: int, world: int) -> int:
    """How many of the `world - 1` parts are sent; the rest is extrapolated."""
    return max(1, min(world - 1, MOST_WIRE_BYTES // size))


def _join(rank: int, file: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)


def _play(file: str, pairs: list[tuple[int, int]]) -> None:
    """Sends what the other ranks would send."""
    os.sched_setaffinity(0, {OTHER_CORE})
    _join(1, file)
    for size, times in pairs:
        own, got = torch.zeros(size, dtype=torch.uint8), [torch.zeros(size, dtype=torch.uint8) for _ in range(2)]
        dist.barrier()
        for _ in range(times):
            dist.all_gather(got, own)


def _measure(told: Connection, count: int, tokens: int, controllers: int, worlds: list[int]) -> None:
    """The measured rank."""
    os.sched_setaffinity(0, {RANK_CORE})
    torch.set_num_threads(1)
    own = count // controllers
    parsed = min(own, MOST_PARSED)
    requests = [Request([7] * PROMPT) for _ in range(count)]
    sampling = SamplingParams(1.0, 1.0, tokens, (0, 1, 0))
    phases = Phases()
    with payload_server(tokens, VERSION, OTHER_CORE) as (url, length):
        client = Client()
        server = Endpoint(0, IN_FLIGHT, generation=1, base_url=url, pushed=VERSION)
        mine, order = Round(), iter(range(parsed))
        task = Task(requests, sampling, 1 << 20, (1,), VOCABULARY, 600.0)
        round_ = Sampling(client, task, VERSION, lambda: next(order, None), IN_FLIGHT, mine)
        phases.run("parse", lambda: client.run(round_.run([server])))
        assert mine.error is None and len(mine.sampled) == parsed, (mine.error, len(mine.sampled), mine.died)
        client.close()
    one = pickle.dumps(mine.sampled)
    for number in range(1, own // parsed):  # fresh objects
        mine.sampled |= {i + number * parsed: sampled for i, sampled in pickle.loads(one).items()}
    del one
    blob, _ = phases.run("pickle", lambda: distributed_c10d._object_to_tensor((mine.portable(), False), torch.device("cpu"), None))
    size = blob.numel()
    with tempfile.TemporaryDirectory() as scratch:
        file = f"{scratch}/meet"
        player = multiprocessing.get_context("fork").Process(
            target=_play, args=(file, [(size, wire_rounds(size, world)) for world in worlds]), daemon=True
        )
        player.start()
        _join(0, file)
        for world in worlds:
            got = [torch.zeros(size, dtype=torch.uint8) for _ in range(2)]
            dist.barrier()
            phases.run(f"wire {world}", lambda world=world, got=got: [dist.all_gather(got, blob) for _ in range(wire_rounds(size, world))])
            del got
        player.join()
        sizes = torch.LongTensor([size])
        parts = phases.run("unpickle", lambda: [distributed_c10d._tensor_to_object(blob, sizes, None) for _ in range(controllers)])
        for number, (part, _) in enumerate(parts):
            part.sampled = {i + number * own: sampled for i, sampled in part.sampled.items()}

        def build() -> list[Rollout]:
            results = dict(joined([part for part, _ in parts]).sampled)
            rollouts = {i: _rollout(requests[i], sampled, 1) for i, sampled in results.items()}
            LengthEstimate().learn(requests, {i: len(sampled.ids) for i, sampled in results.items()})
            return [rollouts[i] for i in range(len(requests))]

        rollouts = phases.run("build", build)
        del blob, parts, mine, round_, part
        gc.collect()
        if controllers == max(1, controllers) and told is not None:
            cache = ResumeCache(Path(scratch), {})
            phases.run("cache", lambda: cache.put(0, dict(enumerate(rollouts)), sampling, count))

            def draw() -> int:
                sequences = [Rollout(rollout.prompt_ids, rollout.response_ids) for rollout in rollouts]
                return sum(_draw(sequences, CHECK_TOKENS, (0, 3, 0)).needed_tokens(count))

            forwarded = phases.run("check", draw)
            for world in worlds:

                def plan(world: int = world) -> StepPlan:
                    table = make_rows(rollouts, positions="last_k", k=LAST_K, position="token", aggregation="sequence_mean")
                    student = Layout(tensor=2, sequence=True, pipeline=2, data=world // 4)
                    return StepPlan.build(table.scale_responses([1.0] * count), None, count, student, BUDGET, [0] * count)

                phases.run(f"plan {world}", plan)
    told.send({"length": length, "part": size, "forwarded": forwarded, "parsed": parsed, "phases": phases.found})


def measure(count: int, tokens: int, controllers: int, worlds: list[int]) -> list[dict[str, Any]]:
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=_measure, args=(there, count, tokens, controllers, worlds))
    process.start()
    there.close()
    found = here.recv()
    process.join()
    phases, rows = found["phases"], []
    for world in worlds:
        scales = {"parse": count // controllers / found["parsed"], f"wire {world}": (world - 1) / wire_rounds(found["part"], world)}
        for name, scale in scales.items():
            phases[name] |= {kind: phases[name][kind] * scale for kind in ("wall", "cpu")} if world == worlds[0] or name != "parse" else {}
        estimated = [f"{name.split()[0]}_seconds" for name, scale in scales.items() if scale > 1]
        seconds = {name: phase["cpu"] for name, phase in phases.items()}
        gather = seconds["pickle"] + seconds[f"wire {world}"] + seconds["unpickle"]
        plan = seconds[f"plan {world}"]
        peak = max(phase["peak"] for name, phase in phases.items() if name.split()[0] not in ("parse", "wire"))
        order = ["pickle", f"wire {world}", "unpickle", "build", "cache", "check", f"plan {world}"]
        rows.append({
            "responses": count, "tokens": tokens, "ranks": world, "controllers": controllers,
            "host_bytes_per_rank": peak - 8 * count * tokens,
            "device_bytes_per_rank": (world + 1) * found["part"],
            "rank0_seconds": gather + seconds["build"] + seconds["cache"] + seconds["check"] + plan,
            "check_seconds": seconds["check"], "gather_seconds": gather,
            "code": "before", "measured": not estimated, "extrapolated": estimated, "parse_seconds": phases["parse"]["cpu"], 
            "answer_bytes_per_token": found["length"] / tokens, "wire_bytes": (world - 1) * found["part"],
            "pickle_seconds": seconds["pickle"], "wire_seconds": seconds[f"wire {world}"], "unpickle_seconds": seconds["unpickle"],
            "build_seconds": seconds["build"], "cache_seconds": seconds["cache"], "plan_seconds": plan,
            "check_forwarded_tokens": found["forwarded"], "gather_elapsed_seconds": sum(phases[name]["wall"] for name in order[:3]), "rank0_elapsed_seconds": sum(phases[name]["wall"] for name in order), "load": os.getloadavg()[0],
        })  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", default=SIZES)
    parser.add_argument("--ranks", nargs="+", type=int, default=(8, 64))
    parser.add_argument("--controllers", nargs="+", type=int, default=(1, 8))
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    rows = []
    for size in options.sizes:
        count, tokens = map(int, size.split("x"))
        for controllers in options.controllers:
            print(size, controllers, flush=True)
            rows += measure(count, tokens, controllers, list(options.ranks))
            if options.json:
                Path(options.json).write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
