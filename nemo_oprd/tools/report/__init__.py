"""`nemo-oprd report`: one HTML page of figures, tables and responses from one or several run directories."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from nemo_oprd.runtime.output_directories import check_file

_LONGEST_S = 86_400


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", metavar="RUN")
    parser.add_argument("--output", metavar="FILE", help="default: report.html in the first run")
    parser.add_argument("--steps", metavar="FIRST-LAST", help="of the timeline; default: the last 5 steps of each run")
    parser.add_argument(
        "--follow",
        metavar="SECONDS",
        type=float,
        nargs="?",
        const=30.0,
        help="write the page anew every so many seconds (30) until the runs are finished; Ctrl-C ends it",
    )


def run(options: argparse.Namespace) -> None:
    """Writes the page and prints its path.

    Raises:
        ValueError: as `write_report`, `--follow` is not above 0 and at most a day, or `--steps` is no range of steps,
            or begins after the last step of runs that are not followed.
    """
    from nemo_oprd.tools.report.page import check_steps, unfinished, write_report
    from nemo_oprd.tools.report.panels import parse_steps

    follow, paths = options.follow, [Path(run) for run in options.runs]
    if follow is not None and not 0 < follow <= _LONGEST_S:
        raise ValueError(f"--follow {follow}: expected seconds above 0, at most {_LONGEST_S}; choose e.g. 30")
    steps = None if options.steps is None else parse_steps(options.steps)
    file = Path(options.output) if options.output else paths[0] / "report.html"
    check_file(file, "report", "--output", r"\s*<!doctype html>.*distillation report</title>")
    going_on = follow is not None and unfinished(paths)  # asked before the page is written, so that none is missed
    if steps is not None and not going_on:  # a run that is followed may reach them
        check_steps(paths, steps)
    print(write_report(paths, file, steps), flush=True)
    while follow is not None and going_on:
        time.sleep(follow)
        going_on = unfinished(paths)
        write_report(paths, file, steps)
