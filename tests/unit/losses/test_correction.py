"""The correction for an engine that samples from other probabilities than the trainer's: weights, gradients against
autograd in float64, the expectation over all tokens, metrics, and what rollouts and configurations hold."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nemo_oprd.batch.token_table import make_rows
from nemo_oprd.batch.types import Rollout
from nemo_oprd.config.loading import load_config, to_yaml
from nemo_oprd.distillation.objective import OutputTerm
from nemo_oprd.distillation.output_head import ROW_METRICS, output_head_metrics
from nemo_oprd.losses.chunked import TeacherStates, chunked_output_loss, output_metrics
from nemo_oprd.losses.divergences import output_rows
from nemo_oprd.losses.output_loss import Correction, OutputLoss
from nemo_oprd.losses.vocab_parallel import OutputHead, VocabShard
from nemo_oprd.rollout.replay import read_rollouts, write_rollouts

ROWS, IDS, WIDTH = 24, 13, 5
CORRECTIONS = [
    Correction("truncate", 0.0, 2.0),
    Correction("mask", 0.0, 2.0),
    Correction("truncate", 0.7, 1.2),
    Correction("mask", 0.7, 1.2),
]
EVERYTHING = Correction("truncate", 0.0, math.inf)


def plain_weight(correction: Correction, ratio: float) -> float:
    if correction.low <= ratio <= correction.high:
        return ratio
    if correction.mode == "mask":
        return 0.0
    return correction.low if ratio < correction.low else correction.high


def problem() -> dict[str, Any]:
    """Random rows and heads of 13 ids in a shard of 16, as `chunked_output_loss` takes them."""
    g = torch.Generator().manual_seed(0)
    hidden, theirs = (torch.randn(ROWS, WIDTH, generator=g, dtype=torch.float64) for _ in range(2))
    head, other = (torch.randn(IDS + 3, WIDTH, generator=g, dtype=torch.float64) for _ in range(2))
    return {
        "hidden_ND": hidden,
        "head_VD": head,
        "teacher": TeacherStates(theirs, OutputHead(other)),
        "tokens_N": torch.randint(0, IDS, (ROWS,), generator=g),
        "weight_N": torch.rand(ROWS, generator=g, dtype=torch.float64),
        "shard": VocabShard(0, IDS + 3, IDS),
    }


def logprobs(hidden_ND: torch.Tensor, head_VD: torch.Tensor, tokens_N: torch.Tensor) -> torch.Tensor:
    return (hidden_ND @ head_VD[:IDS].T).log_softmax(1).gather(1, tokens_N[:, None])[:, 0]


@pytest.mark.parametrize("correction", CORRECTIONS, ids=str)
@pytest.mark.parametrize("clip", [None, (0.1, 0.3)])
@pytest.mark.parametrize("later", [False, True], ids=["first update", "later update"])
@pytest.mark.parametrize("unsampled", [(), ((0, 1), (5, 8), (12, 13))], ids=["", "not all ids sampled"])
def test_gradient(
    correction: Correction, clip: tuple[float, float] | None, later: bool, unsampled: tuple[tuple[int, int], ...]
) -> None:
    """In chunks that don't divide the rows; in a later update the weight is that of the first.

    The loss is over all ids. The ratio is of probabilities among those that can be sampled.
    """
    case = problem()
    case["shard"] = replace(case["shard"], unsampled=unsampled)
    sampled = [i for i in range(IDS) if not any(start <= i < end for start, end in unsampled)]
    case["tokens_N"] = torch.tensor(sampled)[case["tokens_N"] % len(sampled)]
    log_mass = (case["hidden_ND"] @ case["head_VD"][:IDS].T).log_softmax(1)[:, sampled].logsumexp(1)
    hidden, head = case["hidden_ND"].clone().requires_grad_(), case["head_VD"].clone().requires_grad_()
    teacher, tokens = case["teacher"], case["tokens_N"]
    p, q = logprobs(hidden, head, tokens), logprobs(teacher.hidden, teacher.head.weight, tokens)
    old = p.detach() + torch.linspace(-0.4, 0.5, ROWS, dtype=torch.float64).roll(7) if later else None
    sampler = p.detach() - log_mass if old is None else old - 0.5
    engine = sampler - torch.linspace(-0.9, 1.1, ROWS, dtype=torch.float64)
    weight = torch.tensor([plain_weight(correction, float(r)) for r in (sampler - engine).exp()], dtype=torch.float64)
    advantage = (q - p).detach()
    if old is None:
        value, surrogate = -weight * advantage, -weight * advantage * p
    else:
        ratio = (p - old).exp()
        bounded = ratio if clip is None else ratio.clamp(1 - clip[0], 1 + clip[1])
        value = surrogate = -weight * torch.minimum(ratio * advantage, bounded * advantage)
    grad_hidden, grad_head = torch.autograd.grad(3 * case["weight_N"] @ surrogate, [hidden, head])

    loss = OutputLoss("sampled_token", clip=clip, correction=correction)
    given = {**case, "chunk_tokens": 7, "old_logprob_N": old, "engine_logprob_N": engine}
    given |= {"old_sampler_logprob_N": sampler if later else None}
    ours = chunked_output_loss(loss, **given, scale=3.0)
    assert float(ours.sums.loss) == pytest.approx(float(case["weight_N"] @ value.detach()), rel=1e-12)
    torch.testing.assert_close(ours.hidden, grad_hidden, rtol=1e-10, atol=1e-13)
    torch.testing.assert_close(ours.head, grad_head, rtol=1e-10, atol=1e-13)

    assert ours.sums.sampler_logprob is not None
    torch.testing.assert_close(ours.sums.sampler_logprob, p.detach() - log_mass, rtol=1e-12, atol=1e-14)
    outside = ((weight != (sampler - engine).exp()) | (weight == 0)).double()
    assert 0 < float(outside.sum()) < ROWS
    for name, expected in (("", weight), ("_squared", weight**2), ("_outside", outside)):
        assert float(ours.sums.metrics[f"correction{name}"]) == pytest.approx(float(expected.sum()), rel=1e-12), name
    measured = output_metrics(loss, **given)
    assert measured.loss == ours.sums.loss and measured.metrics == ours.sums.metrics


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("mode", ["truncate", "mask"])
def test_equal_probabilities_change_nothing(mode: str, dtype: torch.dtype) -> None:
    """Bit by bit where the engine's log-probabilities are the student's, and up to 1e-6 of them otherwise."""
    case = problem()
    teacher = TeacherStates(case["teacher"].hidden.to(dtype), case["teacher"].head.to(dtype))
    case |= {"hidden_ND": case["hidden_ND"].to(dtype), "head_VD": case["head_VD"].to(dtype), "teacher": teacher}
    off = chunked_output_loss(OutputLoss("sampled_token"), **case, chunk_tokens=7)
    loss = OutputLoss("sampled_token", correction=Correction(mode, 0.5, 2.0))
    engine = off.sums.student_logprob
    on = chunked_output_loss(loss, **case, chunk_tokens=7, engine_logprob_N=engine)
    assert off.head is not None and on.head is not None
    assert torch.equal(on.hidden, off.hidden) and torch.equal(on.head, off.head) and on.sums.loss == off.sums.loss
    assert on.sums.metrics["correction"] == on.sums.metrics["correction_squared"] == ROWS
    near = engine.double() + 1e-6 * torch.linspace(-1, 1, ROWS, dtype=torch.float64)
    close = chunked_output_loss(loss, **case, chunk_tokens=7, engine_logprob_N=near.to(dtype))
    assert (close.hidden - off.hidden).norm() < 2e-6 * off.hidden.norm()


@pytest.mark.parametrize("mode", ["truncate", "mask"])
def test_the_expectation_under_another_engine(mode: str) -> None:
    """Over all ids with the engine's probabilities, the corrected gradient is that of KL(p|q), the plain one is not."""
    g = torch.Generator().manual_seed(1)
    z, w = (torch.randn(1, IDS, generator=g, dtype=torch.float64) for _ in range(2))
    engine = (z + 0.3 * torch.randn(1, IDS, generator=g, dtype=torch.float64)).log_softmax(1)[0]
    p, tokens, shard = z.softmax(1)[0], torch.arange(IDS), VocabShard(0, IDS, IDS)
    leaf = z.clone().requires_grad_()
    log_p, log_q = leaf.log_softmax(1), w.log_softmax(1)
    (exact,) = torch.autograd.grad((log_p.exp() * (log_p - log_q)).sum(), leaf)

    def expectation(correction: Correction | None) -> torch.Tensor:
        loss = OutputLoss("sampled_token", correction=correction)
        logits = [logits.expand(IDS, IDS).clone() for logits in (z, w)]  # one row per id
        rows = output_rows(loss, logits[0], tokens, shard, teacher_logits_CV=logits[1], engine_logprob_C=engine)
        assert rows.grad_logits is not None
        return engine.exp() @ rows.grad_logits

    ratio = p / engine.exp()
    wide = Correction(mode, 0.0, 2 * float(ratio.max()))
    torch.testing.assert_close(expectation(wide), exact[0], rtol=1e-11, atol=1e-14)
    assert (expectation(None) - exact[0]).norm() > 0.05 * exact.norm()
    binding = Correction(mode, 0.0, float(ratio.quantile(0.8)))
    assert (expectation(binding) - exact[0]).norm() > 0.01 * exact.norm()  # bounds have a bias


def test_ratios_that_overflow() -> None:
    trainer, engine = torch.tensor([-1.0, -2000.0, -1.0]), torch.tensor([-2000.0, -1.0, math.nan])
    for correction, expected in ((CORRECTIONS[0], [2.0, 0.0]), (CORRECTIONS[1], [0.0, 0.0])):
        weight, outside = correction.weights(trainer, engine)
        assert weight[:2].tolist() == expected and outside[:2].tolist() == [1.0, 0.0]
        assert weight[2].isnan()  # not hidden by the range


@pytest.mark.parametrize("weights", [[1.0, 1.0, 1.0], [0.5, 2.0, 0.25], [0.0, 0.0, 0.0]])
def test_effective_sample_size(weights: list[float]) -> None:
    rows = torch.zeros(len(ROW_METRICS), 2, dtype=torch.float64)
    for name, power in (("correction", 1), ("correction_squared", 2)):
        total = sum(weight**power for weight in weights)
        rows[list(ROW_METRICS).index(name)] = torch.tensor([total, len(weights)], dtype=torch.float64)
    named = output_head_metrics({"output_rows": rows}, None)
    squares = sum(weight**2 for weight in weights)
    share = sum(weights) ** 2 / (len(weights) * squares) if squares else 0.0
    assert named == {
        "rollout/effective_sample_size": pytest.approx(share),
        "rollout/correction_mean": pytest.approx(sum(weights) / 3),
    }


# ---- rollouts


def test_round_trip(tmp_path: Path) -> None:
    exact = [-0.1, -math.pi, -1e-30, 0.0, -123.456789012345678, float(np.float32(-2.3))]
    rollouts = [Rollout([1, 2], [3] * 6, logprobs=exact, weight_versions=[[5, 0, 2], [7, 2, 6]]), Rollout([1], [2])]
    write_rollouts(tmp_path / "a.jsonl", rollouts)
    assert read_rollouts(tmp_path / "a.jsonl", 10) == rollouts
    assert "logprobs" not in json.loads((tmp_path / "a.jsonl").read_text().splitlines()[1])


def test_rows_find_their_log_probabilities() -> None:
    batch = [Rollout([9], [1, 2, 3], [1, 0, 1], logprobs=[-1.0, -2.0, -3.0]), Rollout([9], [4]), Rollout([9, 9], [5])]
    table = make_rows(batch, positions="all", k=1, position="predicting", aggregation="token_mean")
    found = table.engine_logprobs(batch)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, np.array([-1, -3, np.nan, np.nan], dtype=np.float32))


def test_a_response_without_log_probabilities_is_refused() -> None:
    config = load_config("verify", [*MODELS, *ON, "rollout.correction=mask"])
    term = OutputTerm.build(config)
    assert term is not None and term.loss.correction == Correction("mask", 0.0, 2.0)
    recorded, masked = Rollout([1], [2], logprobs=[-1.0]), Rollout([1], [2], [0])
    assert len(term.rows([recorded, masked])) == 1
    with pytest.raises(ValueError, match=r"response 2 has no logprobs, .*rollout.correction=off"):
        term.rows([recorded, masked, Rollout([1], [2])])
    uncorrected = OutputTerm.build(load_config("verify", [*MODELS, *ON]))
    assert uncorrected is not None and len(uncorrected.rows([Rollout([1], [2])])) == 1


# ---- configuration

MODELS = ["student.hf_path=a", "teacher.hf_path=b"]
ON = ["loss.output.kind=sampled_token", "loss.output.weight=1", "rollout.replay=x"]


@pytest.mark.parametrize("written", ["off", "'off'", "false"])
def test_off_in_a_file_and_on_the_command_line(tmp_path: Path, written: str) -> None:
    """YAML reads a bare `off` as false."""
    (tmp_path / "run.yaml").write_text(f"rollout: {{correction: {written}}}\n")
    assert load_config("run", MODELS, tmp_path).rollout.correction == "off"
    assert load_config("verify", [*MODELS, f"rollout.correction={written}"]).rollout.correction == "off"
    on = load_config("run", [*MODELS, *ON, "rollout.correction=mask", "rollout.correction_range=[0.5,1]"], tmp_path)
    assert (on.rollout.correction, on.rollout.correction_range) == ("mask", (0.5, 1.0))
    for config in (load_config("run", MODELS, tmp_path), on):
        (tmp_path / "again.yaml").write_text(to_yaml(config))
        assert load_config("again", config_dir=tmp_path) == config


@pytest.mark.parametrize("bounds", [(0.5, 0.9), (1.1, 2.0), (-0.1, 2.0), (1.0, 1.0)])
def test_ranges_without_1_are_refused(bounds: tuple[float, float]) -> None:
    low, high = bounds
    with pytest.raises(ValueError, match="with 0 <= low <= 1 <= high and low below high"):
        Correction("mask", low, high)
    with pytest.raises(ValueError, match="with 0 <= low <= 1 <= high"):
        load_config("verify", [*MODELS, f"rollout.correction_range=[{low},{high}]"])


def test_only_a_sampled_token_is_corrected() -> None:
    with pytest.raises(ValueError, match="kind=full_vocab with a correction: expected sampled_token"):
        OutputLoss("full_vocab", correction=EVERYTHING)
    with pytest.raises(ValueError, match="expected one of truncate, mask"):
        Correction("clip", 0, 2)
    loss, z = OutputLoss("sampled_token", correction=EVERYTHING), torch.zeros(1, IDS)
    with pytest.raises(ValueError, match="expected the engine's log-probabilities"):
        output_rows(loss, z, torch.tensor([1]), VocabShard(0, IDS, IDS), teacher_logits_CV=z.clone())
