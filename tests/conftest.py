"""What all tests share."""

from __future__ import annotations

import pytest

from nemo_oprd.runtime.messages import show


@pytest.fixture(autouse=True)
def _messages_are_shown() -> None:
    """On sys.stderr and sys.stdout as in a command, also where a test calls what a command calls."""
    show()
