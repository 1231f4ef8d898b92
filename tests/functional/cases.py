"""What the pool's workers run: a `verify` of a configuration, given as overrides."""

from __future__ import annotations

from nemo_oprd.config import load_config


def run_verify(overrides: list[str]) -> None:
    """The command `nemo-oprd verify`, in this process."""
    from nemo_oprd.verify import verify

    verify(load_config("verify", overrides))
