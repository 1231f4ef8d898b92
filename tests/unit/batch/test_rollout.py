"""`Rollout` holds read-only arrays, whatever sequence it is made from."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from nemo_oprd.batch import types
from nemo_oprd.batch.types import TOKEN_FIELDS, Rollout
from nemo_oprd.rollout.replay import read_rollouts, write_rollouts

FULL = {
    "prompt_ids": [5, 9],
    "response_ids": [7, 1, 4],
    "response_mask": [1, 0, 1],
    "teacher_prompt_ids": [3],
    "teacher_response_ids": [2, 8],
    "teacher_index": [0, -1, 1],
    "logprobs": [-0.1, -1e-9, 0.0],
}


def test_sequences_become_read_only_arrays() -> None:
    made = Rollout(**FULL)  # type: ignore[arg-type]
    for name, dtype in TOKEN_FIELDS.items():
        values = getattr(made, name)
        assert values.dtype == dtype and values.flags.c_contiguous and not values.flags.writeable, name
    assert made.mask.tolist() == [True, False, True] and made.ids.tolist() == [5, 9, 7, 1, 4] and made.length == 5
    assert Rollout([], [1]).mask.tolist() == [True]  # type: ignore[arg-type]


def test_arrays_of_the_right_type_are_views() -> None:
    shared = np.arange(100, dtype=np.int32)
    made = Rollout(shared[:10], shared[10:], logprobs=np.zeros(90, np.float32))
    assert np.shares_memory(made.prompt_ids, shared) and np.shares_memory(made.response_ids, shared)
    assert shared.flags.writeable  # the owner of a buffer may fill it again
    assert np.shares_memory(replace(made, prompt="?").response_ids, shared)
    assert made.as_read_by_teacher().response_ids.base is not None


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"response_ids": [2**31]}, "response_ids holds 2147483648; expected ids that fit int32"),
        ({"prompt_ids": np.array([-(2**31) - 1])}, "prompt_ids holds -2147483649"),
        ({"response_ids": [2**70]}, "response_ids="),
        ({"response_ids": [1.5]}, "expected a sequence of int32 numbers, one per token"),
        ({"prompt_ids": [[1, 2]]}, "prompt_ids="),
        ({"logprobs": ["a"]}, "logprobs="),
    ],
)
def test_what_does_not_fit_is_an_error(fields: dict, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        Rollout(**{**FULL, **fields})


def test_equal_contents_are_equal_rollouts() -> None:
    made = Rollout(**FULL)  # type: ignore[arg-type]
    assert made == Rollout(**{name: np.array(values) for name, values in FULL.items()})
    assert pickle.loads(pickle.dumps(made)) == made
    for name, values in FULL.items():
        assert made != replace(made, **{name: values[:-1]}) and made != replace(
            made, **{name: [*values[:-1], values[-1] - 1]}
        )
        if name not in ("prompt_ids", "response_ids"):
            assert made != replace(made, **{name: None}) and replace(made, **{name: None}) != made
    assert made != replace(made, finish_reason="stop") and made != "a rollout"


def test_files_hold_the_numbers_exactly(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    logprobs = -np.exp(draw.normal(0, 20, 1000)).astype(np.float32)
    made = Rollout(draw.integers(0, 99, 5), draw.integers(0, 99, 1000), draw.random(1000) < 0.5, logprobs=logprobs)
    write_rollouts(tmp_path / "a.jsonl", [made])
    line = json.loads((tmp_path / "a.jsonl").read_text())
    assert list(line) == ["prompt_ids", "response_ids", "response_mask", "logprobs"]
    assert line["response_mask"] == made.mask.astype(int).tolist() and line["logprobs"] == logprobs.tolist()
    (again,) = read_rollouts(tmp_path / "a.jsonl", 99)
    assert again == made


@pytest.mark.parametrize("version", [-(2**63), -1, 2**31, 2**70, 1.0, True, None])
def test_versions_that_no_run_has_are_no_spans(version: object) -> None:
    assert types.from_json([{"version": version, "start": 0, "end": 2}]) is None


def test_spans_as_files_hold_them() -> None:
    """`weight_version` stays where a single version sampled."""
    one, two = types.span(3, 5), types.joined(types.span(3, 5), types.span(4, 1))
    assert types.as_json(one)["weight_version"] == 3 and "weight_version" not in types.as_json(two)
    for spans in (one, two):
        np.testing.assert_array_equal(types.from_json(types.as_json(spans)["weight_versions"]), spans)  # type: ignore[arg-type]
