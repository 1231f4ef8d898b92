"""The benchmarks of rollout engines and of rollouts at size run where there is no vLLM."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from forked_commands import python
from pool import Pools

from benchmarks.rollout_table import HEAD, line

ROOT = Path(__file__).parent.parent.parent
NAMES = ("responses", "tokens", "ranks", "controllers", "host_bytes_per_rank", "device_bytes_per_rank")
NAMES += ("rank0_seconds", "check_seconds", "gather_seconds")


def test_rollout_engines_without_vllm(pools: Pools, tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    command = ["-m", "benchmarks.rollout", "--models", "toy", "--updates", "none", "--json", str(file)]
    command += ["--engines", "megatron,transformers", "--responses", "2", "--tokens", "3", "--repeats", "1"]
    shown = python(pools, command, ROOT, tmp_path / "logs")
    found = json.loads(file.read_text())
    assert found["updates"] == []
    assert [(row["engine"], len(row["seconds"])) for row in found["sampling"]] == [("megatron", 1), ("transformers", 1)]
    assert shown.count("| toy | 2 x 3 |") == 2


def test_rollouts_at_size(tmp_path: Path) -> None:
    """Real processes: a server of payloads, a client process, and ranks of two machines that share their responses."""
    file = tmp_path / "rows.json"
    command = [sys.executable, "-m", "benchmarks.rollout_scale", "--sizes", "96x64", "--json", str(file)]
    shown = subprocess.run(
        [*command, "--ranks", "4", "--controllers", "1", "2"],
        check=True, cwd=ROOT, capture_output=True, text=True, timeout=300,
    ).stdout  # fmt: skip
    rows = json.loads(file.read_text())
    assert shown.splitlines() == [*HEAD.splitlines(), *map(line, rows)]
    for row, controllers in zip(rows, (1, 2), strict=True):
        assert tuple(row)[: len(NAMES)] == NAMES
        assert [row[name] for name in NAMES[:4]] == [96, 64, 4, controllers]
        assert row["device_bytes_per_rank"] == 0
        assert 0 < row["check_seconds"] + row["gather_seconds"] <= row["rank0_seconds"]
        # the check takes 16 tokens of at most 64 responses
        assert 0 < row["check_tokens"] <= 1024
        assert row["check_forwarded_tokens"] < 64 * (128 + 64)
        assert 80 < row["answer_bytes_per_token"] < 180


def test_documented_rows_are_those_of_the_evidence() -> None:
    """Of the largest world, with a controller per machine."""
    found = json.loads((ROOT / "studies" / "results" / "rollout_scale.json").read_text())["after"]
    table = "\n".join([HEAD, *(line(row) for row in found if (row["ranks"], row["controllers"]) == (64, 8))])
    page = (ROOT / "docs" / "results_system.md").read_text()
    assert table in page, f"docs/results_system.md lacks this table:\n{table}"
