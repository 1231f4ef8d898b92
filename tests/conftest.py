"""What all tests share."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest
from composing import composing_once
from lanes import read_full

from nemo_oprd.runtime.messages import show

if TYPE_CHECKING:
    from pool import Pools

ROOT = Path(__file__).parent.parent


# a busy machine is not a failure: neither an example nor making it has a time limit
hypothesis.settings.register_profile("untimed", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("untimed")


@pytest.fixture(autouse=True)
def _messages_are_shown() -> None:
    """On sys.stderr and sys.stdout as in a command, also where a test calls what a command calls."""
    show()


@pytest.fixture(scope="session", autouse=True)
def _configurations_are_composed_once() -> Iterator[None]:
    with composing_once():
        yield


@pytest.fixture(scope="session")
def pools() -> Iterator[Pools]:
    """`pools[n]` is a pool of n ranks; one set for all tests: starting processes and importing Megatron takes long."""
    from pool import Pools  # imports torch

    pools = Pools()
    yield pools
    pools.close()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the tests of tests/full.txt, which counts the cases of a test without those that are marked already."""
    left_out = read_full(ROOT / "tests" / "full.txt")
    seen = Counter[str]()
    for item in items:
        name = item.nodeid.partition("[")[0]
        name = name if name in left_out else name.partition("::")[0]
        if name not in left_out or any(item.get_closest_marker(mark) for mark in ("slow", "full")):
            continue
        if seen[name] not in left_out[name]:
            item.add_marker(pytest.mark.full)
        seen[name] += 1


def pytest_collection_finish() -> None:
    """Modules and tests live to the end: looking through them for garbage took a tenth of all time."""
    gc.freeze()
    gc.enable()


gc.disable()  # until all tests are collected
