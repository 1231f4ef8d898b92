"""One set of worker pools for all functional tests: starting processes and importing Megatron is what takes long."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from bridge_environment import make_environment
from pool import Pools


@pytest.fixture(scope="session")
def pools() -> Iterator[Pools]:
    """`pools[n]` is a pool of n ranks."""
    pools = Pools()
    yield pools
    pools.close()


@pytest.fixture(scope="session")
def bridge_environment() -> dict[str, str]:
    """The variables of a process in Megatron-Bridge's environment."""
    return make_environment()
