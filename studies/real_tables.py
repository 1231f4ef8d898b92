"""Tables of the study on a real language model, from the JSON files of its finished runs.

The held-out prompts are split: the first half chooses a loss's learning rate (the lowest mean of both divergences on
the teacher's responses), and every number in a table is measured on the second half. Intervals are 95 % percentile
bootstrap intervals over prompts.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

RESULTS = Path(__file__).parent / "results" / "real_study"
# responses to the held-out prompts that all runs are measured on, so that runs of several machines can be paired
TEACHER_RESPONSES = RESULTS.parent / "real_study_teacher.jsonl"
DRAWS = 2000

Results = dict[str, dict[str, Any]]
Measured = dict[str, dict[str, list[float]]]


def read_results() -> Results:
    """All finished runs by name."""
    return {file.stem: json.loads(file.read_text()) for file in sorted(RESULTS.glob("*.json"))}


def _mean(measured: Measured, source: str, key: str, prompts: slice | np.ndarray) -> float:
    """The mean over tokens of a sum, or over responses of a description."""
    values = np.array(measured[source][key], dtype=float)[prompts]  # None becomes NaN
    if key in ("distinct_4", "truncated", "tokens"):
        return float(np.nanmean(values))
    return float(values.sum() / np.array(measured[source]["tokens"], dtype=float)[prompts].sum())


# (heading, value for the measurements of some prompts)
COLUMNS: tuple[tuple[str, Callable[[Measured, Any], float]], ...] = (
    ("KL(t\\|s)", lambda m, at: _mean(m, "on_teacher", "forward_kl", at)),
    ("KL(s\\|t)", lambda m, at: _mean(m, "on_teacher", "reverse_kl", at)),
    ("same greedy token", lambda m, at: _mean(m, "on_teacher", "same_greedy", at)),
    ("own KL(s\\|t)", lambda m, at: _mean(m, "on_student", "reverse_kl", at)),
    ("own entropy", lambda m, at: _mean(m, "on_student", "student_entropy", at)),
    ("teacher's perplexity", lambda m, at: math.exp(_mean(m, "on_student", "teacher_nll", at))),
    ("distinct 4-grams", lambda m, at: _mean(m, "on_student", "distinct_4", at)),
    ("length", lambda m, at: _mean(m, "on_student", "tokens", at)),
)


def halves(measured: Measured) -> tuple[slice, slice]:
    """The prompts that choose, and those that are reported."""
    count = len(measured["on_teacher"]["tokens"])
    return slice(0, count // 2), slice(count // 2, count)


def distance(measured: Measured) -> float:
    """What chooses a learning rate: the mean of both divergences on the teacher's responses to the first prompts."""
    chooses, _ = halves(measured)
    return sum(_mean(measured, "on_teacher", key, chooses) for key in ("forward_kl", "reverse_kl")) / 2


def best_runs(results: Results, student: str, change: str = "") -> dict[str, str]:
    """Loss -> the name of its run with the best rate, among the runs with seed 0."""
    best: dict[str, str] = {}
    for name, result in results.items():
        arm = result.get("arm")
        if arm is None or (arm["student"], arm["change"], arm["seed"]) != (student, change, 0):
            continue
        loss = arm["loss"]
        if loss not in best or distance(result["measured"]) < distance(results[best[loss]]["measured"]):
            best[loss] = name
    return best


def line(measured: Measured) -> str:
    """The main numbers of one run, on all prompts."""
    return "  ".join(f"{name} {value(measured, slice(None)):.3f}" for name, value in COLUMNS)


def interval(
    runs: Sequence[tuple[Measured, Measured]], value: Callable[[Measured, Any], float]
) -> tuple[float, float, float]:
    """The mean difference of a value on the reported prompts, with its paired bootstrap interval over prompts.

    Args:
        runs: pairs of runs, such as those of two losses with the same seed, one pair for each seed.
    """
    texts = [side["on_teacher"]["tokens"] for pair in runs for side in pair]
    if any(text != texts[0] for text in texts):
        raise ValueError(
            "two runs were measured on other responses of the teacher; expected the same: measure one again"
        )
    at = np.arange(len(texts[0]))[halves(runs[0][0])[1]]

    def mean(prompts: np.ndarray) -> float:
        return sum(value(one, prompts) - value(other, prompts) for one, other in runs) / len(runs)

    draw = np.random.default_rng(0)
    low, high = np.percentile([mean(chosen) for chosen in draw.choice(at, (DRAWS, len(at)))], [2.5, 97.5])
    return mean(at), float(low), float(high)


def _difference(one: Measured, other: Measured, value: Callable[[Measured, Any], float]) -> str:
    return _signed(*interval([(one, other)], value))


def _signed(difference: float, low: float, high: float) -> str:
    return f"{difference:+.3f} [{low:+.3f}, {high:+.3f}]"


def _row(label: str, measured: Measured) -> str:
    _, reported = halves(measured)
    return f"| {label} | " + " | ".join(f"{value(measured, reported):.3g}" for _, value in COLUMNS) + " |"


def _header(first: str) -> str:
    return f"| {first} | " + " | ".join(name for name, _ in COLUMNS) + " |\n" + "|---" * (1 + len(COLUMNS)) + "|"


def best_table(results: Results, student: str) -> str:
    """Every loss at its best rate, and the student before training."""
    best = best_runs(results, student)
    lines = [_header(student), _row("(start)", results[f"{student}-start"]["measured"])]
    for loss, name in sorted(best.items(), key=lambda item: distance(results[item[1]]["measured"])):
        lines.append(_row(f"{loss}, {results[name]['arm']['rate']:g}", results[name]["measured"]))
    return "\n".join(lines)


def runs_table(results: Results, student: str) -> str:
    """All runs of the losses on a student, and the student before training."""
    arms = [r["arm"] | {"measured": r["measured"]} for r in results.values() if "arm" in r]
    chosen = [arm for arm in arms if arm["student"] == student and not arm["change"]]
    rows = [_row("(start)", results[f"{student}-start"]["measured"])]
    for arm in sorted(chosen, key=lambda arm: (arm["loss"], arm["rate"], arm["seed"])):
        rows.append(_row(f"{arm['loss']}, {arm['rate']:g}, seed {arm['seed']}", arm["measured"]))
    return "\n".join([_header(student), *rows])


def rates_table(results: Results, student: str) -> str:
    """Both divergences on the teacher's responses at every rate that was tried."""
    arms = {
        (r["arm"]["loss"], r["arm"]["rate"]): r["measured"]
        for r in results.values()
        if "arm" in r and (r["arm"]["student"], r["arm"]["change"], r["arm"]["seed"]) == (student, "", 0)
    }
    if not arms:
        return ""
    rates = sorted({rate for _, rate in arms})
    lines = ["| loss | " + " | ".join(f"{rate:g}" for rate in rates) + " |", "|---" * (1 + len(rates)) + "|"]
    for loss in dict.fromkeys(loss for loss, _ in arms):
        cells = [_both(arms[loss, rate]) if (loss, rate) in arms else "" for rate in rates]
        lines.append(f"| {loss} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def cost_table(results: Results, student: str) -> str:
    """Counted operations of an update of every loss."""
    counted = {loss: results[name]["operations"] for loss, name in best_runs(results, student).items()}
    if "mse" not in counted:
        return ""
    headings = ("sampling, GFLOP", "teacher", "update", "all, mse = 1")
    lines = [f"| {student}, per update | " + " | ".join(headings) + " |", "|---" * (1 + len(headings)) + "|"]
    for loss, each in counted.items():
        cells = [f"{each[kind]:.0f}" for kind in ("sampling", "teacher", "update")]
        share = sum(each.values()) / sum(counted["mse"].values())
        lines.append(f"| {loss} | " + " | ".join([*cells, f"{share:.2f}"]) + " |")
    return "\n".join(lines)


def _both(measured: Measured) -> str:
    _, reported = halves(measured)
    return " / ".join(f"{value(measured, reported):.2f}" for _, value in COLUMNS[:2])


def against_mse_table(results: Results, student: str) -> str:
    """The difference of every loss from mse, each at its best rate, with intervals."""
    base = "mse"
    best = best_runs(results, student)
    if base not in best:
        return ""
    reference = results[best[base]]["measured"]
    lines = [f"| minus {base} | KL(t\\|s) | KL(s\\|t) | same greedy token |", "|---|---|---|---|"]
    for loss, name in best.items():
        if loss != base:
            cells = [_difference(results[name]["measured"], reference, value) for _, value in COLUMNS[:3]]
            lines.append(f"| {loss} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def changes_table(results: Results, student: str) -> str:
    """Runs in which one setting differs from a loss's, each after the run without the change."""
    rows: dict[str, str] = {}
    for base, changed in _changes(results, student):
        for name in (base, changed):
            arm = results[name]["arm"]
            label = ", ".join(part for part in (arm["loss"], arm["change"], f"{arm['rate']:g}") if part)
            rows.setdefault(name, _row(label, results[name]["measured"]))
    return "\n".join([_header(f"{student}, changes"), *rows.values()]) if rows else ""


def against_base_table(results: Results, student: str) -> str:
    """The difference of every change from the run without it, with intervals, and its counted operations."""
    rows = []
    for base, changed in _changes(results, student):
        one, other = results[changed], results[base]
        work = sum(one["operations"].values()) * one["arm"]["steps"]
        share = work / (sum(other["operations"].values()) * other["arm"]["steps"])
        cells = [_difference(one["measured"], other["measured"], value) for _, value in COLUMNS[:3]]
        label = f"{one['arm']['change']}, {one['arm']['steps']} updates"
        rows.append(f"| {label} | " + " | ".join([*cells, f"{share:.2f}"]) + " |")
    header = f"| {student}: change minus none | KL(t\\|s) | KL(s\\|t) | same greedy token | operations of the run |"
    return "\n".join([header, "|---|---|---|---|---|", *rows]) if rows else ""


def _changes(results: Results, student: str) -> list[tuple[str, str]]:
    """The runs with one setting changed: (name of the run without the change, name of the run)."""
    names = {
        tuple(r["arm"][key] for key in ("student", "loss", "rate", "seed", "change")): name
        for name, r in results.items()
        if "arm" in r
    }
    pairs = [((*key[:-1], ""), name) for key, name in names.items() if key[-1] and key[0] == student]
    return [(names[base], name) for base, name in pairs]


def seeds_table(results: Results, student: str) -> str:
    """Mean and range over seeds of the losses that ran with several."""
    rows = []
    for label, runs in _seeds(results, student).items():
        cells = []
        for _, value in COLUMNS:
            each = [value(run, halves(run)[1]) for run in runs.values()]
            cells.append(f"{sum(each) / len(each):.3g} ({min(each):.3g} to {max(each):.3g})")
        rows.append(f"| {label}, {len(runs)} seeds | " + " | ".join(cells) + " |")
    return "\n".join([_header(student), *rows]) if rows else ""


def against_seeds_table(results: Results, student: str) -> str:
    """Mean differences of two losses over their common seeds: interval over prompts, and range over seeds."""
    rows = []
    for (one, ours), (other, theirs) in combinations(_seeds(results, student).items(), 2):
        runs = [(ours[seed], theirs[seed]) for seed in sorted(ours.keys() & theirs.keys())]
        cells = []
        for _, value in COLUMNS[:3]:
            each = [interval([pair], value)[0] for pair in runs]
            cells.append(f"{_signed(*interval(runs, value))}, seeds {min(each):+.3f} to {max(each):+.3f}")
        rows.append(f"| {one} minus {other} | " + " | ".join(cells) + " |")
    names = " | ".join(name for name, _ in COLUMNS[:3])
    return "\n".join([f"| {student}, all seeds | {names} |", "|---|---|---|---|", *rows]) if rows else ""


def _seeds(results: Results, student: str) -> dict[str, dict[int, Measured]]:
    """`LOSS, RATE` -> seed -> measurements, for what ran with several seeds."""
    groups: dict[str, dict[int, Measured]] = {}
    for result in results.values():
        arm = result.get("arm")
        if arm and arm["student"] == student and not arm["change"]:
            groups.setdefault(f"{arm['loss']}, {arm['rate']:g}", {})[arm["seed"]] = result["measured"]
    return {label: runs for label, runs in groups.items() if len(runs) > 1}


def tables(results: Results) -> str:
    """The tables of docs/results_smollm2.md."""
    pruned = (best_table, against_seeds_table, against_base_table)
    return _joined(results, {"pruned": pruned, "quantised": (runs_table,)})


def details(results: Results) -> str:
    """The tables that only the command prints."""
    pruned = (rates_table, seeds_table, changes_table, cost_table, against_mse_table)
    return _joined(results, {"pruned": pruned, "quantised": (cost_table,)})


def _joined(results: Results, made: dict[str, tuple[Callable[[Results, str], str], ...]]) -> str:
    """Tables in Markdown of the students whose distance before training was measured."""
    students = [student for student in made if f"{student}-start" in results]
    parts = (table(results, student) for student in students for table in made[student])
    return "\n\n".join(part for part in parts if part)
