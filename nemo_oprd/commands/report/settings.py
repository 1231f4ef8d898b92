"""What runs were started with, and where they differ: from the defaults, from each other, from start to start."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

from nemo_oprd.commands.report.figures import Key, run_key
from nemo_oprd.config.loading import as_plain
from nemo_oprd.config.resume_rules import Change, changes
from nemo_oprd.config.schema import Config
from nemo_oprd.observability.config_history import starts
from nemo_oprd.observability.run_reader import Run

ABSENT = "\N{EM DASH}"
# names of the runs themselves, when they started, and which files say so
_LEFT_OUT = ("output", *(f"environment.{name}" for name in ("started", "config", "after_step")))
_MODELS = ("environment.models", "environment.model_sizes")
# a password in an address: a page is mailed
_PASSWORD = re.compile(r"(?<=://)[^/@\s]*@")


# settings with which steps of a run were made: the steps, the file, and what differs from the steps before
Settings = tuple[str, str, list[Change]]


def differing_settings(runs: list[Run]) -> list[tuple[str, list[str]]]:
    """(Key, value per run) of every key whose value is not the same in all runs, in the order of the first run.

    Keys of environment.json (the last start of a run) begin with `environment.`.
    """
    return [
        (key, values)
        for key, values in all_settings(runs)
        if len(set(values)) > 1 and not key.startswith(_MODELS) and key not in _LEFT_OUT
    ]


def chosen_settings(run: Run) -> list[tuple[str, str, str]]:
    """(Key, value, default) of what a run sets otherwise than the defaults, in the order of its configuration."""
    defaults = _flat(as_plain(Config()))
    flat = {key: value for key, value in _flat(run.config).items() if key not in _LEFT_OUT}
    return [(key, value, defaults.get(key, ABSENT)) for key, value in flat.items() if value != defaults.get(key)]


def all_settings(runs: list[Run]) -> list[tuple[str, list[str]]]:
    """(Key, value per run) of every key of the runs' configurations and of their last starts' environments."""
    flat = [_flat(run.config) | _environment(run) for run in runs]
    keys = dict.fromkeys(key for one in flat for key in one)
    return [(key, [one.get(key, ABSENT) for one in flat]) for key in keys]


def changed_settings(runs: list[Run]) -> list[tuple[Key, list[Settings]]]:
    """The settings of each run whose steps were not all made with the same ones, in the order of the steps."""
    found = []
    for index, run in enumerate(runs):
        ends = [after for after, _, _ in run.history[1:]] + [run.steps[1]]
        rows, before = list[Settings](), None
        for (after, file, config), end in zip(run.history, ends, strict=True):
            if end > after:
                steps = f"{after + 1:,}" if end == after + 1 else f"{after + 1:,} to {end:,}"
                changed: list[Change] = changes(before, config) if before and config else []
                rows.append(
                    (steps, file, [replace(c, before=_shown(c.before), after=_shown(c.after)) for c in changed])
                )
                before = config
        if len(rows) > 1:
            found.append((run_key(index, run), rows))
    return found


def _environment(run: Run) -> dict[str, str]:
    """A run without environment.json has none: the file only informs, as for the run that writes it."""
    return _flat({"environment": (starts(run.path) or [{}])[-1]})


def _flat(value: Any, prefix: str = "") -> dict[str, str]:
    """Nested mappings as dotted key -> text of its value, as in JSON without quotes around texts."""
    if not isinstance(value, dict):
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
        return {prefix: _shown(text)}
    found: dict[str, str] = {}
    for name, item in value.items():
        found |= _flat(item, f"{prefix}.{name}" if prefix else str(name))
    return found


def _shown(text: str) -> str:
    return _PASSWORD.sub("...@", text)
