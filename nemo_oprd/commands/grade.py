"""`grade`: grades kept responses again; needs no model and imports no torch."""

from __future__ import annotations

import argparse
from pathlib import Path

from nemo_oprd.commands.options import add_verbosity


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "targets",
        nargs="+",
        metavar="RUN_OR_FILE",
        help="an output of `evaluate`, a run, or a file generations/SET.jsonl",
    )
    parser.add_argument(
        "--data", action="append", default=[], metavar="[SET=]FILE", help="take reference answers from this file"
    )
    parser.add_argument(
        "--grader", action="append", default=[], metavar="[SET=]NAME", help="a built-in grader, or MODULE:FUNCTION"
    )
    parser.add_argument("--judge", default="math_verify", metavar="NAME", help="math_verify (default) or text")
    parser.add_argument("--against", metavar="RUN_OR_FILE", help="print paired differences from this evaluation")
    parser.add_argument("--output", metavar="DIR", help="of one evaluation (default: beside its generations)")
    add_verbosity(parser)


def run(options: argparse.Namespace) -> None:
    from nemo_oprd.evaluation.grading.regrade import GradeOptions, by_set, grade

    grade(
        GradeOptions(
            targets=tuple(Path(target) for target in options.targets),
            data={name: Path(file) for name, file in by_set("--data", options.data).items()},
            graders=by_set("--grader", options.grader),
            judge=options.judge,
            against=Path(options.against) if options.against else None,
            output=Path(options.output) if options.output else None,
        )
    )
