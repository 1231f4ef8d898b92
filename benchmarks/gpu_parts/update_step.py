"""The parts that measure a training step at full size: seconds, memory beside `plan`, host waits, kernels.

Two responses of 16,384 tokens after prompts of 1,024, at the shape of R1-Distill-Qwen-1.5B, as in the paper; student
and teacher share the GPU. Every part is one objective in the loop of `train.py`; `backbone` is a forward and backward
pass without teacher and loss. The layers are Megatron's local ones, so that cards can be compared; `te.py` has the
others.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from benchmarks.gpu_parts.kernels import kernel_profile
from benchmarks.gpu_parts.measure import Measured, Meter, is_cuda, synchronize
from benchmarks.gpu_parts.outcome import GB, Outcome, Settings
from benchmarks.gpu_parts.real_shape import QUICK, REAL, Batch, build, configure, planned, prepare, that_fits
from benchmarks.gpu_parts.rehearsed import check_gradients_of
from benchmarks.gpu_parts.waits import check_waits
from nemo_oprd.batch.types import Rollout
from nemo_oprd.config.schema import Config
from nemo_oprd.distillation.distiller import Distiller
from nemo_oprd.megatron.model import LAYERS_VARIABLE
from nemo_oprd.megatron.pipeline_schedule import make_microbatch, run_schedule
from nemo_oprd.rollout.replay import read_rollouts
from nemo_oprd.run.resolve import resolve
from nemo_oprd.tools.plan.estimate import Estimate
from nemo_oprd.tools.plan.gpus import ASSUMED, GPUS
from nemo_oprd.tools.rehearse import PLANNED, TOLERANCE, planned_bytes
from nemo_oprd.train import accumulate_gradients

_NO_HIDDEN = ("loss.representation.layers=none", "loss.output.weight=1")
OBJECTIVES = {
    "oprd": (),
    "oprd_all_tokens": ("loss.representation.positions=all",),
    "sampled_token": (*_NO_HIDDEN, "loss.output.kind=sampled_token"),
    "top_16": (*_NO_HIDDEN, "loss.output.kind=top_k", "loss.output.k=16"),
    "full_vocab": (*_NO_HIDDEN, "loss.output.kind=full_vocab"),
    "oprd_top_16": ("loss.output.kind=top_k", "loss.output.k=16", "loss.output.weight=1"),
}
# the optimizer has its state after the first
WARMUP, STEPS = 1, 3
PHASES = tuple(PLANNED)


def oprd(settings: Settings, outcome: Outcome) -> None:
    """Hidden states of the last 2,000 tokens, with full recomputation."""
    measure_step(settings, outcome, "oprd")


def oprd_no_recompute(settings: Settings, outcome: Outcome) -> None:
    """The same without recomputation; responses are shorter if `plan` says that these do not fit."""
    measure_step(settings, outcome, "oprd", recompute="none")


def oprd_all_tokens(settings: Settings, outcome: Outcome) -> None:
    """Hidden states of all tokens."""
    measure_step(settings, outcome, "oprd_all_tokens")


def sampled_token(settings: Settings, outcome: Outcome) -> None:
    """Reverse KL on the sampled tokens."""
    measure_step(settings, outcome, "sampled_token")


def top_16(settings: Settings, outcome: Outcome) -> None:
    """Reverse KL on the student's 16 most probable ids."""
    measure_step(settings, outcome, "top_16")


def full_vocab(settings: Settings, outcome: Outcome) -> None:
    """Reverse KL on the whole vocabulary."""
    measure_step(settings, outcome, "full_vocab")


def oprd_top_16(settings: Settings, outcome: Outcome) -> None:
    """Both losses."""
    measure_step(settings, outcome, "oprd_top_16")


def measure_step(
    settings: Settings, outcome: Outcome, objective: str, *, recompute: str = "full", layers: str = "local"
) -> None:
    """Some steps with an objective, and what `plan` says of them.

    Args:
        layers: as in NEMO_OPRD_LAYERS.
    """
    overrides = [*OBJECTIVES[objective], f"student.recompute={recompute}"]
    batch, config, distiller = _built(settings, outcome, overrides, layers)
    outcome.numbers |= {"objective": objective, "recompute": recompute, "kernels": distiller.student.kernels()}
    rollouts = read_rollouts(str(config.rollout.replay), batch.shape.vocab_size)
    warmup, steps = (WARMUP, STEPS) if is_cuda() and not settings.rehearsed else (1, 1)
    meters, whole = [], []
    for step in range(warmup + steps):
        meters.append(Meter())
        start = time.perf_counter()
        train_step(distiller, rollouts, step, meters[-1])
        synchronize()
        whole.append(time.perf_counter() - start)
    found = {phase: _over_steps(phase, meters[warmup:]) for phase in PHASES}
    seconds = statistics.median(whole[warmup:])
    if not settings.rehearsed:
        outcome.numbers |= {"step_seconds": seconds, "tokens_per_s": batch.responses * batch.tokens / seconds}
    estimate = planned(config, batch)
    report_phases(settings, outcome, config, estimate, found)
    if is_cuda() and not settings.rehearsed:
        free, total = torch.cuda.mem_get_info()
        outside = total - free - torch.cuda.memory_reserved()
        outcome.numbers |= {"reserved_gb": torch.cuda.max_memory_reserved() / GB, "outside_torch_gb": outside / GB}
        outcome.lines.append(
            f"{seconds:.3f} s per step, {outcome.numbers['tokens_per_s']:.0f} tokens/s; reserved "
            f"{outcome.numbers['reserved_gb']:.1f} GB, outside of torch {outside / GB:.2f} GB (plan keeps "
            f"{ASSUMED.reserve / GB:.1f} free)"
        )
        outcome.save()
    check_waits(outcome, lambda: train_step(distiller, rollouts, warmup + steps))
    if not settings.rehearsed:
        kernel_profile(outcome, lambda: train_step(distiller, rollouts, warmup + steps + 1))


def _built(settings: Settings, outcome: Outcome, overrides: list[str], layers: str) -> tuple[Batch, Config, Distiller]:
    """The batch that fits, its configuration, and the models."""
    os.environ[LAYERS_VARIABLE] = layers
    folder = settings.scratch
    batch = that_fits(folder, QUICK if settings.quick else REAL, overrides, settings.layers)
    prepare(folder, batch)
    config = configure(folder, batch, *overrides)
    start = time.perf_counter()
    distiller = build(config)
    check_gradients_of(distiller.student.role)
    synchronize()
    depth = batch.shape.num_hidden_layers
    outcome.numbers |= {
        "build_seconds": time.perf_counter() - start,
        "layers": depth,
        "prompt": batch.prompt,
        "response": batch.response,
        "responses": batch.responses,
    }
    outcome.lines.append(f"{batch.responses} x {batch.prompt:,} + {batch.response:,} tokens, {depth} layers")
    outcome.save()
    return batch, config, distiller


def train_step(distiller: Distiller, rollouts: list[Rollout], step: int, meter: Any = None) -> None:
    """A step of `train.py` on recorded responses."""
    meter = meter or _unmeasured
    batch = distiller.batch(rollouts, distiller.objective_of(None))
    metrics, _ = accumulate_gradients(distiller, batch, meter)
    with meter("optimizer"):
        distiller.student.optimizer_step(step, batch.objective, metrics)


@contextmanager
def _unmeasured(phase: str, part: str | None = None) -> Iterator[None]:
    """A phase that nothing measures: a `Meter` would wait for the device."""
    yield


def _over_steps(phase: str, meters: list[Meter]) -> Measured:
    """A phase that may come several times in a step: the median of its seconds per step, and its largest peak."""
    found = [meter.of(phase, total=True) for meter in meters]
    peaks = [each.peak for each in found if each.peak is not None]
    deltas = [each.delta for each in found if each.delta is not None]
    seconds = statistics.median(each.seconds for each in found)
    return Measured(seconds, max(peaks, default=None), max(deltas, default=None))


def report_phases(
    settings: Settings, outcome: Outcome, config: Config, estimate: Estimate, found: dict[str, Measured]
) -> None:
    """Adds the phases beside what `plan` says; a peak that is more than 5 % off is a problem.

    At tiny sizes memory is that of rounding and small tensors, so that it is compared at full width only.
    """
    kind, flops = estimate.kinds[0], estimate.flops
    always = sum(kind.memory.always.values())
    before = {"update": kind.memory.phases["update"]["targets"]}
    peak_flops = flops_of_this_gpu()
    phases: dict[str, Any] = {}
    run_spec = resolve(config, 1)
    for phase, measured in found.items():
        said = planned_bytes(kind, phase, run_spec)
        assert said is not None
        share, operations = None, {"teacher": flops.teacher, "update": flops.update}.get(phase)
        if peak_flops and operations and not settings.rehearsed:
            share = operations / measured.seconds / peak_flops
        seconds = None if settings.rehearsed else measured.seconds
        phases[phase] = {"seconds": seconds, "share_of_peak": share, "planned_seconds": estimate.seconds.get(phase)}
        outcome.row(
            phase,
            seconds=seconds,
            peak=measured.peak,
            planned_peak=None if settings.quick else said,
            delta=measured.delta,
            planned_delta=None if settings.quick else said - always - before.get(phase, 0.0),
            note="" if share is None else f"{share:.0%} of peak FLOP/s",
        )
        if measured.peak is not None and not settings.quick:
            off = measured.peak / said - 1
            outcome.require(
                abs(off) <= TOLERANCE,
                f"{phase}: the peak of {measured.peak / GB:.2f} GB is {off:+.1%} of plan's {said / GB:.2f} GB "
                f"(limit {TOLERANCE:.0%})",
            )
    outcome.numbers["phases"] = phases
    outcome.save()


def flops_of_this_gpu() -> float | None:
    """Its published bf16 operations per second; None if `plan` does not know the GPU."""
    if not is_cuda():
        return None
    name = torch.cuda.get_device_name().lower()
    return next((gpu.flops for key, gpu in GPUS.items() if key in name), None)


def backbone(settings: Settings, outcome: Outcome) -> None:
    """Forward and backward pass of the student's microbatches without teacher and loss: the floor of an update."""
    batch, config, distiller = _built(settings, outcome, ["student.recompute=full"], "local")
    rollouts = read_rollouts(str(config.rollout.replay), batch.shape.vocab_size)
    student = distiller.student
    packs = distiller.batch(rollouts, distiller.objective_of(None)).plan.hidden.packs[0]
    warmup, passes = (WARMUP, STEPS) if is_cuda() and not settings.rehearsed else (1, 1)
    meter = Meter()
    for _ in range(warmup + passes):
        student.zero_gradients()
        with meter("backbone"):
            microbatches = [make_microbatch(pack, rollouts, student.role, None, None) for pack in packs]
            run_schedule(student.ddp, student.role, microbatches, forward_only=False)
    found = meter.of("backbone", warmup)
    seconds = None if settings.rehearsed else found.seconds
    outcome.numbers["step_seconds"] = seconds
    outcome.row("forward, backward", seconds=seconds, delta=found.delta)
    if not settings.rehearsed:
        kernel_profile(outcome, lambda: run_schedule(student.ddp, student.role, microbatches, forward_only=False))
