"""The checks of forward passes on sampled rollouts: positions, distance of the distributions, repeatability.

Every rank calls these functions alike; what they return counts on the first rank. `hidden_errors.py` has the check of
the hidden-state error.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist

from nemo_oprd.batch.token_table import TokenTable, make_rows
from nemo_oprd.batch.types import Rollout, TeacherTargets
from nemo_oprd.commands.doctor.findings import Finding
from nemo_oprd.config.schema import Config
from nemo_oprd.data.tokenization.token_ids import TokenIds
from nemo_oprd.distillation.distiller import Distiller
from nemo_oprd.distillation.metrics.step_metrics import StepMetrics
from nemo_oprd.distillation.sampling_check import student_logprobs
from nemo_oprd.distillation.step_batch import StepBatch
from nemo_oprd.distillation.student import Student
from nemo_oprd.models.megatron.parallel import device
from nemo_oprd.rollout.engine import Request, RolloutEngine, SamplingParams

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
    """The engine's greedy responses to the first requests, for `positions`."""
    tokens = min(GREEDY_TOKENS, config.rollout.max_new_tokens)
    return engine.generate(requests[:GREEDY_RESPONSES], SamplingParams(0.0, 1.0, tokens, (config.seed, 0)))


def positions(greedy: list[Rollout], student: Student, config: Config, sampled: TokenIds) -> Finding:
    """Whether the trainer scores a token at the state from which the engine sampled it.

    With states that are off by one between sampling and scoring, every loss compares, and trains, the wrong tokens.
    Such losses fall, too. Each token of `greedy_responses` must be the trainer's likeliest one at its position, up to
    ties; the first tokens are counted apart, because a shift of the prompt shows there alone. Else the
    log-probabilities at the positions before and after say whether a shift explains the tokens.
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
    """The rows with their states `shift` positions later, without those that would leave their sequence."""
    lengths = np.array([rollout.length for rollout in rollouts])
    position = table.position + shift
    kept = np.flatnonzero((position >= 0) & (position < lengths[table.response]))
    chosen = table.select(kept)
    return replace(chosen, position=chosen.position + shift)


def aligned_positions(rollouts: list[Rollout], table: TokenTable) -> Finding:
    """Whether student and teacher read the same token at the two positions whose states are compared.

    A teacher that reads another prompt has its states at other positions. If they are off by one, each state of the
    student is pulled towards that of a neighbouring token, which training follows without complaint. For teachers that
    read the student's ids, in whatever prompt; `table` holds the supervised rows.
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
    """Whether the distributions of both models are at a distance that distillation can close.

    A teacher of another vocabulary, another alignment or another prompt format is about ln V away, and the student
    learns noise from it; one at distance 0 teaches nothing. A smaller distance is a warning only, because a badly
    damaged student is there, too, and learns.

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
    """Whether the teacher gives the same states for the same input twice.

    Dropout that is on, a kernel that reads memory of others, or weights that change give targets with noise, which the
    loss then has as its floor. A small difference is a warning only, because sums in another order explain it.
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
    """|one - other| / |one|, float64; infinite instead of NaN, and 0 where both are equal bit for bit."""
    one, other = one.double(), other.double()
    if torch.equal(one, other):
        return one.new_zeros(())
    return ((one - other).norm() / one.norm()).nan_to_num(nan=math.inf, posinf=math.inf)
