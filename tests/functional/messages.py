"""The messages of `nemo_oprd`, for tests."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def messages(name: str = "nemo_oprd") -> Iterator[list[str]]:
    """What is logged under `name` within the context, level INFO and above, on this rank."""
    lines: list[str] = []
    listener, logger = logging.Handler(), logging.getLogger(name)
    listener.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(listener)
    level = logger.level
    logger.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        logger.removeHandler(listener)
        logger.setLevel(level)
