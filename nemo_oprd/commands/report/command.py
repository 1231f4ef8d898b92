"""`nemo-oprd report`: one HTML page of figures, tables and responses from one or several run directories."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from nemo_oprd.commands.report.page import unfinished, write_report
from nemo_oprd.runtime.output_directories import check_file

_LONGEST_S = 86_400


def report(runs: Sequence[str], output: str | None = None, follow: float | None = None) -> None:
    """Writes the page and prints its path.

    Args:
        runs: run directories, at least one.
        output: the file to write; None writes report.html into the first run directory.
        follow: writes the page anew every so many seconds until all runs are finished; None writes it once.

    Raises:
        ValueError: as `write_report`, or `follow` is not above 0.
    """
    if follow is not None and not 0 < follow <= _LONGEST_S:
        raise ValueError(f"--follow {follow}: expected seconds above 0, at most {_LONGEST_S}; choose e.g. 30")
    paths = [Path(run) for run in runs]
    file = Path(output) if output else paths[0] / "report.html"
    check_file(file, "report", "--output", r"\s*<!doctype html>.*distillation report</title>")
    going_on = follow is not None and unfinished(paths)  # asked before the page is written, so that none is missed
    print(write_report(paths, file), flush=True)
    while follow is not None and going_on:
        time.sleep(follow)
        going_on = unfinished(paths)
        write_report(paths, file)
