"""A real vLLM server on a CPU as a teacher: its states are transformers', in every layer and row, also after a kill."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import vllm_environment

ROOT = Path(__file__).parent.parent.parent
PATIENCE_S = 900
# float32 on both sides; rows of layers of random models differed by 1.7e-6 at most
ROW_TOLERANCE = 1e-5
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(vllm_environment.missing() is not None, reason=str(vllm_environment.missing())),
]


def teach(directory: Path, family: str, tensor: int, *more: str) -> tuple[int, str, dict[str, Any]]:
    """(Exit code, stderr, results.json) of vllm_teacher.py."""
    command = [sys.executable, str(ROOT / "tests/e2e/vllm_teacher.py"), family, str(tensor), str(directory), *more]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    environment["XDG_CACHE_HOME"] = str(directory / "cache")
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    results = directory / "results.json"
    return done.returncode, done.stderr, json.loads(results.read_text()) if results.exists() else {}


@pytest.mark.parametrize(("family", "tensor", "more"), [("qwen3", 1, ["kill"]), ("gemma3_text", 2, [])])
def test_states_are_those_of_transformers(tmp_path: Path, family: str, tensor: int, more: list[str]) -> None:
    """Ragged prompts in chunks of 128 tokens; the second family has a sliding window and a cap on its logits."""
    code, said, found = teach(tmp_path, family, tensor, *more)
    assert code == 0, said[-3000:]
    assert len(found["worst"]) >= 6 and max(found["worst"].values()) < ROW_TOLERANCE, found["worst"]
    assert found["final_is_last"] and found["logprob_gap"] < 1e-4
    assert found["bad"]["answered"] == [1] * 9 and found["bad"]["healthy"]
    assert found["bad"]["same_files"] and not found["bad"]["outside"]
    if more:
        assert found["killed"]["equal"] and not found["killed"]["left"], found["killed"]
        assert (found["killed"]["deaths"], found["killed"]["generation"]) == (1, 2)


def test_a_family_that_vllm_computes_wrongly_is_refused(tmp_path: Path) -> None:
    """Cohere2's sliding window is one token longer in vLLM than in transformers."""
    code, said, found = teach(tmp_path, "cohere2", 1)
    assert code != 0 and "worst" not in found
    assert "canary of cohere2: layer 1 of 5" in said and "row 64 is the first wrong one" in said, said[-1500:]
