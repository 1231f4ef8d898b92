"""`fit-bridge`: fits the projectors between models of different shape, stage 1 of OPRD-Bridge (docs/bridge.md)."""

from __future__ import annotations

import argparse

from nemo_oprd.commands.options import add_config, add_verbosity, run_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config(parser)
    add_verbosity(parser)


def run(options: argparse.Namespace) -> None:
    spec = run_of(options)
    from nemo_oprd.run.fit_bridge import fit_bridge

    fit_bridge(spec)
