"""tests/full.txt: the tests that the default command leaves to `bash scripts/test.sh --full`."""

from __future__ import annotations

import sys
from pathlib import Path


def read_full(file: Path) -> dict[str, range]:
    """File, or node id of a test without parameters -> the numbers of its cases that stay in the default command.

    Raises:
        ValueError: a line is malformed, or names a test twice.
    """
    found: dict[str, range] = {}
    for line in file.read_text().splitlines():
        if line.startswith("#") or not line.strip():
            continue
        name, *rest = line.split(" ")
        match rest:
            case []:
                kept = range(0)
            case ["after", number] if number.isdecimal() and "::" in name:
                kept = range(int(number))
            case ["every", number] if number.isdecimal() and int(number) and "::" in name:
                kept = range(0, sys.maxsize, int(number))
            case _:
                name = ""
        if not name or name in found:
            forms = "FILE, FILE::TEST, FILE::TEST after N or FILE::TEST every N"
            raise ValueError(f"{file}: {line!r}; expected {forms}, each once: correct the line")
        found[name] = kept
    return found
