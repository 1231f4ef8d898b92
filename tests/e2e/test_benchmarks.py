"""The benchmarks of rollout engines and at size run where there is no vLLM, and that of peers where there is no TRL."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from forked_commands import python
from pool import Pools

from benchmarks import peers
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
    """Real processes: a server of payloads, and ranks of two machines that share their responses."""
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


def peer_rows(tmp_path: Path, *arguments: str) -> list[dict[str, Any]]:
    """The rows of a run with tiny models; the benchmark itself compares losses, gradients and parameters."""
    file = tmp_path / "rows.json"
    command = [sys.executable, "-m", "benchmarks.peers", "--quick", "--json", str(file), *arguments]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1200)
    assert ended.returncode == 0, ended.stderr[-3000:]
    rows = json.loads(file.read_text())
    assert ended.stdout.startswith(peers.HEAD)
    assert len(ended.stdout.splitlines()) == 2 + sum(row["ratio"] is not None for row in rows)
    for row in rows:
        assert list(row) == ["task", "batch", "product", "cpu_seconds", "wall_seconds", "peak_rss_mb", "ratio"]
        assert row["cpu_seconds"] > 0 and row["wall_seconds"] > 0 and row["peak_rss_mb"] > 50
        assert (row["ratio"] is None) == (row["product"] == "nemo_oprd")
    return rows


@pytest.mark.slow
def test_peers_without_trl(tmp_path: Path) -> None:
    ours, theirs = peer_rows(tmp_path, "--peers", "plain", "--task", "top_16")
    assert [(row["task"], row["batch"]) for row in (ours, theirs)] == [("top_16", "4 x 256-512")] * 2
    assert (ours["product"], theirs["product"]) == ("nemo_oprd", "plain")
    assert theirs["ratio"] == theirs["cpu_seconds"] / ours["cpu_seconds"]


@pytest.mark.slow
def test_peers_of_hidden_states(tmp_path: Path) -> None:
    rows = peer_rows(tmp_path, "--peers", "plain", "--task", "mse")
    found = [(row["batch"], row["product"]) for row in rows]
    assert found[:3] == [("4 x 256-512", name) for name in ("nemo_oprd", "plain", "plain_paper")]
    assert found[5:8] == [("1 x 1,000 + 7 x 60", name) for name in ("nemo_oprd", "plain", "plain_one_by_one")]


@pytest.mark.slow
def test_peers_of_sampled_tokens_and_sampling(tmp_path: Path) -> None:
    rows = peer_rows(tmp_path, "--peers", "plain", "--full", "--task", "sampled_token")
    assert [(row["task"], row["product"]) for row in rows] == [
        ("sampled_token", "nemo_oprd"),
        ("sampled_token", "plain"),
    ]
    rows = peer_rows(tmp_path, "--peers", "plain", "--full", "--task", "sampling")
    assert [row["product"] for row in rows] == ["nemo_oprd", "plain"]


@pytest.mark.slow
def test_peers_with_trl(tmp_path: Path) -> None:
    if (missing := peers.missing_peer(["trl"])) is not None:
        pytest.skip(missing)
    rows = peer_rows(tmp_path, "--full", "--peers", "trl", "--task", "full_vocab")
    assert {row["product"] for row in rows} == {"nemo_oprd", "trl"}
    starts = [row["task"] for row in rows if row["task"].startswith("start") and row["product"] == "trl"]
    assert starts == list(peers.STARTS.values())
