"""An argparse parser that reports a mistake in one line: the option, the expected value and the fix, without usage.

`--help` is argparse's own. Imports nothing heavy.
"""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NoReturn

from nemo_oprd.config.messages import without_secrets
from nemo_oprd.runtime.messages import is_first_rank

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
