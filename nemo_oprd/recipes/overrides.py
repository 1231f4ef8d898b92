"""Nested groups of values, as launchers have them -> KEY=VALUE as Hydra's command line has them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from nemo_oprd.config.overrides import quoted


def as_overrides(values: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """The leaves of nested groups as KEY=VALUE in Hydra's syntax. An empty group sets nothing."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from as_overrides(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}={_literal(value)}"


def _literal(value: Any) -> str:
    """A value in Hydra's syntax. Launchers leave true, false and null on their command line as text."""
    if isinstance(value, str) and value.lower() not in ("true", "false", "null"):
        return quoted(value)
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(map(_literal, value)) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{name}:{_literal(item)}" for name, item in value.items()) + "}"
    return "null" if value is None else str(value).lower()
