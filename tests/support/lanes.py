"""tests/full.txt: the tests that the default command leaves to `bash scripts/test.sh --full`."""

from __future__ import annotations

from pathlib import Path


def read_full(file: Path) -> dict[str, int]:
    """File, or node id of a test without parameters -> its cases that stay in the default command, from the first one.

    Raises:
        ValueError: a line is malformed, or names a test twice.
    """
    found: dict[str, int] = {}
    for line in file.read_text().splitlines():
        if line.startswith("#") or not line.strip():
            continue
        name, _, kept = line.partition(" after ")
        if name in found or (kept and not ("::" in name and kept.isdecimal())):
            raise ValueError(
                f"{file}: {line!r}; expected FILE, FILE::TEST or FILE::TEST after N, each once: correct the line"
            )
        found[name] = int(kept or 0)
    return found
