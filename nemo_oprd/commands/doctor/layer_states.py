"""How alike the states of all layers of student and teacher are, for the check of the layer map.

The teacher computes the same few responses again, with other layers matched, until the ranks of the student have seen
the states of all its layers. n rows of a rank, D width, P = 64 random directions.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist

from nemo_oprd.batch.types import Rollout
from nemo_oprd.commands.doctor.findings import Finding
from nemo_oprd.commands.doctor.layer_map import LayerMap, rounds, similar_layers
from nemo_oprd.distillation.distiller import Distiller
from nemo_oprd.distillation.step_batch import StepBatch
from nemo_oprd.models.megatron.parallel import device

CHECK = "similar layers"
# responses up to so many tokens are enough to tell layers apart; fewer rows than the second number are not
MOST_TOKENS, FEWEST_ROWS = 1024, 32
DIRECTIONS = 64


def layer_similarity(distiller: Distiller, rollouts: list[Rollout], number: int) -> Finding:
    """The check `similar_layers` for teacher `number` on its rollouts. Every rank calls this.

    For models of one width, which have one origin wherever they are compared without a bridge, a layer's similarity to
    another is the mean over the dimensions of the correlation between the two states. For other widths it is linear
    CKA, on random projections. Each dimension is scaled to unit variance first, so that a few massive ones don't count
    for all.
    """
    run = distiller.objective
    match = run.teachers[number]
    depths = run.student.num_layers, match.spec.num_layers
    layers = LayerMap(match.layers, depths, run.final_norm, freely=match.bridge is None)
    batch = distiller.batch(_some(rollouts), distiller.objective_of(0, watch=False))
    inner = layers.inner
    built = distiller.objective_of(0).teacher_depth(number)
    candidates = [layer for layer in layers.candidates if layer <= built]
    if not inner or len(candidates) < 2:
        return Finding(CHECK, "ok", "each layer has one that it can be compared with, and no other")
    student, teacher = _states(distiller, batch, number, candidates)
    correlate = match.bridge is None and run.student.hidden_size == match.spec.hidden_size
    measure = "correlation" if correlate else "CKA"
    similarity, rows = _similarity(student, teacher, list(inner), candidates, correlate=correlate)
    if rows < FEWEST_ROWS:
        return Finding(CHECK, "skipped", f"{rows} states show nothing; expected at least {FEWEST_ROWS}")
    if not np.isfinite(similarity).all():
        return Finding(CHECK, "skipped", "states are not finite; see KL and overlap")
    return similar_layers(similarity, layers, measure, rows)


def _some(rollouts: list[Rollout]) -> list[Rollout]:
    """The first rollouts, up to `MOST_TOKENS` response tokens; one at least."""
    chosen: list[Rollout] = []
    tokens = 0
    for rollout in rollouts:
        if chosen and tokens + len(rollout.response_ids) > MOST_TOKENS:
            break
        chosen.append(rollout)
        tokens += len(rollout.response_ids)
    return chosen


States = dict[int, list[torch.Tensor]]


@torch.no_grad()
def _states(distiller: Distiller, batch: StepBatch, number: int, candidates: list[int]) -> tuple[States, States]:
    """(The student's states by layer, the teacher's by candidate): lists of float32 [n, D], one per group, as far as
    this rank has the rows."""
    student, run = distiller.student, distiller.objective
    match = run.teachers[number]
    supervised = run.layers
    ours, theirs = States(), States()
    at_once = student.role.layout.pipeline == 1
    for group in batch.groups:
        own = student.hidden_states(batch.rollouts, group.hidden)
        coords = student.role.coords
        counts = coords is not None and not (group.hidden.replicated and coords.tensor > 0)
        seen: dict[int, torch.Tensor] = {}
        for pairs in rounds(supervised, candidates, at_once=at_once):
            other = replace(match, layers=pairs, bridge=None, final_layer=None)
            teachers = tuple(other if i == number else each for i, each in enumerate(run.teachers))
            objective = replace(batch.objective, run=replace(run, teachers=teachers))
            targets = distiller.targets(replace(batch, objective=objective), group)
            if number in targets:
                hidden = targets[number].hidden
                seen |= {pairs[layer]: states for layer, states in hidden.items()}
        if counts and seen:
            for layer, states in own.items():
                ours.setdefault(layer, []).append(states.float())
            for layer, states in seen.items():
                theirs.setdefault(layer, []).append(states.float())
    return ours, theirs


def _similarity(
    student: States, teacher: States, inner: list[int], candidates: list[int], *, correlate: bool
) -> tuple[np.ndarray, int]:
    """([S, T] similarities, number of rows), the same on every rank."""
    ours, rows = _standardized(student, inner, seed=0, project=not correlate)
    theirs, teacher_rows = _standardized(teacher, candidates, seed=1, project=not correlate)
    if correlate:
        sums = torch.zeros(len(inner), len(candidates), dtype=torch.float64, device=device())
        for i, one in ours.items():
            for j, other in theirs.items():
                sums[i, j] = (one * other).mean(dim=1, dtype=torch.float64).sum()
        dist.all_reduce(sums)
        return (sums / max(rows, 1)).cpu().numpy(), rows
    size = (DIRECTIONS, DIRECTIONS)
    cross = torch.zeros(len(inner), len(candidates), *size, dtype=torch.float64, device=device())
    grams = [torch.zeros(len(each), *size, dtype=torch.float64, device=device()) for each in (inner, candidates)]
    for i, one in ours.items():
        grams[0][i] = (one.T @ one).double()
        for j, other in theirs.items():
            cross[i, j] = (one.T @ other).double()
    for j, other in theirs.items():
        grams[1][j] = (other.T @ other).double()
    for tensor in (cross, *grams):
        dist.all_reduce(tensor)
    norms = [gram.flatten(1).norm(dim=1) for gram in grams]
    # every stage of the student's pipeline has the teacher's rows, and one stage those of a layer of the student
    times = teacher_rows / max(rows, 1)
    cka = cross.flatten(2).square().sum(dim=2) / (norms[0][:, None] * norms[1][None, :] / times)
    return cka.cpu().numpy(), rows


def _standardized(
    states: States, layers: list[int], *, seed: int, project: bool
) -> tuple[dict[int, torch.Tensor], int]:
    """(Index in `layers` -> this rank's rows with mean 0 and variance 1 over all ranks, projected; rows of a layer)."""
    joined = {i: torch.cat(states[layer]) for i, layer in enumerate(layers) if layer in states}
    widths = torch.tensor([max((rows.shape[1] for rows in joined.values()), default=0)], device=device())
    dist.all_reduce(widths, op=dist.ReduceOp.MAX)
    width = int(widths)
    sums = torch.zeros(len(layers), 2, width, dtype=torch.float64, device=device())
    counts = torch.zeros(len(layers), dtype=torch.float64, device=device())
    for i, rows in joined.items():
        sums[i, 0], sums[i, 1] = rows.double().sum(0), rows.double().square().sum(0)
        counts[i] = len(rows)
    dist.all_reduce(sums)
    dist.all_reduce(counts)
    mean = sums[:, 0] / counts.clamp(min=1)[:, None]
    deviation = (sums[:, 1] / counts.clamp(min=1)[:, None] - mean.square()).clamp(min=0).sqrt()
    directions = torch.randn(width, DIRECTIONS, generator=torch.Generator().manual_seed(seed)).to(device())
    result = {}
    for i, rows in joined.items():
        scale = torch.where(deviation[i] > 1e-6 * deviation[i].max(), 1 / deviation[i].clamp(min=1e-30), 0.0)
        standard = ((rows - mean[i]) * scale).float()
        result[i] = standard @ directions / width**0.5 if project else standard
    return result, int(counts.min()) if len(counts) else 0
