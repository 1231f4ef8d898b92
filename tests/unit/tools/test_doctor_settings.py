"""What the doctor says of settings, of values in config.json and of prompts, without a model."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from family_configs import LLAMA, QWEN2, QWEN3_MOE

from nemo_oprd.config.loading import load_config
from nemo_oprd.config.schema import Config
from nemo_oprd.data.prompts import Prompt
from nemo_oprd.models import parse_model_spec
from nemo_oprd.tools.doctor.findings import Finding
from nemo_oprd.tools.doctor.prompts import _texts, contradictions, instructions, prompt_files, repeated_requests
from nemo_oprd.tools.doctor.run_settings import config_values, settings

CONFIGS = sorted(file.stem for file in (Path(__file__).parents[3] / "conf").glob("*.yaml"))
BOXED = "Please reason step by step, and put your final answer within \\boxed{}."
DAPO = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem.\n\nFind x.\n\nRemember to put your answer on "
    'its own line after "Answer:".'
)


def codes(found: list[Finding]) -> list[str | None]:
    return [finding.code for finding in found if finding.verdict in ("warning", "wrong")]


def said(*overrides: str, config: str = "oprd_1p5b") -> list[Finding]:
    return list(settings(load_config(config, list(overrides)), num_layers=28, hidden_size=1536))


@pytest.mark.parametrize("config", [name for name in CONFIGS if name not in ("quickstart", "verify")])
def test_shipped_settings_are_quiet(config: str) -> None:
    (found,) = settings(load_config(config, []), num_layers=28, hidden_size=576)
    assert found.verdict == "ok"


@pytest.mark.parametrize(
    ("override", "code", "verdict"),
    [
        ("train.lr=10", "learning-rate-high", "wrong"),
        ("train.lr=3e-4", "learning-rate-high", "warning"),  # for a width of 1536
        ("train.lr=2e-4", None, None),
        ("train.lr=1e-15", "learning-rate-low", "wrong"),
        ("train.lr=1e-8", "learning-rate-low", "warning"),
        ("train.lr=1e-7", None, None),
        ("train.clip_grad=1e-9", "clip-too-small", "wrong"),
        ("train.clip_grad=0", None, None),
        ("train.weight_decay=10", "weight-decay-high", "warning"),
        ("train.weight_decay=0.1", None, None),
        ("train.warmup_fraction=1", "warmup-whole-run", "wrong"),
        ("train.warmup_fraction=0.6", "warmup-whole-run", "warning"),
        ("train.warmup_fraction=0.2", None, None),
        ("rollout.temperature=0", "greedy-training", "wrong"),  # with two responses per prompt
        ("rollout.temperature=0.6", None, None),
        ("rollout.top_p=0.1", "top-p-narrow", "warning"),
        ("rollout.top_p=0.95", None, None),
        ("loss.representation.k=1", "few-supervised-tokens", "warning"),
        ("loss.output.k=1", "top-set-of-one", "warning"),
        ("train.betas=[0.9,0.95]", None, None),
        ("train.betas=[0.9,0.1]", "adam-unusual", "warning"),
    ],
)
def test_settings(override: str, code: str | None, verdict: str | None) -> None:
    found = said(override)
    assert codes(found) == ([] if code is None else [code])
    if code is not None:
        assert found[0].verdict == verdict and override.partition("=")[0] in found[0].text
        assert "expected" in found[0].text and "; fix: " in found[0].text


def files(config: dict[str, Any], **changes: Any) -> Any:
    return SimpleNamespace(spec=parse_model_spec({**config, **changes}))


@pytest.mark.parametrize(
    ("student", "teacher", "code"),
    [
        (files(QWEN2), files(QWEN2), None),
        (files(QWEN2), files(QWEN2, rope_theta=12000.0), "rope-theta-differs"),
        (files(QWEN2, num_hidden_layers=2), files(QWEN2, rope_theta=1e6), "rope-theta-differs"),
        # sizes of a family may have other bases, but hardly ones so near
        (files(QWEN2), files(QWEN2, hidden_size=96, rope_theta=1e6), None),
        (files(QWEN2), files(QWEN2, hidden_size=96, rope_theta=12000.0), "rope-theta-differs"),
        (files(QWEN2), files({**LLAMA, "rope_scaling": None}, rope_theta=12000.0), None),
        (files(QWEN2), files(QWEN2, rms_norm_eps=1e-5), "norm-eps-differs"),
        (files(QWEN2), files(QWEN2, hidden_size=96, rms_norm_eps=1e-5), None),
        (files(QWEN2), files(QWEN2, max_position_embeddings=4096), None),
        (files(QWEN2), files(QWEN2, max_position_embeddings=128), "positions-too-few"),
        (files(QWEN2), files(QWEN2, tie_word_embeddings=True), None),
        (files(QWEN2), files(QWEN2, num_hidden_layers=2), "teacher-smaller"),
        (files(QWEN3_MOE), files(QWEN3_MOE, num_experts_per_tok=1), "experts-differ"),
    ],
)
def test_config_values(student: Any, teacher: Any, code: str | None) -> None:
    run = load_config("verify", ["student.hf_path=a", "teacher.hf_path=b", "rollout.max_new_tokens=256"])
    found = list(config_values(run, student, teacher, shares_ids=False))
    assert codes(found) == ([] if code is None else [code])
    if code == "rope-theta-differs":
        theta = f"{teacher.spec.rope.theta:g}"
        assert f"is 10000 in the student's config.json and {theta} in the teacher's" in found[0].text


@pytest.mark.parametrize(
    ("text", "requests"),
    [
        (f"There are 5 balls in a box. {BOXED}", set()),
        (f"{BOXED} Give the final answer in a box.", {"a boxed answer"}),
        (f"{BOXED} Box your answer.", {"a boxed answer"}),
        (f"{BOXED}\nThink step-by-step.", {"reasoning step by step"}),
        (f"{BOXED} Show all your work, one step at a time.", {"reasoning step by step"}),
        (DAPO, set()),
        (f"{DAPO}\n{BOXED}", {"reasoning step by step"}),
    ],
)
def test_requests_in_other_words(text: str, requests: set[str]) -> None:
    assert repeated_requests(text) == requests


def test_contradictions() -> None:
    assert not contradictions(DAPO) and not contradictions(BOXED)
    assert contradictions(f"{BOXED} Give only the final answer.") == {"reasoning, and the answer alone"}
    assert contradictions(f"{DAPO} {BOXED}") == {"an answer in a box, and an answer after another mark"}
    (found,) = instructions({"train": [f"{BOXED} No explanation."] * 5, "val": [BOXED] * 5})
    assert found.code == "instruction-conflicts" and "100% of 5 prompts of train" in found.text


def prompts(texts: list[str], answers: list[str]) -> list[Prompt]:
    pairs = zip(texts, answers, strict=True)
    return [Prompt(({"role": "user", "content": text},), answer, "x", i) for i, (text, answer) in enumerate(pairs)]


def test_answers_in_prompts() -> None:
    """More often than the next problem's: small numbers stand in many prompts."""
    answers = [str(i % 7) for i in range(40)]
    chance = prompts([f"From 0, 1, 2, 3, 4, 5 and 6, which is {i} modulo 7?" for i in range(40)], answers)
    assert codes(list(_texts("data.train", chance))) == []
    told = prompts([f"Problem {i * 8}: what is it? ({answer})" for i, answer in enumerate(answers)], answers)
    assert codes(list(_texts("data.train", told))) == ["answer-in-prompt"]
    stated = prompts(
        [f"Problem {i}. {'The answer is $' + a + '$.' if i < 3 else ''}" for i, a in enumerate(answers)], answers
    )
    assert codes(list(_texts("data.train", stated))) == ["answer-in-prompt"]


def with_files(root: Path, train: list[str], validation: list[str], *overrides: str) -> Config:
    for name, texts in (("train", train), ("val", validation)):
        rows = [{"prompt": text, "answer": str(100 + i)} for i, text in enumerate(texts)]
        (root / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = [f"data.train={root / 'train.jsonl'}", f"data.validation={{val: {root / 'val.jsonl'}}}", "train.steps=10"]
    return load_config("oprd_1p5b", [*given, *overrides])


def test_what_the_data_command_counts(tmp_path: Path) -> None:
    own, other = [[f"What comes after {name} {i}?" for i in range(40)] for name in ("number", "letter")]
    healthy = list(prompt_files(with_files(tmp_path, own, other)))
    assert [finding.verdict for finding in healthy] == ["ok"]
    assert codes(list(prompt_files(with_files(tmp_path, own, own)))) == ["validation-is-training"]
    some = with_files(tmp_path, [*own, *other[:4]], other)
    (found,) = prompt_files(some)
    assert found.code == "contaminated" and "val: 4 of 40 problems stand in data.train" in found.text
    # dropped, or refused by `train`: nothing is left to be said
    dropped = with_files(tmp_path, [*own, *other[:4]], other, "data.contamination=drop")
    assert codes(list(prompt_files(dropped))) == []
    twice = with_files(tmp_path, own * 2, other)
    assert codes(list(prompt_files(twice))) == ["duplicate-prompts", "contradicting-answers"]
    once = with_files(tmp_path, own * 2, other, "data.deduplicate=true")
    assert codes(list(prompt_files(once))) == ["contradicting-answers"]


def test_the_form_of_answers_and_the_grader(tmp_path: Path) -> None:
    """GSM8K's answers under a data source of another name, and what a grader that was named makes of them."""
    own, other = [[f"What comes after {name} {i}?" for i in range(40)] for name in ("number", "letter")]

    def found(answer: str, *overrides: str, box: bool = False) -> list[Finding]:
        made = with_files(tmp_path, own, [f"{text} {BOXED if box else ''}" for text in other], *overrides)
        rows = [json.loads(line) for line in (tmp_path / "val.jsonl").read_text().splitlines()]
        rows = [{**row, "answer": answer.replace("100", row["answer"])} for row in rows]
        (tmp_path / "val.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return list(prompt_files(made))

    hashed = "99 + 1 = 100, so it is 100.\n#### 100"
    (chosen,) = found(hashed)
    assert chosen.verdict == "ok" and "'number' reads, which grades them in place of 'boxed'" in chosen.text
    (unlike,) = found(hashed, "evaluation.graders={val: boxed}")
    assert (
        unlike.code == "answers-unlike-grader" and "40 of 40 answers have the form that 'number' reads" in unlike.text
    )
    assert "fix: the final answer alone in the file, or evaluation.graders.val" in unlike.text
    assert codes(found(hashed, "evaluation.graders={val: boxed}", box=True)) == []
    assert codes(found(hashed, "evaluation.graders={val: exact}", box=True)) == ["answers-unlike-grader"]
    (refused,) = found("100 or more, or 200", "evaluation.graders={val: choice}")
    assert "40 of 40 answers are refused" in refused.text
    (solution,) = found("We add one to the number that stands there, which then makes exactly what was asked for, 100.")
    assert "40 of 40 answers are worked solutions without a mark" in solution.text
    assert codes(found("100")) == codes(found(r"So we get $\boxed{100}$.")) == []
