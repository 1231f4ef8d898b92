"""The output losses against one-row-at-a-time implementations differentiated by autograd, in float64 and on the whole
vocabulary, against the golden gradients through a network, and their memory against the size of a chunk."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from plain_output_losses import (
    DENSE,
    PADDED,
    REAL,
    ROWS,
    SHARD,
    SINGLE,
    TOKENS,
    TOP_K,
    largest,
    logits,
    name,
    padded,
    plain,
    plain_row,
    plain_support,
)
from safetensors.torch import load_file

from nemo_oprd.distillation.reference import agreement
from nemo_oprd.losses import vocab_parallel
from nemo_oprd.losses.chunked import (
    OutputGradients,
    TeacherStates,
    chunked_logprob,
    chunked_output_loss,
    output_metrics,
)
from nemo_oprd.losses.divergences import SUPPORT_METRICS, output_rows
from nemo_oprd.losses.output_loss import OutputLoss
from nemo_oprd.losses.vocab_parallel import OutputHead, VocabShard, first_of_equal, top_k_ids
from tests.support.live_bytes import LiveBytes

GOLDEN = Path(__file__).parents[2] / "golden"


@pytest.mark.parametrize("loss", DENSE + TOP_K + SINGLE, ids=name)
@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
def test_value_and_gradient(loss: OutputLoss, tied: bool) -> None:
    z, w = logits(1), logits(2)
    if tied:
        z, w = z.round(), w.round()
    rows = output_rows(loss, padded(z), TOKENS, SHARD, teacher_logits_CV=padded(w))
    value, gradient = plain(loss, z, w)
    assert rows.grad_logits is not None
    torch.testing.assert_close(rows.value, value, rtol=1e-11, atol=1e-13)
    torch.testing.assert_close(rows.grad_logits[:, :REAL], gradient, rtol=1e-10, atol=1e-13)
    assert (rows.grad_logits[:, REAL:] == 0).all()
    without = output_rows(loss, padded(z), TOKENS, SHARD, teacher_logits_CV=padded(w), with_grad=False)
    assert without.grad_logits is None
    assert torch.equal(without.value, rows.value)


# runs of ids that only one model knows, at the start, in the middle and before the last real id
GAPS = ((0, 2), (17, 18), (40, 60))
KEPT = [i for i in range(REAL) if not any(start <= i < end for start, end in GAPS)]


@pytest.mark.parametrize("loss", DENSE + TOP_K[::3] + SINGLE, ids=name)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_ids_between_others_that_are_left_out(loss: OutputLoss, dtype: torch.dtype) -> None:
    """As if they were not there, although both models find them likely."""
    z, w = logits(1), logits(2)
    for each in (z, w):
        each[:, [i for i in range(REAL) if i not in KEPT]] = 40 + each[:, :1]
    place = torch.tensor([KEPT.index(i) if i in KEPT else n for n, i in enumerate(TOKENS.tolist())])
    tokens, shard = torch.tensor(KEPT)[place], replace(SHARD, gaps=GAPS)
    rows = output_rows(loss, padded(z.to(dtype)), tokens, shard, teacher_logits_CV=padded(w.to(dtype)))
    value, gradient = plain(loss, z[:, KEPT], w[:, KEPT], tokens=place)
    assert rows.grad_logits is not None
    found = rows.grad_logits.double()
    close = {"rtol": 1e-10, "atol": 1e-13} if dtype == torch.float64 else {"rtol": 2e-4, "atol": 2e-6}
    torch.testing.assert_close(rows.value.double(), value, **close)
    torch.testing.assert_close(found[:, KEPT], gradient, **close)
    found[:, KEPT] = 0
    assert (found == 0).all()
    both = [torch.log_softmax(each[:, KEPT] / loss.temperature, 1) for each in (z, w)]
    for model, log_p in zip(("student", "teacher"), both, strict=True):
        entropy = -(log_p.exp() * log_p).sum(1)
        torch.testing.assert_close(rows.metrics[f"{model}_entropy"].double(), entropy, **close)
        own = log_p.gather(1, place[:, None])[:, 0]
        torch.testing.assert_close(rows.metrics[f"{model}_logprob"].double(), own, **close)


def test_whole_vocabulary_as_support_is_the_whole_divergence() -> None:
    z, w = logits(1), logits(2)
    for weight, kind in (("student", "full_vocab"), ("teacher", "forward_kl")):
        whole = output_rows(OutputLoss(kind), z.clone(), TOKENS, VocabShard(0, REAL, REAL), teacher_logits_CV=w.clone())
        for normalizer in ("renormalized", "full"):
            loss = OutputLoss("top_k", REAL, normalizer=normalizer, support_weight=weight)
            rows = output_rows(loss, z.clone(), TOKENS, VocabShard(0, REAL, REAL), teacher_logits_CV=w.clone())
            torch.testing.assert_close(rows.value, whole.value, rtol=1e-12, atol=0)
            torch.testing.assert_close(rows.grad_logits, whole.grad_logits, rtol=1e-10, atol=1e-15)


@pytest.mark.parametrize("clip", [None, 0.2, (0.1, 0.3)])
def test_ratio_to_the_sampling_policy(clip: float | tuple[float, float] | None) -> None:
    loss, z, w = OutputLoss("sampled_token", clip=clip), logits(1), logits(2)
    now = torch.log_softmax(z, 1).gather(1, TOKENS[:, None])[:, 0]
    old = now + torch.linspace(-0.5, 0.5, ROWS, dtype=torch.float64)
    old[:2] = now[:2]
    rows = output_rows(
        loss, z.clone(), TOKENS, VocabShard(0, REAL, REAL), teacher_logits_CV=w.clone(), old_logprob_C=old
    )
    value, gradient = plain(loss, z, w, old)
    torch.testing.assert_close(rows.value, value, rtol=1e-12, atol=0)
    torch.testing.assert_close(rows.grad_logits, gradient, rtol=1e-10, atol=1e-14)
    torch.testing.assert_close(rows.metrics["ratio"], (now - old).exp(), rtol=1e-12, atol=0)
    assert (0 < rows.metrics["clipped"].sum() < ROWS) == (clip is not None)
    # the sampling policy itself: the plain estimator
    first = output_rows(
        loss, z.clone(), TOKENS, VocabShard(0, REAL, REAL), teacher_logits_CV=w.clone(), old_logprob_C=now
    )
    simple = output_rows(loss, z.clone(), TOKENS, VocabShard(0, REAL, REAL), teacher_logits_CV=w.clone())
    torch.testing.assert_close(first.value, simple.value, rtol=1e-12, atol=0)
    torch.testing.assert_close(first.grad_logits, simple.grad_logits, rtol=1e-12, atol=1e-16)


def test_sampled_token_needs_only_the_teachers_logprob() -> None:
    z, w = logits(1), logits(2)
    q = torch.log_softmax(w / 0.6, 1).gather(1, TOKENS[:, None])[:, 0]
    loss = OutputLoss("sampled_token", temperature=0.6)
    thin = output_rows(loss, padded(z), TOKENS, SHARD, teacher_logprob_C=q)
    full = output_rows(loss, padded(z), TOKENS, SHARD, teacher_logits_CV=padded(w))
    torch.testing.assert_close(thin.value, full.value, rtol=1e-12, atol=0)
    torch.testing.assert_close(thin.grad_logits, full.grad_logits, rtol=1e-12, atol=1e-16)
    assert set(thin.metrics) == {"student_logprob", "teacher_logprob", "student_entropy"}


@pytest.mark.parametrize("support", ["student", "teacher", "union", "intersection"])
def test_metrics(support: str) -> None:
    z, w, k, tau = logits(1), logits(2), 5, 0.8
    loss = OutputLoss("full_vocab", k, tau, support)
    metrics = output_rows(loss, padded(z), TOKENS, SHARD, teacher_logits_CV=padded(w), with_grad=False).metrics
    p, q = torch.softmax(z / tau, 1), torch.softmax(w / tau, 1)
    sets = [plain_support(loss, z[row], w[row]) for row in range(ROWS)]
    shared = [len(set(largest(z[row], k)) & set(largest(w[row], k))) / k for row in range(ROWS)]
    expected = {
        "student_logprob": p.gather(1, TOKENS[:, None])[:, 0].log(),
        "teacher_logprob": q.gather(1, TOKENS[:, None])[:, 0].log(),
        "student_entropy": -(p * p.log()).sum(1),
        "teacher_entropy": -(q * q.log()).sum(1),
        "reverse_kl": (p * (p / q).log()).sum(1),
        "overlap": torch.tensor(shared, dtype=torch.float64),
        "student_mass": torch.stack([p[row, s].sum() for row, s in enumerate(sets)]),
        "teacher_mass": torch.stack([q[row, s].sum() for row, s in enumerate(sets)]),
        "empty_support": torch.tensor([float(not s) for s in sets]),
    }
    assert set(metrics) == set(expected)
    for key, values in expected.items():
        torch.testing.assert_close(
            metrics[key], values.double(), rtol=1e-12, atol=1e-14, msg=lambda m, k=key: f"{k}: {m}"
        )


@pytest.mark.parametrize("normalizer", ["renormalized", "full"])
@pytest.mark.parametrize("weight", ["student", "teacher"])
def test_empty_intersection(normalizer: str, weight: str) -> None:
    z, w = torch.zeros(2, REAL, dtype=torch.float64), torch.zeros(2, REAL, dtype=torch.float64)
    z[0, 5:8], w[0, 15:18] = 9.0, 9.0  # nothing in common
    z[1, 5:8], w[1, 7:10] = 9.0, 9.0  # id 7
    loss = OutputLoss("top_k", 3, support="intersection", normalizer=normalizer, support_weight=weight)
    rows = output_rows(loss, padded(z), TOKENS[:2], SHARD, teacher_logits_CV=padded(w))
    assert rows.metrics["empty_support"].tolist() == [1, 0]
    assert rows.grad_logits is not None
    assert rows.value[0] == 0 and (rows.grad_logits[0] == 0).all()
    assert rows.grad_logits.isfinite().all()
    assert (rows.grad_logits[1] != 0).any() == (normalizer == "full")


@pytest.mark.parametrize("kind", ["sampled_token", "top_k", "full_vocab", "forward_kl", "jsd"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_distributions_that_have_nothing_in_common(kind: str, dtype: torch.dtype) -> None:
    """Probabilities that underflow: everything stays finite, and where there is a limit, it is met."""
    z, w = torch.zeros(1, REAL, dtype=dtype), torch.zeros(1, REAL, dtype=dtype)
    z[0, 3], w[0, 4] = 2000.0, 2000.0
    loss = OutputLoss(kind, 2, support="union")
    rows = output_rows(loss, z, torch.tensor([3]), VocabShard(0, REAL, REAL), teacher_logits_CV=w)
    assert rows.grad_logits is not None and rows.grad_logits.isfinite().all()
    expected = {"jsd": math.log(2)}.get(kind, 2000.0)
    assert float(rows.value[0]) == pytest.approx(expected, rel=1e-6)
    assert all(values.isfinite().all() for values in rows.metrics.values())


def test_float32_is_close_to_float64() -> None:
    z, w = logits(1, spread=6.0), logits(2, spread=6.0)
    for loss in DENSE + TOP_K:
        exact = output_rows(loss, padded(z), TOKENS, SHARD, teacher_logits_CV=padded(w))
        short = output_rows(loss, padded(z.float()), TOKENS, SHARD, teacher_logits_CV=padded(w.float()))
        torch.testing.assert_close(short.value.double(), exact.value, rtol=2e-5, atol=2e-6)
        assert exact.grad_logits is not None and short.grad_logits is not None
        assert (short.grad_logits - exact.grad_logits).norm() <= 1e-5 * exact.grad_logits.norm() + 1e-6


def test_top_k_takes_the_lowest_of_equal_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vocab_parallel, "SLAB", 7)  # several slabs
    z = torch.cat([logits(1).round(), torch.zeros(2, REAL), logits(4)])
    for k in (1, 2, 5, 60, 61, 99):
        ids = top_k_ids(padded(z)[:, :REAL], k, SHARD)
        assert ids.tolist() == [largest(row, k) for row in z]
        values, columns = z[:, :REAL].topk(min(k, REAL))
        first = first_of_equal(z[:, :REAL], values, columns)  # as on a GPU, which corrects all rows
        assert [sorted(row) for row in first.tolist()] == [sorted(largest(row, k)) for row in z]
        assert torch.equal(z.gather(1, first), values)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"kind": "top_k", "k": 1}, "sampled_token"),
        ({"kind": "top_k", "k": 1, "support": "teacher"}, "identically zero"),
        ({"kind": "top_k", "k": 1, "support": "intersection"}, "identically zero"),
        ({"kind": "top_k"}, "k=None"),
        ({"kind": "jsd", "k": 0}, "k=0"),
        ({"kind": "kl"}, "full_vocab"),
        ({"kind": "top_k", "k": 4, "support": "both"}, "union"),
        ({"kind": "jsd", "jsd_beta": 1.0}, "forward_kl"),
        ({"kind": "jsd", "temperature": 0.0}, "temperature"),
        ({"kind": "sampled_token", "clip": 0.0}, "clip"),
        ({"kind": "sampled_token", "clip": (0.2, 0.0)}, "clip"),
    ],
)
def test_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        OutputLoss(**options)


def test_the_teachers_distribution_is_asked_for() -> None:
    with pytest.raises(ValueError, match="full_vocab: expected the teacher's logits"):
        output_rows(OutputLoss("full_vocab"), logits(1), TOKENS, VocabShard(0, REAL, REAL), teacher_logprob_C=TOKENS)


# ---- chunks


def problem(n: int, dtype: torch.dtype = torch.float64, real: int = REAL, size: int = PADDED) -> dict[str, Any]:
    """Random rows and heads; the teacher is wider."""
    g = torch.Generator().manual_seed(5)
    hidden, head = torch.randn(n, 6, generator=g), torch.randn(size, 6, generator=g)
    theirs, other = torch.randn(n, 10, generator=g), torch.randn(size, 10, generator=g)
    teacher = TeacherStates(theirs.to(dtype), OutputHead(other.to(dtype)))
    head[real:] = math.nan  # padding rows of a head are never read
    return {
        "hidden_ND": hidden.to(dtype),
        "head_VD": head.to(dtype),
        "teacher": teacher,
        "tokens_N": torch.randint(0, real, (n,), generator=g),
        "weight_N": torch.rand(n, generator=g),
        "shard": VocabShard(0, size, real),
    }


@pytest.mark.parametrize("loss", [OutputLoss("top_k", 4), OutputLoss("jsd", 3), OutputLoss("sampled_token")], ids=name)
@pytest.mark.parametrize("chunk_tokens", [1, 4, 12, 13, 100])
@pytest.mark.parametrize("slab", [10, 16384])
def test_chunks(loss: OutputLoss, chunk_tokens: int, slab: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """12 rows in chunks that do and don't divide them, heads in slabs, against autograd from the hidden states."""
    monkeypatch.setattr(vocab_parallel, "SLAB", slab)
    case = problem(12)
    before = torch.ones(PADDED, 6, dtype=torch.float64)
    ours = chunked_output_loss(loss, **case, chunk_tokens=chunk_tokens, scale=3.0, head_grad=before)
    hidden, head = case["hidden_ND"].clone().requires_grad_(), case["head_VD"].clone().requires_grad_()
    student, teacher = hidden @ head[:REAL].T, case["teacher"].hidden @ case["teacher"].head.weight[:REAL].T
    rows = [plain_row(loss, student[i], teacher[i], int(case["tokens_N"][i]), None) for i in range(12)]
    total = sum(w * surrogate for w, (_, surrogate) in zip(case["weight_N"].double(), rows, strict=True))
    grad_hidden, grad_head = torch.autograd.grad(3.0 * total, [hidden, head])
    expected = sum(w * value.detach() for w, (value, _) in zip(case["weight_N"].double(), rows, strict=True))
    assert float(ours.sums.loss) == pytest.approx(float(expected), rel=1e-12)
    torch.testing.assert_close(ours.hidden, grad_hidden, rtol=1e-10, atol=1e-13)
    assert ours.head is before
    torch.testing.assert_close(ours.head - 1, grad_head.nan_to_num(), rtol=1e-10, atol=1e-13)
    measured = output_metrics(loss, **case, chunk_tokens=chunk_tokens)
    assert measured.rows == ours.sums.rows == 12
    assert measured.loss == ours.sums.loss and measured.metrics == ours.sums.metrics
    frozen = chunked_output_loss(loss, **case, chunk_tokens=chunk_tokens, scale=3.0, train_head=False)
    assert frozen.head is None and torch.equal(frozen.hidden, ours.hidden)


@pytest.mark.parametrize("support", ["student", "intersection", "union"])
@pytest.mark.parametrize("chunk_tokens", [1, 4, 12])
@pytest.mark.parametrize("rows", [[0, 3, 4, 5, 11], [7], [], [*range(12)]])
def test_top_sets_of_some_rows(support: Any, chunk_tokens: int, rows: list[int]) -> None:
    """Gradient, loss and the other metrics are those of all rows; the top sets are compared with sets of Python's."""
    loss, case = OutputLoss("full_vocab", 4, support=support), problem(12)
    chosen = np.array(rows, dtype=np.int64)
    ours = chunked_output_loss(loss, **case, chunk_tokens=chunk_tokens, support_rows=chosen)
    measured = output_metrics(loss, **case, chunk_tokens=chunk_tokens, support_rows=chosen)
    everywhere = chunked_output_loss(loss, **case, chunk_tokens=chunk_tokens)
    assert torch.equal(ours.hidden, everywhere.hidden) and torch.equal(ours.sums.loss, everywhere.sums.loss)
    assert measured.metrics == ours.sums.metrics
    assert (ours.sums.rows, ours.sums.support_rows, everywhere.sums.support_rows) == (12, len(rows), 12)
    for metric in set(everywhere.sums.metrics) - set(SUPPORT_METRICS):
        assert torch.equal(ours.sums.metrics[metric], everywhere.sums.metrics[metric]), metric
    p, q = (
        (states @ head[:REAL].T).softmax(-1)
        for states, head in (
            (case["hidden_ND"], case["head_VD"]),
            (case["teacher"].hidden, case["teacher"].head.weight),
        )
    )
    expected = dict.fromkeys(SUPPORT_METRICS, 0.0)
    for row in rows:
        own, other = (set(each[row].topk(4).indices.tolist()) for each in (p, q))
        ids = sorted({"student": own, "intersection": own & other, "union": own | other}[support])
        expected["overlap"] += len(own & other) / 4
        expected["student_mass"] += float(p[row, ids].sum())
        expected["teacher_mass"] += float(q[row, ids].sum())
        expected["empty_support"] += not ids
    assert {name: float(ours.sums.metrics[name]) for name in expected} == pytest.approx(expected, rel=1e-12)


def test_a_loss_on_top_sets_needs_all_rows() -> None:
    with pytest.raises(ValueError, match="kind=top_k with support_rows: expected None, because it needs all rows"):
        chunked_output_loss(OutputLoss("top_k", 4), **problem(3), chunk_tokens=2, support_rows=np.array([1]))


@pytest.mark.parametrize(
    "loss", [OutputLoss("top_k", 4), OutputLoss("full_vocab"), OutputLoss("sampled_token")], ids=name
)
@pytest.mark.parametrize("caps", [(1.5, None), (None, 0.7), (1.5, 0.7)])
@pytest.mark.parametrize(
    ("scale", "biased", "gaps"),
    [(1.0, False, ()), (0.4, True, ()), (0.4, True, GAPS)],
    ids=["", "scale and bias", "scale, bias and ids that are left out"],
)
def test_bounded_logits(
    loss: OutputLoss, caps: tuple[float | None, float | None], scale: float, biased: bool, gaps: Any
) -> None:
    """A student's and a teacher's cap, the teacher's scale and bias, against autograd through cap * tanh(z / cap)."""

    def bounded(logits: torch.Tensor, cap: float | None) -> torch.Tensor:
        return logits if cap is None else cap * torch.tanh(logits / cap)

    case = problem(7)
    case["shard"] = VocabShard(0, PADDED, REAL, cap=caps[0], gaps=gaps)
    kept = KEPT if gaps else list(range(REAL))
    place = case["tokens_N"] % len(kept)
    case["tokens_N"] = torch.tensor(kept)[place]
    weight = case["teacher"].head.weight
    bias = torch.linspace(-1, 1, PADDED, dtype=weight.dtype) if biased else None
    case["teacher"] = TeacherStates(case["teacher"].hidden, OutputHead(weight, bias, caps[1], scale))
    ours = chunked_output_loss(loss, **case, chunk_tokens=3)
    hidden, head = case["hidden_ND"].clone().requires_grad_(), case["head_VD"].clone().requires_grad_()
    student = bounded(hidden @ head[kept].T, caps[0])
    product = case["teacher"].hidden @ weight[kept].T
    teacher = scale * bounded(product if bias is None else product + bias[kept], caps[1])
    rows = [plain_row(loss, student[i], teacher[i], int(place[i]), None) for i in range(7)]
    weights = case["weight_N"].double()
    total = sum(w * surrogate for w, (_, surrogate) in zip(weights, rows, strict=True))
    grad_hidden, grad_head = torch.autograd.grad(total, [hidden, head])
    torch.testing.assert_close(ours.hidden, grad_hidden, rtol=1e-10, atol=1e-13)
    torch.testing.assert_close(ours.head, grad_head.nan_to_num(), rtol=1e-10, atol=1e-13)
    expected = sum(w * value.detach() for w, (value, _) in zip(weights, rows, strict=True))
    assert float(ours.sums.loss) == pytest.approx(float(expected), rel=1e-12)
    logprob, _ = chunked_logprob(
        hidden.detach(), case["head_VD"], case["tokens_N"], case["shard"], temperature=0.7, chunk_tokens=4
    )
    plain = (student.detach() / 0.7).log_softmax(-1).gather(1, place[:, None])[:, 0]
    torch.testing.assert_close(logprob, plain, rtol=1e-12, atol=1e-14)


def test_logprob_of_the_teacher_is_what_the_student_needs() -> None:
    loss, case = OutputLoss("sampled_token", temperature=0.7), problem(11)
    full = chunked_output_loss(loss, **case, chunk_tokens=5)
    teacher: TeacherStates = case["teacher"]
    arguments = (case["tokens_N"], case["shard"])
    logprob, entropy = chunked_logprob(teacher.hidden, teacher.head.weight, *arguments, temperature=0.7, chunk_tokens=3)
    thin = chunked_output_loss(loss, **case | {"teacher": logprob}, chunk_tokens=5)
    torch.testing.assert_close(thin.hidden, full.hidden, rtol=1e-12, atol=1e-15)
    assert float(entropy.sum()) == pytest.approx(float(full.sums.metrics["teacher_entropy"]), rel=1e-12)


@pytest.mark.parametrize("loss", [OutputLoss("top_k", 4), OutputLoss("full_vocab")], ids=name)
def test_no_rows(loss: OutputLoss) -> None:
    """A microbatch without rows reports the same names, so that ranks can reduce them together."""
    some, none = (chunked_output_loss(loss, **problem(n), chunk_tokens=4) for n in (3, 0))
    assert set(some.sums.metrics) == set(none.sums.metrics)
    assert none.sums.rows == 0 and none.sums.loss == 0 and not any(none.sums.metrics.values())
    assert none.hidden.shape == (0, 6) and none.head is not None and (none.head == 0).all()


def test_bfloat16_products_accumulate_in_float32() -> None:
    """Equal to float64 arithmetic on the bfloat16 factors, but for the gradient of the logits, rounded to bfloat16."""
    short = problem(8, torch.bfloat16)
    exact = problem(8) | {"hidden_ND": short["hidden_ND"].double(), "head_VD": short["head_VD"].double()}
    exact["teacher"] = TeacherStates(short["teacher"].hidden.double(), short["teacher"].head.to(torch.float64))
    for loss in (OutputLoss("full_vocab"), OutputLoss("top_k", 4)):
        ours, reference = (chunked_output_loss(loss, **case, chunk_tokens=3) for case in (short, exact))
        assert ours.hidden.dtype == torch.float32 and ours.head is not None and ours.head.dtype == torch.float32
        assert float(ours.sums.loss) == pytest.approx(float(reference.sums.loss), rel=1e-6)
        assert reference.head is not None
        assert (ours.hidden - reference.hidden).norm() < 1e-2 * reference.hidden.norm()
        assert (ours.head - reference.head).norm() < 1e-2 * reference.head.norm()


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="chunk_tokens=0"):
        chunked_output_loss(OutputLoss("jsd"), **problem(3), chunk_tokens=0)
    coarse = torch.zeros(PADDED, 6, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="bfloat16"):
        chunked_output_loss(OutputLoss("jsd"), **problem(3, torch.bfloat16), chunk_tokens=2, head_grad=coarse)


# ---- memory


def buffers(
    loss: OutputLoss, n: int, chunk_tokens: int, size: int, monkeypatch: pytest.MonkeyPatch, **other: Any
) -> float:
    """Peak of one call beyond its two results, in [chunk_tokens, size] float32 tensors; slabs are kept small."""
    monkeypatch.setattr(vocab_parallel, "SLAB", 256)
    case = problem(n, torch.float32, real=size - 3, size=size) | other
    head_grad = torch.zeros(size, 6)
    with LiveBytes() as counter:
        chunked_output_loss(loss, **case, chunk_tokens=chunk_tokens, head_grad=head_grad)
    return (counter.peak - case["hidden_ND"].nbytes) / (4 * chunk_tokens * size)


@pytest.mark.parametrize(
    "loss",
    [
        OutputLoss("full_vocab"),
        OutputLoss("forward_kl"),
        OutputLoss("jsd"),
        OutputLoss("top_k", 16),
        OutputLoss("top_k", 16, support="union", normalizer="full"),
        OutputLoss("sampled_token"),
    ],
    ids=name,
)
def test_live_bytes(loss: OutputLoss, monkeypatch: pytest.MonkeyPatch) -> None:
    """A peak of three [chunk, vocabulary] tensors and a few slabs, however many rows there are."""
    base = buffers(loss, 32, 16, 4096, monkeypatch)
    assert 3 <= base < 3.3
    assert buffers(loss, 64, 16, 4096, monkeypatch) == pytest.approx(base, abs=0.05)
    assert buffers(loss, 64, 32, 4096, monkeypatch) == pytest.approx(base, abs=0.15)
    assert buffers(loss, 32, 16, 8192, monkeypatch) == pytest.approx(base, abs=0.2)


def test_live_bytes_of_a_sampled_token(monkeypatch: pytest.MonkeyPatch) -> None:
    logprob = torch.zeros(64)
    assert 1 <= buffers(OutputLoss("sampled_token"), 64, 16, 4096, monkeypatch, teacher=logprob) < 1.2


def test_counter_counts() -> None:
    with LiveBytes() as counter:
        a = torch.zeros(100)
        b = a + 1
        del a
        c = b.view(10, 10).add_(1) * 2
        del b, c
    assert (counter.peak, counter.now) == (800, 0)


# ---- through a network


def through_the_network(case: str) -> tuple[float, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Loss, our gradients and autograd's of a golden case, all in float64 on the plain Hugging Face models."""
    from transformers import AutoModelForCausalLM

    options = json.loads((GOLDEN / "expected.json").read_text())[case]["options"]
    student, teacher = (
        AutoModelForCausalLM.from_pretrained(GOLDEN / who, dtype=torch.float64, attn_implementation="eager").eval()
        for who in ("student", "teacher")
    )
    rollouts = [json.loads(line) for line in (GOLDEN / "rollouts.jsonl").read_text().splitlines()]
    masks = [[t for t, m in enumerate(r.get("response_mask", [])) if m] for r in rollouts]
    active = sum(1 for tokens in masks if tokens)
    rows: dict[str, list[torch.Tensor]] = {"student": [], "teacher": []}
    tokens, weights, representation = [], [], torch.zeros((), dtype=torch.float64)
    for r, mask in zip(rollouts, masks, strict=True):
        if not mask:
            continue
        ids = torch.tensor([r["prompt_ids"] + r["response_ids"]])
        start, last = len(r["prompt_ids"]), mask[-options["k"] :]
        ours = student.model(ids, output_hidden_states=True).hidden_states
        with torch.no_grad():
            theirs = teacher.model(ids, output_hidden_states=True).hidden_states
        at = torch.tensor(mask) + start - 1
        rows["student"].append(ours[-1][0, at])
        rows["teacher"].append(theirs[-1][0, at])
        tokens += [r["response_ids"][t] for t in mask]
        weights += [1 / (active * len(mask))] * len(mask)
        here = torch.tensor(last) + start
        for layer in (1, 2, 3):
            representation = representation + (ours[layer][0, here] - theirs[layer][0, here]).square().mean() / (
                3 * active
            )
    loss = OutputLoss(options["out"], options.get("topk"))
    hidden, head = torch.cat(rows["student"]), student.lm_head.weight
    result: OutputGradients = chunked_output_loss(
        loss,
        hidden.detach(),
        head.detach(),
        TeacherStates(torch.cat(rows["teacher"]), OutputHead(teacher.lm_head.weight.detach())),
        torch.tensor(tokens),
        torch.tensor(weights, dtype=torch.float64),
        VocabShard(0, REAL, REAL),
        chunk_tokens=5,
        scale=options["w_out"],
    )
    parameters = dict(student.named_parameters())
    rep = options["w_rep"] * representation
    # ours: the gradient of the rows enters the network's backward; the head's is added to what autograd has (nothing)
    got = torch.autograd.grad(
        [hidden, rep], list(parameters.values()), [result.hidden, torch.ones_like(rep)], True, allow_unused=True
    )
    gradients = {n: torch.zeros_like(p) if g is None else g for (n, p), g in zip(parameters.items(), got, strict=True)}
    assert result.head is not None
    gradients["lm_head.weight"] = gradients["lm_head.weight"] + result.head
    z, w = hidden @ head.T, torch.cat(rows["teacher"]) @ teacher.lm_head.weight.detach().T
    plain_rows = [plain_row(loss, z[i], w[i], tokens[i], None)[1] for i in range(len(tokens))]
    total = rep + options["w_out"] * sum(weight * row for weight, row in zip(weights, plain_rows, strict=True))
    exact = dict(zip(parameters, torch.autograd.grad(total, list(parameters.values())), strict=True))
    return float(result.sums.loss), gradients, exact


@pytest.mark.parametrize("case", ["opd_sampled_token", "opd_top_k_4", "opd_full_vocab", "composite_full_mu3"])
def test_golden(case: str) -> None:
    value, ours, exact = through_the_network(case)
    assert value == pytest.approx(json.loads((GOLDEN / "expected.json").read_text())[case]["output/loss"], rel=1e-6)
    assert max(agreement(ours, exact).values()) < 1e-12
    # Hugging Face's norms compute in float32 whatever the model's dtype: autograd is as far from the files
    golden = load_file(GOLDEN / f"grads_{case}.safetensors")
    assert max(agreement(ours, golden).values()) < 2e-6
