"""`fit-bridge`: stage 1 of OPRD-Bridge. Both models run over the student's rollouts once; a fit gives the projectors.

Both models keep their own layouts, except that the student's sequence parallelism, which only training needs, is off.
The teacher's hidden states travel to the student rank that has the same rows. That rank adds the states of both models
to running float64 moments, whose size does not depend on the number of tokens. All tensor ranks of a pipeline stage
have all rows, so the stage's layer pairs are divided among them. At the end the moments are summed over data and
context parallel ranks, and the pairs are divided among those ranks for the fit (`bridge.build.build_bridge`).
"""

from __future__ import annotations

import logging
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from nemo_oprd.bridge.artifact import save_bridge
from nemo_oprd.bridge.build import build_bridge
from nemo_oprd.bridge.covariance import LayerPair, PairStatistics
from nemo_oprd.bridge.maps import Bridge, CapturePoint
from nemo_oprd.bridge.row_sample import assign_parts
from nemo_oprd.commands.fit_bridge.rollouts import RecordedRollouts, SampledRollouts, rollout_source
from nemo_oprd.config.schema import Config
from nemo_oprd.distillation.distiller import Distiller
from nemo_oprd.distillation.gradient_injection import row_chunks
from nemo_oprd.distillation.objective import model_identity
from nemo_oprd.models.megatron.parallel import device
from nemo_oprd.runtime.disk import check_output
from nemo_oprd.runtime.messages import ON_STDOUT, is_first_rank
from nemo_oprd.runtime.output_directories import check_directory
from nemo_oprd.runtime.run_lock import RunLock
from nemo_oprd.runtime.signals import Signals, Stopped, agree
from nemo_oprd.setup.checks import check_experts_train
from nemo_oprd.setup.models import RunFiles, build_distiller, make_plan
from nemo_oprd.setup.resolve import RunSpec

logger = logging.getLogger(__name__)

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
    output = Path(spec.config.output)
    check_output(spec.config.output)
    check_directory(output, "fit-bridge")
    spec = _without_sequence_parallelism(spec)
    config, files = spec.config, RunFiles(spec.config, spec.models)
    with ExitStack() as stack:
        if is_first_rank():
            stack.callback(RunLock(output).undo)
        source = rollout_source(spec, files)
        plan = make_plan(spec, files, fitting=True)
        distiller = stack.enter_context(closing(build_distiller(plan, trainable=False)))
        signals = stack.enter_context(Signals())
        statistics = _collect_statistics(config, distiller, source, signals)
        # a signal that arrives from here on is ignored: the remaining work is short
        bridge = _fit(config, distiller, statistics, source)
        if dist.get_rank() == 0:
            print(_rank_table(bridge.report["layers"]), flush=True)
            save_bridge(bridge, output)
            print(f"wrote {output}: rank {bridge.rank}, {len(bridge.pairs)} layer pairs", flush=True)
        dist.barrier()


def _without_sequence_parallelism(spec: RunSpec) -> RunSpec:
    """Every tensor rank then has all rows, and pairs can be divided among them; experts, which need it, are refused."""
    student, layout = spec.config.student, replace(spec.student_layout, sequence=False)
    check_experts_train(spec.models.student.spec, layout)
    parallel = replace(student.parallel, sequence=False)
    config = replace(spec.config, student=replace(student, parallel=parallel))
    return replace(spec, config=config, student_layout=layout)


def _collect_statistics(
    config: Config, distiller: Distiller, source: RolloutSource, signals: Signals
) -> list[PairStatistics]:
    """Of all rows, for the layer pairs that this rank collects: the same on its data and context parallel peers."""
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
    """Empty statistics for the layer pairs that this rank collects: its part of its pipeline stage's pairs."""
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
    """Divides this rank's pairs among its data and context parallel peers and fits them; the same on every rank."""
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
    """One line per layer pair: the ranks that the pair alone would choose, and its cosine at the chosen rank."""
    lines = ["pair        r*  crossing  held-out cosine"]
    for key, report in layers.items():
        cosine = report["held_out_cosine"]
        lines.append(f"{key:<9} {report['optimal_rank']:>4}  {report['crossing_rank']:>8}  {cosine:>15.4f}")
    return "\n".join(lines)
