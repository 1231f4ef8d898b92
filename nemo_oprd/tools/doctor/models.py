"""Checks of forward passes on sampled rollouts: layer map, massive activations, positions, distance, repeatability.

Every rank calls these functions alike; their findings are valid on the first rank. The parts stand in this order:
the similarity of layers, the error of the hidden states, and the checks of positions, distributions and repetition.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist

from nemo_oprd.batch.token_table import TokenTable, make_rows
from nemo_oprd.batch.types import Rollout, TeacherTargets
from nemo_oprd.config.schema import Config, RepresentationLossConfig
from nemo_oprd.data.token_ids import TokenIds
from nemo_oprd.distillation.distiller import Distiller
from nemo_oprd.distillation.gradient_injection import row_chunks
from nemo_oprd.distillation.metrics.step_metrics import StepMetrics
from nemo_oprd.distillation.sampling_check import student_logprobs
from nemo_oprd.distillation.step_batch import StepBatch
from nemo_oprd.distillation.student import Student
from nemo_oprd.distillation.trained_projectors import student_projection
from nemo_oprd.losses.registry import ROW_LOSSES, normalizes_rows
from nemo_oprd.megatron.parallel import device
from nemo_oprd.rollout.engine import Request, RolloutEngine, SamplingParams
from nemo_oprd.runtime.messages import ranges
from nemo_oprd.tools.doctor.findings import Finding
from nemo_oprd.tools.doctor.layer_map import LayerMap, rounds, similar_layers

# The similarity of the states of all layers of student and teacher, for the check of the layer map.
#
# The teacher computes the same few responses again, with other layers matched, until the ranks of the student have seen
# the states of all its layers. n rows of a rank, D width, P = 64 random directions.


CHECK = "similar layers"
# responses up to so many tokens are enough to tell layers apart; fewer rows than the second number are not
MOST_TOKENS, FEWEST_ROWS = 1024, 32
DIRECTIONS = 64


def layer_similarity(distiller: Distiller, rollouts: list[Rollout], number: int) -> Finding:
    """Runs the check `similar_layers` for teacher `number` on its rollouts. Every rank calls this.

    Without a bridge (models of one width and origin), the similarity of two layers is the correlation between their
    states, averaged over the dimensions. With a bridge it is linear CKA on random projections. Each dimension is scaled
    to unit variance first, so that a few massive ones don't decide.
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
    """Returns the first rollouts, up to `MOST_TOKENS` response tokens; at least one."""
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
    """Returns (student layer -> states, candidate -> states): float32 [n, D] of the rows on this rank, per group."""
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
    """Returns ([S, T] similarities, number of rows), the same on every rank."""
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
    """Returns (index in `layers` -> own rows, standardized over all ranks, projected if `project`; rows per layer)."""
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


# The check for massive activations: which layers and which dimensions hold the error between hidden states.
#
# n rows of a rank, W compared values per row (hidden size, or rank of a bridge), L supervised layers.


# an error is "dominated" where the largest 1 % of the dimensions hold more than half of it, and ...
TOP_SHARE, DOMINATED = 0.01, 0.5
# ... at least ten times what they would hold if all were equal: one of 4 dimensions is no small part of them
TIMES_EQUAL = 10.0
SHOWN = 3
# the text names the layers that have this part of the loss
MOST = 0.9


@dataclass(frozen=True)
class LayerError:
    """The error of one layer of the student: its share of the loss, and the dimensions that hold most of it."""

    layer: int
    share: float  # of the squared error over all layers, at the layers' weights
    top: tuple[int, ...]  # the 1 % of the dimensions that hold most of it, largest first
    top_share: float  # their part of the layer's error
    width: int  # number of dimensions

    @property
    def dominated(self) -> bool:
        """Returns whether few dimensions hold most of the layer's error."""
        return self.top_share > max(DOMINATED, TIMES_EQUAL * len(self.top) / self.width)


def massive_activations(
    distiller: Distiller, batch: StepBatch, loss: RepresentationLossConfig, gradient_shares: dict[int, float]
) -> Finding:
    """Checks whether a few dimensions hold most of the hidden-state loss.

    Many models have a few dimensions with states hundreds of times larger than all others. A plain MSE then trains
    these dimensions, in the layers that have them, and hardly anything else, while the loss falls by orders of
    magnitude. The rows are measured as the loss compares them: projected by a bridge; scaled to unit length for
    normalized_mse and cosine.

    Args:
        batch: rollouts of one teacher.
        gradient_shares: layer -> its share of the squared gradient, only reported.
    """
    normalized = normalizes_rows(loss.kind)
    errors = layer_errors(squared_errors(distiller, batch, normalized=normalized), batch.objective.layer_weights)
    return judge(errors, loss, gradient_shares)


def judge(errors: list[LayerError], loss: RepresentationLossConfig, gradient_shares: dict[int, float]) -> Finding:
    """Returns the finding about the errors of all layers, as `massive_activations` describes it."""
    check = "massive activations"
    dominated = [error for error in errors if error.dominated]
    held = sum(error.share for error in dominated)
    numbers = {
        "dominated_layers": [error.layer for error in dominated],
        "share_of_loss": held,
        "layers": [
            {
                "layer": error.layer,
                "share_of_loss": error.share,
                "share_of_gradient": gradient_shares.get(error.layer),
                "top_dimensions": list(error.top[:SHOWN]),
                "share_of_top_dimensions": error.top_share,
            }
            for error in errors
        ],
    }
    if not any(error.share for error in errors):
        return Finding(check, "ok", "the states of both models are equal", numbers)
    largest = max(errors, key=lambda error: error.share)
    if held <= DOMINATED:
        text = f"no few dimensions hold the {loss.kind} loss: layers {ranges(_most(errors))} of {len(errors)} have "
        text += f"{MOST:.0%} of it, most of all layer {largest.layer}, where {_dimensions(largest)} hold "
        return Finding(check, "ok", f"{text}{largest.top_share:.0%} of the error", numbers)
    worst = max(dominated, key=lambda error: error.top_share)
    layers = ranges([error.layer for error in dominated])
    said = f"few dimensions hold the error of layers {layers}, which have {held:.0%} of the {loss.kind} loss: in layer "
    said += f"{worst.layer}, {_dimensions(worst)} hold {worst.top_share:.0%}"
    if loss.kind not in ROW_LOSSES:
        text = f"{said} of the squared error; what {loss.kind} makes of it is not known here"
        return Finding(check, "skipped", text, numbers)
    choice = "loss.representation.kind=normalized_mse or cosine, or " if loss.kind == "mse" else ""
    text = f"{said}; expected at most half of the loss there: little else is trained; fix: {choice}"
    return Finding(check, "warning", f"{text}loss.representation.layers=last", numbers, code="massive-activations")


def _most(errors: list[LayerError]) -> list[int]:
    """Returns the fewest layers that have 90 % of the loss."""
    ordered = sorted(errors, key=lambda error: -error.share)
    before = np.cumsum([0.0, *(error.share for error in ordered)])
    return [error.layer for error, earlier in zip(ordered, before, strict=False) if earlier < MOST]


def _dimensions(error: LayerError) -> str:
    shown = ", ".join(map(str, error.top[:SHOWN])) + (", ..." if len(error.top) > SHOWN else "")
    return f"{len(error.top)} of {error.width} dimensions ({shown})"


def layer_errors(squares: dict[int, np.ndarray], weights: dict[int, float]) -> list[LayerError]:
    """Returns the layers' errors from the sums of squared differences per dimension.

    Args:
        squares: layer -> float64 [W], weighted by the rows' weights.
        weights: layer -> its weight in the representation loss.
    """
    total = sum(weights[layer] * values.sum() for layer, values in squares.items())
    errors = []
    for layer, values in sorted(squares.items()):
        top = np.argsort(-values, kind="stable")[: max(1, int(TOP_SHARE * len(values)))]
        whole = values.sum()
        share = float(weights[layer] * whole / total) if total else 0.0
        top_share = float(values[top].sum() / whole) if whole else 0.0
        errors.append(LayerError(layer, share, tuple(top.tolist()), top_share, len(values)))
    return errors


@torch.no_grad()
def squared_errors(distiller: Distiller, batch: StepBatch, *, normalized: bool) -> dict[int, np.ndarray]:
    """Returns layer -> float64 [W]: squared differences of the compared rows, summed by row weights; same on all ranks.

    Args:
        batch: rollouts of one teacher.
        normalized: whether rows are scaled to unit length first.
    """
    student, layers = distiller.student, distiller.objective.layers
    (number,) = set(batch.plan.taught_by)
    sums = torch.zeros(len(layers), distiller.objective.teachers[number].width, dtype=torch.float64, device=device())
    project = student_projection(student.chunks, distiller.objective, number)
    for group in batch.groups:
        targets, states = distiller.targets(batch, group), student.hidden_states(batch.rollouts, group.hidden)
        coords = student.role.coords
        # tensor ranks without sequence parallelism hold the same rows
        if coords is None or number not in targets or (group.hidden.replicated and coords.tensor > 0):
            continue
        rows = np.concatenate([local.table_index for local in group.hidden.local_rows(coords)])
        weight = torch.from_numpy(group.hidden.table.weight[rows]).to(device())
        for layer, student_ND in states.items():
            for chunk in row_chunks(len(rows)):
                pair = project(layer, student_ND[chunk].float()), targets[number].hidden[layer][chunk].float()
                if normalized:
                    pair = tuple(torch.nn.functional.normalize(values, dim=-1) for values in pair)  # type: ignore
                squares = (pair[0] - pair[1]).double().square()
                sums[layers.index(layer)] += weight[chunk] @ squares
    dist.all_reduce(sums)
    return {layer: sums[i].cpu().numpy() for i, layer in enumerate(layers)}


# greedy responses of the position check; the first tokens are counted apart, and there is one per response
GREEDY_RESPONSES, GREEDY_TOKENS = 8, 64
AGREES, FIRST_TOKENS_AGREE = 0.95, 0.75
# At this temperature, -temperature * log-probability of a token is its logit's distance to the largest one, up to
# temperature * ln V: 0.012 nats for 150,000 ids. Distances up to TIE count as ties. Engine and trainer add in different
# orders: float32 logits differ by 1e-5, bfloat16 ones of real models by up to 0.4 (distillation/sampling_check.py).
SHARP = 1e-3
TIE = {"fp32": 0.05, "bf16": 0.5}
# Shares of ln V, the KL from a sure student to a teacher that knows nothing. SmolLM2-135M rounded to 2 bits is at 0.42,
# with its embedding at 0.53, and learns; shuffled ids and states that are off by one token were above 1 (toy models).
KL_WRONG, KL_WARNING = 0.75, 0.25
# these damaged students have 0.14 of the likeliest 16 ids in common with their teacher; unrelated models have k / V
OVERLAP_WRONG, OVERLAP_WARNING = 0.1, 0.3
# below this the two distributions are one, up to rounding
NOTHING_TO_LEARN = 1e-6
DIFFERS = 1e-3


def greedy_responses(engine: RolloutEngine, requests: list[Request], config: Config) -> list[Rollout]:
    """Returns the engine's greedy responses to the first requests, for `positions`."""
    tokens = min(GREEDY_TOKENS, config.rollout.max_new_tokens)
    return engine.generate(requests[:GREEDY_RESPONSES], SamplingParams(0.0, 1.0, tokens, (config.seed, 0)))


def positions(greedy: list[Rollout], student: Student, config: Config, sampled: TokenIds) -> Finding:
    """Checks whether the trainer scores a token at the state from which the engine sampled it.

    With states that are off by one between sampling and scoring, every loss compares, and trains, the wrong tokens, yet
    it falls. Nearly all tokens of `greedy_responses` (`AGREES`) must be the trainer's likeliest ones, up to ties; the
    first tokens are counted apart, because only they show a shift of the prompt. Otherwise the log-probabilities at the
    positions before and after show whether a shift explains the tokens.
    """
    check = "positions"
    sequences = [Rollout(r.prompt_ids, r.response_ids) for r in greedy if len(r.response_ids)]
    table = make_rows(sequences, positions="all", k=1, position="predicting", aggregation="token_mean")

    def score(shift: int, temperature: float) -> tuple[np.ndarray, TokenTable]:
        rows = _shifted(table, sequences, shift)
        settings = replace(config, rollout=replace(config.rollout, temperature=temperature, top_p=1.0))
        return student_logprobs(student, sequences, rows, settings, sampled), rows

    sharp, rows = score(0, SHARP)
    agrees = -SHARP * sharp <= TIE[config.precision]
    share, first = float(agrees.mean()), float(agrees[rows.token == 0].mean())
    mean = {shift: float(score(shift, 1.0)[0].mean()) for shift in (-1, 0, 1)}
    numbers = {"tokens": len(rows), "agree": share, "first_tokens_agree": first}
    numbers |= {"logprob": mean[0], "logprob_one_before": mean[-1], "logprob_one_after": mean[1]}
    said = f"{share:.1%} of the engine's {len(rows)} greedy tokens are the trainer's likeliest ones, and {first:.0%} "
    said += f"of the {len(sequences)} first tokens"
    if share >= AGREES and first >= FIRST_TOKENS_AGREE:
        return Finding(check, "ok", said, numbers)
    best, code = max(mean, key=mean.__getitem__), "sampling-differs"
    if best:
        code = "sampling-off-by-one"
        where = "before" if best < 0 else "after"
        reason = f"the states one position {where} explain the tokens better ({mean[best]:.2f} nats per token, not "
        reason += f"{mean[0]:.2f}), so sampling and scoring are off by one"
    elif first < FIRST_TOKENS_AGREE <= share:
        reason = "the first tokens differ most, so responses begin elsewhere than where the engine began them"
    else:
        reason = "the engine and the trainer compute different models"
    text = f"{said}: {reason}; expected at least {AGREES:.0%} and {FIRST_TOKENS_AGREE:.0%}; fix: report this with the "
    return Finding(check, "wrong", f"{text}student's config.json", numbers, code=code)


def _shifted(table: TokenTable, rollouts: list[Rollout], shift: int) -> TokenTable:
    """Returns the rows with their states `shift` positions later, without those that would leave their sequence."""
    lengths = np.array([rollout.length for rollout in rollouts])
    position = table.position + shift
    kept = np.flatnonzero((position >= 0) & (position < lengths[table.response]))
    chosen = table.select(kept)
    return replace(chosen, position=chosen.position + shift)


def aligned_positions(rollouts: list[Rollout], table: TokenTable) -> Finding:
    """Checks whether student and teacher read the same token at the two positions whose states are compared.

    A teacher that reads another prompt has its states at other positions. If they are off by one, each state of the
    student is pulled towards that of a neighbouring token, and no error shows it. The check is for teachers that read
    the student's response ids, after any prompt; `table` holds the supervised rows.
    """
    own = [rollout.ids for rollout in rollouts]
    read = [rollout.as_read_by_teacher().ids for rollout in rollouts]
    # before the first response token stand the prompts' ends, which may differ
    rows = [
        (own[response][position], read[response][other])
        for response, position, other in zip(table.response, table.position, table.teacher_position, strict=True)
        if position >= len(rollouts[response].prompt_ids)
    ]
    wrong = sum(int(one != other) for one, other in rows)
    numbers = {"rows": len(rows), "other_tokens": wrong}
    if not wrong:
        text = f"student and teacher read the same token in all {len(rows)} supervised rows"
        return Finding("teacher's positions", "ok", text, numbers)
    text = f"student and teacher read different tokens in {wrong} of {len(rows)} supervised rows; expected none: the "
    text += "states of other tokens are compared; fix: report this with teacher.prompt and the models' tokenizers"
    return Finding("teacher's positions", "wrong", text, numbers, code="teacher-positions-differ")


def distance(metrics: StepMetrics, vocabulary: int, k: int) -> Finding:
    """Checks whether the distributions of both models are at a distance that distillation can close.

    A teacher of another vocabulary, another alignment or another prompt format is about ln V away, and the student
    learns noise from it; a teacher at distance 0 teaches nothing. A KL up to `KL_WRONG` times ln V with an
    overlap of at least `OVERLAP_WRONG` is a warning at most: a badly damaged student has both, and learns.

    Args:
        metrics: of an update on the sampled rollouts.
        vocabulary: number of ids that both models know.
    """
    check = "KL and overlap"
    if metrics.nonfinite_reason:
        text = f"{metrics.nonfinite_reason}; expected finite numbers; fix: check both models' weights for NaN"
        return Finding(check, "wrong", text, code="not-finite")
    scale, kl = math.log(vocabulary), metrics.named["output/reverse_kl"]
    overlap = metrics.named["val-topk/overlap_ratio"]
    numbers = {"reverse_kl": kl, "ln_vocabulary": scale, "overlap": overlap, "k": k}
    for name, metric in (("student_entropy", "actor/entropy"), ("teacher_entropy", "teacher/entropy")):
        if metric in metrics.named:
            numbers[name] = metrics.named[metric]
    said = f"reverse KL {kl:.3g} nats per token (ln V is {scale:.1f}), overlap of the top {k} is {overlap:.2f}"
    if not (kl <= KL_WRONG * scale and overlap >= OVERLAP_WRONG):
        text = f"{said}; expected KL below {KL_WRONG * scale:.1f} and overlap above {OVERLAP_WRONG}: the models do not "
        text += "speak the same language; fix: compare tokenizers, templates and paths"
        return Finding(check, "wrong", text, numbers, code="distributions-unrelated")
    if kl < NOTHING_TO_LEARN:
        text = f"{said}; expected a difference: there is nothing to learn; fix: another teacher, or teacher.prompt"
        return Finding(check, "warning", text, numbers, code="distributions-equal")
    if kl > KL_WARNING * scale or overlap < OVERLAP_WARNING:
        text = f"{said}; expected KL below {KL_WARNING * scale:.1f} and overlap above {OVERLAP_WARNING}: far apart for "
        text += "models of one origin; fix: compare templates and paths, unless the student is known to be damaged"
        return Finding(check, "warning", text, numbers, code="distributions-far")
    return Finding(check, "ok", said, numbers)


def repeatability(distiller: Distiller, batch: StepBatch) -> Finding:
    """Checks whether the teacher gives the same targets for the same input twice.

    Active dropout, a kernel that reads foreign memory, or changing weights add noise to the targets, below which the
    loss can't fall. A small difference is a warning only, because sums in another order explain it.
    """
    check, group = "repeatability", batch.groups[0]
    first, second = distiller.targets(batch, group), distiller.targets(batch, group)
    layers = distiller.objective.layers
    # the last entry is the output loss's targets; NaN becomes infinite
    differences = torch.zeros(len(layers) + 1, dtype=torch.float64, device=device())
    for number, targets in first.items():
        for i, layer in enumerate(layers):
            if layer in targets.hidden:
                found = _difference(targets.hidden[layer], second[number].hidden[layer])
                differences[i] = torch.maximum(differences[i], found)
        ours, again = _output(targets), _output(second[number])
        if ours is not None and again is not None:
            differences[-1] = torch.maximum(differences[-1], _difference(ours, again))
    dist.all_reduce(differences, op=dist.ReduceOp.MAX)
    worst = int(differences.argmax())
    largest = float(differences[worst])
    where = f"layer {layers[worst]}" if worst < len(layers) else "the final states"
    numbers = {"largest_relative_difference": largest, "at": where}
    if largest == 0:
        return Finding(check, "ok", "the teacher gives the same targets twice, bit for bit", numbers)
    said = f"the same input gives the teacher's targets with a relative difference of up to {largest:.1e} ({where})"
    if largest <= DIFFERS:
        text = f"{said}: not bit for bit; expected 0; fix: none needed, but such runs don't repeat exactly"
        return Finding(check, "warning", text, numbers, code="targets-not-bitwise")
    text = f"{said}; expected at most {DIFFERS}; fix: dropout of 0 in the teacher's config.json, or other kernels"
    return Finding(check, "wrong", text, numbers, code="targets-noisy")


def _output(targets: TeacherTargets) -> torch.Tensor | None:
    return targets.output if targets.output is not None and targets.output.numel() else None


def _difference(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Returns |one - other| / |one|, float64; infinite instead of NaN, and 0 where both are equal bit for bit."""
    one, other = one.double(), other.double()
    if torch.equal(one, other):
        return one.new_zeros(())
    return ((one - other).norm() / one.norm()).nan_to_num(nan=math.inf, posinf=math.inf)
