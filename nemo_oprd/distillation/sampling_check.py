"""Checks that a separate engine samples from the student: compares its log-probabilities with the trainer's.

Versions and checksums say that the bytes of the weights have arrived. They don't say that the engine computes with
them: a packed copy of the head may be stale, a prefix cache may hold keys of the old weights, the temperature may be
wrong. The responses look plausible in all these cases, and the losses fall. So before each update the student computes
the log-probabilities of some of the sampled tokens, by a forward pass without gradient at full depth. Its cost does not
grow with the batch: each step checks a few responses, which take turns, and a few tokens of each.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from nemo_oprd.batch.packing import make_packs
from nemo_oprd.batch.plan import BatchPlan
from nemo_oprd.batch.token_table import TokenTable, sums_of_first
from nemo_oprd.batch.types import Rollout
from nemo_oprd.config.schema import Config
from nemo_oprd.data.token_ids import TokenIds
from nemo_oprd.distillation.capture import HiddenStateCapture
from nemo_oprd.distillation.output_head import final_state_rows, vocab_shard
from nemo_oprd.distillation.student import Student
from nemo_oprd.losses.chunked import sampling_logprob
from nemo_oprd.megatron.parallel import device, on_device
from nemo_oprd.megatron.pipeline_schedule import make_microbatch, run_schedule

# first number of the key that draws the tokens, so that it never meets the key of a sampling
_CHECK_STREAM = 3
# at most so many responses of a step are checked, and so many tokens of each
MOST_RESPONSES, TOKENS_OF_RESPONSE = 64, 16
_PERCENTILE = 99


@dataclass(frozen=True)
class Bounds:
    """Upper bounds of |engine - trainer| in nats per token: the mean, the 99th percentile, and any response's mean."""

    mean: float
    p99: float
    response: float


# Measured without faults: float32 on CPU at most 6e-5; bfloat16 mean 0.045, p99 0.25, largest 0.44 (SmolLM2-135M).
# The mildest of the faults in the module's docstring, a stale prefix cache, gave 0.76 in the responses that it hit.
BOUNDS = {"fp32": Bounds(1e-3, 1e-2, 1e-2), "bf16": Bounds(0.15, 1.0, 0.5)}
# a response with fewer checked tokens has no mean of its own worth a bound
MIN_TOKENS_OF_RESPONSE = 4


class SamplingCheck:
    """The check of one run. Every rank builds one and makes the same calls.

    `sampled` are the ids that can be sampled; None: all ids of the student's vocabulary.
    """

    def __init__(self, config: Config, sampled: TokenIds | None) -> None:
        self._config, self._sampled = config, sampled
        self._tokens = config.rollout.vllm.check_tokens

    def __call__(self, student: Student, rollouts: list[Rollout], step: int) -> dict[str, float]:
        """Returns the metrics of `compare`; {} without `check_tokens` or log-probabilities, and for recorded rollouts.

        Raises:
            ValueError: the engine does not sample from the student.
        """
        found = self._both(student, rollouts, step)
        return {} if found is None else compare(*found, BOUNDS[self._config.precision])

    def drift(self, student: Student, rollouts: list[Rollout], step: int) -> dict[str, float]:
        """Measures how far the student has moved from the weights that sampled; returns metrics, without bounds.

        `rollout/drift_kl` estimates KL(engine | student) in nats per token as `compare` does;
        `rollout/drift_effective_sample_size` is (sum w)^2 / (n sum w^2) with w = student's / engine's probability. Both
        also over the first k = 1, 2, 4, ... tokens of every response, as `NAME_first_k/K`.
        """
        found = self._both(student, rollouts, step)
        if found is None:
            return {}
        return drift_metrics(*found)

    def _both(
        self, student: Student, rollouts: list[Rollout], step: int
    ) -> tuple[np.ndarray, np.ndarray, TokenTable] | None:
        """Returns log-probabilities [n], float64, of engine and student, and the table; None if none are checked."""
        if not self._tokens or self._config.rollout.replay or any(r.logprobs is None for r in rollouts):
            return None
        table = _draw(rollouts, self._tokens, self._config.seed, step)
        if not len(table):
            return None
        trainer = student_logprobs(student, rollouts, table, self._config, self._sampled)
        return table.engine_logprobs(rollouts).astype(np.float64), trainer, table


def drift_metrics(engine: np.ndarray, trainer: np.ndarray, table: TokenTable) -> dict[str, float]:
    """Returns the metrics of `SamplingCheck.drift`; the arguments are those of `compare`."""
    ratio, named = np.exp(trainer - engine), dict[str, float]()
    terms = (np.ones_like(ratio), ratio - 1 + engine - trainer, ratio, ratio**2)
    count, kl, weight, square = (sums_of_first(each, table.from_start) for each in terms)
    for k in count:
        named[f"rollout/drift_kl_first_k/{k}"] = kl[k] / max(1.0, count[k])
        size = weight[k] ** 2 / (count[k] * square[k]) if count[k] else 1.0
        named[f"rollout/drift_effective_sample_size_first_k/{k}"] = size
    whole = {name.partition("_first_k/")[0]: value for name, value in named.items()}  # the last k covers all
    return whole | named


def compare(engine: np.ndarray, trainer: np.ndarray, table: TokenTable, bounds: Bounds) -> dict[str, float]:
    """Returns the metrics of a comparison.

    `rollout/kl_engine_trainer` estimates KL(engine | trainer) in nats per token from the engine's tokens, by the mean
    of r - 1 - log r with r = trainer's / engine's probability, which is never negative.

    Args:
        engine, trainer: [n] log-probabilities of the tokens of `table`.

    Raises:
        ValueError: the gap exceeds its bounds.
    """
    difference = engine - trainer
    gap = np.abs(difference)
    counts = np.maximum(np.bincount(table.response), 1)
    of_response = np.bincount(table.response, gap) / counts
    of_response[counts < MIN_TOKENS_OF_RESPONSE] = 0.0
    found = {
        "rollout/logprob_gap_mean": float(gap.mean()),
        "rollout/logprob_gap_p99": float(np.percentile(gap, _PERCENTILE)),
        "rollout/logprob_gap_max": float(gap.max()),
        "rollout/kl_engine_trainer": float((np.exp(-difference) - 1 + difference).mean()),
    }
    worst_response, worst = int(of_response.argmax()), int(gap.argmax())
    for what, value, bound in (
        ("rollout/logprob_gap_mean", found["rollout/logprob_gap_mean"], bounds.mean),
        ("rollout/logprob_gap_p99", found["rollout/logprob_gap_p99"], bounds.p99),
        (f"the mean gap of response {worst_response}", float(of_response.max()), bounds.response),
    ):
        if not value <= bound:
            raise ValueError(
                f"the engine does not sample from the student: {what} is {value:.3g} nats per token over {len(gap)} "
                f"tokens, expected at most {bound} (response {table.response[worst]}, token {table.token[worst]}: "
                f"engine {engine[worst]:.4f}, trainer {trainer[worst]:.4f}): does it have other weights, a stale head "
                "or prefix cache, or another temperature or top_p? Restart its server"
            )
    return found


def _draw(rollouts: list[Rollout], count: int, seed: int, step: int) -> TokenTable:
    """Draws at most `count` tokens: at most `TOKENS_OF_RESPONSE` from each of at most `MOST_RESPONSES` responses.

    A response counts if one of its tokens has a predecessor. They take turns: a step checks every `turns`-th of them,
    and while their number stays the same, each index has its turn within `turns` steps.
    """
    # a token is predicted by the one before it
    first = [0 if len(rollout.prompt_ids) else 1 for rollout in rollouts]
    candidates = [i for i, rollout in enumerate(rollouts) if len(rollout.response_ids) > first[i]]
    most = min(MOST_RESPONSES, -(-count // TOKENS_OF_RESPONSE))
    turns = max(1, -(-len(candidates) // most))
    chosen = candidates[step % turns :: turns]
    tokens = []
    for number, i in enumerate(chosen):
        share = count * (number + 1) // len(chosen) - count * number // len(chosen)
        available = len(rollouts[i].response_ids) - first[i]
        draw = np.random.default_rng((seed, _CHECK_STREAM, step, i))
        drawn = draw.choice(available, min(share, TOKENS_OF_RESPONSE, available), replace=False, shuffle=False)
        tokens.append(np.sort(drawn) + first[i])
    response = np.repeat(np.array(chosen, np.int64), [len(each) for each in tokens])
    token = np.concatenate([*tokens, np.zeros(0, np.int64)])
    prompts, lengths = ([len(getattr(r, name)) for r in rollouts] for name in ("prompt_ids", "response_ids"))
    position = np.array(prompts, np.int64)[response] + token - 1
    from_end = np.array(lengths, np.int64)[response] - 1 - token
    weight = np.full(len(token), 1 / max(1, len(token)))
    return TokenTable(
        response,
        position,
        teacher_position=position,
        token=token,
        from_start=token,
        from_end=from_end,
        weight=weight,
        num_responses=sum(map(bool, map(len, tokens))),
    )


@torch.no_grad()
def student_logprobs(
    student: Student, rollouts: list[Rollout], table: TokenTable, config: Config, sampled: TokenIds | None
) -> np.ndarray:
    """Returns the student's log-probabilities float64 [n] of the tokens of `table`, on every rank. All ranks call it.

    The distribution is that of `config.rollout` over the ids `sampled`; None: all ids of the student's vocabulary.
    """
    values = torch.zeros(len(table), dtype=torch.float64, device=device())
    role, spec, coords = student.role, student.spec, student.role.coords
    if coords is not None:
        packs = make_packs(table.needed_tokens(len(rollouts)), role.layout, config.train.tokens_per_microbatch)
        local = BatchPlan(table, role.layout, packs).with_rows(table).local_rows(coords)
        none = torch.zeros(0, dtype=torch.int64, device=device())
        captures = [
            HiddenStateCapture(none, {}, final_rows=final_state_rows(rows, pack, role))
            for rows, pack in zip(local, packs[coords.data], strict=True)
        ]
        microbatches = [
            make_microbatch(pack, rollouts, role, capture, spec.num_layers)
            for pack, capture in zip(packs[coords.data], captures, strict=True)
        ]
        run_schedule(student.chunks, role, microbatches, forward_only=True)
        if coords.pipeline == role.layout.pipeline - 1:
            rows = np.concatenate([part.table_index for part in local])
            model = student.chunks[-1]
            logprob = sampling_logprob(
                torch.cat([capture.final for capture in captures if capture.final is not None]),
                model.output_weight(),
                on_device(table.tokens(rollouts)[rows]),
                vocab_shard(model, role, TokenIds(spec.vocab_size) if sampled is None else sampled),
                temperature=config.rollout.temperature,
                top_p=config.rollout.top_p,
                chunk_tokens=config.loss.output.chunk_tokens,
            )
            if coords.tensor == 0:
                values[on_device(rows)] = logprob.double()
    dist.all_reduce(values)  # each row comes from one rank
    return values.cpu().numpy()
