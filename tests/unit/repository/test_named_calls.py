"""Functions that tests and benchmarks name as "module:name" exist: a kill at a renamed one would never happen."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.forked_run import find_call

ROOT = Path(__file__).parents[3]
FILES = [file for folder in ("benchmarks", "studies", "tests") for file in sorted((ROOT / folder).rglob("*.py"))]
CALLS = sorted(
    {call for file in FILES for call in re.findall(r'"(nemo_oprd(?:\.\w+)+:[A-Za-z_][\w.]*)"', file.read_text())}
)


def test_there_are_some() -> None:
    assert len(CALLS) > 10


@pytest.mark.parametrize("call", CALLS)
def test_it_exists(call: str) -> None:
    owner, name = find_call(call)
    assert hasattr(owner, name), call
