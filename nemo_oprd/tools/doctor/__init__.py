"""`doctor`: checks before a run for what makes distillation fail silently, one line each (docs/doctor.md)."""

from __future__ import annotations

import argparse
from pathlib import Path

from nemo_oprd.commands.options import add_config, config_of, json_file, origin, ranks
from nemo_oprd.run.checks import Refusal
from nemo_oprd.run.preflight import StartRequest, preflight, refused_start
from nemo_oprd.runtime.messages import is_first_rank
from nemo_oprd.tools.doctor.findings import Finding, Report, SampleSizes, for_diagnosis


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config(parser)
    parser.add_argument("--prompts", type=int, default=16, help="prompts to sample (default: %(default)s)")
    parser.add_argument("--problems", type=int, default=32, help="problems to grade (default: %(default)s)")
    parser.add_argument("--max-new-tokens", type=int, default=512, help="per response (default: %(default)s)")
    parser.add_argument("--json", metavar="FILE", help="also write all findings, with their numbers")


def run(options: argparse.Namespace) -> int:
    file = json_file(options, r'\{\s*"summary":')
    config = config_of(options)
    settings = SampleSizes(options.prompts, options.problems, options.max_new_tokens)
    diagnosed, from_file = for_diagnosis(config, settings), origin(options)
    try:
        spec = preflight(diagnosed, ranks(), "doctor", origin=from_file)
    except ValueError:
        _report_refusals(refused_start(StartRequest(diagnosed, ranks(), "doctor", origin=from_file)), file)
        raise
    from nemo_oprd.tools.doctor.examination import doctor

    return int(doctor(config, spec, settings, file))


def _report_refusals(refused: list[Refusal], file: Path | None) -> None:
    """Reports every check that `train` would fail before it imports torch; `train` names the first one only."""
    report = Report(speaks=is_first_rank())
    for refusal in refused:
        report.add(Finding("start", "wrong", str(refusal.error), {"check": refusal.code}, code="train-refuses"))
    if file is not None and report.speaks:
        report.write(file)
