"""What all tests share."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import TYPE_CHECKING

import hypothesis
import pytest
from composing import composing_once

from nemo_oprd.runtime.messages import show

if TYPE_CHECKING:
    from pool import Pools


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


def pytest_collection_finish() -> None:
    """Modules and tests live to the end: looking through them for garbage took a tenth of all time."""
    gc.freeze()
    gc.enable()


gc.disable()  # until all tests are collected
