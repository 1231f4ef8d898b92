"""`fit-bridge`: stage 1 of OPRD-Bridge. The student's rollouts, one pass of both models over them, a closed form.

Both models keep their own layouts, but for the student's sequence parallelism, which is for training. Teacher states
travel to the student rank that has the same rows, which adds both to running moments in float64; nothing grows with the
number of tokens. A stage's layer pairs are shared out over its tensor ranks, which all have all rows. At the end the
moments are summed over data and context parallel ranks, on which different pairs are then fitted.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from nemo_oprd.batch.types import Rollout
from nemo_oprd.bridge.artifact import MANIFEST, TENSORS, save_bridge
from nemo_oprd.bridge.build import finish_pair
from nemo_oprd.bridge.covariance import LayerPair, PairStatistics
from nemo_oprd.bridge.fit import fit_ridge
from nemo_oprd.bridge.maps import Bridge, CapturePoint, LayerBridge, ModelIdentity
from nemo_oprd.bridge.rank import choose_rank, crossing_rank, normalized_curve, optimal_rank
from nemo_oprd.bridge.sampling import assign_parts
from nemo_oprd.checkpointing.directory import write_atomically
from nemo_oprd.config.schema import Config
from nemo_oprd.data.prompts import prompt_order
from nemo_oprd.distillation.gradient_injection import row_chunks
from nemo_oprd.distillation.objective import Objective, model_identity
from nemo_oprd.distillation.step import System
from nemo_oprd.evaluation.sample import TRAINING_STREAM
from nemo_oprd.fault_tolerance.disk import check_output
from nemo_oprd.fault_tolerance.signals import Signals, Stopped, agree
from nemo_oprd.megatron.parallel import device
from nemo_oprd.models import read_model_spec
from nemo_oprd.rollout.engine import Request, SamplingParams
from nemo_oprd.rollout.megatron_engine import MegatronEngine
from nemo_oprd.rollout.replay import read_rollouts, write_rollouts
from nemo_oprd.setup.data import check_teacher_prompts, encode_prompts, make_teacher_inputs, recorded_rollouts
from nemo_oprd.setup.models import check_vocabulary, make_plan, make_system
from nemo_oprd.setup.preflight import check_bridge_rank, check_one_teacher, check_prompts_given, model_directory
from nemo_oprd.tokenization.tokenizer import Tokenizer

OURS = {TENSORS, MANIFEST, "rollouts"}


def fit_bridge(config: Config) -> None:
    """Writes the bridge between `config.student` and `config.teacher` into the directory `config.output`.

    The rollouts are sampled from `data.train`, or recorded ones (`rollout.replay`). Sampled ones are kept in
    `output/rollouts`: started again, the command takes up those that are there.

    Raises:
        ValueError: bad configuration, models or data, states that are not finite, fewer rows than the rank needs.
        Stopped: the process was asked to stop by a signal; the same command goes on with the rollouts that are there.
    """
    output = Path(config.output)
    if output.exists() and not (output.is_dir() and {file.name for file in output.iterdir()} <= OURS):
        raise ValueError(f"output={output} exists and is not a bridge; choose another directory")
    check_output(output)
    check_one_teacher(config)
    config = _with_whole_rows(config)
    source = _Rollouts(config)
    plan = make_plan(config, fitting=True)
    check_bridge_rank(config, plan.objective.student, plan.objective.teacher)
    system = make_system(config, plan, trainable=False)
    say: Callable[[str], None] = (lambda line: print(line, flush=True)) if dist.get_rank() == 0 else lambda line: None
    with Signals() as signals:
        statistics = _collect(config, system, source, signals, say)
        # a signal from here on finds little left to do: the fit ends, and is written
        tokenizers = source.fingerprint, source.teacher_fingerprint
        bridge = _fit(config, system, statistics, tokenizers, say)
        if bridge is not None:
            save_bridge(bridge, output)
            say(f"wrote {output}: rank {bridge.rank}, {len(bridge.pairs)} layer pairs")
        dist.barrier()


def _with_whole_rows(config: Config) -> Config:
    """Without the student's sequence parallelism: a tensor rank then has all rows, and needs moments of few layers."""
    student = config.student
    return replace(config, student=replace(student, parallel=replace(student.parallel, sequence=False)))


class _Rollouts:
    """Batches of rollouts: recorded ones in one file, or sampled step by step."""

    def __init__(self, config: Config) -> None:
        self.config, self.source = config, model_directory(config.student)
        self.spec = read_model_spec(self.source)
        self.recorded = recorded_rollouts(config)
        # of the tokenizers, which recorded rollouts don't need
        self.fingerprint: str | None = None
        self.teacher_fingerprint: str | None = None
        if self.recorded is not None:
            self.count = len(self.recorded)
            return
        check_prompts_given(config)
        self.tokenizer = Tokenizer.load(self.source)
        self.fingerprint = self.tokenizer.fingerprint()
        check_vocabulary(self.tokenizer, self.spec, self.source)
        self.reader = make_teacher_inputs(config, self.tokenizer)[0]
        self.teacher_fingerprint = self.fingerprint if self.reader is None else self.reader.teacher.fingerprint()
        self.prompts = encode_prompts(config, self.tokenizer, self.spec.max_positions)
        check_teacher_prompts(config, [self.reader], self.prompts)
        self.count = config.bridge.prompts * config.rollout.per_prompt

    def batches(self, system: System) -> Iterator[list[Rollout]]:
        """All of them, `train.prompts_per_step` prompts at a time; the same on every rank."""
        size = self.config.train.prompts_per_step * self.config.rollout.per_prompt
        if self.recorded is not None:
            yield from (self.recorded[start : start + size] for start in range(0, self.count, size))
            return
        layout = system.student.role.layout
        engine = MegatronEngine(self.config, self.spec, layout, self.tokenizer.eos_ids, system.objective.vocab_limit)
        self._claim_directory()
        loaded = False
        for step, start in enumerate(range(0, self.count, size)):
            file = Path(self.config.output) / "rollouts" / f"step_{step + 1:07d}.jsonl"
            requests = self._requests(start, min(size, self.count - start))
            kept = _kept(file, requests, self.spec.vocab_size)
            if kept is None:
                if not loaded:
                    engine.update_weights(system.student)
                    loaded = True
                rollout = self.config.rollout
                key = (self.config.seed, TRAINING_STREAM, step)
                kept = engine.generate(
                    requests, SamplingParams(rollout.temperature, rollout.top_p, rollout.max_new_tokens, key)
                )
                if dist.get_rank() == 0:
                    write_rollouts(file, kept)
            yield kept if self.reader is None else self.reader.read(kept, requests)

    def _claim_directory(self) -> None:
        """Says in `rollouts/about.json` of what the rollouts there are; what is there of something else is refused."""
        file, settings = Path(self.config.output) / "rollouts" / "about.json", self.config.rollout
        about = {
            "student": str(self.source),
            "precision": self.config.precision,
            "seed": self.config.seed,
            "per_prompt": settings.per_prompt,
            "sampling": [settings.temperature, settings.top_p, settings.max_new_tokens],
        }
        problem: list[str | None] = [None]
        if dist.get_rank() == 0:
            file.parent.mkdir(parents=True, exist_ok=True)
            if file.exists() and json.loads(file.read_text()) != about:
                problem[0] = (
                    f"{file.parent} holds rollouts of {file.read_text().strip()}, this run's are of "
                    f"{json.dumps(about)}; remove that directory, or choose another output"
                )
            else:
                write_atomically(file, json.dumps(about) + "\n")
        dist.broadcast_object_list(problem, src=0)
        if problem[0] is not None:
            raise ValueError(problem[0])

    def _requests(self, start: int, count: int) -> list[Request]:
        per_prompt = self.config.rollout.per_prompt
        chosen = prompt_order(len(self.prompts), self.config.seed, start // per_prompt, count // per_prompt)
        return [self.prompts[index] for index in chosen for _ in range(per_prompt)]


def _kept(file: Path, requests: list[Request], vocab_size: int) -> list[Rollout] | None:
    """The rollouts that an interrupted fit had sampled; the same answer on every rank."""
    answer: list[list[Rollout] | None] = [None]
    if dist.get_rank() == 0 and file.is_file():
        rollouts = read_rollouts(file, vocab_size)
        if [r.prompt_ids for r in rollouts] == [request.prompt_ids for request in requests]:
            answer[0] = rollouts
    dist.broadcast_object_list(answer, src=0)
    return answer[0]


def _collect(
    config: Config, system: System, source: _Rollouts, signals: Signals, say: Callable[[str], None]
) -> dict[int, PairStatistics]:
    """One pass; student layer -> statistics of all rows, on the tensor rank that has this layer's."""
    parts = assign_parts(range(source.count), config.bridge.held_out, config.seed)
    student, objective = system.student, system.objective
    at, statistics, first, rows = student.role.coords, dict[int, PairStatistics](), 0, 0
    if at is not None:
        layout = student.role.layout
        owned = layout.owned_layers(at.pipeline, objective.student.num_layers)
        for layer in [layer for layer in owned if layer in objective.layers][at.tensor :: layout.tensor]:
            pair = LayerPair(layer, objective.layers[layer])
            widths = objective.teacher.hidden_size, objective.student.hidden_size
            statistics[layer] = PairStatistics(pair, *widths, seed=config.seed, device=device())
    for rollouts in source.batches(system):
        plan = system.plan(rollouts)
        for wave in plan.microbatch_groups(config.teacher.resident_microbatches):
            targets, held = system.teach(rollouts, wave).get(0), wave.hidden
            states = student.hidden_states(rollouts, held)
            if at is None or targets is None:
                continue
            row = np.concatenate([microbatch.row for microbatch in held.local_rows(at)])
            response = held.table.response[row] + first
            part = np.array([parts[i] for i in response.tolist()], dtype=np.int64)
            for layer, stats in statistics.items():
                for rows_at in row_chunks(len(row)):  # float64 copies of a part at a time
                    here = targets.hidden[layer][rows_at], states[layer][rows_at]
                    stats.update(*here, response[rows_at], held.table.token[row][rows_at], part[rows_at])
        first += len(rollouts)
        rows += len(plan.hidden.table)
        say(f"{first}/{source.count} responses, {rows} rows")
        (stop,) = agree(device(), signals.received is not None)
        if stop and first < source.count:
            raise Stopped(
                f"stopped by {signals.received or 'a signal to another rank'} after {first} of {source.count} "
                "responses; the same command goes on with those that it sampled"
            )
    for stats in statistics.values():
        stats.all_reduce(student.role.groups.dp_cp)  # type: ignore[attr-defined]
    return statistics


def _fit(
    config: Config,
    system: System,
    statistics: dict[int, PairStatistics],
    tokenizers: tuple[str | None, str | None],
    say: Callable[[str], None],
) -> Bridge | None:
    """The bridge on rank 0; each rank fits some of the layer pairs that it has statistics of."""
    settings, role, objective = config.bridge, system.student.role, system.objective
    group = role.groups.dp_cp if role.is_member else None  # type: ignore[attr-defined]
    mine = list(statistics.values())[dist.get_rank(group) :: dist.get_world_size(group)] if role.is_member else []
    ridge = [fit_ridge(stats, center_student=settings.center_student) for stats in mine]
    curves = {fit.pair: normalized_curve(fit).cpu() for fit in ridge}
    everywhere: dict[LayerPair, torch.Tensor] = {}
    for part in _everyone(curves):
        everywhere.update(part)
    ordered = [everywhere[pair] for pair in sorted(everywhere)]
    rank = choose_rank(ordered) if settings.rank == "auto" else settings.rank
    pairs: dict[LayerPair, LayerBridge] = {}
    layers: dict[str, Any] = {}
    for stats, fit in zip(mine, ridge, strict=True):
        fit.check_rank(rank)
        pairs[stats.pair], layers[stats.pair.key] = finish_pair(
            stats, fit, rank, fit=settings.fit, seed=config.seed, say=say
        )
        layers[stats.pair.key] |= {"optimal_rank": optimal_rank(fit), "crossing_rank": crossing_rank(fit)}
    for other_pairs, other_layers in _everyone((pairs, layers)):
        pairs.update(other_pairs)
        layers.update(other_layers)
    if dist.get_rank() != 0:
        return None
    layers = {pair.key: layers[pair.key] for pair in sorted(pairs)}
    say(_table(layers))
    report = {
        "fit": settings.fit,
        "center_student": settings.center_student,
        "rank_asked_for": settings.rank,
        "layers": layers,
    }
    student, teacher = _identities(config, objective, *tokenizers)
    capture = CapturePoint(objective.position, objective.final_norm)
    return Bridge(rank, dict(sorted(pairs.items())), student, teacher, capture, report)


def _everyone(mine: Any) -> list[Any]:
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, mine)
    return parts


def _identities(
    config: Config, objective: Objective, of_student: str | None, of_teacher: str | None
) -> tuple[ModelIdentity, ModelIdentity]:
    student, teacher = config.student, config.teacher
    return (
        model_identity(objective.student, student.path, of_student),
        model_identity(objective.teacher, teacher.path, of_teacher),
    )


def _table(layers: dict[str, Any]) -> str:
    lines = ["pair        r*  crossing  held-out cosine"]
    for key, report in layers.items():
        cosine = report["held_out_cosine"]
        lines.append(f"{key:<9} {report['optimal_rank']:>4}  {report['crossing_rank']:>8}  {cosine:>15.4f}")
    return "\n".join(lines)
