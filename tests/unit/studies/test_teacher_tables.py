"""The tables of teachers behind servers are those of the committed evidence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.teacher_server import SHAPE, Turn, arguments, lines, rows_of
from studies.teacher_families import RESULTS, table

ROOT = Path(__file__).parents[3]
# of a row of states in float32
ALLOWED = 1e-5


def test_the_table_of_families() -> None:
    """At least 14 pass at both sizes, and what does not pass has its reason."""
    cases = json.loads(RESULTS.read_text())
    assert table(cases) in (ROOT / "docs" / "teacher_placement.md").read_text()
    passed = {(case["family"], case["tensor"]) for case in cases if "worst" in case}
    both = {family for family, _ in passed if {(family, 1), (family, 2)} <= passed}
    assert len(both) >= 14
    for case in cases:
        if "worst" in case:
            assert max(case["worst"].values()) < ALLOWED and case["logprob_gap"] < 1e-4, case
        else:
            assert case["refused"] and str(ROOT) not in case["refused"]


def test_a_refused_case_and_one_that_was_not_run() -> None:
    cases: list[dict[str, Any]] = [
        {"family": "a", "tensor": 1, "worst": {"1": 1e-7, "2": 3e-6, "3": 2e-6}, "logprob_gap": 4e-6},
        {"family": "a", "tensor": 2, "refused": "canary"},
        {"family": "b", "tensor": 2, "worst": {"1": 1e-7, "2": 2e-7}, "logprob_gap": 1e-6},
    ]
    assert table(cases).splitlines()[2:] == [
        "| a | 3.0e-06 (1.0e-07 .. 2.0e-06) | refused | 4.0e-06 |  |",
        "| b | not run | 2.0e-07 (1.0e-07 .. 2.0e-07) |  | 1.0e-06 |",
    ]


def test_the_table_of_the_benchmark() -> None:
    rows = json.loads((ROOT / "studies" / "results" / "teacher_server.json").read_text())
    assert "\n".join(lines(rows)) in (ROOT / "docs" / "results_system.md").read_text()


def test_rows_of_the_benchmark() -> None:
    """Ratios are medians of those within a turn, and bytes are those of the rows that were asked for."""
    options = arguments(["--sequences", "2", "--tokens", "10", "--rows", "4", "--layers", "3"])
    seconds = {"no capture": [1.0, 4.0, 2.0], "states": [2.0, 5.0, 2.0], "log-probability": [1.0, 1.0, 1.0]}
    seconds["transformers"] = [2.0, 2.0, 2.0]
    found = {row["way"]: row for row in rows_of(options, seconds)}
    assert found["states"]["speed_of_no_capture"] == pytest.approx(0.8)
    assert found["states"]["speed_of_transformers"] == pytest.approx(1.0)
    assert found["states"]["tokens_per_second"] == pytest.approx(20 / 2)
    assert found["states"]["bytes_per_token"] == 2 * 3 * 4 * SHAPE.hidden_size * 4 / 20
    assert found["log-probability"]["bytes_per_token"] == found["states"]["bytes_per_token"] + 2 * 4 * 2 * 4 / 20
    assert found["no capture"]["bytes_per_token"] == 0


def test_what_a_turn_asks_for() -> None:
    options = arguments(["--sequences", "2", "--tokens", "10", "--rows", "4", "--layers", "3"])
    turn, other = Turn.of(options, 0), Turn.of(options, 1)
    assert turn.ids != other.ids and turn.rows == [5, 6, 7, 8] and turn.layers == [4, 8, 13]
    request = turn.requests(logprobs=True)[1]
    assert request.state_request.tokens == request.ids[6:10] and request.state_request.final_rows == turn.rows
