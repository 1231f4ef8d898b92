"""Tables of the runs of `toy_rollouts.py`, from studies/results/toy_rollouts/."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from nemo_oprd.evaluation.intervals import paired_differences

RESULTS = Path(__file__).parent / "results" / "toy_rollouts"
STEPS = 60  # updates of a run that is not shortened
EQUAL = 0.03  # runs whose operations differ by less have as many
SEED = 0  # the one at which rates are chosen
SEEDS = (SEED, 1, 2)
BASE, WHOLE = "mse token", "all"
LOSS_ORDER = (BASE, "mse predicting", "forward_kl", "full_vocab", "sampled_token", "sampled_token corrected")

Result = dict[str, Any]
Results = dict[str, Result]

# per held-out problem: heading, key, factor and digits
MEASURES = (("KL(t\\|s)", "forward_kl", 1.0, 4), ("KL(s\\|t)", "reverse_kl", 1.0, 4), ("solved, %", "solved", 100.0, 1))
POSITIONS = ((0, 8), (8, 16), (16, 24), (24, None))


def read_results() -> Results:
    """Name -> the measurements of every finished run, and of the students before training."""
    return {file.stem: json.loads(file.read_text()) for file in sorted(RESULTS.glob("*.json"))}


def distance(result: Result) -> float:
    """What chooses a rate: the mean of both divergences on the teacher's responses to tune problems."""
    return float(np.mean([result["tune"]["forward_kl"], result["tune"]["reverse_kl"]]))


def runs_of(results: Results, **values: Any) -> list[Result]:
    """The runs of the first seed, unless `values` names another one, whose arms have these values."""
    wanted = {"seed": SEED, **values}
    arms = [each for each in results.values() if "arm" in each]
    return [each for each in arms if all(each["arm"][key] == value for key, value in wanted.items())]


def best(results: Results, **values: Any) -> Result | None:
    """The run with the best rate; None if there is none."""
    return min(runs_of(results, **{"steps": STEPS, **values}), key=distance, default=None)


def _table(headings: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [list(headings), *map(list, rows)]
    lines.insert(1, ["---"] * len(lines[0]))
    return (
        "\n".join("| " + " | ".join(line) + " |" for line in lines).replace("| --- ", "|---").replace("--- |", "---|")
    )


def _means(result: Result) -> list[str]:
    return [f"{factor * np.mean(result['heldout'][key]):.{digits}f}" for _, key, factor, digits in MEASURES]


def _differences(one: Result, other: Result) -> list[str]:
    """Means over held-out problems of one run minus another, with paired bootstrap intervals."""
    values = [{key: factor * np.array(each["heldout"][key]) for _, key, factor, _ in MEASURES} for each in (one, other)]
    found = paired_differences(*values)
    return [
        f"{found[key].value:+.{digits}f} [{found[key].low:+.{digits}f}, {found[key].high:+.{digits}f}]"
        for _, key, _, digits in MEASURES
    ]


def _work(result: Result) -> float:
    return float(sum(result["operations"].values())) * int(result["arm"]["steps"])


def _label(result: Result) -> list[str]:
    arm = result["arm"]
    return [arm["tokens"], str(arm["steps"]), f"{arm['rate']:g}"]


def beginnings(results: Results) -> str:
    """Which tokens of mse on token states, without a lag: every number of tokens and updates at its best rate."""
    keys = dict.fromkeys((each["arm"]["tokens"], each["arm"]["steps"]) for each in runs_of(results, loss=BASE, lag=0))
    rows = [row for tokens, steps in keys if (row := best(results, loss=BASE, lag=0, tokens=tokens, steps=steps))]
    rows.sort(key=lambda row: (-_work(row), row["arm"]["tokens"]))
    whole = best(results, loss=BASE, lag=0, tokens=WHOLE)
    assert whole is not None
    start = results[f"start-seed_{SEED}"]

    def cells(row: Result) -> list[str]:
        kl = row["by_position"]["reverse_kl"]
        return [*_means(row), *(f"{np.mean(kl[first:last]):.4f}" for first, last in POSITIONS)]

    headings = ["supervised tokens", "updates", "rate", "operations", *(heading for heading, *_ in MEASURES)]
    headings += ["KL(s\\|t) of tokens 1-8", "9-16", "17-24", "25-"]
    body = [[*_label(row), f"{_work(row) / _work(whole):.2f}", *cells(row)] for row in rows]
    return _table(headings, [["(start)", "0", "", "0", *cells(start)], *body])


def against_whole(results: Results) -> str:
    """Beginnings and ends against all tokens, at as many updates, and at as many operations with sampling counted."""
    runs = [each for each in (best(results, loss=BASE, lag=0, tokens=tokens) for tokens in _parts(results)) if each]
    counts = sorted({each["arm"]["steps"] for each in runs_of(results, loss=BASE, lag=0, tokens=WHOLE)}, reverse=True)
    rows = []
    for run, count in itertools.product(runs, counts):
        whole = best(results, loss=BASE, lag=0, tokens=WHOLE, steps=count)
        assert whole is not None
        equal = [name for name, is_equal in (
            ("updates", count == STEPS), ("operations", abs(_work(run) / _work(whole) - 1) < EQUAL),
        ) if is_equal]  # fmt: skip
        if equal:
            label = f"{run['arm']['tokens']}, {STEPS} updates - all, {count}"
            rows.append([label, " and ".join(equal), *_differences(run, whole)])
    return _table(["difference", "equal", *(heading for heading, *_ in MEASURES)], rows)


def _parts(results: Results) -> list[str]:
    found = {each["arm"]["tokens"] for each in runs_of(results, loss=BASE, lag=0)} - {WHOLE}
    return sorted(found, key=lambda tokens: (tokens.split()[0], int(tokens.split()[1])))


def lagged(results: Results) -> str:
    """KL(s|t) and the share solved of every loss with and without lags, at the best rate that ran at all lags."""
    rows = []
    arms = [each["arm"] for each in runs_of(results, steps=STEPS)]
    methods = {(arm["loss"], arm["tokens"]) for arm in arms if arm["lag"]}
    for loss, tokens in sorted(methods, key=lambda each: (LOSS_ORDER.index(each[0]), each[1])):
        # without a lag all weights of a correction are 1
        of_lag = {0: _by_rate(results, loss.removesuffix(" corrected"), tokens, 0)}
        of_lag |= {lag: _by_rate(results, loss, tokens, lag) for lag in sorted({arm["lag"] for arm in arms} - {0})}
        of_lag = {lag: tried for lag, tried in of_lag.items() if tried}
        common = set.intersection(*(set(tried) for tried in of_lag.values()))
        runs = {lag: min((tried[rate] for rate in common), key=distance) for lag, tried in of_lag.items()}
        for lag, run in runs.items():
            change = _differences(run, runs[0]) if lag else [""] * len(MEASURES)
            label = loss if tokens == WHOLE else f"{loss}, {tokens}"
            if lag or not loss.endswith("corrected"):
                cells = [*_means(run)[1:], *change[1:]]
                rows.append([label, str(lag), f"{run['arm']['rate']:g}", *cells])
    headings = [heading for heading, *_ in MEASURES[1:]]
    return _table(["loss", "lag", "rate", *headings, *(f"{heading}: minus lag 0" for heading in headings)], rows)


def close(results: Results) -> Iterator[tuple[str, Result, Result]]:
    """(what is compared, run, run) of every seed, at the rate that is best at the first seed."""
    beginning, late = {"tokens": "first 8", "lag": 0}, {"tokens": WHOLE, "lag": 8}
    run = best(results, loss=BASE, **beginning)
    if run is None:
        return
    whole = runs_of(results, loss=BASE, tokens=WHOLE, lag=0)
    counts = sorted({each["arm"]["steps"] for each in whole if abs(_work(each) / _work(run) - 1) < EQUAL} | {STEPS})
    compared = [
        (f"first 8, {STEPS} updates - all, {count}", BASE, beginning, {"steps": count}) for count in counts[::-1]
    ]
    compared += [(f"{loss}, lag 8 - lag 0", loss, late, {"steps": STEPS}) for loss in (BASE, "mse predicting")]
    for label, loss, changes, plain in compared:
        for seed in SEEDS:
            of_seed = {"loss": loss, "seed": seed, "rate": run["arm"]["rate"]}
            ones = runs_of(results, **of_seed, **changes, steps=STEPS)
            others = runs_of(results, **of_seed, tokens=WHOLE, lag=0, **plain)
            if ones and others:
                yield label, ones[0], others[0]


def seeds(results: Results) -> str:
    """Differences of close runs: means over seeds with intervals over problems, and what each seed says."""
    pairs: dict[str, list[tuple[Result, Result]]] = {}
    for label, one, other in close(results):
        pairs.setdefault(label, []).append((one, other))
    rows = []
    for label, runs in pairs.items():
        cells = []
        means = _differences(*map(_pooled, zip(*runs, strict=True)))
        for mean, (_, key, factor, digits) in zip(means, MEASURES, strict=True):
            each = [
                factor * np.mean(one["heldout"][key]) - factor * np.mean(other["heldout"][key]) for one, other in runs
            ]
            cells.append(f"{mean}; seeds " + ", ".join(f"{value:+.{digits}f}" for value in each))
        ends = [[np.mean(run["by_position"]["reverse_kl"][slice(*POSITIONS[-1])]) for run in pair] for pair in runs]
        rows.append([label, *cells, ", ".join(f"{one - other:+.4f}" for one, other in ends)])
    found = sorted({one["arm"]["seed"] for runs in pairs.values() for one, _ in runs})
    headings = [*(heading for heading, *_ in MEASURES), f"KL(s\\|t) of tokens {POSITIONS[-1][0] + 1}-, seeds"]
    return _table([f"seeds {', '.join(map(str, found))}", *headings], rows)


def _pooled(runs: Iterable[Result]) -> Result:
    """The problems of several seeds as those of one run."""
    values = [run["heldout"] for run in runs]
    return {"heldout": {key: np.concatenate([each[key] for each in values]) for _, key, *_ in MEASURES}}


def _by_rate(results: Results, loss: str, tokens: str, lag: int) -> dict[float, Result]:
    runs = runs_of(results, loss=loss, tokens=tokens, lag=lag, steps=STEPS)
    return {each["arm"]["rate"]: each for each in runs}


def rates(results: Results) -> str:
    """The divergence on tune problems at every rate that was tried."""
    tried = [each for each in runs_of(results) if each["arm"]["steps"] == STEPS]
    keys = dict.fromkeys(tuple(each["arm"][key] for key in ("loss", "tokens", "lag")) for each in tried)
    every = sorted({each["arm"]["rate"] for each in tried})
    rows = []
    for loss, tokens, lag in sorted(keys, key=lambda key: (LOSS_ORDER.index(key[0]), key[1:])):
        found = _by_rate(results, loss, tokens, lag)
        cells = [f"{distance(found[rate]):.4f}" if rate in found else "" for rate in every]
        rows.append([f"{loss}, {tokens}, lag {lag}", *cells])
    return _table(["tune problems, mean of both divergences", *(f"{rate:g}" for rate in every)], rows)


def tables(results: Results) -> str:
    """The tables of docs/results_rollouts.md."""
    return "\n\n".join(table(results) for table in (beginnings, lagged, seeds))


def details(results: Results) -> str:
    """The tables that only the command prints."""
    return "\n\n".join(table(results) for table in (against_whole, rates))
