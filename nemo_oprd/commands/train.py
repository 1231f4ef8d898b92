"""`train`: distils the student; docs/runs.md describes the run directory."""

from __future__ import annotations

import argparse

from nemo_oprd.commands.options import add_config, add_verbosity, run_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config(parser)
    add_verbosity(parser)


def run(options: argparse.Namespace) -> None:
    spec = run_of(options)
    from nemo_oprd.train import train

    train(spec)
