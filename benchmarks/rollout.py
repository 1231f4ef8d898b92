"""Tokens per second of sampling by the rollout engines and by transformers, and what a weight update of vLLM costs.

    python -m benchmarks.rollout [--json FILE] [--models toy,smollm2] [--responses N] [--tokens T] [--smollm2 DIR]

Every engine samples from the same weights in fp32, with one compute thread, responses of the same number of tokens to
the same prompts; ids that end a response are sampled like others. The engines take turns, so that all of them see the
same changes of a busy machine, and the first turn does not count. vLLM's server takes requests in a second process;
CPU time is that of all processes that take part.

Without --smollm2, SmolLM2-135M has random weights of its shape: speed does not depend on the values. The second part
times `update_weights` with tensors that are in memory: the way from Megatron's layout to them is not included.
Needs vLLM's environment (scripts/setup_vllm.sh), or --engines megatron,transformers --updates none.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.rollout_models import ENGINES, MODELS, Sampler, configure, cpu_seconds, directory_of, open_sampler
from nemo_oprd.batch.layout import Layout
from nemo_oprd.megatron.parallel import init_distributed
from nemo_oprd.megatron.weights.hf import HFCheckpoint
from nemo_oprd.models import read_model_spec
from nemo_oprd.run.engine_kinds import make_engine
from nemo_oprd.vllm import transport
from nemo_oprd.vllm.engine import VllmEngine

TRANSPORTS = ("file", "group")
# calls of an update -> the column that their seconds are in
PARTS = {
    "/pause?mode=wait": "pause, begin, resume",
    "/start_weight_update": "pause, begin, resume",
    "/resume": "pause, begin, resume",
    "/update_weights": "receive and load",
    "nemo_oprd_received": "compare digests",
    "/finish_weight_update": "rebuild",
}
OWN = "trainer alone"
COLUMNS = (*dict.fromkeys(PARTS.values()), OWN)


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""

    def names(known: Sequence[str]) -> Any:
        def parse(text: str) -> list[str]:
            found = [name for name in text.split(",") if name not in ("", "none")]
            if not set(found) <= set(known):
                raise argparse.ArgumentTypeError(f"{text}: expected some of {', '.join(known)}, or none")
            return found

        return parse

    sampled = [name for name, model in MODELS.items() if model.responses]
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write all measurements there")
    parser.add_argument("--models", metavar="NAMES", type=names(sampled), default=sampled, help="to sample from")
    parser.add_argument("--updates", metavar="NAMES", type=names([*MODELS]), default=[*MODELS], help="to update")
    parser.add_argument("--engines", metavar="NAMES", type=names(ENGINES), default=[*ENGINES], help="to sample with")
    parser.add_argument("--responses", metavar="N", type=int, help="responses at a time (toy: 64, smollm2: 16)")
    parser.add_argument("--tokens", metavar="T", type=int, help="tokens per response (toy: 40, smollm2: 64)")
    parser.add_argument("--repeats", metavar="N", type=int, default=3, help="measurements of everything (3)")
    parser.add_argument("--smollm2", metavar="DIR", type=Path, help="SmolLM2-135M as Hugging Face model")
    options = parser.parse_args(given)
    if options.smollm2 is not None and not (options.smollm2 / "config.json").is_file():
        parser.error(f"--smollm2 {options.smollm2}: expected the directory of a Hugging Face model")
    return options


def prompts_of(seed: int, count: int, length: int, vocabulary: int) -> list[list[int]]:
    """Random prompts of one length; others for every seed, so that no cache of prompts helps."""
    return np.random.default_rng(seed).integers(0, vocabulary, (count, length)).tolist()


def sample(name: str, engines: list[str], options: argparse.Namespace, scratch: Path) -> list[dict[str, Any]]:
    """One row of the first table per engine."""
    model, source = MODELS[name], directory_of(name, scratch, options.smollm2)
    responses, tokens = options.responses or model.responses, options.tokens or model.tokens
    samplers: dict[str, Sampler] = {}
    rows: dict[str, dict[str, Any]] = {}
    try:
        for engine in engines:
            samplers[engine] = open_sampler(engine, source, scratch)
            rows[engine] = {"model": name, "engine": engine, "responses": responses, "tokens": tokens}
            rows[engine] |= {"seconds": [], "cpu_seconds": []}
        for turn in range(options.repeats + 1):
            prompts = prompts_of(turn, responses, model.prompt, model.shape.vocab_size)
            for engine, sampler in samplers.items():
                cpu, start = sampler.cpu_seconds(), time.perf_counter()
                ids = sampler.sample(prompts, tokens, seed=turn)
                if turn:
                    rows[engine]["seconds"].append(time.perf_counter() - start)
                    rows[engine]["cpu_seconds"].append(sampler.cpu_seconds() - cpu)
                lengths = {len(response) for response in ids}
                if len(ids) != responses or lengths != {tokens}:
                    raise RuntimeError(f"{engine} sampled {len(ids)} responses of {lengths} tokens")
    finally:
        for sampler in samplers.values():
            sampler.close()
    return list(rows.values())


class UpdateMeter:
    """An engine whose updates are timed, also by the calls to its server; counts the bytes of all buckets."""

    def __init__(self, kind: str, source: Path, scratch: Path) -> None:
        """Starts the server."""
        init_distributed()
        settings = ("rollout.engine=vllm", f"rollout.vllm.transport={kind}")
        config = configure(source, scratch / kind, *settings)
        self._engine = make_engine(config, read_model_spec(source), source, Layout(), eos_ids=())
        assert isinstance(self._engine, VllmEngine)
        self._calls: dict[str, float] = defaultdict(float)
        self.close = self._engine.close
        client: Any = self._engine._mine.client
        post = client.post

        async def timed(server: Any, path: str, body: Any = None, **more: Any) -> Any:
            start = time.perf_counter()
            answer = await post(server, path, body, **more)
            name = body["method"] if path == "/collective_rpc" else path
            self._calls[name] += time.perf_counter() - start
            return answer

        client.post = timed

    def update(self, tensors: dict[str, torch.Tensor], step: int) -> dict[str, Any]:
        """Seconds, CPU seconds of all processes and seconds by part of one update."""
        self._calls.clear()
        cpu, start = cpu_seconds(self._engine), time.perf_counter()
        self._engine.update_weights(lambda: iter(tensors.items()), step)
        seconds = time.perf_counter() - start
        return {
            "seconds": seconds,
            "cpu_seconds": cpu_seconds(self._engine) - cpu,
            "parts": parts_of(seconds, self._calls),
        }


def parts_of(seconds: float, calls: dict[str, float]) -> dict[str, float]:
    """Seconds of an update by column; what is left is the trainer's, in which the server waits."""
    parts = dict.fromkeys(COLUMNS, 0.0)
    for path, spent in calls.items():
        if path in PARTS:
            parts[PARTS[path]] += spent
    return parts | {OWN: seconds - sum(parts.values())}


def update(name: str, options: argparse.Namespace, scratch: Path) -> list[dict[str, Any]]:
    """One row of the second table per transport."""
    source = directory_of(name, scratch, options.smollm2)
    checkpoint = HFCheckpoint(source)
    tensors = {key: checkpoint[key].float() for key in sorted(checkpoint.keys())}
    sizes = [len(bucket.data) for bucket in transport.buckets(tensors.items())]
    meters: dict[str, UpdateMeter] = {}
    rows: dict[str, dict[str, Any]] = {}
    try:
        for kind in TRANSPORTS:
            meters[kind] = UpdateMeter(kind, source, scratch)
            rows[kind] = {"model": name, "transport": kind, "bytes": sum(sizes), "buckets": len(sizes)}
            rows[kind] |= {"seconds": [], "cpu_seconds": [], "parts": []}
        for turn in range(options.repeats + 1):
            for kind, meter in meters.items():
                for key, value in meter.update(tensors, turn).items():
                    if turn:  # the first waits for the server
                        rows[kind][key].append(value)
    finally:
        for meter in meters.values():
            meter.close()
    return list(rows.values())


def spread(values: Sequence[float], digits: int) -> str:
    """Median (least to most)."""
    low, middle, high = (f"{v:,.{digits}f}" for v in (min(values), statistics.median(values), max(values)))
    return f"{middle} ({low} to {high})"


def sampling_lines(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """The first table: more is better in the column of tokens/s, less in that of CPU time."""
    yield "| model | responses x tokens | engine | tokens/s | CPU ms per token |"
    yield "|---" * 5 + "|"
    for row in rows:
        count = row["responses"] * row["tokens"]
        rates = spread([count / seconds for seconds in row["seconds"]], 0)
        cpu = spread([1000 * seconds / count for seconds in row["cpu_seconds"]], 2)
        yield f"| {row['model']} | {row['responses']} x {row['tokens']} | {row['engine']} | {rates} | {cpu} |"


def update_lines(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """The second table: an update as a whole, and the medians of its parts."""
    yield f"| model | MB | transport | seconds | CPU s | {' | '.join(COLUMNS)} |"
    yield "|---" * (5 + len(COLUMNS)) + "|"
    for row in rows:
        parts = [f"{statistics.median(each[part] for each in row['parts']):.3f}" for part in COLUMNS]
        cpu = f"{statistics.median(row['cpu_seconds']):.2f}"
        cells = [row["model"], f"{row['bytes'] / 1e6:,.1f}", row["transport"], spread(row["seconds"], 3), cpu, *parts]
        yield f"| {' | '.join(cells)} |"


def main(given: Sequence[str] | None = None) -> None:
    """Prints the tables."""
    options = arguments(given)
    torch.set_num_threads(1)
    os.environ["NEMO_OPRD_VLLM_THREADS"] = "1"
    found: dict[str, list[dict[str, Any]]] = {"sampling": [], "updates": []}
    with tempfile.TemporaryDirectory() as place:
        if options.smollm2 is None and "smollm2" in {*options.models, *options.updates}:
            print("smollm2 has random weights of the shape of SmolLM2-135M (--smollm2 DIR: the model itself)\n")
        for name in options.models:
            found["sampling"] += sample(name, options.engines, options, Path(place))
        if options.models:
            print(*sampling_lines(found["sampling"]), "", sep="\n", flush=True)
        for name in options.updates:
            found["updates"] += update(name, options, Path(place))
        if options.updates:
            print(*update_lines(found["updates"]), sep="\n", flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
