"""`doctor`: says in one line each what makes distillation fail silently, before the run (docs/doctor.md)."""

from __future__ import annotations

import argparse

from nemo_oprd.commands.options import add_config, config_of, json_file, origin, ranks
from nemo_oprd.run.preflight import preflight
from nemo_oprd.tools.doctor.settings import Settings, for_diagnosis


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config(parser)
    parser.add_argument("--prompts", type=int, default=16, help="prompts to sample (default: %(default)s)")
    parser.add_argument("--problems", type=int, default=32, help="problems to grade (default: %(default)s)")
    parser.add_argument("--max-new-tokens", type=int, default=512, help="per response (default: %(default)s)")
    parser.add_argument("--json", metavar="FILE", help="also write all findings, with their numbers")


def run(options: argparse.Namespace) -> int:
    file = json_file(options, r'\{\s*"summary":')
    config = config_of(options)
    settings = Settings(options.prompts, options.problems, options.max_new_tokens)
    spec = preflight(for_diagnosis(config, settings), ranks(), options.command, origin=origin(options))
    from nemo_oprd.tools.doctor.examination import doctor

    return int(doctor(config, spec, settings, file))
