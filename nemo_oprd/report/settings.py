"""What runs were started with, where they differ: their configurations and their environments."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from nemo_oprd.observability.run_reader import Run

ABSENT = "\N{EM DASH}"
# names of the runs themselves, and when they started
_LEFT_OUT = ("output", "environment.started")


def differing_settings(runs: list[Run]) -> list[tuple[str, list[str]]]:
    """(Key, value per run) of every key whose value is not the same in all runs, in the order of the first run.

    Keys of environment.json (the last start of a run) begin with `environment.`.
    """
    flat = [_flat(run.config) | _flat({"environment": _environment(run.path)}) for run in runs]
    keys = dict.fromkeys(key for one in flat for key in one if key not in _LEFT_OUT)
    rows = [(key, [one.get(key, ABSENT) for one in flat]) for key in keys]
    return [(key, values) for key, values in rows if len(set(values)) > 1]


def _environment(path: Path) -> dict[str, Any]:
    """The last entry of environment.json; {} if there is none: it only informs, as for the run that writes it."""
    try:
        entries = json.loads((path / "environment.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return entries[-1] if isinstance(entries, list) and entries and isinstance(entries[-1], dict) else {}


def _flat(value: Any, prefix: str = "") -> dict[str, str]:
    """Nested mappings as dotted key -> text of its value, as in JSON without quotes around texts."""
    if not isinstance(value, dict):
        return {prefix: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)}
    found: dict[str, str] = {}
    for name, item in value.items():
        found |= _flat(item, f"{prefix}.{name}" if prefix else str(name))
    return found
