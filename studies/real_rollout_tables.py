"""Tables of the runs of `real_rollouts.py`, from studies/results/real_rollouts/.

Values are means over the tokens of the teacher's responses to held-out prompts. Brackets are 95 % percentile bootstrap
intervals over prompts of the difference of two students on the same responses.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

RESULTS = Path(__file__).parent / "results" / "real_rollouts"
TEACHER_RESPONSES = RESULTS.parent / "real_rollouts_teacher.jsonl"
BUCKETS = ((1, 16), (17, 32), (33, 64), (65, 128))
DRAWS = 2000
EQUAL = 0.05  # runs whose operations differ by less have as many
WHOLE = "all"

Result = dict[str, Any]
Results = dict[str, Result]
# bucket -> measure -> a sum per response
Measured = dict[str, dict[str, list[float]]]

# heading, measure and digits
MEASURES = (("KL(t\\|s)", "forward_kl", 3), ("KL(s\\|t)", "reverse_kl", 3), ("same greedy token", "same_greedy", 3))


def read_results() -> Results:
    """Name -> the measurements of every finished run, and of the student before training."""
    return {file.stem: json.loads(file.read_text()) for file in sorted(RESULTS.glob("*.json"))}


def sums(measured: Measured, key: str, buckets: Iterable[str] = ()) -> np.ndarray:
    """[prompts]: the sums of a measure over the tokens of some buckets; of all if none is named."""
    return np.sum([measured[bucket][key] for bucket in buckets or measured], axis=0)


def mean(measured: Measured, key: str, buckets: Iterable[str] = ()) -> float:
    """The mean of a measure over tokens."""
    return float(sums(measured, key, buckets).sum() / sums(measured, "tokens", buckets).sum())


def difference(one: Measured, other: Measured, key: str, buckets: Iterable[str] = ()) -> tuple[float, float, float]:
    """The difference of two means over tokens, with its paired bootstrap interval over prompts.

    Raises:
        ValueError: the two were measured on other responses.
    """
    tokens = sums(one, "tokens", buckets)
    if not np.array_equal(tokens, sums(other, "tokens", buckets)):
        raise ValueError(
            "two runs were measured on other responses of the teacher; expected the same: measure one again"
        )
    gaps = sums(one, key, buckets) - sums(other, key, buckets)
    chosen = np.random.default_rng(0).integers(len(gaps), size=(DRAWS, len(gaps)))
    low, high = np.percentile(gaps[chosen].sum(1) / tokens[chosen].sum(1), [2.5, 97.5])
    return float(gaps.sum() / tokens.sum()), float(low), float(high)


def work(result: Result, updates: int) -> float:
    """Counted operations of so many updates in 10^9: sampling, teacher and update."""
    return float(sum(result["operations"].values())) * updates


def _runs(results: Results, **values: Any) -> Iterator[tuple[Result, int, Measured]]:
    """(run, updates, measurements) of the arms with these values."""
    for result in results.values():
        arm = result.get("arm")
        if arm is not None and all(arm[key] == value for key, value in values.items()):
            for updates, measured in result["measured"].items():
                yield result, int(updates), measured


def _table(headings: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in (list(headings), *rows)]
    lines.insert(1, "|" + "---|" * len(list(headings)))
    return "\n".join(lines)


def _beginnings(results: Results) -> list[tuple[Result, int, Measured]]:
    """The runs of mse on the longer responses, the dearest first."""
    longest = BUCKETS[-1][1]
    found = list(_runs(results, loss="mse", limit=longest, lag=0, seed=0))
    return sorted(found, key=lambda run: (-round(work(run[0], run[1])), run[0]["arm"]["tokens"]))


def _whole(runs: list[tuple[Result, int, Measured]]) -> list[tuple[Result, int, Measured]]:
    """Those on all tokens, the longest first."""
    return sorted((run for run in runs if run[0]["arm"]["tokens"] == WHOLE), key=lambda run: -run[1])


def _cells(measured: Measured) -> list[str]:
    whole = [f"{mean(measured, key):.{digits}f}" for _, key, digits in MEASURES]
    return [*whole, *(f"{mean(measured, 'reverse_kl', [bucket]):.2f}" for bucket in measured)]


def beginnings(results: Results) -> str:
    """Which tokens of mse, on responses of at most 128."""
    runs = _beginnings(results)
    if not _whole(runs):
        return ""
    longest, most, _ = _whole(runs)[0]
    start = results["start"]["measured"]["0"]
    first, *others = start
    headings = ["supervised tokens", "updates", "operations", *(heading for heading, *_ in MEASURES),
                f"KL(s\\|t), tokens {first}", *others]  # fmt: skip
    rows = [["(start)", "0", "0", *_cells(start)]]
    for run, updates, measured in runs:
        share = work(run, updates) / work(longest, most)
        rows.append([run["arm"]["tokens"], str(updates), f"{share:.2f}", *_cells(measured)])
    return _table(headings, rows)


def against_whole(results: Results) -> str:
    """Beginnings and ends against all tokens, at as many updates, and at as many operations with sampling counted."""
    runs, last = _beginnings(results), list(results["start"]["measured"]["0"])[-1] if "start" in results else ""
    rows = []
    for run, updates, measured in runs:
        for whole, count, reference in _whole(runs) if run["arm"]["tokens"] != WHOLE else []:
            equal = [name for name, is_equal in (
                ("updates", count == updates),
                ("operations", abs(work(run, updates) / work(whole, count) - 1) < EQUAL),
            ) if is_equal]  # fmt: skip
            if equal:
                cells = [_signed(*difference(measured, reference, key)) for _, key, _ in MEASURES]
                end = _signed(*difference(measured, reference, "reverse_kl", [last]))
                label = f"{run['arm']['tokens']}, {updates} updates - all, {count}"
                rows.append([label, " and ".join(equal), *cells, end])
    headings = ["difference", "equal", *(heading for heading, *_ in MEASURES), f"KL(s\\|t) of tokens {last}"]
    return _table(headings, rows) if rows else ""


def lagged(results: Results) -> str:
    """Losses with and without a lag, on shorter responses."""
    rows = []
    for run, updates, measured in _runs(results, limit=BUCKETS[1][1]):
        loss, lag = run["arm"]["loss"], run["arm"]["lag"]
        # without a lag all weights of a correction are 1
        without = list(_runs(results, limit=BUCKETS[1][1], loss=loss.removesuffix(" corrected"), lag=0))
        change = [""] * len(MEASURES)
        if lag and without:
            change = [_signed(*difference(measured, without[0][2], key)) for _, key, _ in MEASURES]
        values = [f"{mean(measured, key):.{digits}f}" for _, key, digits in MEASURES]
        rows.append([loss, str(lag), f"{run['rate']:g}", str(updates), *values, *change])
    rows.sort(key=lambda row: (row[0], int(row[1])))
    names = [heading for heading, *_ in MEASURES]
    headings = ["loss", "lag", "rate", "updates", *names, *(f"{name}: minus lag 0" for name in names)]
    return _table(headings, rows) if rows else ""


def _signed(value: float, low: float, high: float) -> str:
    return f"{value:+.3f} [{low:+.3f}, {high:+.3f}]"


def tables(results: Results) -> str:
    """The tables of docs/results_smollm2.md."""
    return "\n\n".join(table for table in (made(results) for made in (beginnings, against_whole, lagged)) if table)
