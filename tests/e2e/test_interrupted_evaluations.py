"""Evaluations that are interrupted sample only what is missing; `interrupted_evaluations.py` makes them.

A whole evaluation is 4 batches on each of 2 ranks, a step of training is 1 batch.
"""

from __future__ import annotations

from typing import Any

import pytest
from pool import Pools, WorkerError


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, pools: Pools) -> dict[str, Any]:
    directory = tmp_path_factory.mktemp("evaluations")
    try:
        return pools.once(1, "interrupted_evaluations:interrupt", timeout=400, directory=directory)
    except WorkerError as error:
        logs = "\n".join(file.read_text()[-1500:] for file in sorted(directory.glob("start-*/log.txt"))[-2:])
        raise AssertionError(f"{error}\n{logs}") from error


def test_evaluate_is_killed_twice_and_samples_only_what_is_missing(results: dict[str, Any]) -> None:
    found = results["evaluate"]
    print(found)
    assert found["whole"] == {"codes": [0, 0], "batches": [4, 4], "said": []}
    assert found["killed"] == [[3, 3], [2, 2]]
    assert found["parts"] == {".heldout.part_0.jsonl": 4, ".heldout.part_1.jsonl": 4}
    kept = "evaluating heldout: {} of 16 responses are kept from an earlier start"
    # 2 batches, 1 batch and 1 batch: the second start kept one, and the damaged line counts for nothing
    assert found["last"] == {"codes": [0, 0], "batches": [1, 1], "said": [kept.format(12)]}
    assert found["same"]
    assert found["files"] == [".made_by", "evaluation.json", "generations/heldout.jsonl", "grades/heldout.jsonl"]
    assert found["again"] == {"codes": [0, 0], "batches": [0, 0], "said": [kept.format(16)]}


def test_evaluate_refuses_the_responses_of_other_settings_and_weights(results: dict[str, Any]) -> None:
    found = results["evaluate"]
    for name in ("temperature", "weights"):
        assert (found[name]["codes"], found[name]["batches"]) == ([2, 2], [0, 0])
        # there is no launcher that ends the second rank when the first one has explained
        (line,) = (line for line in found[name]["said"] if not line.startswith("error: rank 1: "))
        assert line.startswith("error: ") and line.endswith("; remove that directory, or choose another output")
    assert "holds responses with sampling.temperature=0.7, expected 0.5;" in found["temperature"]["said"][0]
    assert "holds responses with model.files.model.safetensors=" in found["weights"]["said"][0]
    assert "bytes of 1970-01-01T00:00:00.000000000Z" in found["weights"]["said"][0]
    assert found["untouched"]


def test_a_deferred_evaluation_that_is_interrupted_twice_ends(results: dict[str, Any]) -> None:
    found = results["train"]
    print(found)
    assert (found["whole"]["codes"], found["whole"]["batches"]) == ([0, 0], [10, 10])
    starts = found["starts"]
    assert [start["codes"] for start in starts] == [[75, 75]] * 3 + [[0, 0]]
    # together as many as without an interruption
    assert [start["batches"] for start in starts] == [[2, 2], [6, 6], [1, 1], [1, 1]]
    first, second, third, last = (start["said"] for start in starts)
    kept = "evaluating heldout: {} of 16 responses are kept from an earlier start"
    assert "in the evaluation before training" in first[0] and len(first) == 1
    assert second[:2] == [kept.format(8), "step 2: the evaluation is deferred to the next start: asked to stop"]
    assert third[:2] == ["step 2: the evaluation that was deferred", kept.format(8)]
    assert last == ["step 2: the evaluation that was deferred", kept.format(12)]
    assert found["same_metrics"] and found["same_grades"]
    files = ("evaluation.json", "generations/heldout.jsonl", "grades/heldout.jsonl")
    assert found["files"] == [f"step_{step:07d}/{file}" for step in (0, 2) for file in files]
    # a run logs one number per metric; intervals are in evaluation.json only
    logged = {name: value for name, value in found["evaluation"].items() if not name.endswith(("/ci", "/problems"))}
    assert found["logged"] == {"step": 2, **logged}


def test_a_step_that_is_reached_anew_is_evaluated_afresh(results: dict[str, Any]) -> None:
    found = results["anew"]
    assert (found["killed"], found["parts"]) == ([8, 8], 2)
    # the responses before training are of the same weights; those after step 2 may not be
    assert (found["last"]["codes"], found["last"]["batches"]) == ([0, 0], [6, 6])
    assert len(found["last"]["said"]) == 1 and "16 of 16 responses are kept" in found["last"]["said"][0]
