"""`evaluate`: samples the student on the validation sets, grades the responses and prints a table."""

from __future__ import annotations

import argparse

from nemo_oprd.commands.options import add_config, add_verbosity, config_of, origin, ranks
from nemo_oprd.run.preflight import preflight_evaluation


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config(parser)
    add_verbosity(parser)


def run(options: argparse.Namespace) -> None:
    sampling = preflight_evaluation(config_of(options), ranks(), origin=origin(options))
    from nemo_oprd.run.evaluate import evaluate

    evaluate(sampling)
