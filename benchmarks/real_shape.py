"""The phases of `gpu_check` that measure speed: a training step at the shape of R1-Distill-Qwen-1.5B, and sampling.

Student and teacher share one GPU, in bf16, with random weights, because time and memory do not depend on the values of
weights. Each phase of a step is timed with a synchronised device, and has its own memory peak.
"""

from __future__ import annotations

import dataclasses
import math
import resource
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from benchmarks.outcome import Outcome, Settings
from nemo_oprd.commands.plan.estimate import Lengths, estimate
from nemo_oprd.commands.plan.gpus import GPUS, Cluster
from nemo_oprd.config.loading import load_config
from nemo_oprd.config.schema import Config
from nemo_oprd.distillation.distiller import Distiller
from nemo_oprd.distillation.step_batch import StepBatch
from nemo_oprd.layout import Layout
from nemo_oprd.models import read_model_spec
from nemo_oprd.models.megatron.model import layer_backend
from nemo_oprd.models.megatron.parallel import init_distributed
from nemo_oprd.models.weights.hf import HFCheckpoint
from nemo_oprd.rollout.engine import Request, SamplingParams
from nemo_oprd.rollout.in_process.engine import MegatronEngine
from nemo_oprd.rollout.replay import read_rollouts
from nemo_oprd.setup.models import distiller_for
from nemo_oprd.setup.resolve import resolve
from tests.support.random_pair import Shape, read_shape, save_random_model, save_random_rollouts

# config.json of DeepSeek-R1-Distill-Qwen-1.5B; its head is not tied
R1_DISTILL_1P5B = Shape(28, 1536, 8960, 12, 2, 151936, 131072)
WARMUP, STEPS = 2, 3


@dataclasses.dataclass(frozen=True)
class Size:
    """The sizes of a measurement: the models, one batch of recorded responses, and the batch to sample."""

    shape: Shape
    prompt: int
    responses: tuple[int, ...]
    last_k: int
    tokens_per_microbatch: int
    sequences: int
    new_tokens: int
    long_prompt: int  # of `long_context.py`
    long_sequences: int


REAL = Size(R1_DISTILL_1P5B, 128, (2000, 2500, 3000, 4000, 5000, 6000, 7000, 8000), 2000, 8192, 64, 256, 16384, 4)
QUICK = Size(Shape(2, 64, 128, 4, 2, 512, 512), 8, (20, 25, 30, 40, 50, 60, 70, 80), 20, 96, 4, 8, 256, 2)

# Bytes for a layer of the 1.5B: 46.8 M parameters (student: bf16 weight, fp32 gradient, main weight and two moments;
# teacher: bf16 weight) and, without recompute, activations per token of a microbatch: 130 kB are kept for the backward
# pass (counted with saved-tensor hooks on local layers), the rest is a reserve.
LAYER_BYTES = 46.8e6 * (18 + 2) + 150e3 * REAL.tokens_per_microbatch
# the same for both embeddings and the student's head, and a reserve for temporary tensors
OTHER_BYTES = 233e6 * (18 + 2 + 2) + 5e9


def layers_that_fit(free_bytes: float) -> int:
    """An estimate of the depth, from 1 to 28, at which a step of a 1.5B-shaped pair fits without recompute."""
    return int(min(R1_DISTILL_1P5B.num_hidden_layers, max(1, (free_bytes - OTHER_BYTES) // LAYER_BYTES)))


def models(settings: Settings) -> Outcome:
    """Writes the pair and the rollouts that the other phases of this file read."""
    size = QUICK if settings.quick else REAL
    layers = settings.layers or size.shape.num_hidden_layers
    if settings.layers is None and not settings.quick and torch.cuda.is_available():
        layers = layers_that_fit(torch.cuda.mem_get_info()[0])
    shape = dataclasses.replace(size.shape, num_hidden_layers=layers)
    for seed, role in enumerate(("student", "teacher")):
        save_random_model(settings.scratch / role, shape, seed=seed, std=0.02, dtype=torch.bfloat16)
    recorded = settings.scratch / "rollouts.jsonl"
    save_random_rollouts(recorded, shape, prompt=size.prompt, responses=list(size.responses))
    student = HFCheckpoint(settings.scratch / "student")
    millions = sum(math.prod(student.shape(name)) for name in student.keys()) / 1e6  # noqa: SIM118 - no dictionary
    line = f"{layers} layers, width {shape.hidden_size}, vocabulary {shape.vocab_size}: {millions:.1f} M parameters"
    return Outcome({**dataclasses.asdict(shape), "million_parameters": millions}, [line])


class Meter:
    """Measures seconds and peak memory of the phases of a step. Without CUDA, memory is not measured (None)."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self.peaks: dict[str, list[int]] = defaultdict(list)
        self.above: dict[str, list[int]] = defaultdict(list)

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        cuda = torch.cuda.is_available()
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        resident, start = resident_bytes(), time.perf_counter()
        yield
        if cuda:
            torch.cuda.synchronize()
        self.seconds[phase].append(time.perf_counter() - start)
        if resident is not None:
            self.peaks[phase].append(torch.cuda.max_memory_allocated())
            self.above[phase].append(self.peaks[phase][-1] - resident)

    def summary(self, warmup: int) -> dict[str, dict[str, float | None]]:
        """Phase -> median seconds and largest peak after the warm-up (`above_gb`: peak minus memory in use before)."""
        return {
            phase: {
                "seconds": statistics.median(self.seconds[phase][warmup:]),
                "peak_gb": _largest(self.peaks[phase][warmup:]),
                "above_gb": _largest(self.above[phase][warmup:]),
            }
            for phase in self.seconds
        }


def _largest(values: list[int]) -> float | None:
    return max(values) / 1e9 if values else None


def resident_bytes() -> int | None:
    """Bytes of the tensors on the GPU; None without a GPU."""
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else None


def step_recompute_none(settings: Settings) -> Outcome:
    """A training step that keeps all activations."""
    return _step(settings, "none")


def step_recompute_full(settings: Settings) -> Outcome:
    """A training step that keeps one layer's activations at a time, as `conf/oprd_1p5b.yaml` does."""
    return _step(settings, "full")


def _step(settings: Settings, recompute: str) -> Outcome:
    """Seconds, tokens/s and memory of a training step on a batch of recorded responses."""
    size = QUICK if settings.quick else REAL
    config = configure(settings, size, f"student.recompute={recompute}")
    distiller = distiller_for(config)
    rollouts = read_rollouts(str(config.rollout.replay), size.shape.vocab_size)
    meter = Meter()
    for step in range(WARMUP + STEPS):
        with meter("teacher"):
            batch = distiller.batch(rollouts, distiller.objective_of(None))
            targets = distiller.targets(batch, batch.plan)
        with meter("update"):
            measured = _forward_backward(distiller, batch, targets)
        with meter("optimizer"):
            distiller.student.optimizer_step(step, batch.objective, measured)
    between = resident_bytes()
    phases = meter.summary(WARMUP)
    tokens = sum(rollout.length for rollout in rollouts)
    seconds = sum(phase["seconds"] or 0.0 for phase in phases.values())
    numbers: dict[str, Any] = {
        "recompute": recompute,
        "layers": distiller.student.spec.num_layers,
        "response_tokens": list(size.responses),
        "tokens_per_microbatch": size.tokens_per_microbatch,
        "supervised_rows": len(batch.plan.hidden.table),
        "phases": phases,
        "step_seconds": seconds,
        "tokens_per_s": tokens / seconds,
        "resident_gb": None if between is None else between / 1e9,
        "peak_rss_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9,
        "update_without_loss_seconds": _without_loss(distiller, batch, targets),
        "memory": _against_plan(settings, size, recompute, phases),
    }
    return Outcome(numbers, list(_step_lines(numbers, tokens)))


def _against_plan(
    settings: Settings, size: Size, recompute: str, phases: dict[str, dict[str, float | None]]
) -> dict[str, Any]:
    """What `plan` estimates for one rank, whole and of the phases that were measured, and measured / estimated.

    `plan` takes every response to be the longest. Here that is nearly so: each microbatch holds about
    `tokens_per_microbatch` tokens, and each response has `last_k` supervised rows.
    """
    config = configure(
        settings,
        size,
        f"student.recompute={recompute}",
        f"rollout.max_new_tokens={max(size.responses)}",
        f"train.prompts_per_step={len(size.responses)}",
    )
    engine = layer_backend(torch.bfloat16) == "transformer_engine"
    # the memory of a rank that does not sample does not depend on the kind of GPU
    found = estimate(
        resolve(config, 1),
        Cluster(1, GPUS["h100"], layers="transformer_engine" if engine else "local"),
        Lengths(prompt=size.prompt),
    )
    memory = found.kinds[0].memory
    always = sum(memory.always.values())
    parts = {name: sum(phase.values()) for name, phase in memory.phases.items()}
    planned = {
        "whole": memory.peak,
        "teacher": always + max(parts["teacher"], parts["transfer"]),
        "update": always + parts["update"],
        "optimizer": always + parts["optimizer"],
    }
    peaks = {name: phases[name]["peak_gb"] for name in ("teacher", "update", "optimizer")}
    peaks["whole"] = max((p["peak_gb"] for p in phases.values() if p["peak_gb"] is not None), default=None)
    return {
        "transformer_engine": engine,
        "resident_plan_gb": always / 1e9,
        "fullest": memory.fullest,
        "plan_gb": {name: held / 1e9 for name, held in planned.items()},
        "peak_gb": peaks,
        "ratio": {name: None if peak is None else peak * 1e9 / planned[name] for name, peak in peaks.items()},
    }


def _without_loss(distiller: Distiller, batch: StepBatch, targets: Any) -> float:
    """Median seconds of forward and backward with loss.representation.weight=0: losses are computed, not injected."""
    meter = Meter()
    without = dataclasses.replace(batch, objective=dataclasses.replace(batch.objective, weight=0.0))
    for _ in range(WARMUP + STEPS):
        with meter("update"):
            _forward_backward(distiller, without, targets)
    return meter.summary(WARMUP)["update"]["seconds"] or 0.0


def _forward_backward(distiller: Distiller, batch: StepBatch, targets: Any) -> Any:
    accumulation = distiller.start(batch)
    accumulation.forward_backward(batch.plan, targets)
    return accumulation.finish()


def _step_lines(numbers: dict[str, Any], tokens: int) -> Iterator[str]:
    yield (
        f"{numbers['layers']} layers, {len(numbers['response_tokens'])} responses, {tokens} tokens: "
        f"{numbers['step_seconds']:.3f} s per step, {numbers['tokens_per_s']:.0f} tokens/s"
    )
    for name, phase in numbers["phases"].items():
        memory = "memory not measured (no GPU)"
        if phase["peak_gb"] is not None:
            memory = f"peak {phase['peak_gb']:6.2f} GB, {phase['above_gb']:6.2f} GB above the memory in use before"
        yield f"{name:<10}{phase['seconds']:8.3f} s   {memory}"
    yield f"update with loss.representation.weight=0: {numbers['update_without_loss_seconds']:.3f} s"
    memory = numbers["memory"]
    for name, planned in memory["plan_gb"].items():
        ratio = memory["ratio"][name]
        measured = (
            "" if ratio is None else f"; measured {memory['peak_gb'][name]:.3g} GB, {ratio:.2f} times the estimate"
        )
        yield f"memory, {name}: plan estimates {planned:.3g} GB{measured}"


def configure(settings: Settings, size: Size, *more: str) -> Config:
    """The configuration of a measurement on the pair that `models` wrote."""
    sources = [f"{role}.hf_path={settings.scratch / role}" for role in ("student", "teacher")]
    return load_config(
        "verify",
        [
            *sources,
            f"rollout.replay={settings.scratch / 'rollouts.jsonl'}",
            f"loss.representation.k={size.last_k}",
            f"train.tokens_per_microbatch={size.tokens_per_microbatch}",
            "train.clip_grad=1000.0",
            "precision=bf16",
            "output=unused",
            *more,
        ],
    )


def generation(settings: Settings) -> Outcome:
    """Tokens per second of the in-process engine at temperature 1; without a stop id, so all responses are full."""
    size = QUICK if settings.quick else REAL
    source, shape = str(settings.scratch / "student"), read_shape(settings.scratch / "student")
    init_distributed()
    config = configure(settings, size)
    engine = MegatronEngine(config.rollout, read_model_spec(source), Layout(), eos_ids=(), precision=config.precision)
    engine.load(HFCheckpoint(source).__getitem__, source)
    requests = [Request([(7 * i + t) % shape.vocab_size for t in range(size.prompt)]) for i in range(size.sequences)]
    meter = Meter()
    for new_tokens in (8, size.new_tokens):  # the first is the warm-up
        with meter("generation"):
            rollouts = engine.generate(requests, SamplingParams(1.0, 1.0, new_tokens, (0, 1, 0)))
    measured = meter.summary(1)["generation"]
    sampled = sum(len(rollout.response_ids) for rollout in rollouts)
    seconds = measured["seconds"] or 0.0
    memory = "" if measured["peak_gb"] is None else f", peak {measured['peak_gb']:.2f} GB"
    rate = sampled / seconds
    line = f"{size.sequences} sequences x {size.new_tokens} tokens: {seconds:.3f} s, {rate:.0f} tokens/s{memory}"
    outcome = Outcome({**measured, "sampled_tokens": sampled, "tokens_per_s": rate}, [line])
    outcome.require(
        sampled == size.sequences * size.new_tokens,
        f"{sampled} tokens were sampled, expected {size.sequences * size.new_tokens}",
    )
    ids = {token for rollout in rollouts for token in rollout.response_ids.tolist()}
    outcome.require(len(ids) > 1, "every sampled token is the same")
    return outcome
