"""The benchmark of sampling: its command line and its tables."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import rollout
from benchmarks.rollout_models import MODELS


def test_arguments(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    options = rollout.arguments([])
    assert (options.models, options.updates) == (["toy", "smollm2"], ["toy", "smollm2", "qwen2-0.5b"])
    assert options.engines == ["megatron", "vllm", "transformers"]
    options = rollout.arguments(["--models", "toy", "--updates", "none", "--responses", "3", "--tokens", "5"])
    assert (options.models, options.updates, options.responses, options.tokens) == (["toy"], [], 3, 5)
    for wrong in (["--models", "qwen2-0.5b"], ["--engines", "sglang"], ["--smollm2", str(tmp_path)]):
        with pytest.raises(SystemExit):
            rollout.arguments(wrong)
        assert "expected" in capsys.readouterr().err


def test_prompts_differ_between_turns() -> None:
    first, second = (rollout.prompts_of(seed, 4, 6, 24) for seed in (1, 2))
    assert first == rollout.prompts_of(1, 4, 6, 24) != second
    assert all(len(ids) == 6 and set(ids) <= set(range(24)) for ids in first + second)


def test_every_second_of_an_update_is_in_one_column() -> None:
    calls = {"/pause?mode=wait": 0.25, "/resume": 0.25, "/update_weights": 1.0, "/inference/v1/generate": 9.0}
    parts = rollout.parts_of(2.0, calls)
    assert set(parts) == set(rollout.COLUMNS)
    assert (parts["pause, begin, resume"], parts["receive and load"], parts[rollout.OWN]) == (0.5, 1.0, 0.5)
    assert sum(parts.values()) == 2.0


def test_tables() -> None:
    row = {"model": "toy", "engine": "vllm", "responses": 10, "tokens": 20}
    lines = list(rollout.sampling_lines([{**row, "seconds": [0.1, 0.4, 0.2], "cpu_seconds": [0.2, 0.4, 0.6]}]))
    assert lines[-1] == "| toy | 10 x 20 | vllm | 1,000 (500 to 2,000) | 2.00 (1.00 to 3.00) |"
    parts = [dict.fromkeys(rollout.COLUMNS, value) for value in (0.1, 0.3, 0.2)]
    row = {"model": "toy", "transport": "file", "bytes": 3_000_000, "seconds": [1.0, 3.0, 2.0], "cpu_seconds": [0.5]}
    lines = list(rollout.update_lines([{**row, "parts": parts}]))
    assert lines[-1] == "| toy | 3.0 | file | 2.000 (1.000 to 3.000) | 0.50 |" + " 0.200 |" * len(rollout.COLUMNS)
    assert len({line.count("|") for line in lines}) == 1


def test_the_larger_model_has_the_larger_update() -> None:
    sizes = [model.shape.num_hidden_layers * model.shape.hidden_size**2 for model in MODELS.values()]
    assert sizes == sorted(sizes)
