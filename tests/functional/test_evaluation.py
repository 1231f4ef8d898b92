"""What an evaluation writes, what it keeps when it is cancelled, and the KV budget of `auto`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from evaluation_cases import MODEL, write_problems
from pool import Pools

from nemo_oprd.models import read_model_spec

GOLDEN = Path(__file__).parent.parent / "golden" / "student"
TEXTS = [r"so \boxed{4}", r"\boxed{5}", "no box", r"\boxed{1}, no: \boxed{10.0}", r"\boxed{7}", r"\boxed{ 07 }"]
ANSWERS = ["4", "10", "7"]


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.parametrize("ranks", [1, 2])
def test_cancelled_twice_it_samples_what_is_missing(pools: Pools, tmp_path: Path, ranks: int) -> None:
    # with two ranks, answers of the form of GSM8K, which `number` grades
    answers, grader = (ANSWERS, "boxed") if ranks == 1 else ([f"So.\n#### {answer}" for answer in ANSWERS], "number")
    write_problems(tmp_path, answers)
    found = pools[ranks].run(
        "evaluation_cases:evaluate", directory=str(tmp_path), texts=TEXTS, untils=[1, 1, None], timeout=60
    )
    first, second, last = found["evaluations"]
    assert (first["metrics"], second["metrics"]) == (None, None)
    assert (first["asked"], second["asked"]) == (([0], [1]) if ranks == 1 else ([0, 1], [2, 3]))
    assert last["asked"] == (list(range(2, 6)) if ranks == 1 else [4, 5])
    kept = f"evaluating sums: {2 * ranks} of 6 responses are kept from an earlier start"
    lines_of_progress = [f"evaluating sums: {done}/6 responses  left 0:00" for done in range(2 * ranks + 1, 7)]
    if ranks == 1:
        assert last["said"] == [kept, *lines_of_progress]
    else:  # the first rank speaks when responses of its own are complete
        assert len(last["said"]) == 2 and last["said"][0] == kept and last["said"][1] in lines_of_progress
    metrics = last["metrics"]
    lengths = [len(text) + 1 for text in TEXTS]
    assert metrics["val/sums/avg@2"] == pytest.approx(4 / 6) and metrics["val/sums/best@2"] == 1
    assert metrics["val/sums/pass@1"] == metrics["val/sums/avg@2"] and metrics["val/sums/maj@2"] == pytest.approx(
        2.5 / 3
    )
    assert metrics["val/sums/no_answer"] == pytest.approx(1 / 6) and metrics["val/sums/truncated"] == 0
    assert metrics["val/sums/avg_len"] == pytest.approx(sum(lengths) / 6)
    assert found["again"] == {name.replace("sums/", "sums/teacher/"): value for name, value in metrics.items()}
    check_files(tmp_path / "run", metrics, answers, grader)


@pytest.mark.parametrize(
    ("student", "teacher", "overrides", "says"),
    [
        (9, 2, [], "of 10 problems of sums the teacher solves 20.0% and the student 90.0%, -70.0 +- 32.3 points: the "
         "student is better; expected a better teacher; fix: another teacher, or exchange the paths"),
        (6, 2, [], None),  # 1 / 16 by chance
        (2, 9, [], None),
        (9, 9, [], None),
        # such a teacher knows more in training than in an evaluation
        (9, 2, ["teacher.prompt='{prompt} {answer}'"], None),
    ],
)  # fmt: skip
def test_a_teacher_that_is_worse_is_named_before_training(
    pools: Pools, tmp_path: Path, student: int, teacher: int, overrides: list[str], says: str | None
) -> None:
    """The models that were exchanged: each has so many of ten problems right, in both of its two responses."""
    write_problems(tmp_path, ["4"] * 10)
    right = {"student": student, "teacher": teacher}
    texts = {name: [rf"\boxed{{{4 if i // 2 < count else 5}}}" for i in range(20)] for name, count in right.items()}
    said = pools[1].run("evaluation_cases:before_training", directory=str(tmp_path), overrides=overrides, **texts)
    assert [line for line in said if "student is better" in line] == ([] if says is None else [says])


def check_files(run: Path, metrics: dict[str, float], answers: list[str], grader: str) -> None:
    """The formats of docs/runs.md, to the letter."""
    files = sorted(str(file.relative_to(run)) for file in run.rglob("*") if file.is_file())
    assert files == ["evaluation.json", "generations/about.json", "generations/sums.jsonl", "grades/sums.jsonl"]
    kept = json.loads((run / "evaluation.json").read_text())
    assert {name: kept[name] for name in metrics} == metrics
    assert kept.keys() - metrics.keys() == {"val/sums/problems", *(f"{name}/ci" for name in metrics)}
    assert all(kept[f"{name}/ci"][0] <= metrics[name] <= kept[f"{name}/ci"][1] for name in metrics)
    assert lines(run / "generations" / "sums.jsonl") == [
        {
            "problem": i // 2,
            "sample": i % 2,
            "prompt_ids": [ord(str(i // 2)), ord("?")],
            "response_ids": [*map(ord, text), 0],
            "response": text,
            "finish_reason": "stop",
            "seed": [0, 2, 0, i],
            "model": MODEL["name"],
            "answer": answers[i // 2],
            "data_source": "problems",
            "logprobs": [-0.5] * (len(text) + 1),
        }
        for i, text in enumerate(TEXTS)
    ]
    extracted = ["4", "5", None, "10.0", "7", "07"]
    correct = [True, False, False, True, True, True]
    assert lines(run / "grades" / "sums.jsonl") == [
        {"problem": i // 2, "sample": i % 2, "extracted": extracted[i], "correct": correct[i], "grader": grader}
        for i in range(6)
    ]
    about = json.loads((run / "generations" / "about.json").read_text())
    assert list(about) == ["format", "model", "engine", "precision", "seed", "samples", "sampling", "sets"]
    assert list(about["sampling"]) == ["temperature", "top_p", "max_new_tokens", "stop_ids"]
    assert {**about["sets"]["sums"], "prompts": len(about["sets"]["sums"]["prompts"])} == {
        "number": 0, "problems": 3, "prompts": 64
    }  # fmt: skip


@pytest.mark.parametrize("tensor", [1, 2])
def test_the_budget_of_auto_is_the_smallest_of_the_role(pools: Pools, tensor: int) -> None:
    """Layers x key/value heads per tensor rank x channels x keys and values x bytes of a number."""
    spec = read_model_spec(GOLDEN)
    per_token = spec.num_layers * spec.num_kv_heads // tensor * spec.head_dim * 2 * 4
    free = [5000 * per_token + 1, 3000 * per_token - 1]
    got = pools[2].run("evaluation_cases:cache_budgets", hf_path=str(GOLDEN), tensor=tensor, free=free)
    assert got == [2999, 2999]
    assert pools[2].run("evaluation_cases:cache_budgets", hf_path=str(GOLDEN), tensor=tensor, free=[0, 1]) == [1024] * 2
