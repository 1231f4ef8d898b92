"""What the pool's workers run: the command `capture`."""

from __future__ import annotations

import os
from unittest import mock

from nemo_oprd import cli


def run(arguments: list[str], cache: str) -> None:
    """`nemo-oprd capture`, with transformers' reference in this process; `cache` is XDG_CACHE_HOME."""
    from nemo_oprd.canary.layer_by_layer import layered_states
    from nemo_oprd.vllm import teacher_canary

    here = mock.patch.object(teacher_canary, "reference_states", layered_states)
    with here, mock.patch.dict(os.environ, XDG_CACHE_HOME=cache):
        options = cli.make_parser().parse_args(["capture", *arguments])
        options.run(options)
