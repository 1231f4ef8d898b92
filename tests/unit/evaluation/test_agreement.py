"""Agreement of two models, against sums written out in numpy, and the measurements of text by hand."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from nemo_oprd.data.token_ids import TokenIds
from nemo_oprd.evaluation.agreement import (
    PromptAgreement,
    SampledIds,
    SamplingSettings,
    describe_text,
    load_model,
    measure,
    sample_responses,
    summarize,
)

KNOWN, ROWS = 40, 48  # the embedding has 8 rows of padding
IDS = TokenIds(KNOWN, ((10, 14),))
EOS = (3, 7)
PROMPTS = [[5, 9, 11], [20], [1, 2, 8, 9, 30]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """Two random models with distributions far from uniform; float64 makes the comparison with numpy sharp."""
    made = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        config = AutoConfig.for_model(
            "qwen2", vocab_size=ROWS, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=1, initializer_range=0.3, tie_word_embeddings=False,
        )  # fmt: skip
        place = tmp_path_factory.mktemp("model")
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(place)
        # a model's own preferences must not change what is sampled
        (place / "generation_config.json").write_text('{"repetition_penalty": 1.8, "min_new_tokens": 4}')
        made.append(load_model(place, torch.float64))
    return made[0], made[1]


def log_probs(model: Any, response: SampledIds) -> np.ndarray:
    """[tokens, KNOWN] by numpy from the logits of the whole sequence."""
    with torch.no_grad():
        logits = model(torch.tensor([response.prompt + response.tokens])).logits[0].double().numpy()
    kept = logits[len(response.prompt) - 1 : -1, :KNOWN]
    return kept - np.log(np.exp(kept).sum(-1, keepdims=True))


def test_measures_are_the_sums_written_out(models: tuple[Any, Any]) -> None:
    student, teacher = models
    responses = [SampledIds([5, 9, 11], [4, 4, 30, 3], True), SampledIds([20], [39], False)]
    found = measure(student, teacher, responses, KNOWN)
    for response, part in zip(responses, found, strict=True):
        p, q = log_probs(student, response), log_probs(teacher, response)
        rows = range(len(response.tokens))
        # tolerance: the models run in float64, their distributions are rounded to float32
        expected = {
            "tokens": len(response.tokens),
            "reverse_kl": sum(float(np.exp(p[r]) @ (p[r] - q[r])) for r in rows),
            "forward_kl": sum(float(np.exp(q[r]) @ (q[r] - p[r])) for r in rows),
            "same_greedy": sum(int(p[r].argmax() == q[r].argmax()) for r in rows),
            "student_entropy": -sum(float(np.exp(p[r]) @ p[r]) for r in rows),
            "teacher_entropy": -sum(float(np.exp(q[r]) @ q[r]) for r in rows),
            "teacher_nll": -sum(float(q[r, response.tokens[r]]) for r in rows),
        }
        assert vars(part) == pytest.approx(expected, rel=1e-5)
        assert part.reverse_kl > 0.1 and part.forward_kl > 0.1


def test_a_model_agrees_with_itself(models: tuple[Any, Any]) -> None:
    (part,) = measure(models[0], models[0], [SampledIds([5], [6, 8], False)], KNOWN)
    assert (part.reverse_kl, part.forward_kl, part.same_greedy) == (0, 0, 2)
    assert part.student_entropy == part.teacher_entropy > 0


def test_means_are_over_all_tokens() -> None:
    parts = [PromptAgreement(1, 2.0, 1.0, 1, 0.5, 0.5, 1.0), PromptAgreement(3, 2.0, 7.0, 0, 3.5, 1.5, 2.0)]
    assert summarize(parts) == {
        "tokens": 4, "reverse_kl": 1.0, "forward_kl": 2.0, "greedy_agreement": 0.25, "student_entropy": 1.0,
        "teacher_entropy": 0.5, "teacher_perplexity": math.exp(0.75),
    }  # fmt: skip
    with pytest.raises(ValueError, match="no response tokens"):
        summarize([])


def test_greedy_responses_are_the_most_probable_tokens(models: tuple[Any, Any]) -> None:
    """Token by token without a cache, one prompt at a time: padding and batches change nothing."""
    found = sample_responses(models[0], PROMPTS, EOS, IDS, SamplingSettings(6, 0.0, 0, batch=2))
    for prompt, response in zip(PROMPTS, found, strict=True):
        ids = list(prompt)
        while len(ids) < len(prompt) + 6 and (len(ids) == len(prompt) or ids[-1] not in EOS):
            with torch.no_grad():
                logits = models[0](torch.tensor([ids])).logits[0, -1, :KNOWN]
                logits[~IDS.mask] = -torch.inf
                ids.append(int(logits.argmax()))
        assert (response.prompt, response.tokens) == (prompt, ids[len(prompt) :])
        assert response.ended == (ids[-1] in EOS)


def test_samples_follow_the_seed_and_the_distribution(models: tuple[Any, Any]) -> None:
    """Of 4,000 first tokens each one's share is within four standard errors of its probability."""
    draws, temperature = 4000, 1.5
    settings = SamplingSettings(1, temperature, seed=3, batch=draws)
    found = sample_responses(models[0], [PROMPTS[0]] * draws, EOS, IDS, settings)
    again = sample_responses(models[0], [PROMPTS[0]] * draws, EOS, IDS, settings)
    other = sample_responses(
        models[0], [PROMPTS[0]] * draws, EOS, IDS, SamplingSettings(1, temperature, seed=4, batch=draws)
    )
    assert found == again != other
    with torch.no_grad():
        logits = models[0](torch.tensor([PROMPTS[0]])).logits[0, -1, :KNOWN] / temperature
        logits[~IDS.mask] = -torch.inf
        probabilities = logits.softmax(-1).numpy()
    shares = np.bincount([response.tokens[0] for response in found], minlength=KNOWN) / draws
    errors = np.sqrt(probabilities * (1 - probabilities) / draws)
    assert (np.abs(shares - probabilities) < 4 * errors + 1 / draws).all()


def test_text_is_described_by_its_ids() -> None:
    responses = [
        SampledIds([1], [8, 8, 8, 8, 8, 8], False),
        SampledIds([1], [4, 5, 6, 7, 3], True),
        SampledIds([1], [3], True),
    ]
    found = describe_text(responses)
    assert found["distinct_2"] == pytest.approx((1 / 5 + 1) / 2)  # the third response has no pair
    assert found["distinct_4"] == pytest.approx((1 / 3 + 1) / 2)
    assert found["length"] == 4 and found["truncated"] == pytest.approx(1 / 3)


def test_a_model_is_read_without_a_network(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such directory"):
        load_model(tmp_path / "nowhere", torch.float32)
