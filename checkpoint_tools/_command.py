"""What the commands here share: they run from a source checkout, and a user's mistake is one line, not a traceback."""

from __future__ import annotations

import importlib.util
import sys
import warnings
from collections.abc import Callable
from pathlib import Path


def run(command: Callable[[], int]) -> None:
    """Ends the program with what `command` returns, or with 2 after `error: ...` on stderr."""
    if importlib.util.find_spec("nemo_oprd") is None:  # not installed: take the checkout that this file is in
        sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    # Megatron warns that Apex and Transformer Engine are absent; nothing here would use them
    warnings.filterwarnings("ignore", module=r"megatron\.")
    try:
        code = command()
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        code = 2
    sys.exit(code)
