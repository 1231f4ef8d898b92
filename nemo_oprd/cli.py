"""The command line: a table of the commands. Each command's options and work are in the module that the table names.

    nemo-oprd toy --output DIR                                    a small model pair and its prompts
    torchrun ... -m nemo_oprd train --config-name NAME [k=v]      training on several GPUs

A command is a module in `commands/`, or a module or package in `tools/` or `integrations/`, which training never
imports. It has an entry in `COMMANDS`, and defines

    add_arguments(parser)          its options
    run(options) -> int | None     what it does; the exit code, 0 if None (`runtime/exits.py` has the others)

Only the module of the command that was called is imported. It imports slow packages inside `run`, so that `--help`
and mistakes show at once.
"""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NoReturn

from nemo_oprd import __version__
from nemo_oprd.config.messages import without_secrets
from nemo_oprd.runtime.exits import run_as_command
from nemo_oprd.runtime.messages import is_first_rank, show

__all__ = ["COMMANDS", "main", "run_as_command"]

# name -> module of its options and its work, what it does
COMMANDS: dict[str, tuple[str, str]] = {
    "doctor": (
        "nemo_oprd.tools.doctor",
        "say in one line each what would make this run fail silently; exit code 1 if anything is wrong",
    ),
    "train": (
        "nemo_oprd.commands.train",
        "distil the student on its own rollouts",
    ),
    "verify": (
        "nemo_oprd.commands.verify",
        "one training step on recorded rollouts, without the optimizer: losses.json and grads.safetensors",
    ),
    "fit-bridge": (
        "nemo_oprd.commands.fit_bridge",
        "make the frozen projectors between models of different shape (OPRD-Bridge, stage 1)",
    ),
    "evaluate": (
        "nemo_oprd.commands.evaluate",
        "sample the student on the validation sets and grade it",
    ),
    "serve": (
        "nemo_oprd.commands.serve",
        "a vLLM server for the student or a teacher, for runs that name it in rollout.vllm or teacher.vllm",
    ),
    "data": (
        "nemo_oprd.commands.data",
        "what a run would do to its prompts: suffix, held-out problems, duplicates, contamination; needs no model",
    ),
    "plan": (
        "nemo_oprd.tools.plan",
        "what a training run needs on a number of GPUs: memory, operations, bytes, seconds; config.json is enough",
    ),
    "rehearse": (
        "nemo_oprd.tools.rehearse",
        "two steps of some ranks at full size on fake CUDA tensors: memory, waits, mistakes; needs no GPU",
    ),
    "families": (
        "nemo_oprd.tools.families",
        "which model families run, who builds them, with which layouts they were tried, what is refused",
    ),
    "toy": (
        "nemo_oprd.tools.toy",
        "make a small student-teacher pair and its prompts",
    ),
    "report": (
        "nemo_oprd.tools.report",
        "one HTML page of curves from one or several runs",
    ),
    "compare": (
        "nemo_oprd.commands.compare",
        "how far students' next-token distributions are from their teacher's, on its responses and on their own",
    ),
    "capture": (
        "nemo_oprd.commands.capture",
        "the hidden states of any model that vLLM runs, proven against transformers, as safetensors files",
    ),
    "grade": (
        "nemo_oprd.commands.grade",
        "grade kept responses again and print their metrics with intervals; needs no model",
    ),
    "from-nemo-rl": (
        "nemo_oprd.integrations.from_nemo_rl",
        "a distillation recipe of NeMo-RL as a configuration, with a list of what has no counterpart",
    ),
}


# A parser that reports a mistake in one line: the option, the expected value and the fix, without usage. `--help` is
# argparse's own.

_TYPES = {"int": "a whole number", "float": "a number"}


class Parser(argparse.ArgumentParser):
    """An `argparse.ArgumentParser` that exits with status 2 after a mistake; rank 0 of a job prints one line."""

    _given: Sequence[str] = ()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parses as argparse does; keeps the arguments, from which a message derives the intended command."""
        self._given = sys.argv[1:] if args is None else args
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Prints one line and exits with 2."""
        if is_first_rank():  # every rank of a job has the same command line
            print(f"error: {without_secrets(self._in_our_words(message))}", file=sys.stderr, flush=True)
        sys.exit(2)

    def _in_our_words(self, message: str) -> str:
        found = re.fullmatch(r"unrecognized arguments: (.+)", message, re.DOTALL)
        if found:
            return self._unknown(found[1].split()[0])
        found = re.fullmatch(r"the following arguments are required: (.+)", message)
        if found:
            missing = found[1].split(", ")
            given = [self._with_value(name) for name in missing]
            return f"{self.prog}: {', '.join(missing)} missing; expected {' '.join(given)}: give it ({self._help})"
        found = re.fullmatch(r"argument (\S+): invalid choice: '?(.*?)'? \(choose from (.*)\)", message, re.DOTALL)
        if found:
            choices = [choice.strip("' ") for choice in found[3].split(",")]
            near = difflib.get_close_matches(found[2], choices, n=1)
            name = "" if found[1] == "COMMAND" else f" {found[1]}"
            fix = f"did you mean {near[0]!r}?" if near else f"choose one ({self._help})"
            return f"{self.prog}{name} {found[2]}: expected one of {', '.join(choices)}; {fix}"
        found = re.fullmatch(r"argument (\S+): invalid (\w+) value: (.*)", message, re.DOTALL)
        if found:
            expected = _TYPES.get(found[2], f"a value of type {found[2]}")
            return f"{self.prog}: {found[1]} {found[3]}: expected {expected}; give one"
        found = re.fullmatch(r"argument (\S+): expected (one|at least one) argument", message)
        if found:
            return f"{self.prog}: {found[1]} has no value; expected {self._with_value(found[1])}: give one"
        return f"{self.prog}: {' '.join(message.split())}; correct it ({self._help})"

    @property
    def _help(self) -> str:
        return f"{self.prog} --help"

    def _with_value(self, name: str) -> str:
        """Returns an option with the name of its value, as `--help` shows it. Example: "--output DIR"."""
        action = next((each for each in self._actions if name in each.option_strings), None)
        if action is None or action.nargs == 0:
            return name
        value = action.metavar if isinstance(action.metavar, str) else action.dest.upper()
        return f"{name} {value}"

    def _unknown(self, argument: str) -> str:
        """Describes an unrecognised argument and suggests the intended option, key or command."""
        commands = self._commands()
        command = next((commands[text] for text in self._given if text in commands), self)
        named, _, value = argument.partition("=")
        plain = named.lstrip("-")
        if named.startswith("-") and value and "." in plain:
            return f"{command.prog}: {argument}: settings have no dashes; expected KEY=VALUE: write {plain}={value}"
        options = [text for action in command._actions for text in action.option_strings]
        near = difflib.get_close_matches(named, options, n=1, cutoff=0.6)
        others = [name for name, each in commands.items() if named in each._option_string_actions]
        if near:
            fix = f"did you mean {near[0]}?"
        elif others:
            fix = f"it is an option of {', '.join(others)}: leave it out"
        else:
            fix = f"leave it out, or see {command.prog} --help"
        expected = "one of its options" if named.startswith("-") else "no such argument"
        return f"{command.prog}: unknown argument {argument}; expected {expected}: {fix}"

    def _commands(self) -> dict[str, CommandParser]:
        """Returns the parser of each command by name, with its arguments."""
        found: dict[str, CommandParser] = {}
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                found |= action.choices
        for command in found.values():
            command.load()
        return found


class CommandParser(Parser):
    """The parser of one command, for `add_subparsers(parser_class=...)`; it accepts settings and files between options.

    Args:
        module: name of the command's module, imported when it is needed.
    """

    _loaded = _mixes = False

    def __init__(self, *, module: str, **settings: Any) -> None:
        super().__init__(**settings)
        self._module = module

    def load(self) -> None:
        """Imports the command's module, adds its arguments, and sets its `run` as a default of the parsed options."""
        if not self._loaded:
            self._loaded = True
            command: Any = import_module(self._module)
            command.add_arguments(self)
            self.set_defaults(run=command.run)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Loads the command; parses arguments in any order. In Python 3.11 each of argparse's two passes calls this."""
        self.load()
        if self._mixes:
            return super().parse_known_args(args, namespace)
        self._mixes = True
        try:
            return self.parse_known_intermixed_args(args, namespace)
        finally:
            self._mixes = False


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of all commands."""
    parser = Parser(prog="nemo-oprd", description="On-policy representation distillation on Megatron-core.")
    parser.add_argument("--version", action="version", version=f"nemo-oprd {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=CommandParser)
    for name, (module, text) in COMMANDS.items():
        commands.add_parser(name, help=text, description=text, module=module)
    return parser


def main(arguments: list[str] | None = None, *, alone: bool | None = None) -> None:
    """Runs the command line `arguments` (None: those of this process), and exits with a nonzero code on failure.

    `alone` is passed to `run_as_command`; None: true if `arguments` is None.
    """
    options = make_parser().parse_args(arguments)

    def work() -> int:
        show(getattr(options, "verbosity", "usual"))
        return options.run(options) or 0

    run_as_command(work, alone=arguments is None if alone is None else alone)
