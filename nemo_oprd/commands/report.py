"""`nemo-oprd report`: one HTML page of curves and tables from one or several run directories."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from nemo_oprd.observability.report.page import write_report


def report(runs: Sequence[str], output: str | None = None) -> None:
    """Writes the page and prints its path.

    Args:
        runs: run directories, at least one.
        output: the file to write; None writes report.html into the first run directory.

    Raises:
        ValueError: as `write_report`.
    """
    paths = [Path(run) for run in runs]
    print(write_report(paths, Path(output) if output else paths[0] / "report.html"))
