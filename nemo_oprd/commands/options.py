"""Options that several commands have, and what they stand for."""

from __future__ import annotations

import argparse
import os
from functools import partial
from pathlib import Path

from nemo_oprd.config.loading import load_config, origin_of
from nemo_oprd.config.schema import Config
from nemo_oprd.run.named_files import Origin
from nemo_oprd.run.preflight import preflight
from nemo_oprd.run.resolve import RunSpec
from nemo_oprd.runtime import disk, output_directories


def positive(text: str) -> int:
    """The type of options that count something."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number of at least 1")
    return int(text)


def add_config(parser: argparse.ArgumentParser) -> None:
    """The configuration of the commands that have one: `config_of` and `run_of` read it."""
    parser.add_argument(
        "--config-name", required=True, metavar="NAME", help="a YAML file in the configuration directory"
    )
    parser.add_argument(
        "--config-dir", metavar="DIR", help="the configuration directory (default: the project's conf/)"
    )
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="e.g. train.lr=1e-4 output=runs/a")


def add_verbosity(parser: argparse.ArgumentParser) -> None:
    """How much a command that runs long shows."""
    how = parser.add_mutually_exclusive_group()
    how.add_argument(
        "--quiet", dest="verbosity", action="store_const", const="quiet", help="show results and warnings only"
    )
    how.add_argument(
        "--verbose", dest="verbosity", action="store_const", const="verbose", help="messages of all ranks, with times"
    )
    parser.set_defaults(verbosity="usual")


def config_of(options: argparse.Namespace) -> Config:
    """The configuration that the command line names.

    Raises:
        ValueError: there is none of that name, or a key or value is wrong.
    """
    return load_config(options.config_name, options.overrides, options.config_dir)


def origin(options: argparse.Namespace) -> Origin:
    """Says which file sets a key of `config_of(options)`."""
    return partial(origin_of, name=options.config_name, overrides=options.overrides, config_dir=options.config_dir)


def run_of(options: argparse.Namespace, *, against_reference: bool = False) -> RunSpec:
    """The run of this command, after the checks of `preflight`, which need neither torch nor weights.

    Raises:
        ValueError: as `config_of` and `preflight`.
    """
    config, command = config_of(options), options.command
    return preflight(config, ranks(), command, against_reference=against_reference, origin=origin(options))


def ranks() -> int:
    """Ranks of the job; 1 without torchrun."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def json_file(options: argparse.Namespace, begins: str) -> Path | None:
    """The file of `--json`, None without it.

    Args:
        begins: a pattern at the beginning of the files that the command writes, by which it recognises its own.

    Raises:
        ValueError: the file can't be written, or the command did not make the one that is there.
    """
    if options.json is None:
        return None
    file = Path(options.json)
    disk.check_file(options.json, "--json")
    output_directories.check_file(file, options.command, "--json", begins)
    return file
