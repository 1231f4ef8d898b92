"""Log-probabilities of the distribution that was sampled from, and the comparison of an engine's with them."""

from __future__ import annotations

import re
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from nemo_oprd.batch.token_table import TokenTable, make_rows
from nemo_oprd.batch.types import Rollout
from nemo_oprd.distillation.sampling_check import BOUNDS, Bounds, _draw, compare
from nemo_oprd.losses import chunked as sampling_distribution
from nemo_oprd.losses.chunked import sampling_logprob
from nemo_oprd.losses.vocab_parallel import VocabShard

VOCABULARY, PADDED, WIDTH = 37, 48, 12


def example(rows: int = 11, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden rows, a head whose padding rows must not count, and tokens."""
    generator = torch.Generator().manual_seed(rows)
    hidden = torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64)
    head = torch.randn(PADDED, WIDTH, generator=generator, dtype=torch.float64)
    head[VOCABULARY:] = torch.nan
    return hidden.to(dtype), head.to(dtype), torch.randint(0, VOCABULARY, (rows,), generator=generator)


def plain(logits: list[float], token: int, temperature: float, top_p: float) -> float:
    """The definition, for one row."""
    logits = [logit / (temperature or 1.0) for logit in logits]
    probability = np.exp(np.array(logits) - max(logits))
    probability /= probability.sum()
    kept: list[int] = []
    for candidate in np.argsort(-probability):
        kept.append(int(candidate))
        if temperature == 0 or sum(probability[kept]) >= top_p:
            break
    if temperature == 0 or top_p == 1:
        return float(np.log(probability[token]))
    return float(np.log(probability[token] / sum(probability[[*{*kept, token}]])))


def found(
    temperature: float, top_p: float, vocabulary: int = VOCABULARY, dtype: torch.dtype = torch.float64
) -> tuple[torch.Tensor, list[float]]:
    """(`sampling_logprob`, the definition) of all rows, with few rows at a time."""
    hidden, head, tokens = example(dtype=dtype)
    tokens = tokens % vocabulary
    got = sampling_logprob(
        hidden, head, tokens, VocabShard(0, PADDED, vocabulary), temperature=temperature, top_p=top_p, chunk_tokens=4
    )
    rows = (hidden.double() @ head.double().T)[:, :vocabulary].tolist()
    return got, [plain(row, token, temperature, top_p) for row, token in zip(rows, tokens.tolist(), strict=True)]


@pytest.mark.parametrize("vocabulary", [VOCABULARY, 20])
@pytest.mark.parametrize(
    ("temperature", "top_p"),
    [(1.0, 1.0), (0.6, 1.0), (1.7, 1.0), (1.0, 0.9), (0.7, 0.5), (1.3, 0.05), (0.0, 1.0), (0.0, 0.5)],
)
def test_against_the_definition(
    temperature: float, top_p: float, vocabulary: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling_distribution, "NUCLEUS_ROWS", 3)
    got, expected = found(temperature, top_p, vocabulary)
    assert got.dtype == torch.float64
    assert got.tolist() == pytest.approx(expected, abs=1e-12)
    if top_p < 1 and temperature:
        whole, _ = found(temperature, 1.0, vocabulary)
        assert (got > whole).any()


@pytest.mark.parametrize("top_p", [1.0, 0.8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_in_low_precision(dtype: torch.dtype, top_p: float) -> None:
    """Products of bfloat16 factors are not rounded."""
    got, expected = found(0.7, top_p, dtype=dtype)
    assert got.dtype == torch.float32
    assert got.tolist() == pytest.approx(expected, abs=1e-5)


def test_tokens_around_the_edge_of_the_nucleus() -> None:
    """Probabilities 0.5, 0.3, 0.15, 0.05: the nucleus of 0.7 is the first two. A third id counts as one of it."""
    head = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64).log()[:, None]
    hidden, tokens = torch.ones(4, 1, dtype=torch.float64), torch.arange(4)

    def of(top_p: float) -> list[float]:
        shard = VocabShard(0, 4, 4)
        found = sampling_logprob(hidden, head, tokens, shard, temperature=1.0, top_p=top_p, chunk_tokens=8)
        return found.exp().tolist()

    assert of(0.7) == pytest.approx([0.5 / 0.8, 0.3 / 0.8, 0.15 / 0.95, 0.05 / 0.85], abs=1e-12)
    assert of(0.4) == pytest.approx([1, 0.3 / 0.8, 0.15 / 0.65, 0.05 / 0.55], abs=1e-12)
    assert of(0.999) == pytest.approx([0.5, 0.3, 0.15, 0.05], abs=1e-12)


@pytest.mark.parametrize("top_p", [1.0, 0.5])
def test_no_rows(top_p: float) -> None:
    hidden, head, tokens = example(rows=0)
    shard = VocabShard(0, PADDED, VOCABULARY)
    assert sampling_logprob(hidden, head, tokens, shard, temperature=1.0, top_p=top_p, chunk_tokens=4).shape == (0,)


def table(lengths: list[int]) -> TokenTable:
    """All tokens of responses of these lengths."""
    rollouts = [Rollout([1], list(range(length))) for length in lengths]
    return make_rows(rollouts, positions="all", k=1, position="predicting", aggregation="token_mean")


class TestCompare:
    LENGTHS = (10, 3, 20)
    TRAINER = np.random.default_rng(0).uniform(-5, -0.1, sum(LENGTHS))
    WIDE = Bounds(9.0, 9.0, 9.0)

    def metrics(self, change: np.ndarray, bounds: Bounds = WIDE) -> dict[str, float]:
        return compare(self.TRAINER + change, self.TRAINER, table([*self.LENGTHS]), bounds)

    def test_equal_ones(self) -> None:
        assert set(self.metrics(np.zeros(33), BOUNDS["fp32"]).values()) == {0.0}

    def test_values(self) -> None:
        """KL estimates exp(t - e) - 1 - (t - e) per token, which is positive for gaps of either sign."""
        change = np.random.default_rng(1).normal(0, 0.3, 33)
        metrics = self.metrics(change)
        gap = sorted(abs(change))
        assert metrics["rollout/logprob_gap_mean"] == pytest.approx(sum(gap) / 33)
        assert metrics["rollout/logprob_gap_max"] == pytest.approx(gap[-1])
        assert metrics["rollout/logprob_gap_p99"] == pytest.approx(gap[-2] + 0.68 * (gap[-1] - gap[-2]))
        kl = [np.exp(-d) - 1 + d for d in change]
        assert metrics["rollout/kl_engine_trainer"] == pytest.approx(sum(kl) / 33)
        for sign in (1, -1):
            assert self.metrics(np.full(33, sign * 0.01))["rollout/kl_engine_trainer"] == pytest.approx(5e-5, rel=0.01)

    def test_the_estimate_is_a_kl(self) -> None:
        """Its expectation over the engine's tokens is KL(engine | trainer)."""
        engine, trainer = np.array([0.7, 0.2, 0.1]), np.array([0.5, 0.2, 0.3])
        counts = [70, 20, 10]
        logs = [np.repeat(np.log(p), counts) for p in (engine, trainer)]
        metrics = compare(*logs, table([100]), self.WIDE)
        expected = (engine * np.log(engine / trainer)).sum()
        assert metrics["rollout/kl_engine_trainer"] == pytest.approx(expected)

    @pytest.mark.parametrize(
        ("changed", "bounds", "message"),
        [
            ({}, Bounds(0.09, 9, 9), "rollout/logprob_gap_mean is 0.1 nats per token over 33 tokens, expected at most"),
            ({7: 3.0}, Bounds(9, 1, 9), "rollout/logprob_gap_p99 is 2.07"),
            ({7: -3.0}, Bounds(9, 1, 9), "(response 0, token 7: engine "),
            # the third response's tokens begin at row 13
            (dict.fromkeys(range(13, 33), 1.0), Bounds(9, 9, 0.5), "the mean gap of response 2 is 1 nats"),
            (dict.fromkeys(range(10), 0.6), Bounds(9, 9, 0.5), "the mean gap of response 0 is 0.6 nats"),
            ({30: np.nan}, WIDE, "rollout/logprob_gap_mean is nan nats per token"),
            ({30: np.nan}, WIDE, "(response 2, token 17: engine nan, trainer "),
        ],
    )
    def test_bounds(self, changed: dict[int, float], bounds: Bounds, message: str) -> None:
        change = np.full(33, 0.1)
        change[[*changed]] = [*changed.values()]
        with pytest.raises(ValueError, match=re.escape(message)) as raised:
            self.metrics(change, bounds)
        assert str(raised.value).startswith("the engine does not sample from the student: ")
        worst = int(abs(change).argmax())
        numbers = f"engine {(self.TRAINER + change)[worst]:.4f}, trainer {self.TRAINER[worst]:.4f})"
        assert numbers in str(raised.value)

    def test_a_response_of_few_tokens_has_no_mean(self) -> None:
        """The second response has 3."""
        change = np.zeros(33)
        change[10:13] = 1.0
        assert self.metrics(change, Bounds(9, 9, 0.5))["rollout/logprob_gap_max"] == pytest.approx(1.0)


class Long:
    """A response of which nothing but the length may be asked."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length


def responses(*lengths: int, prompt: int = 2) -> list[Any]:
    return [SimpleNamespace(prompt_ids=range(prompt), response_ids=Long(length)) for length in lengths]


class TestDraw:
    def test_at_most_64_responses_and_16_tokens_whatever_their_lengths(self) -> None:
        """Only these responses are computed, up to their last drawn token."""
        table = _draw(responses(*[10**6] * 1024), 1024, 0, 5)
        counts = np.bincount(table.response, minlength=1024)
        assert sorted(counts.tolist()) == [0] * 960 + [16] * 64
        assert np.diff(np.flatnonzero(counts)).tolist() == [16] * 63  # spread over the batch
        needed = table.needed_tokens(1024)
        assert sum(map(bool, needed)) == 64 and max(needed) < 10**6 + 2
        # the state before the token predicts it
        assert (table.position == 2 + table.token - 1).all() and (table.token < 10**6).all()

    @pytest.mark.parametrize(
        ("count", "lengths", "expected"),
        [
            (1024, (30, 2, 0, 9, 30), [16, 2, 0, 9, 16]),
            (64, (30, 20, 0, 90, 30), [16, 16, 0, 16, 16]),
            (40, (30, 30, 0, 30), [13, 13, 0, 14]),
            (5, (30, 30, 30), [5, 0, 0]),
            (16, (0, 0), [0, 0]),
        ],
    )
    def test_the_number_of_tokens(self, count: int, lengths: tuple[int, ...], expected: list[int]) -> None:
        table = _draw(responses(*lengths), count, 0, 0)
        assert np.bincount(table.response, minlength=len(lengths)).tolist() == expected
        pairs = [*zip(table.response.tolist(), table.token.tolist(), strict=True)]
        assert all(one < other for one, other in pairwise(pairs))

    @pytest.mark.parametrize(("responses_", "count"), [(1024, 1024), (65, 1024), (100, 100), (7, 16), (64, 1024)])
    def test_every_response_has_its_turn(self, responses_: int, count: int) -> None:
        """Within responses / (responses of a step) steps, whatever the first one."""
        of_step = min(64, -(-count // 16))
        turns = -(-responses_ // of_step)
        for start in (0, 3):
            seen = [_draw(responses(*[40] * responses_), count, 0, start + step).response for step in range(turns)]
            assert sorted({*np.concatenate(seen).tolist()}) == [*range(responses_)]
            assert max(len(np.unique(each)) for each in seen) <= of_step

    def test_seed_and_step_draw_the_tokens_anywhere(self) -> None:
        def tokens(seed: int, step: int) -> list[int]:
            return _draw(responses(30, 30), 8, seed, step).token.tolist()

        steps = [tokens(0, step) for step in range(80)]
        assert steps == [tokens(0, step) for step in range(80)] != [tokens(1, step) for step in range(80)]
        assert {token for drawn in steps for token in drawn} == set(range(30))

    def test_a_first_token_without_a_prompt_is_not_drawn(self) -> None:
        assert _draw(responses(5, prompt=0), 16, 0, 0).token.tolist() == [1, 2, 3, 4]
        assert len(_draw(responses(1, prompt=0), 16, 0, 0)) == 0
