"""What functional tests share; `pools` is in tests/conftest.py."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from layout_cases import Workbench
from megatron_bridge_environment import make_environment
from pool import HostedPools
from served_teachers import ServedTeachers, serving_teachers

from nemo_oprd.runtime.files import cache_directory


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Verdicts of canaries are kept for these tests alone; workers of pools inherit the variable.

    The files of Transformer Engine stay those of the user (scripts/setup_te_files.sh).
    """
    fetched = [*cache_directory().glob("transformer_engine-*")]
    with mock.patch.dict(os.environ, XDG_CACHE_HOME=str(tmp_path_factory.mktemp("cache"))):
        cache_directory().mkdir()
        for folder in fetched:
            (cache_directory() / folder.name).symlink_to(folder)
        yield


@pytest.fixture(scope="session")
def run_with_te() -> Iterator[Callable[..., Any]]:
    """`run_with_te(ranks, layers, target, **kwargs)` calls a function with layers of this kind, in workers that can
    import the stand-in for Transformer Engine."""
    stand_in = str(Path(__file__).parent / "te_stand_in")
    pools = HostedPools({"PYTHONPATH": os.pathsep.join([stand_in, os.environ.get("PYTHONPATH", "")])})
    yield lambda ranks, layers, target, /, **kwargs: pools.run(
        ranks, "te_cases:with_layers", layers=layers, function=target, **kwargs
    )
    pools.close()


@pytest.fixture(scope="session")
def workbench(tmp_path_factory: pytest.TempPathFactory) -> Workbench:
    return Workbench(tmp_path_factory.mktemp("layouts"))


@pytest.fixture(scope="session")
def megatron_bridge() -> dict[str, str]:
    """The variables of a process in Megatron-Bridge's environment."""
    return make_environment()


@pytest.fixture(scope="session")
def served_teachers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedTeachers]:
    """Computes in this process what stand-in servers of teachers answer."""
    with serving_teachers(tmp_path_factory.mktemp("served")) as served:
        yield served
