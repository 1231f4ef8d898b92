"""A benchmark that compares rollout engines runs where there is no vLLM."""

from __future__ import annotations

import json
from pathlib import Path

from forked_commands import python
from pool import Pools

ROOT = Path(__file__).parent.parent.parent


def test_rollout_engines_without_vllm(pools: Pools, tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    command = ["-m", "benchmarks.rollout", "--models", "toy", "--updates", "none", "--json", str(file)]
    command += ["--engines", "megatron,transformers", "--responses", "2", "--tokens", "3", "--repeats", "1"]
    shown = python(pools, command, ROOT, tmp_path / "logs")
    found = json.loads(file.read_text())
    assert found["updates"] == []
    assert [(row["engine"], len(row["seconds"])) for row in found["sampling"]] == [("megatron", 1), ("transformers", 1)]
    assert shown.count("| toy | 2 x 3 |") == 2
