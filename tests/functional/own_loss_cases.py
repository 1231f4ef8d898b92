"""What the pool's workers run: `verify --against reference`, with what it prints."""

from __future__ import annotations

import contextlib
import io

from nemo_oprd.config.loading import load_config


def verify_against_reference(overrides: list[str]) -> str:
    """The command `nemo-oprd verify --against reference`, in this process; what this rank prints."""
    from nemo_oprd.run.models import world_size
    from nemo_oprd.run.preflight import preflight
    from nemo_oprd.run.verify import verify
    from nemo_oprd.train import accumulate_gradients

    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        config = load_config("verify", overrides)
        verify(preflight(config, world_size(), "verify"), accumulate_gradients, against_reference=True)
    return printed.getvalue()
