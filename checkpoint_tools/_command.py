"""The entry point that the commands share: it finds the source checkout and prints user errors as one line."""

from __future__ import annotations

import argparse
import importlib.util
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

if importlib.util.find_spec("nemo_oprd") is None:  # not installed: use the checkout of this file
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from nemo_oprd.cli import run_as_command
from nemo_oprd.commands.parser import Parser

__all__ = ["Parser", "add_provider", "run"]


def run(command: Callable[[], int]) -> None:
    """Runs `command` and ends as `nemo-oprd` does: a user's mistake is one line on stderr and exit code 2."""
    # Megatron warns that Apex and Transformer Engine are missing; the commands do not use them
    warnings.filterwarnings("ignore", module=r"megatron\.")
    run_as_command(command)


def add_provider(parser: argparse.ArgumentParser) -> None:
    """The option of families that only Megatron-Bridge has."""
    parser.add_argument(
        "--provider",
        choices=("own", "bridge"),
        default="own",
        help="bridge: for a model of a family that only Megatron-Bridge has, in its environment (docs/nemo.md)",
    )
