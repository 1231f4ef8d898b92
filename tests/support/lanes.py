"""tests/full.txt: the tests that the default command leaves to `bash scripts/test.sh --full`."""

from __future__ import annotations

from pathlib import Path


def read_full(file: Path) -> dict[str, int]:
    """Node id of a test, without parameters -> its cases that stay in the default command, from the first one.

    Raises:
        ValueError: a line is malformed, or names a test twice.
    """
    found: dict[str, int] = {}
    for line in file.read_text().splitlines():
        if line.startswith("#") or not line.strip():
            continue
        name, _, kept = line.partition(" after ")
        if "::" not in name or name in found or (kept and not kept.isdecimal()):
            raise ValueError(f"{file}: {line!r}; expected FILE::TEST or FILE::TEST after N, once per test: correct it")
        found[name] = int(kept or 0)
    return found
