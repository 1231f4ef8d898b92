"""The measurements behind docs/theory.md: exact sums against sampling, autograd and the plain reference."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from nemo_oprd.batch.types import Rollout
from nemo_oprd.config.loading import load_config
from nemo_oprd.distillation.reference import reference
from nemo_oprd.tools.toy.pair import make_tiny_pair
from studies import theory, theory_gradients, theory_head, theory_rollouts
from studies.theory_figure import figure

VOCABULARY, WIDTH = 11, 16
PREFIX = [3, 1, 4, 1, 5]
CLOSE = {"rtol": 1e-9, "atol": 1e-12}


def random_model(seed: int) -> Qwen2ForCausalLM:
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=32,
        tie_word_embeddings=False,
        pad_token_id=None,
        initializer_range=0.5,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return theory.in_float64(Qwen2ForCausalLM(config)).eval()


@pytest.fixture(scope="module")
def models() -> tuple[Qwen2ForCausalLM, Qwen2ForCausalLM]:
    return random_model(0), random_model(1)


@pytest.fixture(scope="module")
def target(models) -> theory_gradients.Target:
    return theory_gradients.teacher_target(models[1], PREFIX)


@pytest.fixture(scope="module")
def found(models, target) -> theory_gradients.Position:
    return theory_gradients.position(models[0], PREFIX, target)


def gradient_of(value: torch.Tensor, model: Qwen2ForCausalLM) -> torch.Tensor:
    """[P], by backward."""
    model.zero_grad()
    value.backward()
    return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in model.parameters()])


def log_p_of(model: Qwen2ForCausalLM) -> torch.Tensor:
    return model(torch.tensor([PREFIX])).logits[0, -1].log_softmax(-1)


def test_gradients_of_each_token_equal_the_plain_reference(models, target, found, tmp_path: Path) -> None:
    for role, model in zip(("student", "teacher"), models, strict=True):
        model.save_pretrained(tmp_path / role)
    names = [name for name, _ in models[0].named_parameters()]
    shapes = [p.shape for p in models[0].parameters()]
    u = found.log_p - target.log_q
    for v in (0, 7):
        ours = {**{name: g[v] for name, g in found.gradients.items()}, "sampled": u[v] * found.scores[v]}
        for name, values in ours.items():
            terms = ["loss.representation.weight=0", "loss.output.weight=1", "loss.output.kind=sampled_token"]
            if name != "sampled":
                terms = [f"loss.representation.position={name}", "loss.representation.positions=all"]
            sources = [f"{role}.hf_path={tmp_path / role}" for role in ("student", "teacher")]
            config = load_config("verify", [*sources, *terms, "rollout.replay=unused", f"output={tmp_path / 'out'}"])
            theirs = reference(config, [Rollout(PREFIX, [v])])["gradients"]
            pieces = [theirs.get(n, torch.zeros(s).double()).flatten() for n, s in zip(names, shapes, strict=True)]
            expected = torch.cat(pieces)  # in float64, but for what Hugging Face always does in float32
            assert (values - expected).norm() < 1e-5 * expected.norm()


def test_exact_moments_equal_sampling(models, target, found) -> None:
    """Draws tokens, differentiates each as training would, and compares within five standard errors."""
    student, teacher = models
    p, draws = found.log_p.exp(), 20_000
    tokens = np.random.default_rng(0).choice(VOCABULARY, size=draws, p=p.numpy())
    gradients: dict[str, dict[int, torch.Tensor]] = {"sampled": {}, "token": {}}
    for v in set(tokens.tolist()):
        ids = torch.tensor([[*PREFIX, v]])
        log_p = student(ids).logits[0, -2].log_softmax(-1)
        theirs = teacher(ids, output_hidden_states=True)
        reward = (log_p - theirs.logits[0, -2].log_softmax(-1)).detach()[v]
        gradients["sampled"][v] = gradient_of(reward * log_p[v], student)
        ours = student(ids, output_hidden_states=True)
        pairs = zip(ours.hidden_states[1:], theirs.hidden_states[1:], strict=True)
        loss = sum(((a[0, -1] - b[0, -1].detach()) ** 2).sum() for a, b in pairs) / (2 * WIDTH)
        gradients["token"][v] = gradient_of(loss, student)
    exact = {
        "sampled": theory_gradients.moments(p, (found.log_p - target.log_q)[:, None] * found.scores),
        "token": theory_gradients.moments(p, found.gradients["token"]),
    }
    for name, by_token in gradients.items():
        mean = sum(by_token[v] * float((tokens == v).mean()) for v in by_token)
        squares = np.array([float((by_token[v] - mean).square().sum()) for v in tokens.tolist()])
        error = squares.std() / draws**0.5
        assert 0 < 5 * error < 0.2 * exact[name].variance, "too few draws to say anything"
        assert abs(squares.mean() - exact[name].variance) < 5 * error
        assert abs(float(mean.square().sum()) ** 0.5 - exact[name].signal ** 0.5) < 5 * (squares.mean() / draws) ** 0.5
        signal, variance, own_error = theory_gradients.sampled_moments(
            p, torch.stack([by_token.get(v, torch.zeros_like(mean)) for v in range(VOCABULARY)]), draws, seed=1
        )
        assert abs(variance - exact[name].variance) < 5 * own_error
        assert own_error == pytest.approx(error, rel=0.2)
        assert signal == pytest.approx(exact[name].signal, rel=0.5)


def test_variance_given_the_prefix_is_zero_for_the_predicting_state_only(found) -> None:
    p = found.log_p.exp()
    predicting, token = (theory_gradients.moments(p, found.gradients[name]) for name in ("predicting", "token"))
    assert predicting.signal > 1e-3
    assert predicting.variance < 1e-25 * predicting.signal
    assert token.variance > 0.01 * token.signal


def test_products_of_scores_need_no_gradients(found, target) -> None:
    p, u = found.log_p.exp(), found.log_p - target.log_q
    direct = theory_gradients.moments(p, u[:, None] * found.scores)
    gram = theory_gradients.moments_of_products(p, u, found.scores @ found.scores.T)
    assert gram.signal == pytest.approx(direct.signal, rel=1e-10)
    assert gram.variance == pytest.approx(direct.variance, rel=1e-10)


def test_means_are_the_gradients_of_their_objectives(models, target, found) -> None:
    student, _ = models
    p, u = found.log_p.exp(), found.log_p - target.log_q
    log_p = log_p_of(student)
    reverse_kl = gradient_of((log_p.exp() * (log_p - target.log_q)).sum(), student)
    torch.testing.assert_close(p @ (u[:, None] * found.scores), reverse_kl, **CLOSE)
    torch.testing.assert_close(p @ ((u - p @ u)[:, None] * found.scores), reverse_kl, **CLOSE)
    assert (p @ found.scores).norm() < 1e-12 * found.scores.norm()  # log p - log q as written trains nothing

    ids = torch.tensor([[*PREFIX, v] for v in range(VOCABULARY)])
    hidden = torch.stack(student(ids, output_hidden_states=True).hidden_states[1:])
    losses = (hidden[:, :, -1] - target.hidden_LV2D[:, :, 1]).square().mean(dim=(0, 2))
    held = gradient_of((p * losses).sum(), student)
    torch.testing.assert_close(p @ found.gradients["token"], held, **CLOSE)
    whole = gradient_of((log_p_of(student).exp() * losses.detach()).sum(), student) + held
    lost = (p * found.losses["token"]) @ found.scores
    torch.testing.assert_close(p @ found.gradients["token"] + lost, whole, **CLOSE)
    measured = theory_gradients.measure_position(found, target)
    assert measured["sampling_term"] == pytest.approx(float(lost.norm()), rel=1e-9)
    assert measured["rank_of_fisher"] <= VOCABULARY - 1
    ratio = (p * (p / target.log_q.exp()).log()).sum()
    assert measured["kl"] == pytest.approx(float(ratio), rel=1e-10)


def test_signal_to_noise_tends_to_the_limit_at_the_teacher(models) -> None:
    student, teacher = models
    direction = theory_gradients.flat_parameters(student) - theory_gradients.flat_parameters(teacher)
    limit = theory_gradients.limit_of_sampled(teacher, PREFIX, direction)
    near, gap = random_model(1), 1e-5
    with torch.no_grad():
        for ours, towards in zip(near.parameters(), student.parameters(), strict=True):
            ours += gap * (towards - ours)
    target = theory_gradients.teacher_target(teacher, PREFIX)
    measured = theory_gradients.measure_position(theory_gradients.position(near, PREFIX, target), target)
    for theirs, ours in (("signal", "sampled_signal"), ("variance", "sampled_variance"), ("delta", "delta")):
        assert measured[ours] / gap**2 == pytest.approx(limit[theirs], rel=1e-2)


def test_invisible_directions_change_no_probability() -> None:
    draw = torch.Generator().manual_seed(0)
    wide = torch.randn(VOCABULARY, WIDTH, generator=draw, dtype=torch.float64)
    states = torch.randn(50, WIDTH, generator=draw, dtype=torch.float64)
    before = (states @ wide.T).softmax(-1)
    invisible = theory_head.invisible_basis(wide)
    assert invisible.shape == (WIDTH - VOCABULARY + 1, WIDTH)
    constant, missed = theory_head.constant_logit_direction(wide)
    assert missed < 1e-12
    for direction in (*invisible, constant):
        torch.testing.assert_close(((states + 3 * direction) @ wide.T).softmax(-1), before, **CLOSE)
    assert (wide @ constant).norm() > 0.1  # its logits do change
    visible = theory_head.singular_directions(wide)[1][0]
    assert (((states + 3 * visible) @ wide.T).softmax(-1) - before).abs().max() > 0.01

    tall = torch.randn(3 * WIDTH, WIDTH, generator=draw, dtype=torch.float64)
    assert len(theory_head.invisible_basis(tall)) == 0
    assert theory_head.constant_logit_direction(tall)[1] > 0.1
    moved = theory_head.with_common_row(tall, 100 * visible)
    torch.testing.assert_close((states @ moved.T).softmax(-1), (states @ tall.T).softmax(-1), **CLOSE)
    assert theory_head.constructed(tall, states)["gap_claimed"] > 100


def test_what_objectives_see_of_a_move() -> None:
    draw = torch.Generator().manual_seed(0)
    head = torch.randn(VOCABULARY, WIDTH, generator=draw, dtype=torch.float64)
    states, moves = (torch.randn(20, WIDTH, generator=draw, dtype=torch.float64) for _ in range(2))
    numbers = theory_head.seen(states, 1e-3 * moves, lambda h: h @ head.T)
    q = torch.distributions.Categorical(logits=states @ head.T)
    both = [torch.distributions.Categorical(logits=(states + sign * 1e-3 * moves) @ head.T) for sign in (1, -1)]
    kl = torch.stack([torch.distributions.kl_divergence(p, q) for p in both]).mean()
    assert numbers["full_vocab"] == pytest.approx(float(kl), rel=1e-6)
    assert numbers["second_order"] == pytest.approx(float(kl), rel=1e-2)
    assert 0 < numbers["bound"] <= 1
    assert 0.1 < numbers["sampled_negative"] < 0.9  # not a loss in the paper's sense, which is never negative
    ratios = torch.stack([(p.probs * (p.logits - q.logits) ** 2).sum(-1) for p in both])
    assert numbers["sampled_rms"] == pytest.approx(float(ratios.mean()) ** 0.5, rel=1e-9)


def test_gradients_of_responses_average_to_those_of_the_distribution(models) -> None:
    student, teacher = models
    p = log_p_of(student).detach().exp()
    losses = [theory_rollouts.response_losses(student, teacher, PREFIX, [v]) for v in range(VOCABULARY)]
    mean = sum(float(p[v]) * gradient_of(losses[v]["sampled"], student) for v in range(VOCABULARY))
    whole = gradient_of(theory_rollouts.response_losses(student, teacher, PREFIX, [0])["full_vocab"], student)
    torch.testing.assert_close(mean, whole, **CLOSE)


def test_moments_of_responses() -> None:
    rows = np.random.default_rng(0).normal(1.0, 2.0, (40, 7))
    signal, variance = theory_rollouts.unbiased_moments(torch.tensor(rows.sum(0)), float((rows**2).sum()), 40)
    assert variance == pytest.approx(rows.var(axis=0, ddof=1).sum())
    others = [(rows[i] * rows[j]).sum() for i in range(40) for j in range(40) if i != j]
    assert signal == pytest.approx(np.mean(others))


def test_everything_is_measured_on_a_pair(tmp_path: Path) -> None:
    make_tiny_pair(tmp_path, log=lambda _: None)
    pair = theory.Pair(tmp_path)
    settings = theory.Settings(positions=1, responses=16, gaps=(1.0, 0.03, 0.01), rollout_gaps=(1.0,))
    numbers = json.loads(json.dumps(theory.measure(pair, pair, settings)))
    rows = numbers["given_prefix"]["rows"]
    assert [row["gap"] for row in rows] == [1.0, 0.03, 0.01]
    assert rows[0]["delta"] > rows[1]["delta"] > rows[2]["delta"] > 0
    assert all(row["predicting_variance"] < 1e-20 * row["predicting_signal"] for row in rows)
    assert numbers["given_prefix"]["slopes"]["sampled_variance"] == pytest.approx(1, abs=0.1)
    assert numbers["head"]["pair"]["kl"] > 0
    ET.fromstring(figure(numbers))
    assert "predicting" in theory.table(numbers)


def test_a_directory_without_a_pair_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no student; expected a directory written by nemo-oprd toy"):
        theory.Pair(tmp_path)
