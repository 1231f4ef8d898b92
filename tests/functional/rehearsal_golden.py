"""What a rehearsed step of a small model waits for and calls, per version: `rehearsal_golden.json`.

A new version of Megatron-core or Transformer Engine shows there what has changed.
"""

from __future__ import annotations

import json
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import Any

from nemo_oprd.tools.rehearse import layers as te_package
from nemo_oprd.tools.rehearse import waits_of_a_step

FILE = Path(__file__).with_name("rehearsal_golden.json")


def key(layers: str, model: str) -> str:
    """The versions of which the file has an entry; `model`: which of the models, "" for one without experts."""
    core = f"Megatron-core {version('megatron-core')}"
    built_of = "local layers" if layers == "local" else f"Transformer Engine {te_package.version()}"
    return ", ".join(filter(None, (core, built_of, model)))


def summary(found: dict[str, Any]) -> dict[str, Any]:
    """Waits by function and kind, calls by function and tensors -> how often, in one step."""
    waits: Counter[str] = Counter()
    for wait in waits_of_a_step(found):
        waits[f"{', '.join(wait['innermost'])}: {wait['what']}"] += wait["count"]
    calls = {f"{call['function']}({', '.join(call['tensors'])})": call["count"] for call in found["te_calls"]}
    return {"waits": dict(sorted(waits.items())), "calls": dict(sorted(calls.items()))}


def check(layers: str, found: dict[str, Any], folder: Path, model: str = "") -> None:
    """Raises AssertionError if the file's entry of these layers and versions is another one, or missing."""
    entries = json.loads(FILE.read_text())
    now = {**entries, key(layers, model): summary(found)}
    anew = folder / FILE.name
    anew.write_text(json.dumps(dict(sorted(now.items())), indent=1) + "\n")
    assert now == entries, f"if the change is meant: cp {anew} {FILE}"
