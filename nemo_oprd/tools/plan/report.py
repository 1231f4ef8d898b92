"""Writes an estimate as text, and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from nemo_oprd.run.engine_kinds import ENGINES
from nemo_oprd.tools.plan.alternatives import Alternative
from nemo_oprd.tools.plan.estimate import Estimate
from nemo_oprd.tools.plan.gpus import ASSUMED, count, in_bytes, unit
from nemo_oprd.tools.plan.parameters import model_parameters
from nemo_oprd.tools.plan.rollout_cost import SamplingCost


def lines(found: Estimate, near: list[Alternative], name: str) -> Iterator[str]:
    """Yields the lines of the report.

    Args:
        near: alternatives that fit, where the configuration does not.
        name: the configuration's name.
    """
    yield f"{name} on {found.ranks} x {found.gpu.name}"
    for part in (_roles, _memory, _step):
        yield ""
        yield from part(found)
    yield ""
    if found.idle is not None:
        yield found.idle.line
    lengths = f"planned: prompts of {found.work.prompt:,} and responses of at most {found.longest:,} tokens"
    yield from (f"{each.line} ({lengths})" for each in found.positions)
    if not found.problems:
        yield f"it fits: {in_bytes(found.kinds[0].memory.peak)} on the fullest GPU"
        return
    yield from (f"does not fit: {problem}" for problem in found.problems)
    for each in near:
        peak = each.estimate.kinds[0].memory.peak
        yield f"fits: {each.arguments}   ({in_bytes(peak)}, {each.estimate.step_seconds:.0f} s per step)"
    if not near:
        yield "no layout near this one fits: start more ranks, or lower train.tokens_per_microbatch or the lengths"


def _roles(found: Estimate) -> Iterator[str]:
    work, config = found.work, found.work.config
    student, teacher = found.student, found.teacher
    yield (
        f"student    {count(model_parameters(work.student))} parameters, {student.describe()}, ranks "
        f"{_ranks(student.ranks)}"
    )
    for served in found.servers:
        yield (
            f"teacher    {served.name}: {served.count} vLLM server(s) of {served.tensor} GPU(s), {served.placement}; "
            f"of {in_bytes(served.memory)} per GPU {in_bytes(served.weights)} are weights, and "
            f"{in_bytes(served.cache, 2)} the cache of {served.longest:,} tokens; {served.row_bytes:,} bytes per token "
            f"and layer, {in_bytes(served.answers, 2)} per step"
            + (
                f"; early answers take at most {in_bytes(served.ahead, 2)} of a machine's memory"
                if served.ahead
                else ""
            )
        )
    for each in work.own_teachers:
        depth = f", layers 1 to {each.depth}" if each.depth < each.spec.num_layers else ""
        offload = ", weights on the host between its passes" if config.teacher.offload else ""
        yield (
            f"teacher    {count(model_parameters(each.spec))} parameters{depth}, {teacher.describe()}, ranks "
            f"{_ranks(teacher.ranks)}{offload}"
        )
    if found.rollout is not None:
        groups = found.rollout.groups
        yield (
            f"sampling   {ENGINES[config.rollout.engine].label}, {groups.count} group(s) of {groups.gpus} GPU(s), "
            f"{found.rollout.at_a_time} response(s) at a time"
        )
    batches = work.on(student)
    yield (
        f"a step     {work.responses} responses of {work.response:,} tokens (at most "
        f"{found.longest:,}) after prompts of {work.prompt:,}; {batches.count} microbatch(es) of "
        f"{batches.tokens:,} tokens, {batches.responses} response(s), on the fullest data-parallel rank"
    )


def _ranks(ranks: range) -> str:
    return f"{ranks.start} to {ranks.stop - 1}" if len(ranks) > 1 else str(ranks.start)


def _memory(found: Estimate) -> Iterator[str]:
    kinds = found.kinds[:4]
    scale, name = unit(max(kind.memory.peak for kind in kinds))
    yield f"{name} per GPU, with the longest responses"
    header = [kind.name for kind in kinds]
    width = max(14, *(len(name) for name in header)) + 2
    yield f"{'':<34}" + "".join(f"{name:>{width}}" for name in header)
    for part in dict.fromkeys(part for kind in kinds for part in kind.memory.always):
        yield _row(part, [kind.memory.always.get(part, 0.0) for kind in kinds], width, scale)
    for phase in dict.fromkeys(phase for kind in kinds for phase in kind.memory.phases):
        held = [kind.memory.phases.get(phase, {}) for kind in kinds]
        for part in dict.fromkeys(part for parts in held for part in parts):
            yield _row(f"{phase}: {part}", [parts.get(part, 0.0) for parts in held], width, scale)
    yield _row("peak", [kind.memory.peak for kind in kinds], width, scale)
    yield f"{'reached in':<34}" + "".join(f"{kind.memory.fullest:>{width}}" for kind in kinds)
    if len(found.kinds) > len(kinds):
        yield f"and {len(found.kinds) - len(kinds)} other kinds of ranks with less"


def _row(name: str, values: list[float], width: int, scale: float) -> str:
    """Returns a line of the table, in a unit of `scale` bytes; a number above 0 is never shown as 0."""
    shown = [f"{value / scale:.2f}" if value >= 0.01 * scale or not value else "<0.01" for value in values]
    return f"{name:<34}" + "".join(f"{text:>{width}}" for text in shown)


def _step(found: Estimate) -> Iterator[str]:
    flops = found.flops
    yield (
        f"operations per step: sampling {flops.sampling:.2e}, teacher {flops.teacher:.2e}, update {flops.update:.2e}"
    )
    moved = ", ".join(f"{kind} {in_bytes(value, 2)}" for kind, value in found.bytes.by_kind().items() if value)
    yield f"the busiest GPU receives per step: {moved}"
    waiting = {role: share for role, share in found.bubbles.items() if share}
    if waiting:
        shares = ", ".join(f"{role} {share:.0%}" for role, share in waiting.items())
        yield f"share of a pipeline's time in which a rank waits: {shares}"
    seconds = ", ".join(f"{phase} {_seconds(value)}" for phase, value in found.seconds.items())
    if found.overlap_seconds:
        seconds += f", of which {found.overlap_seconds:.1f} at a time"
    steps = found.work.config.train.steps
    whole = _duration(found.step_seconds * steps)
    yield f"seconds per step, estimated: {_seconds(found.step_seconds)} ({seconds}); {steps} steps: {whole}"
    if found.evaluation is not None:
        yield f"one evaluation, estimated: {_evaluation(found.evaluation, found.evaluation_seconds)}"
    launch = f", {ASSUMED.launch * 1e6:.0f} us to start an operation of the in-process engine"
    yield (
        f"assumed, not measured: {ASSUMED.compute:.0%} of {found.gpu.flops / 1e12:.0f} TFLOP/s, "
        f"{ASSUMED.bandwidth:.0%} of {found.gpu.bandwidth / 1e12:.2f} TB/s"
        + (launch if ENGINES[found.work.config.rollout.engine].in_process else "")
    )


def _seconds(value: float) -> str:
    return f"{value:.1f}" if value >= 0.05 or not value else "<0.1"


def _duration(seconds: float) -> str:
    """Formats seconds. Example: "27.5 h"."""
    if seconds >= 3600:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 60:.0f} min" if seconds >= 60 else f"{_seconds(seconds)} s"


def _evaluation(sampling: SamplingCost, seconds: float | None) -> str:
    if seconds is None:
        return "unknown without the number of problems (--problems)"
    return f"{_duration(seconds)} in {sampling.waves} batch(es) of {sampling.at_a_time} response(s)"


def as_json(found: Estimate, near: list[Alternative]) -> dict[str, Any]:
    """Returns all numbers of the report: bytes, operations and seconds."""
    return {
        "ranks": found.ranks,
        "gpu": found.gpu.name,
        "student": found.student.describe(),
        "teacher": found.teacher.describe(),
        "parameters": {
            "student": model_parameters(found.work.student),
            "teachers": [
                model_parameters(each.spec) if each.served is None else each.served.parameters
                for each in found.work.teachers
            ],
        },
        "memory": [
            {"kind": kind.name, "rank": kind.rank, "always": kind.memory.always, "phases": kind.memory.phases}
            | {"peak": kind.memory.peak, "fullest": kind.memory.fullest}
            for kind in found.kinds
        ],
        "flops": vars(found.flops),
        "bytes": found.bytes.by_kind(),
        "bubbles": found.bubbles,
        "teacher_servers": [each.as_json() for each in found.servers],
        "findings": ([] if found.idle is None else [found.idle.as_json()])
        + [each.as_json() for each in found.positions]
        + [each.finding() for each in found.servers if each.problem is not None],
        "seconds": found.seconds,
        "step_seconds": found.step_seconds,
        "evaluation_seconds": found.evaluation_seconds,
        "fits": not found.problems,
        "problems": list(found.problems),
        "alternatives": [
            {"changes": each.changes, "peak": each.estimate.kinds[0].memory.peak}
            | {"step_seconds": each.estimate.step_seconds}
            for each in near
        ],
    }
