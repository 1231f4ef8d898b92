"""The entry point that the commands share: it finds the source checkout and prints user errors as one line."""

from __future__ import annotations

import argparse
import importlib.util
import sys
import warnings
from collections.abc import Callable
from pathlib import Path


def run(command: Callable[[], int]) -> None:
    """Exits with the return value of `command`; after a ValueError, prints `error: ...` on stderr and exits with 2."""
    if importlib.util.find_spec("nemo_oprd") is None:  # not installed: use the checkout of this file
        sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    # Megatron warns that Apex and Transformer Engine are missing; the commands do not use them
    warnings.filterwarnings("ignore", module=r"megatron\.")
    try:
        code = command()
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        code = 2
    sys.exit(code)


def add_provider(parser: argparse.ArgumentParser) -> None:
    """The option of families that only Megatron-Bridge has."""
    parser.add_argument(
        "--provider",
        choices=("own", "bridge"),
        default="own",
        help="bridge: for a model of a family that only Megatron-Bridge has, in its environment (docs/nemo.md)",
    )
