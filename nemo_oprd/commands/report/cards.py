"""The summary of each run at the top of the report: models, layouts, loss, batch, and how far the run is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nemo_oprd.commands.report.figures import Key, run_key
from nemo_oprd.commands.report.numbers import duration
from nemo_oprd.observability.run_reader import Run

PARALLEL = (("tensor", "TP"), ("pipeline", "PP"), ("virtual_pipeline", "VPP"), ("context", "CP"))


@dataclass(frozen=True)
class Card:
    """The summary of one run: (setting, value) pairs, and the number of a line that was cut off."""

    key: Key
    settings: list[tuple[str, str]]
    cut_line: int | None


def cards(runs: list[Run]) -> list[Card]:
    """One card per run."""
    return [Card(run_key(index, run), _settings(run), run.cut_line) for index, run in enumerate(runs)]


def _settings(run: Run) -> list[tuple[str, str]]:
    """Only the settings that the run has."""
    steps = f"{run.steps[1]:,}" + (f" of {run.setting('train.steps'):,}, unfinished" if run.unfinished else "")
    prompts, each, lr = (run.setting(k) for k in ("train.prompts_per_step", "rollout.per_prompt", "train.lr"))
    batch = "" if None in (prompts, each, lr) else f"{prompts} prompts x {each} responses, learning rate {lr}"
    rows = [
        ("Student", _model(run, "student")),
        ("Student layout", _layout(run, "student")),
        ("Teacher", _model(run, "teacher")),
        ("Teacher layout", _layout(run, "teacher")),
        ("Loss", " + ".join(filter(None, (_representation_term(run), _output_term(run))))),
        ("Batch", batch),
        ("Steps", steps),
        ("Total time", duration(run.seconds)),
    ]
    return [(name, value) for name, value in rows if value]


def _model(run: Run, role: str) -> str:
    return str(run.setting(f"{role}.checkpoint") or run.setting(f"{role}.hf_path") or "")


def _layout(run: Run, role: str) -> str:
    """Only what is switched on. Example: "TP 2, PP 2, sequence parallel"."""
    layout = run.setting(f"{role}.parallel")
    if not isinstance(layout, dict):
        return ""
    parts = [f"{short} {layout[name]}" for name, short in PARALLEL if layout.get(name, 1) != 1]
    parts += ["sequence parallel"] if layout.get("sequence") else []
    if role == "teacher" and run.setting("teacher.placement"):
        parts.append(str(run.setting("teacher.placement")))
    return ", ".join(parts) or "data parallel only"


def _representation_term(run: Run) -> str:
    """Example: "representation mse (layers all, last_k 2000)"; "" if the term is off."""
    settings = run.setting("loss.representation")
    if not isinstance(settings, dict) or not settings.get("weight"):
        return ""
    positions = settings.get("positions", "")
    positions = "all positions" if positions == "all" else f"{positions} {settings.get('k', '')}"
    bridge = run.setting("bridge.path")
    through = f", bridge {bridge}" if bridge not in (None, "none") else ""
    if run.setting("rollout.stop_after") is not None:
        positions += ", where sampling stops"
    details = f"layers {settings.get('layers', '')}, {positions}{through}"
    return f"{_weight(settings)}representation {settings.get('kind', '')} ({details})"


def _output_term(run: Run) -> str:
    """Example: "0.5 x output top_k (k 16)"; "" if the term is off."""
    settings = run.setting("loss.output")
    if not isinstance(settings, dict) or not settings.get("weight") or settings.get("kind") in (None, "none"):
        return ""
    support = f" (k {settings.get('k')})" if settings["kind"] == "top_k" else ""
    return f"{_weight(settings)}output {settings['kind']}{support}"


def _weight(settings: dict[str, Any]) -> str:
    if isinstance(settings["weight"], list):
        return "scheduled "
    return "" if settings["weight"] == 1 else f"{settings['weight']} x "
