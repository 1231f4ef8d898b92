"""Which version of Transformer Engine the stand-in claims to be, and what older versions' functions lack."""

from __future__ import annotations

import functools
import importlib.metadata
import inspect
from collections.abc import Callable
from typing import Any

NEWEST = "2.20.2"
# of which Megatron-core 0.16 and earlier is tested with; later ones take the newest
OLDER, LAST_CORE_OF_OLDER = "2.11.0", (0, 16)


def _claimed() -> str:
    major, minor, *_ = importlib.metadata.version("megatron-core").split(".")
    return OLDER if (int(major), int(minor)) <= LAST_CORE_OF_OLDER else NEWEST


VERSION = _claimed()


def since_newest(added: tuple[str, ...], required_before: tuple[str, ...] = ()) -> Callable[[Callable], Callable]:
    """Decorates a function that has the newest version's parameters.

    Where the older version is claimed it lacks the parameters `added`, so that positions count and names are accepted
    as they were, and those `required_before` have no default.
    """

    def decorate(function: Callable) -> Callable:
        if VERSION == NEWEST:
            return function
        whole = inspect.signature(function).parameters
        assert {*added, *required_before} <= set(whole), (function, added, required_before)
        older = inspect.Signature(
            [
                parameter.replace(default=parameter.empty) if name in required_before else parameter
                for name, parameter in whole.items()
                if name not in added
            ]
        )

        @functools.wraps(function)
        def with_older_interface(*args: Any, **kwargs: Any) -> Any:
            return function(**older.bind(*args, **kwargs).arguments)

        with_older_interface.__signature__ = older  # type: ignore[attr-defined]
        return with_older_interface

    return decorate
