"""A real vLLM on a CPU as the rollout engine: what it samples, and what the run notices when it samples wrongly.

A server takes half a minute to start, so one process per model makes all comparisons, and two of them run at a time.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import vllm_environment

ROOT = Path(__file__).parent.parent.parent
PATIENCE_S = 600
# the experts of a layer are packed in the same way at both sizes, and positions do not depend on them
ONE_SIZE = {("qwen3_moe", 1), ("qwen3_yarn", 2)}
CASES = [case for name in vllm_environment.MODELS for case in ((name, 1), (name, 2)) if case not in ONE_SIZE]
# each family at one size, but llama, which is qwen2 without biases
SLOW = {("llama", 1), ("llama", 2), ("qwen3", 1), ("qwen2_tied", 2), ("qwen2_untied", 1), ("qwen2_untied", 2)}
SIZES = [1, pytest.param(2, marks=pytest.mark.slow)]
# float32 on both sides; log-probabilities of thousands of tokens differed by 2e-5 at most
LOGPROB_TOLERANCE = 1e-4
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(vllm_environment.missing() is not None, reason=str(vllm_environment.missing())),
]


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}


def agreement(model: str, tensor: int, directory: Path) -> dict[str, Any]:
    directory.mkdir()
    command = [sys.executable, str(ROOT / "tests/e2e/vllm_agreement.py"), model, str(tensor), str(directory)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    log = directory / "vllm" / "server_0.log"
    assert done.returncode == 0, done.stderr[-3000:] + (log.read_text()[-2000:] if log.exists() else "")
    return json.loads((directory / "results.json").read_text())


class Agreements(dict[tuple[str, int], Future]):
    """Comparisons by their case, begun when first asked for, two at a time."""

    def __init__(self, pool: ThreadPoolExecutor, root: Path) -> None:
        self.pool, self.root = pool, root

    def __missing__(self, case: tuple[str, int]) -> Future:
        self[case] = self.pool.submit(agreement, *case, self.root / f"{case[0]}-{case[1]}")
        return self[case]


@pytest.fixture(scope="module")
def agreements(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agreements]:
    """All that are not slow have begun."""
    root, before = tmp_path_factory.mktemp("vllm"), vllm_environment.shared_memory()
    with ThreadPoolExecutor(2) as pool:
        found = Agreements(pool, root)
        for case in CASES:
            if case not in SLOW:
                found[case]
        yield found
    assert vllm_environment.shared_memory() <= before, "a server left something in shared memory"


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[pytest.mark.slow] if case in SLOW else []) for case in CASES],
    ids=lambda case: f"{case[0]}-tp{case[1]}",
)
def test_ids_and_logprobs_are_those_of_transformers(case: tuple[str, int], agreements: Agreements) -> None:
    """Before and after three updates, greedily and sampled; an id without a token is likely, and never sampled."""
    found = agreements[case].result()
    assert len(found["greedy"]) == 4
    for update, greedy in enumerate(found["greedy"]):
        assert greedy["transformers"] and greedy["in_process"] and greedy["reasons"], (update, greedy)
        assert greedy["versions"] == [update] and greedy["distinct"] > 6, (update, greedy)
    assert sum(p > 0.5 for p in found["left_out"]) > 0.1 * len(found["left_out"])
    assert max(found["logprob_gap"]) < LOGPROB_TOLERANCE, found["logprob_gap"]


@pytest.mark.parametrize("tensor", SIZES)
def test_what_is_sampled_follows_the_exact_distribution(tensor: int, agreements: Agreements) -> None:
    sampling = agreements["qwen2_tied", tensor].result()["sampling"]
    assert sampling["cells"] > 10 and sampling["outside"] == 0
    assert sampling["p_value"] > 1e-3  # the seeds are fixed: this fails always or never
    assert sampling["logprob_gap"] < LOGPROB_TOLERANCE and sampling["repeatable"]


@pytest.mark.parametrize("tensor", SIZES)
def test_a_cancelled_generation_goes_on_with_what_was_complete(tensor: int, agreements: Agreements) -> None:
    cancelled = agreements["qwen2_tied", tensor].result()["cancelled"]
    assert cancelled["completed"] is not None and 0 < cancelled["completed"] < cancelled["of"], cancelled
    assert cancelled["same_with_done"] and cancelled["same_after"]
