"""Options that several commands share, and the configuration, run or file that their values name."""

from __future__ import annotations

import argparse
import os
from functools import partial
from pathlib import Path

from nemo_oprd.config.loading import load_config, origin_of
from nemo_oprd.config.schema import Config
from nemo_oprd.run.preflight import Origin, preflight
from nemo_oprd.run.resolve import RunSpec
from nemo_oprd.runtime import disk, output_directories

_MOST_RANKS = 1_000_000


def positive(text: str) -> int:
    """Parses the value of an option that counts something; the option's `type`."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number of at least 1")
    return int(text)


def rank_count(text: str) -> int:
    """Parses the number of ranks of a job that is only planned or rehearsed; the option's `type`."""
    ranks = positive(text)
    if ranks > _MOST_RANKS:
        raise argparse.ArgumentTypeError(f"{text}: expected at most {_MOST_RANKS:,} ranks")
    return ranks


def add_config(parser: argparse.ArgumentParser) -> None:
    """Adds the options that name a configuration; `config_of` and `run_of` read them."""
    parser.add_argument(
        "--config-name", required=True, metavar="NAME", help="a YAML file in the configuration directory"
    )
    parser.add_argument(
        "--config-dir", metavar="DIR", help="the configuration directory (default: the project's conf/)"
    )
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="e.g. train.lr=1e-4 output=runs/a")


def add_verbosity(parser: argparse.ArgumentParser) -> None:
    """Adds the options that set how much a long command logs."""
    how = parser.add_mutually_exclusive_group()
    how.add_argument(
        "--quiet", dest="verbosity", action="store_const", const="quiet", help="show results and warnings only"
    )
    how.add_argument(
        "--verbose", dest="verbosity", action="store_const", const="verbose", help="messages of all ranks, with times"
    )
    parser.set_defaults(verbosity="usual")


def config_of(options: argparse.Namespace) -> Config:
    """Loads the configuration that the command line names.

    Raises:
        ValueError: no configuration has that name, or a key or value is wrong.
    """
    return load_config(options.config_name, options.overrides, options.config_dir)


def origin(options: argparse.Namespace) -> Origin:
    """Returns a function: key of `config_of(options)` -> the file that sets it."""
    return partial(origin_of, name=options.config_name, overrides=options.overrides, config_dir=options.config_dir)


def run_of(options: argparse.Namespace, *, against_reference: bool = False) -> RunSpec:
    """Returns the run of this command, after the checks of `preflight`, which read no weights.

    Raises:
        ValueError: as `config_of` and `preflight`.
    """
    config, command = config_of(options), options.command
    return preflight(config, ranks(), command, against_reference=against_reference, origin=origin(options))


def ranks() -> int:
    """Returns the number of ranks of the job; 1 without torchrun."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def json_file(options: argparse.Namespace, begins: str) -> Path | None:
    """Returns the file of `--json`, None without it.

    Args:
        begins: a pattern that matches the beginning of every file that the command writes; other files are refused.

    Raises:
        ValueError: the file can't be written, or it exists and another program wrote it.
    """
    if options.json is None:
        return None
    file = Path(options.json)
    disk.check_file(options.json, "--json")
    output_directories.check_file(file, options.command, "--json", begins)
    return file
