"""The table at the end of a check: what was measured beside what `plan` says, and beside an earlier check's numbers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

WIDTHS: tuple[int, ...] = (22, 30, 10, 9, 9, 9, 9)
HEAD: tuple[str, ...] = ("part", "", "seconds", "peak GB", "plan", "delta GB", "plan")
OTHERS = ("seconds", "peak GB", "delta GB")
MEASURED = ("seconds", "peak_gb", "delta_gb")
# step of a part / step of another, as far as both were measured
RATIOS = (
    ("oprd", "backbone"), ("oprd_all_tokens", "oprd"), ("sampled_token", "oprd"), ("top_16", "oprd"),
    ("full_vocab", "oprd"), ("oprd_top_16", "oprd"),
)  # fmt: skip


def table(report: dict[str, Any], others: dict[str, Any] | None = None) -> str:
    """The lines of the table, and the ratios of steps.

    Args:
        others: the JSON of another check, such as a rehearsal, whose numbers stand in further columns.
    """
    return "\n".join(_lines(report, others))


def _lines(report: dict[str, Any], others: dict[str, Any] | None) -> Iterator[str]:
    kind = "rehearsed" if report["run"]["rehearsed"] else "measured"
    yield f"\n{kind}; plan: what `nemo-oprd plan` says of the same update"
    head, widths = HEAD, WIDTHS
    if others is not None:
        where = "rehearsed" if others["run"]["rehearsed"] else others["machine"].get("gpu") or "the other"
        yield f"last columns: {where}"
        head, widths = (*HEAD, *OTHERS), (*WIDTHS, *(9,) * len(OTHERS))
    yield _row(head, widths)
    known = {} if others is None else {(part, row["what"]): row for part, row in _rows(others)}
    for part, row in _rows(report):
        cells = [part, row["what"], _number(row["seconds"], 3)]
        cells += [_number(row[key]) for key in ("peak_gb", "planned_peak_gb", "delta_gb", "planned_delta_gb")]
        if others is not None:
            other = known.get((part, row["what"]), {})
            cells += [_number(other.get(key), 3 if key == "seconds" else 2) for key in MEASURED]
        yield f"{_row(cells, widths)}  {row['note']}".rstrip()
    ratios = _ratios(report)
    if ratios:
        yield f"step ratios: {', '.join(ratios)}"
    for part in report["parts"]:
        skipped = part["numbers"].get("skipped")
        if skipped:
            yield f"{part['name']}: skipped: {skipped}"
    for part in report["parts"]:
        for problem in part["problems"]:
            yield f"NOT OK: {part['name']}: {problem}"
    run = report["run"]
    fine = sum(part["ok"] for part in report["parts"])
    yield (
        f"{fine} of {len(report['parts'])} parts ok; {run['seconds']:.0f} s, of which {run['overhead_seconds']:.0f} s "
        "outside of parts"
    )


def _rows(report: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for part in report["parts"]:
        for row in part["numbers"].get("rows", []):
            yield part["name"], row


def _ratios(report: dict[str, Any]) -> list[str]:
    steps = {part["name"]: part["numbers"].get("step_seconds") for part in report["parts"]}
    shapes = {
        part["name"]: (part["numbers"].get("layers"), part["numbers"].get("response")) for part in report["parts"]
    }
    return [
        f"{one} / {other} {steps[one] / steps[other]:.2f}"
        for one, other in RATIOS
        if steps.get(one) and steps.get(other) and shapes[one] == shapes[other]
    ]


def _number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _row(cells: Any, widths: Any) -> str:
    return "".join(
        f"{cell:<{width}}" if number < 2 else f"{cell:>{width}}"
        for number, (cell, width) in enumerate(zip(cells, widths, strict=True))
    )
