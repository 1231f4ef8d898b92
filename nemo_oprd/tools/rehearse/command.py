"""`rehearse`: runs two steps of some ranks of a job at full size, on fake CUDA tensors, and compares with `plan`."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from nemo_oprd.commands.options import add_config, config_of, json_file, origin, positive
from nemo_oprd.config.schema import Config
from nemo_oprd.run.checks import check_trains
from nemo_oprd.run.named_files import check_models
from nemo_oprd.run.positions import known_prompt, longest_response, prompt_tokens, too_few_positions
from nemo_oprd.run.resolve import RunSpec, resolve
from nemo_oprd.runtime.files import write_atomically
from nemo_oprd.tools.plan.estimate import Estimate, Lengths, RankKind, estimate
from nemo_oprd.tools.plan.gpus import ASSUMED, Cluster, add_gpus, gpu_of, in_bytes
from nemo_oprd.tools.rehearse import layers
from nemo_oprd.tools.rehearse.agreement import disagreements
from nemo_oprd.tools.rehearse.known_waits import unknown_waits

# a larger difference between what was measured and what `plan` says is reported
TOLERANCE = 0.05
# phase of a step -> the phases of `plan` that it passes through
PLANNED: dict[str, tuple[str, ...]] = {
    "teacher": ("teacher", "transfer"),
    "update": ("update", "output loss"),
    "optimizer": ("optimizer",),
}
# the same of phases around the steps
AROUND: dict[str, tuple[str, ...]] = {"generation": ("rollout",)}
# phase of building -> what it adds to what is there, of `plan`'s parts that are always there
BUILT = {
    "build engine": ("rollout copy",),
    "build student": ("weights",),
    "build optimizer": ("gradients", "optimizer"),
    "build teachers": ("teacher's head", "teacher weights"),
}
# all phases of a step
STEP = ("step", *PLANNED)
# parts of a run around its steps -> what a rehearsal of them is; see phases.py and checkpoints.py
PARTS = {
    "check": "the check of an engine's log-probabilities",
    "generation": "some tokens of the in-process engine",
    "weights": "weights on their way to the engine",
    "checkpoint": "saving and loading a checkpoint, without files",
}
# those of `experts.py`, which needs torch
EXPERTS_LOADS = ("balanced", "one-rank")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config(parser)
    parser.add_argument("--ranks", type=positive, required=True, metavar="N", help="ranks of the job, one GPU each")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--rank", type=int, metavar="R", help="only this rank")
    which.add_argument(
        "--ranks-of-interest", action="store_true", help="the first and the fullest rank of each kind (default)"
    )
    parser.add_argument(
        "--phases",
        type=_parts,
        default=tuple(PARTS),
        metavar="NAMES",
        help=f"what is rehearsed around the steps, of {','.join(PARTS)}, or none (default: all)",
    )
    add_gpus(parser)
    parser.add_argument("--prompt-tokens", type=positive, metavar="N", help="default: data.max_prompt_tokens, or 256")
    parser.add_argument("--response-tokens", type=positive, metavar="N", help="default: the longest that there can be")
    text = "whose layers: Megatron's local ones, or Transformer Engine's (default: %(default)s)"
    parser.add_argument("--layers", choices=layers.CHOICES, default="local", help=text)
    parser.add_argument(
        "--experts-load",
        choices=EXPERTS_LOADS,
        default=EXPERTS_LOADS[0],
        help="how tokens spread over experts: evenly (default), or all to those of one rank",
    )
    parser.add_argument("--json", metavar="FILE", help="also write all numbers there")


def _parts(text: str) -> tuple[str, ...]:
    names = () if text == "none" else tuple(text.split(","))
    unknown = [name for name in names if name not in PARTS]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r}: expected some of {','.join(PARTS)}, or none")
    return names


def run(options: argparse.Namespace) -> int:
    """Prints one line per finding; returns 1 if a rank would fail or does not fit, else 0.

    Raises:
        ValueError: the configuration, a model or the number of ranks is wrong, or a compiler or the files of
            Transformer Engine are not there.
    """
    file = json_file(options, r'\{\s*"ranks":')
    config = config_of(options)
    check_trains(config)
    layers.check(options.layers, config)
    if config.served_teachers:
        raise ValueError(
            "teacher.engine=vllm: a rehearsal has no servers; expected megatron: rehearse with teacher.engine=megatron "
            "teacher.placement=dedicated for the student's part"
        )
    layers.make_bridge_importable(options.layers, config)
    check_models(config, origin(options))
    run_spec = resolve(config, options.ranks)
    student, teachers = run_spec.models.student.spec, dict(enumerate(run_spec.models.teacher_specs))
    prompt = prompt_tokens(config, student, options.prompt_tokens)
    response = min(options.response_tokens or config.rollout.max_new_tokens, longest_response(config, student, prompt))
    short = [*too_few_positions(config, student, teachers, known_prompt(config, student, options.prompt_tokens))]
    for each in short:
        print(f"{each.line} (rehearsed: prompts of {prompt:,} and responses of {response:,} tokens)", flush=True)
    cluster = Cluster(options.ranks, gpu_of(options), options.gpus_per_node, layers.NAMES[options.layers])
    # the plan of memory is that of the longest responses
    planned = estimate(_shortened(run_spec, response), cluster, Lengths(prompt, response))
    ranks = [_rank(options, run_spec)] if options.rank is not None else ranks_of_interest(run_spec, planned)
    stack = layers.stack(options.layers, config)
    print(f"rehearsed: {', '.join(f'{name} {value}' for name, value in stack.items())}", flush=True)
    if options.layers == "local" and config.precision == "bf16":
        print("note: where Transformer Engine is installed, a job has its layers: --layers te rehearses them")
    found = {}
    for rank in ranks:
        print(f"rank {rank} of {options.ranks}: {role_of(run_spec, rank)}", flush=True)
        found[rank] = rehearse_rank(options, rank, prompt, response)
    reports = [report(rank, run_spec, planned, found[rank]) for rank in ranks]
    between = disagreements({rank: found[rank] for rank in ranks})
    problems = 0
    for one in reports:
        for line, is_problem in lines(one, gpu_of(options).memory - ASSUMED.reserve):
            problems += is_problem
            print(line)
    for line in between:
        problems += 1
        print(f"error: {line}")
    if file is not None:
        content = {"ranks": reports, "disagreements": between, "stack": stack}
        content["findings"] = [each.as_json() for each in short]
        write_atomically(file, json.dumps(content, indent=1) + "\n")
    return 1 if problems else 0


def _rank(options: argparse.Namespace, run_spec: RunSpec) -> int:
    if not 0 <= options.rank < options.ranks:
        raise ValueError(f"--rank {options.rank}: expected 0..{options.ranks - 1}, as --ranks says: give one")
    if options.rank not in run_spec.student_layout.ranks and options.rank not in run_spec.teacher_layout.ranks:
        raise ValueError(f"--rank {options.rank} holds no model; expected a rank of student or teacher: give one")
    return int(options.rank)


def _shortened(run_spec: RunSpec, response: int) -> RunSpec:
    """The run with responses of at most `response` tokens."""
    config: Config = run_spec.config
    return replace(run_spec, config=replace(config, rollout=replace(config.rollout, max_new_tokens=response)))


def ranks_of_interest(run_spec: RunSpec, planned: Estimate) -> list[int]:
    """The first rank of each kind that `plan` tells apart, and the last tensor rank of student and teacher.

    The last tensor rank is the fullest under sequence parallelism: it has the last rows of a response.
    """
    chosen = set()
    for kind in planned.kinds:
        alike = [rank for rank in range(planned.ranks) if stages(run_spec, rank) == (kind.student, kind.teacher)]
        chosen.add(kind.rank)
        for layout in (run_spec.student_layout, run_spec.teacher_layout):
            if kind.rank in layout.ranks:
                last = max(layout.coordinates(rank).tensor for rank in alike)
                chosen.add(next(rank for rank in alike if layout.coordinates(rank).tensor == last))
    return sorted(chosen)


def stages(run_spec: RunSpec, rank: int) -> tuple[int | None, int | None]:
    """The pipeline stages of a rank in student and teacher; None: it has no part in that model."""
    student, teacher = (
        layout.coordinates(rank).pipeline if rank in layout.ranks else None
        for layout in (run_spec.student_layout, run_spec.teacher_layout)
    )
    return student, teacher


def role_of(run_spec: RunSpec, rank: int) -> str:
    """The stages of a rank as text, such as "student stage 0, teacher stage 0"."""
    parts = [("student", run_spec.student_layout), ("teacher", run_spec.teacher_layout)]
    return ", ".join(
        f"{name} stage {layout.coordinates(rank).pipeline}" for name, layout in parts if rank in layout.ranks
    )


def rehearse_rank(options: argparse.Namespace, rank: int, prompt: int, response: int) -> dict[str, Any]:
    """Rehearses a rank in a process of its own, and returns the report of the process.

    Raises:
        ValueError: the rehearsal can't be carried out here, or the configuration is wrong.
    """
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        task = {
            "rank": rank,
            "ranks": options.ranks,
            "gpu_bytes": int(gpu_of(options).memory),
            "gpus_per_node": options.gpus_per_node,
            "layers": options.layers,
            "config_name": options.config_name,
            "config_dir": options.config_dir,
            "overrides": options.overrides,
            "prompt_tokens": prompt,
            "response_tokens": response,
            "phases": options.phases,
            "experts_load": options.experts_load,
            "result": str(result),
        }
        command = [sys.executable, "-m", f"{__package__}.rank"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "CUDA_VISIBLE_DEVICES": ""}
        done = subprocess.run(command, input=json.dumps(task), capture_output=True, text=True, env=environment)
        if not result.is_file():
            said = [line for line in done.stderr.splitlines() if line.strip()] or ["nothing"]
            raise RuntimeError(f"the rehearsal of rank {rank} ended with {done.returncode}: {said[-1][:300]}")
        found: dict[str, Any] = json.loads(result.read_text())
    if "error" in found:
        raise ValueError(found["error"])
    return found


def report(rank: int, run_spec: RunSpec, planned: Estimate, found: dict[str, Any]) -> dict[str, Any]:
    """One rank's part of the JSON: bytes per phase, waits, kernels and collectives per step."""
    kind = planned.of_rank(rank)
    phases: dict[str, dict[str, Any]] = {}
    collectives: dict[str, Any] = {}
    for name, seen in found["phases"].items():
        phases[name] = {
            "measured_bytes": seen["bytes"],
            "planned_bytes": planned_bytes(kind, name, run_spec),
            **{key: seen[key] for key in ("host_bytes", "leaves", "kernels", "at_peak", "lines_at_peak")},
            "waits": sum(wait["count"] for wait in seen["waits"]),
        }
        collectives[name] = {}
        for message in seen["messages"]:
            where = "" if message["device"] == "cuda" else " in host memory"
            key = f"{message['kind']} of {message['dtype']} in {len(message['ranks'])} ranks{where}"
            one = collectives[name].setdefault(key, {"count": 0, "bytes": 0})
            one["count"] += 1
            one["bytes"] += message["bytes"]
    waits = waits_of_a_step(found)
    return {
        "rank": rank,
        "role": role_of(run_spec, rank),
        "phases": phases,
        "waits": waits,
        "mistakes": [*found["mistakes"], *unknown_waits(waits), *([found["failure"]] if found["failure"] else [])],
        "collectives": collectives,
        "te_calls": found["te_calls"],
        "seconds": found["seconds"],
    }


def waits_of_a_step(found: dict[str, Any]) -> list[dict[str, Any]]:
    """The places where the host waits in a step, over all its phases, and how often."""
    keys = ("file", "line", "below", "what", "innermost")
    counts: Counter[tuple[Any, ...]] = Counter()
    for name, seen in found["phases"].items():
        if name in STEP:
            for wait in seen["waits"]:
                counts[tuple(tuple(wait[key]) if key == "innermost" else wait[key] for key in keys)] += wait["count"]
    return [dict(zip(keys, place, strict=True)) | {"count": count} for place, count in sorted(counts.items())]


def planned_bytes(kind: RankKind, phase: str, run_spec: RunSpec) -> float | None:
    """The bytes of a phase by `plan`; None if `plan` has no such phase."""
    memory, config = kind.memory, run_spec.config
    if phase in BUILT:
        # an optimizer has its two moments from the first step on; a copy of bfloat16 weights in float32 at once
        share = {"optimizer": 1 / 3 if config.precision == "bf16" else 0.0}
        there = [*BUILT][: [*BUILT].index(phase) + 1]
        held = sum(memory.always.get(part, 0.0) * share.get(part, 1.0) for name in there for part in BUILT[name])
        if phase == "build optimizer" and config.distributes_optimizer(run_spec.student_layout):
            # before that, Megatron copies the weights into one buffer
            copied = sum(memory.always.get(part, 0.0) for part in ("rollout copy", "weights", "weights", "gradients"))
            held = max(held, copied)
        return held
    passed = [name for name in (PLANNED | AROUND).get(phase, ()) if name in memory.phases]
    if not passed:
        return None
    return sum(memory.always.values()) + max(sum(memory.phases[name].values()) for name in passed)


def lines(one: dict[str, Any], usable: float) -> Iterator[tuple[str, bool]]:
    """(A line of the report, whether it makes the rehearsal fail)."""
    yield f"rank {one['rank']} ({one['role']}), {one['seconds']:.0f} s:", False
    for name, phase in one["phases"].items():
        measured, said = phase["measured_bytes"], phase["planned_bytes"]
        text = f"  {name:<16} {in_bytes(measured, 3):>11}"
        if said:
            text += f"   plan {in_bytes(said, 3):>11} ({measured / said - 1:+.1%})"
        yield f"{text}   {phase['kernels']} kernels{_around(one, name)}", False
        if measured > usable:
            yield f"error: {name} holds {in_bytes(measured)}, but {in_bytes(usable)} can be used", True
        if said and abs(measured / said - 1) > TOLERANCE:
            held = ", ".join(f"{in_bytes(size, 3)} at {line}" for line, size in phase["lines_at_peak"].items())
            text = f"finding: {name} holds {measured / said - 1:+.1%} of what plan says; expected {TOLERANCE:.0%}"
            yield f"{text}; most is allocated here: {held}", False
    own = [wait for wait in one["waits"] if not wait["below"] and wait["file"].startswith("nemo_oprd/")]
    for wait in own:
        yield f"  the host waits {wait['count']} times: {wait['file']}:{wait['line']} ({wait['what']})", False
    others = sum(wait["count"] for wait in one["waits"]) - sum(wait["count"] for wait in own)
    if others:
        yield f"  the host waits {others} times in Megatron (see --json)", False
    for mistake in one["mistakes"]:
        yield f"error: {mistake['file']}:{mistake['line']}: {mistake['text']} [{mistake['code']}]", True


def _around(one: dict[str, Any], name: str) -> str:
    """A text on the waits of a phase outside of the steps, and the bytes that it sent and would have written."""
    if name in STEP:
        return ""
    phase, sent = one["phases"][name], one["collectives"][name].values()
    found = [
        (phase["waits"], f"the host waits {phase['waits']} times"),
        (
            sent,
            f"{sum(each['count'] for each in sent)} collectives of {in_bytes(sum(each['bytes'] for each in sent), 3)}",
        ),
        (phase["host_bytes"], f"{in_bytes(phase['host_bytes'], 3)} in host memory"),
        *((True, f"{in_bytes(size, 3)}: {where}") for where, size in phase["leaves"].items()),
    ]
    return "".join(f", {text}" for is_there, text in found if is_there)
