"""`rehearse`: runs two steps of some ranks of a job at full size, on fake CUDA tensors, and compares with `plan`.

Each rehearsed rank is a process of its own (`rank.py`), because such a process changes torch for good. Training imports
nothing of this package.
"""

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
from itertools import combinations, zip_longest
from pathlib import Path
from typing import Any

from nemo_oprd.commands.options import add_config, config_of, json_file, origin, positive, rank_count
from nemo_oprd.config.schema import Config
from nemo_oprd.run.positions import known_prompt, longest_response, prompt_tokens, too_few_positions
from nemo_oprd.run.preflight import preflight
from nemo_oprd.run.resolve import RunSpec
from nemo_oprd.runtime.files import write_atomically
from nemo_oprd.tools.plan.estimate import Estimate, Lengths, RankKind, estimate
from nemo_oprd.tools.plan.gpus import ASSUMED, Cluster, add_gpus, gpu_of, in_bytes
from nemo_oprd.tools.plan.memory import (
    GRADIENTS,
    OPTIMIZER,
    ROLLOUT_COPY,
    TEACHER_HEAD,
    TEACHER_WEIGHTS,
    WEIGHTS,
)
from nemo_oprd.tools.rehearse import layers

# Compares rehearsed ranks: the ranks of a group must issue the same collectives, in the same order.
#
# They must agree in kind, number of elements and dtype of every collective, which no single rank can see. A message
# must meet its counterpart: the k-th message from rank a to rank b is received as the k-th message from a on rank b.


Messages = list[dict[str, Any]]


def disagreements(found: dict[int, dict[str, Any]]) -> list[str]:
    """Returns lines on ranks that disagree: each pair's first difference in every group, and in messages either way.

    `found`: rank -> the report of its process.
    """
    sequences = {rank: _in_order(seen) for rank, seen in found.items()}
    lines = []
    for one, other in combinations(sorted(found), 2):
        for ranks in sorted({message["ranks"] for message in sequences[one]}):
            if other in ranks:
                here = _collectives(sequences[one], ranks, ranks.index(other))
                there = _collectives(sequences[other], ranks, ranks.index(one), is_mirrored=True)
                lines += _first_difference(one, other, here, there)
        lines += _first_difference(one, other, _sent(sequences[one], other), _received(sequences[other], one))
        lines += _first_difference(other, one, _sent(sequences[other], one), _received(sequences[one], other))
    return lines


def _in_order(seen: dict[str, Any]) -> Messages:
    messages = [message for phase in seen["phases"].values() for message in phase["messages"]]
    return [{**message, "ranks": tuple(message["ranks"])} for message in messages]


def _collectives(messages: Messages, ranks: tuple[int, ...], partner: int, *, is_mirrored: bool = False) -> Messages:
    """Returns the collectives of a group; of an uneven all-to-all only the numbers of rows from and to `partner`.

    `is_mirrored` swaps the two numbers, so that they compare with those of the partner.
    """
    found = []
    for message in messages:
        if message["peer"] is None and message["ranks"] == ranks:
            if message["rows"] is not None:
                rows = [part[partner] for part in message["rows"]]
                message = {**message, "shapes": [rows[::-1] if is_mirrored else rows, message["shapes"][0][1:]]}
            found.append(message)
    return found


def _sent(messages: Messages, target: int) -> Messages:
    return [message for message in messages if message["kind"] == "send" and message["peer"] == target]


def _received(messages: Messages, source: int) -> Messages:
    return [message for message in messages if message["kind"] == "recv_" and message["peer"] == source]


def _first_difference(one: int, other: int, here: Messages, there: Messages) -> list[str]:
    for number, pair in enumerate(zip_longest(here, there), start=1):
        if _signature(pair[0]) != _signature(pair[1]):
            ours, theirs = (_said(message) for message in pair)
            return [f"rank {one} and rank {other} do not meet at their message {number}: {ours}, but {theirs}"]
    return []


def _signature(message: dict[str, Any] | None) -> Any:
    if message is None:
        return None
    kind = message["kind"] if message["peer"] is None else "message"
    # the rank that gathers has one more tensor per rank, for what it gets
    shapes = message["shapes"][-1:] if message["kind"].startswith("gather") else message["shapes"]
    return kind, shapes, message["dtype"]


def _said(message: dict[str, Any] | None) -> str:
    if message is None:
        return "nothing more"
    return f"{message['kind']} of {message['shapes']} {message['dtype']} at {message['place']}"


# Lists the places where a step makes the host wait for the device, with the reason for each.
#
# A wait of a step at any other place is a mistake: on a GPU the host would fall behind. Nothing of this project that
# runs per layer, microbatch, row or token is here.


_DISPATCHER = "how many tokens go to each expert, several times per layer with experts and microbatch"
_DELTA_NET = "checks of a pack's lengths, five times per layer with a delta net and microbatch"
# (file, function) of the innermost line, which differ little between versions -> what waits there, and how often
KNOWN_WAITS = {
    ("nemo_oprd/distillation/distiller.py", "resident_microbatches"): (
        "with teacher.resident_microbatches=auto, the number that all ranks agree on, once per step"
    ),
    ("nemo_oprd/distillation/metrics/step_metrics.py", "reduced"): "the sums of a step's metrics, once per step",
    ("megatron/core/optimizer/clip_grads.py", "get_grad_norm_fp32"): "the gradient's norm, twice per step",
    ("nemo_oprd/distillation/student.py", "optimizer_step"): (
        "the same, where Megatron leaves it on the device: whether it is finite, once per step"
    ),
    ("megatron/core/distributed/finalize_model_grads.py", "finalize_model_grads"): (
        "whether the number of tokens is zero, once per step"
    ),
    ("megatron/core/transformer/moe/moe_utils.py", "maybe_move_tensor_to_cpu"): _DISPATCHER,
    ("megatron/core/transformer/moe/moe_utils.py", "permute"): _DISPATCHER,
    ("megatron/core/transformer/moe/token_dispatcher.py", "_maybe_dtoh_and_synchronize"): _DISPATCHER,
    ("megatron/core/transformer/moe/token_dispatcher.py", "dispatch_postprocess"): _DISPATCHER,
    ("megatron/core/models/common/embeddings/rope_utils.py", "_apply_rotary_pos_emb_thd"): (
        "the lengths of a pack, several times per layer with attention and microbatch, where the rotation of "
        "Megatron-Bridge is not fused"
    ),
    ("megatron/core/fusions/fused_bias_geglu.py", "weighted_bias_quick_geglu_impl"): (
        "a constant of gpt-oss's activation, once per layer with experts and microbatch"
    ),
    ("megatron/core/ssm/gated_delta_net/common.py", "_resolve_cu_seqlens"): _DELTA_NET,
    ("megatron/core/ssm/gated_delta_net/gdn.py", "forward"): _DELTA_NET,
    ("megatron/core/pipeline_parallel/p2p_communication.py", "_communicate_shapes"): (
        "the shape of a pipeline message, twice per message"
    ),
    ("megatron/core/pipeline_parallel/p2p_communication.py", "_communicate"): "after a pipeline message, once",
}


def unknown_waits(waits: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns a mistake for each place of `waits` that is not in `KNOWN_WAITS`."""
    return [
        {
            "code": "unknown-wait",
            "file": wait["file"],
            "line": wait["line"],
            "text": f"the host waits {wait['count']} times per step{_below(wait)}: {wait['what']}",
        }
        for wait in waits
        if tuple(wait["innermost"]) not in KNOWN_WAITS
    ]


def _below(wait: dict[str, Any]) -> str:
    return f" in {wait['below']}" if wait["below"] else ""


# a larger relative difference between the measured bytes and those of `plan` is reported
TOLERANCE = 0.05
# phase of a step -> the phases of `plan` that it passes through
PLANNED: dict[str, tuple[str, ...]] = {
    "teacher": ("teacher", "transfer"),
    "update": ("update", "output loss"),
    "optimizer": ("optimizer",),
}
# phase around the steps -> the phases of `plan` that it passes through
AROUND: dict[str, tuple[str, ...]] = {"generation": ("rollout",)}
# phase of building -> the parts of `plan` that it adds, of those that stay in memory
BUILT = {
    "build engine": (ROLLOUT_COPY,),
    "build student": (WEIGHTS,),
    "build optimizer": (GRADIENTS, OPTIMIZER),
    "build teachers": (TEACHER_HEAD, TEACHER_WEIGHTS),
}
# all phases of a step
STEP = ("step", *PLANNED)
# parts of a run around its steps (phases.py) -> what is rehearsed of them
PARTS = {
    "check": "the check of an engine's log-probabilities",
    "generation": "some tokens of the in-process engine",
    "weights": "weights on their way to the engine",
    "checkpoint": "saving and loading a checkpoint, without files",
}
# the loads of `host_values.py`, which needs torch
EXPERTS_LOADS = ("balanced", "one-rank")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config(parser)
    parser.add_argument("--ranks", type=rank_count, required=True, metavar="N", help="ranks of the job, one GPU each")
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
    """Prints the report; returns 1 if a rank would fail or does not fit, or if ranks disagree, else 0.

    Raises:
        ValueError: the configuration, a model or an option is wrong, or a compiler or Transformer Engine is missing.
    """
    file = json_file(options, r'\{\s*"ranks":')
    config = config_of(options)
    layers.check(options.layers, config)
    if config.served_teachers:
        raise ValueError(
            "teacher.engine=vllm: a rehearsal has no servers; expected megatron: rehearse with teacher.engine=megatron "
            "teacher.placement=dedicated for the student's part"
        )
    layers.make_bridge_importable(options.layers, config)
    run_spec = preflight(config, options.ranks, "rehearse", origin=origin(options))
    student, teachers = run_spec.models.student.spec, dict(enumerate(run_spec.models.teacher_specs))
    prompt = prompt_tokens(config, student, options.prompt_tokens)
    response = min(options.response_tokens or config.rollout.max_new_tokens, longest_response(config, student, prompt))
    short = [*too_few_positions(config, student, teachers, known_prompt(config, student, options.prompt_tokens))]
    for each in short:
        print(f"{each.line} (rehearsed: prompts of {prompt:,} and responses of {response:,} tokens)", flush=True)
    cluster = Cluster(options.ranks, gpu_of(options), options.gpus_per_node, layers.NAMES[options.layers])
    # `plan` computes memory with the longest responses
    planned = estimate(_shortened(run_spec, response), cluster, Lengths(prompt, response))
    ranks = [_rank(options, run_spec)] if options.rank is not None else ranks_of_interest(run_spec, planned)
    stack = layers.stack(options.layers, config)
    print(f"rehearsed: {', '.join(f'{name} {value}' for name, value in stack.items())}", flush=True)
    if options.layers == "local" and config.precision == "bf16":
        print("note: where Transformer Engine is installed, a job has its layers: --layers te rehearses them")
    found = {}
    for rank in ranks:
        print(f"rank {rank} of {options.ranks}: {planned.of_rank(rank).name}", flush=True)
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
    """Returns the run with responses of at most `response` tokens."""
    config: Config = run_spec.config
    return replace(run_spec, config=replace(config, rollout=replace(config.rollout, max_new_tokens=response)))


def ranks_of_interest(run_spec: RunSpec, planned: Estimate) -> list[int]:
    """Returns the first rank of each kind that `plan` tells apart, and the last tensor rank of student and teacher.

    The last tensor rank is the fullest under sequence parallelism: it has the last rows of a response.
    """
    chosen = set()
    for kind in planned.kinds:
        alike = [rank for rank in range(planned.ranks) if planned.stages(rank) == (kind.student, kind.teacher)]
        chosen.add(kind.rank)
        for layout in (run_spec.student_layout, run_spec.teacher_layout):
            if kind.rank in layout.ranks:
                last = max(layout.coordinates(rank).tensor for rank in alike)
                chosen.add(next(rank for rank in alike if layout.coordinates(rank).tensor == last))
    return sorted(chosen)


def rehearse_rank(options: argparse.Namespace, rank: int, prompt: int, response: int) -> dict[str, Any]:
    """Rehearses a rank in a process of its own, and returns the report of the process.

    Raises:
        ValueError: the rehearsal can't be carried out here, or the configuration is wrong.
        RuntimeError: the process ended without a report.
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
    """Returns one rank's part of the JSON: bytes per phase, waits, kernels and collectives per step."""
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
        "role": kind.name,
        "phases": phases,
        "waits": waits,
        "mistakes": [*found["mistakes"], *unknown_waits(waits), *([found["failure"]] if found["failure"] else [])],
        "collectives": collectives,
        "te_calls": found["te_calls"],
        "seconds": found["seconds"],
    }


def waits_of_a_step(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the places where the host waits in a step, over all its phases, and how often."""
    keys = ("file", "line", "below", "what", "innermost")
    counts: Counter[tuple[Any, ...]] = Counter()
    for name, seen in found["phases"].items():
        if name in STEP:
            for wait in seen["waits"]:
                counts[tuple(tuple(wait[key]) if key == "innermost" else wait[key] for key in keys)] += wait["count"]
    return [dict(zip(keys, place, strict=True)) | {"count": count} for place, count in sorted(counts.items())]


def planned_bytes(kind: RankKind, phase: str, run_spec: RunSpec) -> float | None:
    """Returns the bytes of a phase by `plan`; None if `plan` has no such phase."""
    memory, config = kind.memory, run_spec.config
    if phase in BUILT:
        # an optimizer has its two moments from the first step on; a copy of bfloat16 weights in float32 at once
        share = {OPTIMIZER: 1 / 3 if config.precision == "bf16" else 0.0}
        there = [*BUILT][: [*BUILT].index(phase) + 1]
        held = sum(memory.always.get(part, 0.0) * share.get(part, 1.0) for name in there for part in BUILT[name])
        if phase == "build optimizer" and config.distributes_optimizer(run_spec.student_layout):
            # before that, Megatron copies the weights into one buffer
            copied = sum(memory.always.get(part, 0.0) for part in (ROLLOUT_COPY, WEIGHTS, WEIGHTS, GRADIENTS))
            held = max(held, copied)
        return held
    passed = [name for name in (PLANNED | AROUND).get(phase, ()) if name in memory.phases]
    if not passed:
        return None
    return sum(memory.always.values()) + max(sum(memory.phases[name].values()) for name in passed)


def lines(one: dict[str, Any], usable: float) -> Iterator[tuple[str, bool]]:
    """Yields (a line of the report, whether it makes the rehearsal fail)."""
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
    """Describes the waits of a phase outside of the steps, and the bytes that it sent and would have written."""
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
