"""`verify`: runs the training step on recorded rollouts without the optimizer; writes losses and gradients."""

from __future__ import annotations

import argparse

from nemo_oprd.commands.options import add_config, run_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config(parser)
    parser.add_argument(
        "--against",
        choices=["reference"],
        help="also compute the plain Hugging Face reference in one process and print the deviations",
    )


def run(options: argparse.Namespace) -> None:
    against_reference = options.against == "reference"
    spec = run_of(options, against_reference=against_reference)
    from nemo_oprd.run.verify import verify
    from nemo_oprd.train import accumulate_gradients

    verify(spec, accumulate_gradients, against_reference=against_reference)
