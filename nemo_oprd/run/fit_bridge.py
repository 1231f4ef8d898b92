"""`fit-bridge`: stage 1 of OPRD-Bridge. Reads or samples the student's rollouts, runs both models, fits projectors.

Both models keep their own layouts, except that the student's sequence parallelism, which only training needs, is off.
The teacher's hidden states travel to the student rank that has the same rows. That rank adds the states of both models
to running float64 moments, whose size does not depend on the number of tokens. All tensor ranks of a pipeline stage
have all rows, so the stage's layer pairs are divided among them. At the end the moments are summed over data and
context parallel ranks, and the pairs are divided among those ranks for the fit (`bridge.build.build_bridge`).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from nemo_oprd.batch.types import Rollout
from nemo_oprd.bridge.artifact import save_bridge
from nemo_oprd.bridge.build import build_bridge
from nemo_oprd.bridge.covariance import LayerPair, PairStatistics
from nemo_oprd.bridge.maps import Bridge, CapturePoint
from nemo_oprd.bridge.row_sample import assign_parts
from nemo_oprd.config.schema import Config
from nemo_oprd.distillation.distiller import Distiller
from nemo_oprd.distillation.gradient_injection import row_chunks
from nemo_oprd.distillation.objective import model_identity
from nemo_oprd.megatron.parallel import device, first_ranks
from nemo_oprd.rollout.engine import Request, RolloutEngine
from nemo_oprd.rollout.exchange import first_ranks_rollouts
from nemo_oprd.rollout.replay import read_rollouts, write_rollouts
from nemo_oprd.rollout.schedule import training_requests, training_sampling
from nemo_oprd.run.checks import check_experts_train
from nemo_oprd.run.engine_kinds import ENGINES, make_engine
from nemo_oprd.run.inputs import RunInputs, read_inputs
from nemo_oprd.run.models import build_distiller
from nemo_oprd.run.resolve import RunSpec
from nemo_oprd.runtime.files import read_json, write_atomically
from nemo_oprd.runtime.messages import ON_STDOUT, is_first_rank
from nemo_oprd.runtime.output_directories import mark
from nemo_oprd.runtime.run_lock import RunLock
from nemo_oprd.runtime.signals import Signals, Stopped, agree

# The rollouts of `fit-bridge`: recorded ones, or sampled ones that an interrupted fit keeps.
#
# Sampled rollouts are written to `output/rollouts`, one file per step of `train.prompts_per_step` prompts, beside
# `about.json`, which records the sampling settings. The command, started again, reads the files that exist.


logger = logging.getLogger(__name__)

DIRECTORY = "rollouts"


class RecordedRollouts:
    """The rollouts of `rollout.replay`.

    Attributes:
        count: responses in all batches together.
        student_tokenizer, teacher_tokenizer: None, because recorded rollouts need no tokenizer.
    """

    student_tokenizer = teacher_tokenizer = None

    def __init__(self, config: Config, rollouts: list[Rollout]) -> None:
        self.config, self.rollouts, self.count = config, rollouts, len(rollouts)

    def batches(self, distiller: Distiller) -> Iterator[list[Rollout]]:
        """Yields all rollouts, as many at a time as `SampledRollouts` samples in a step."""
        size = _batch_size(self.config)
        yield from (self.rollouts[start : start + size] for start in range(0, self.count, size))


class SampledRollouts:
    """The student's responses to the prompts of `data.train`, sampled step by step and kept.

    Attributes:
        count: responses in all batches together.
        student_tokenizer, teacher_tokenizer: fingerprints.
    """

    def __init__(self, inputs: RunInputs) -> None:
        self.config, self.files = config, files = inputs.config, inputs.files
        self.student, self.prompts = files.student, inputs.data.prompts
        (self.teacher_inputs,) = inputs.data.teacher_inputs
        if inputs.data.report is not None:
            for line in inputs.data.report.lines:
                logger.info(line)
        tokenizer = files.student.tokenizer
        self.student_tokenizer = tokenizer.fingerprint()
        self.teacher_tokenizer = files.teachers[0].tokenizer.fingerprint()
        self.count = config.bridge.prompts * config.rollout.per_prompt

    def batches(self, distiller: Distiller) -> Iterator[list[Rollout]]:
        """Yields all rollouts, `train.prompts_per_step` prompts at a time; the same on every rank."""
        self._claim_directory()
        size, engine = _batch_size(self.config), None
        try:
            for step, start in enumerate(range(0, self.count, size)):
                file = Path(self.config.output) / DIRECTORY / f"step_{step + 1:07d}.jsonl"
                requests = self._requests(start, min(size, self.count - start))
                rollouts = _read_kept(file, requests, self.student.spec.vocab_size)
                if rollouts is None:
                    engine = engine or self._engine(distiller)
                    rollouts = engine.generate(requests, training_sampling(self.config, step))
                    if dist.get_rank() == 0:
                        write_rollouts(file, rollouts)
                yield rollouts if self.teacher_inputs is None else self.teacher_inputs.add_to(rollouts, requests)
        finally:
            if engine is not None:
                engine.close()

    def _engine(self, distiller: Distiller) -> RolloutEngine:
        """Makes an engine and gives it the student's weights; returns it."""
        files, layout, sampled = self.student, distiller.student.role.layout, self.files.sampled_ids
        engine = make_engine(self.config, files.spec, files.directory, layout, files.tokenizer.eos_ids, sampled)
        engine.update_weights(distiller.student.hf_weights, 0)
        return engine

    def _claim_directory(self) -> None:
        """Records the sampling settings; refuses a directory with rollouts of other settings."""
        file, settings = Path(self.config.output) / DIRECTORY / "about.json", self.config.rollout
        about = {
            "student": str(self.student.directory),
            "precision": self.config.precision,
            "seed": self.config.seed,
            "per_prompt": settings.per_prompt,
            "sampling": [settings.temperature, settings.top_p, self.config.response_limit[1]],
        }
        about |= ENGINES[settings.engine].sampled_with
        problem = None
        if dist.get_rank() == 0:
            mark(Path(self.config.output), "fit-bridge")
            file.parent.mkdir(exist_ok=True)
            problem = self._other_settings(file, about)
            if problem is None:
                write_atomically(file, json.dumps(about) + "\n")
        problem = first_ranks(problem)
        if problem is not None:
            raise ValueError(problem)

    @staticmethod
    def _other_settings(file: Path, about: dict[str, Any]) -> str | None:
        """Describes how an existing about.json differs from `about`; None if it is equal, or there is no such file."""
        fix = "remove that directory, or choose another output"
        try:
            existing = read_json(file, "how these rollouts were sampled", fix) if file.exists() else about
        except ValueError as error:
            return str(error)
        if existing == about:
            return None
        return (
            f"{file.parent} holds rollouts that were sampled with {json.dumps(existing)}, expected "
            f"{json.dumps(about)}; {fix}"
        )

    def _requests(self, start: int, count: int) -> list[Request]:
        per_prompt = self.config.rollout.per_prompt
        return training_requests(self.prompts, self.config, start // per_prompt, count // per_prompt)


def _batch_size(config: Config) -> int:
    return config.train.prompts_per_step * config.rollout.per_prompt


def _read_kept(file: Path, requests: list[Request], vocab_size: int) -> list[Rollout] | None:
    """Returns the rollouts of `requests` that an earlier start kept in `file`, on every rank; None if it kept none."""
    kept: list[Rollout] = []
    if dist.get_rank() == 0 and file.is_file():
        rollouts = read_rollouts(file, vocab_size)
        if [r.prompt_ids.tolist() for r in rollouts] == [request.prompt_ids for request in requests]:
            kept = rollouts
    return [*first_ranks_rollouts(dict(enumerate(kept))).values()] or None


RolloutSource = RecordedRollouts | SampledRollouts


def fit_bridge(spec: RunSpec) -> None:
    """Writes the bridge between the student and its teacher into the directory `output` of the configuration.

    The rollouts are sampled from `data.train`, or recorded ones (`rollout.replay`). Sampled rollouts are kept in
    `output/rollouts`; when the command is started again, it reads them instead of sampling them again.

    Raises:
        ValueError: the configuration, a model or the data are wrong, hidden states are not finite, there are fewer
            rows than the rank needs, or another process uses the directory.
        Stopped: a signal asked the process to stop; the same command resumes with the rollouts that were kept.
    """
    spec = _without_sequence_parallelism(spec)
    config, output, inputs = spec.config, Path(spec.config.output), read_inputs(spec, "fit-bridge")
    with ExitStack() as stack:
        if is_first_rank():
            stack.callback(RunLock(output).undo)
        recorded = inputs.data.recorded
        source = SampledRollouts(inputs) if recorded is None else RecordedRollouts(config, recorded)
        distiller = stack.enter_context(closing(build_distiller(inputs.plan, trainable=False)))
        signals = stack.enter_context(Signals())
        statistics = _collect_statistics(config, distiller, source, signals)
        # signals are ignored from here on: the remaining work is short
        bridge = _fit(config, distiller, statistics, source)
        if dist.get_rank() == 0:
            print(_rank_table(bridge.report["layers"]), flush=True)
            mark(output, "fit-bridge")
            save_bridge(bridge, output)
            print(f"wrote {output}: rank {bridge.rank}, {len(bridge.pairs)} layer pairs", flush=True)
        dist.barrier()


def _without_sequence_parallelism(spec: RunSpec) -> RunSpec:
    """Returns `spec` without sequence parallelism, so that tensor ranks have all rows; refuses experts with TP > 1."""
    student, layout = spec.config.student, replace(spec.student_layout, sequence=False)
    check_experts_train(spec.models.student.spec, layout)
    parallel = replace(student.parallel, sequence=False)
    config = replace(spec.config, student=replace(student, parallel=parallel))
    return replace(spec, config=config, student_layout=layout)


def _collect_statistics(
    config: Config, distiller: Distiller, source: RolloutSource, signals: Signals
) -> list[PairStatistics]:
    """Returns statistics over all rows for this rank's layer pairs, equal on its data- and context-parallel peers."""
    parts = assign_parts(range(source.count), config.bridge.held_out, config.seed)
    student, objective = distiller.student, distiller.objective_of(None)
    coords, statistics, first, rows = student.role.coords, _empty_statistics(config, distiller), 0, 0
    for rollouts in source.batches(distiller):
        batch = distiller.batch(rollouts, objective)
        for group in batch.groups:
            targets, hidden_plan = distiller.targets(batch, group).get(0), group.hidden
            states = student.hidden_states(rollouts, hidden_plan)
            if coords is None or targets is None:
                continue
            row_N = np.concatenate([microbatch.table_index for microbatch in hidden_plan.local_rows(coords)])
            response_N, token_N = hidden_plan.table.response[row_N] + first, hidden_plan.table.token[row_N]
            part_N = np.array([parts[response] for response in response_N.tolist()], dtype=np.int64)
            for stats in statistics:
                teacher_NDt, student_NDs = targets.hidden[stats.pair.student], states[stats.pair.student]
                for chunk in row_chunks(len(row_N)):  # bounds the float64 copies
                    stats.update(
                        teacher_NDt[chunk], student_NDs[chunk], response_N[chunk], token_N[chunk], part_N[chunk]
                    )
        first += len(rollouts)
        rows += len(batch.plan.hidden.table)
        logger.info(f"{first}/{source.count} responses, {rows} rows", extra=ON_STDOUT)
        (stop,) = agree(device(), signals.received is not None)
        if stop and first < source.count:
            raise Stopped(
                f"stopped by {signals.by} after {first} of {source.count} "
                "responses; the same command resumes with the sampled rollouts"
            )
    for stats in statistics:
        stats.all_reduce(student.role.member_groups.dp_cp)
    return statistics


def _empty_statistics(config: Config, distiller: Distiller) -> list[PairStatistics]:
    """Returns empty statistics for the layer pairs that this rank collects: its part of its pipeline stage's pairs."""
    role, student, match = distiller.student.role, distiller.student.spec, distiller.objective.teachers[0]
    if role.coords is None:
        return []
    owned = role.layout.owned_layers(role.coords.pipeline, student.num_layers)
    supervised = [layer for layer in owned if layer in match.layers]
    widths = match.spec.hidden_size, student.hidden_size
    return [
        PairStatistics(LayerPair(layer, match.layers[layer]), *widths, seed=config.seed, device=device())
        for layer in supervised[role.coords.tensor :: role.layout.tensor]
    ]


def _fit(config: Config, distiller: Distiller, statistics: list[PairStatistics], source: RolloutSource) -> Bridge:
    """Divides this rank's pairs among its data- and context-parallel peers and fits them; returns the whole bridge."""
    settings, role, objective = config.bridge, distiller.student.role, distiller.objective
    own: list[PairStatistics] = []
    if role.is_member:
        peers = role.member_groups.dp_cp
        own = statistics[dist.get_rank(peers) :: dist.get_world_size(peers)]
    return build_bridge(
        own,
        model_identity(objective.student, config.student.path, source.student_tokenizer),
        model_identity(objective.teachers[0].spec, config.teacher.path, source.teacher_tokenizer),
        CapturePoint(objective.position, objective.final_norm),
        rank=settings.rank,
        fit=settings.fit,
        center_student=settings.center_student,
        baselines=settings.baselines,
        seed=config.seed,
        gather=_all_gather,
    )


def _all_gather(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _rank_table(layers: dict[str, Any]) -> str:
    """Formats a line per layer pair: the ranks that the pair alone would choose, and its cosine at the chosen rank."""
    lines = ["pair        r*  crossing  held-out cosine"]
    for key, report in layers.items():
        cosine = report["held_out_cosine"]
        lines.append(f"{key:<9} {report['optimal_rank']:>4}  {report['crossing_rank']:>8}  {cosine:>15.4f}")
    return "\n".join(lines)
