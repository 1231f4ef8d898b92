"""Arguments of a command whose settings or files may stand between its options."""

from __future__ import annotations

from typing import Any

from nemo_oprd.commands.parser import Parser


class IntermixedParser(Parser):
    """A command's parser, for `add_subparsers(parser_class=...)`: argparse's own ones end at an option after a file."""

    _mixes = False

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As in argparse, which calls this for a command; in Python 3.11 each of its two passes calls it again."""
        if self._mixes:
            return super().parse_known_args(args, namespace)
        self._mixes = True
        try:
            return self.parse_known_intermixed_args(args, namespace)
        finally:
            self._mixes = False
