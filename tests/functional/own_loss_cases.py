"""What the pool's workers run: `verify --against reference`, with what it prints."""

from __future__ import annotations

import contextlib
import io

from nemo_oprd.config.loading import load_config


def verify_against_reference(overrides: list[str]) -> str:
    """The command `nemo-oprd verify --against reference`, in this process; what this rank prints."""
    from nemo_oprd.commands.verify.step import verify

    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        verify(load_config("verify", overrides), against_reference=True)
    return printed.getvalue()
