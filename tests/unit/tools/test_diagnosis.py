"""The judgements of the doctor on numbers and texts; tests/functional/test_doctor.py has whole visits."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from family_configs import LLAMA, QWEN3

from nemo_oprd.batch.token_table import make_rows
from nemo_oprd.batch.types import Rollout
from nemo_oprd.config.loading import load_config
from nemo_oprd.config.schema import RepresentationLossConfig
from nemo_oprd.models import parse_model_spec
from nemo_oprd.tools.doctor.files import rope
from nemo_oprd.tools.doctor.findings import Finding, Report, SampleSizes, for_diagnosis
from nemo_oprd.tools.doctor.models import aligned_positions, distance, judge, layer_errors
from nemo_oprd.tools.doctor.prompts import (
    Answers,
    instructions,
    repeated_sentences,
    repeats_itself,
    teacher_is_better,
    truncation,
)

SUFFIX = "Please reason step by step, and put your final answer within \\boxed{}."
OTHER = "Let's think step by step and output the final answer within \\boxed{}."


def test_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = Report(speaks=True)
    report.add(Finding("one", "ok", "fine", {"n": 1}))
    odd = Finding("two", "warning", "not\n so fine", code="stop-ids-differ")
    report.add([odd.about("math"), Finding("three", "skipped", "why")])
    assert not report.is_wrong
    report.add(Finding("four", "wrong", "bad", code="same-weights"))
    assert report.is_wrong and report.summary() == "1 wrong, 1 warnings, 1 ok, 1 skipped"
    report.write(tmp_path / "found.json")
    assert (
        capsys.readouterr().out.splitlines()[1]
        == "warning  two                  stop-ids-differ: teacher math: not so fine"
    )
    written = json.loads((tmp_path / "found.json").read_text())
    assert written["summary"] == {"ok": 1, "warning": 1, "skipped": 1, "wrong": 1}
    assert written["findings"][0] == {
        "check": "one",
        "verdict": "ok",
        "text": "fine",
        "numbers": {"n": 1},
        "code": None,
    }
    assert written["findings"][1]["code"] == "stop-ids-differ"
    silent = Report(speaks=False)
    silent.add(Finding("four", "wrong", "bad", code="same-weights"))
    assert not silent.findings and capsys.readouterr().out == ""


def test_the_sample_is_small_and_of_the_run_s_engine() -> None:
    config = load_config("oprd_1p5b", ["rollout.engine=vllm", "rollout.replay=recorded.jsonl"])
    made = for_diagnosis(config, SampleSizes(max_new_tokens=512))
    assert (made.rollout.engine, made.rollout.replay, made.rollout.per_prompt) == ("megatron", None, 1)
    served = for_diagnosis(load_config("oprd_1p5b", ["rollout.engine=vllm"]), SampleSizes())
    assert served.rollout.engine == "vllm"
    assert made.rollout.max_new_tokens == made.evaluation.max_new_tokens == 512
    assert made.logging.output_metrics_every == 1
    assert for_diagnosis(config, SampleSizes(max_new_tokens=99999)).evaluation.max_new_tokens == 31744
    assert for_diagnosis(load_config("bridge_phi4mini_to_qwen3_1p7b"), SampleSizes()).logging.output_metrics_every == 0
    with pytest.raises(ValueError, match="--max-new-tokens=0: expected at least 1"):
        SampleSizes(max_new_tokens=0)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (f"What is 2+2? {SUFFIX}", set()),
        (f"What is 2+2? {SUFFIX}\n{SUFFIX}", {SUFFIX.lower()}),
        # Qwen2.5-Math's template has the suffix as its system prompt, and data sets have it at the end
        (f"<|im_start|>system\n{SUFFIX}<|im_end|>\n<|im_start|>user\nWhat? {SUFFIX}<|im_end|>\n", {SUFFIX.lower()}),
        (f"<\uff5cUser\uff5c>What is it? {SUFFIX} {OTHER}<\uff5cAssistant\uff5c>", set()),
        ("Find x. Find x. Find x.", set()),
        ("Put \\boxed{} around it. The sum is in \\boxed{7} already, so don't.", set()),
    ],
)
def test_repeated_sentences(text: str, found: set[str]) -> None:
    assert repeated_sentences(text) == found


def test_repeated_instruction() -> None:
    plain, twice = [f"What is 2+{i}? {SUFFIX}" for i in range(300)], f"{SUFFIX} What is 2+2? {SUFFIX}"

    def repeated_instruction(prompts: dict[str, list[str]]) -> Finding:
        (found,) = instructions(prompts)
        return found

    assert repeated_instruction({"train": plain}).verdict == "ok"
    # a single problem that repeats itself among many, and one among few
    assert repeated_instruction({"train": [*plain, twice]}).verdict == "ok"
    assert repeated_instruction({"train": [*plain[:29], twice]}).verdict == "ok"
    found = repeated_instruction({"train": plain, "val": [twice, twice, plain[0], plain[1]]})
    assert found.verdict == "warning" and found.text.startswith("50% of 4 prompts of val hold an instruction twice")


def test_loops() -> None:
    draw = np.random.default_rng(0).integers(0, 1000, 200).tolist()
    assert repeats_itself([*draw, *[1, 2, 3] * 30]) and repeats_itself([7] * 64)
    assert repeats_itself(draw[:32] * 2) and not repeats_itself(draw[:33] * 2)
    assert not repeats_itself(draw) and not repeats_itself([7] * 63)


def responses(cut: int, loops: int, whole: int) -> list[Rollout]:
    draw = np.random.default_rng(0).integers(0, 1000, 100).tolist()
    kinds = [(draw, "length")] * cut + [([5] * 100, "length")] * loops + [(draw, "stop")] * whole
    return [Rollout([1], ids, finish_reason=reason) for ids, reason in kinds]


@pytest.mark.parametrize(
    ("counts", "run_limit", "verdict"),
    [
        ((0, 0, 10), 100, "ok"),
        ((5, 0, 5), 100, "ok"),
        ((6, 0, 4), 100, "warning"),
        # at a shorter limit than the run's: few cut responses are fine there, too; many say nothing; loops do
        ((5, 0, 5), 900, "ok"),
        ((6, 0, 4), 900, "skipped"),
        ((0, 3, 7), 900, "warning"),
        ((4, 2, 4), 900, "skipped"),
    ],
)
def test_truncation(counts: tuple[int, int, int], run_limit: int, verdict: str) -> None:
    assert truncation(responses(*counts), 100, run_limit).verdict == verdict


def test_an_end_on_purpose_is_no_truncation() -> None:
    """What `rollout.stop_after` ends needs no end of its own; loops are a fault even so."""
    key = "loss.representation.k"
    found = truncation(responses(10, 0, 0), 100, 900, limited_by=key)
    assert found.verdict == "ok" and f"{key} ends them there on purpose" in found.text
    assert truncation(responses(0, 3, 7), 100, 100, limited_by=key).code == "responses-loop"


@pytest.mark.parametrize(
    ("both", "teacher", "student", "neither", "verdict"),
    [
        (10, 12, 2, 8, "ok"),
        (16, 5, 0, 11, "ok"),  # 1 / 32
        (16, 4, 0, 12, "warning"),  # 1 / 16
        (10, 7, 3, 12, "warning"),
        (16, 0, 0, 16, "warning"),
        (16, 0, 5, 11, "wrong"),
        (3, 4, 0, 0, "skipped"),
    ],
)
def test_teacher_is_better(both: int, teacher: int, student: int, neither: int, verdict: str) -> None:
    pairs = [(True, True)] * both + [(False, True)] * teacher + [(True, False)] * student + [(False, False)] * neither
    found = teacher_is_better(Answers([s for s, _ in pairs]), Answers([t for _, t in pairs]), 40, 40)
    assert found.verdict == verdict
    assert found.numbers["teacher"] == pytest.approx((both + teacher) / len(pairs))


def test_cut_responses_are_not_compared() -> None:
    student, teacher = Answers([False] * 32, cut=16), Answers([True] * 32)
    assert teacher_is_better(student, teacher, 512, 31744).verdict == "ok"
    student = Answers([False] * 32, cut=17)
    found = teacher_is_better(student, teacher, 512, 31744)
    assert found.verdict == "skipped" and "--max-new-tokens 31744" in found.text
    assert teacher_is_better(student, teacher, 512, 512).verdict == "ok"


def test_nothing_is_solved() -> None:
    """0 % against 0 %: the line says why, and what is written behind +- is a 95 % interval."""
    found = teacher_is_better(Answers([False] * 16, 3, 1), Answers([False] * 16, 14, 2), 40, 40)
    assert (
        found.code == "teacher-solves-nothing"
        and "of the teacher's responses 14 had no answer and 2 were cut" in found.text
    )
    assert "data.suffix" in found.text
    found = teacher_is_better(Answers([False] * 16, 3, 16), Answers([False] * 16, 14, 12), 40, 40)
    assert "fix: evaluation.max_new_tokens" in found.text
    half = teacher_is_better(Answers([False] * 32), Answers([True] * 16 + [False] * 16), 40, 40)
    assert "+50.0 +- 17.7 points" in half.text
    alike = teacher_is_better(Answers([True] * 32), Answers([True] * 32), 40, 40)
    assert "+0.0 +- 5.8 points" in alike.text


@pytest.mark.parametrize(
    ("kl", "overlap", "vocabulary", "verdict"),
    [
        (0.3, 0.8, 150_000, "ok"),
        (4.8, 0.15, 49_000, "warning"),  # a student that was rounded to 2 bits
        (1.0, 0.25, 49_000, "warning"),
        (5.7, 0.14, 49_000, "warning"),  # with its embedding, too
        (8.2, 0.5, 49_000, "wrong"),
        (1.0, 0.05, 49_000, "wrong"),
        (float("nan"), 0.8, 49_000, "wrong"),
        (1e-9, 1.0, 49_000, "warning"),
        (2.5, 0.7, 25, "wrong"),
    ],
)
def test_distance(kl: float, overlap: float, vocabulary: int, verdict: str) -> None:
    metrics: Any = SimpleNamespace(
        nonfinite_reason=None, named={"output/reverse_kl": kl, "val-topk/overlap_ratio": overlap}
    )
    assert distance(metrics, vocabulary, 16).verdict == verdict
    broken: Any = SimpleNamespace(nonfinite_reason="loss nan at layer 3", named={})
    assert distance(broken, vocabulary, 16).verdict == "wrong"


def test_aligned_positions() -> None:
    """The teacher reads another prompt, of which neither the ids nor the last one matter."""
    whole = Rollout([3, 4], [5, 6, 7], teacher_prompt_ids=[9, 9, 9])
    shifted = Rollout(
        [3, 4], [5, 6, 7], teacher_prompt_ids=[9], teacher_response_ids=[5, 6, 7], teacher_index=[1, 2, -1]
    )
    for position in ("token", "predicting"):
        for rollouts, verdict in (([whole], "ok"), ([whole, shifted], "wrong")):
            table = make_rows(rollouts, positions="all", k=1, position=position, aggregation="token_mean")
            assert aligned_positions(rollouts, table).verdict == verdict


def of_layers(*shapes: tuple[float, float], width: int = 576) -> dict[int, np.ndarray]:
    """Per layer (squared error of dimensions 3 and 8 together, that of each other dimension)."""
    squares = {}
    for layer, (large, small) in enumerate(shapes, 1):
        squares[layer] = np.full(width, small)
        squares[layer][[3, 8]] = large / 2
    return squares


@pytest.mark.parametrize(
    ("kind", "verdict"), [("mse", "warning"), ("normalized_mse", "warning"), ("my_losses:mine", "skipped")]
)
def test_massive_activations(kind: str, verdict: str) -> None:
    """Layers 3 and 4 of 5 have nearly all of the loss, from two dimensions."""
    squares = of_layers((0.1, 0.1), (0.2, 0.1), (9e4, 0.5), (9e4, 0.5), (0.1, 0.1))
    errors = layer_errors(squares, dict.fromkeys(squares, 1.0))
    assert [error.dominated for error in errors] == [False, False, True, True, False]
    loss: Any = SimpleNamespace(kind=kind)
    found = judge(errors, loss, {3: 0.5})
    assert found.verdict == verdict
    assert "few dimensions hold the error of layers 3-4, which have 100% of" in found.text
    assert "5 of 576 dimensions (3, 8, 0, ...) hold 100%" in found.text
    assert ("kind=normalized_mse" in found.text) == (kind == "mse")
    assert found.numbers["layers"][2]["share_of_gradient"] == 0.5
    assert found.numbers["layers"][2]["top_dimensions"] == [3, 8, 0]


def test_dominated_layers_without_weight_do_not_matter() -> None:
    squares = of_layers((1e4, 1.0), (100.0, 1000.0))
    errors = layer_errors(squares, {1: 1.0, 2: 1.0})
    assert errors[0].dominated and errors[0].share < 0.1
    assert judge(errors, RepresentationLossConfig(), {}).verdict == "ok"
    assert judge(layer_errors(squares, {1: 1000.0, 2: 1.0}), RepresentationLossConfig(), {}).verdict == "warning"


def test_one_of_few_dimensions_is_not_few() -> None:
    """The first direction of a bridge's basis has the most variance, so it holds most of the error."""
    errors = layer_errors({1: np.array([9.0, 0.5, 0.3, 0.2])}, {1: 1.0})
    assert errors[0].top_share == 0.9 and not errors[0].dominated
    assert judge(errors, RepresentationLossConfig(), {}).verdict == "ok"
    assert judge(layer_errors({1: np.zeros(4)}, {1: 1.0}), RepresentationLossConfig(), {}).verdict == "ok"


def test_rope_of_both_models() -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    plain, scaled = (parse_model_spec({**QWEN3, "rope_scaling": value}) for value in (None, scaling))
    found = rope(scaled, scaled)
    assert (found.verdict, found.text) == (
        "ok",
        "student yarn (factor 4) of 512 positions, teacher yarn (factor 4) of 512 positions",
    )
    assert rope(plain, parse_model_spec({**QWEN3, "rope_theta": 5e5})).verdict == "ok"
    assert rope(plain, parse_model_spec({**LLAMA, "rope_scaling": scaling})).verdict == "ok"  # another family
    found = rope(plain, scaled)
    assert found.verdict == "warning" and "student default of 512 positions, teacher yarn (factor 4)" in found.text
    short = parse_model_spec({**QWEN3, "rope_scaling": scaling, "max_position_embeddings": 160})
    found = rope(scaled, short)
    assert found.verdict == "warning" and "the teacher's YaRN is made for 512 tokens" in found.text
    assert "max_position_embeddings is 160; expected the same number; fix: " in found.text
