"""What the tools share: a tool is `main = tool(description, add_arguments, run)`, the two as in `nemo_oprd/cli.py`."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path

if importlib.util.find_spec("nemo_oprd") is None:  # not installed: use the checkout of this file
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from nemo_oprd.cli import Parser
from nemo_oprd.runtime.exits import run_as_command


def tool(
    description: str,
    add_arguments: Callable[[argparse.ArgumentParser], None],
    run: Callable[[argparse.Namespace], int | None],
) -> Callable[[], None]:
    """The entry point: it ends as `nemo-oprd` does, with one line on stderr and exit code 2 for a user's mistake."""

    def main() -> None:
        parser = Parser(description=description)
        add_arguments(parser)
        options = parser.parse_args()
        run_as_command(lambda: run(options) or 0)

    return main


def add_model(parser: argparse.ArgumentParser, output: str | None = None) -> None:
    """The model that is read, and where the result goes; `output` is the help of that option, None without it."""
    parser.add_argument("--hf-path", required=True, metavar="DIR", help="the model: config.json and safetensors")
    if output is not None:
        parser.add_argument("--output", required=True, metavar="DIR", help=output)


def student_of(options: argparse.Namespace) -> tuple[Path, Path]:
    """(The model's directory, the student's).

    Raises:
        ValueError: they are the same, or the student's holds something that no tool made.
    """
    from nemo_oprd.runtime.output_directories import check_directory

    source, target = Path(options.hf_path), Path(options.output)
    if target.resolve() == source.resolve():
        raise ValueError(f"--output {target} is the model itself; expected another directory: choose one")
    check_directory(target, "export", "--output")
    return source, target


def add_provider(parser: argparse.ArgumentParser) -> None:
    """The option of families that only Megatron-Bridge has."""
    parser.add_argument(
        "--provider",
        choices=("own", "bridge"),
        default="own",
        help="bridge: for a model of a family that only Megatron-Bridge has, in its environment (docs/nemo.md)",
    )
