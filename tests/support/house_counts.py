"""Counts modules, lines and modules with one importer of each room: `python tests/support/house_counts.py` prints them.

With `--write` they become those that tests/unit/repository/test_house.py compares with. Counts may fall freely; they
rise in the commit of a feature, which thereby shows what it costs.
"""

from __future__ import annotations

import ast
import collections
import json
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "nemo_oprd"
FILE = ROOT / "tests" / "unit" / "repository" / "house_counts.json"


def imported(file: Path, modules: set[str]) -> set[str]:
    """The modules of the package that a file imports, wherever the import stands."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found & modules


def counts() -> dict[str, dict[str, int]]:
    """Room, or "." for loose files -> its modules, lines, and modules that exactly one other module imports."""
    files = {
        ".".join(("nemo_oprd", *file.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__"): file
        for file in sorted(PACKAGE.rglob("*.py"))
        if "_conf" not in file.parts
    }
    importers = collections.defaultdict(set)
    for name, file in files.items():
        for other in imported(file, set(files)) - {name}:
            importers[other].add(name)
    rooms: dict[str, dict[str, int]] = {}
    for name, file in files.items():
        inside = file.relative_to(PACKAGE).parts
        room = rooms.setdefault(inside[0] if len(inside) > 1 else ".", {"modules": 0, "lines": 0, "one_importer": 0})
        room["modules"] += 1
        room["lines"] += file.read_text().count("\n")
        room["one_importer"] += file.name != "__init__.py" and len(importers[name]) == 1
    return rooms


def as_text(rooms: dict[str, dict[str, int]]) -> str:
    """A line per room, as the file holds them."""
    lines = [f" {json.dumps(room)}: {json.dumps(numbers)}" for room, numbers in sorted(rooms.items())]
    return "{\n" + ",\n".join(lines) + "\n}\n"


if __name__ == "__main__":
    text = as_text(counts())
    print(text, end="")
    if sys.argv[1:] == ["--write"]:
        FILE.write_text(text)
