"""Makes interpreters whose `vllm` is the stand-in of tests/functional/vllm_stand_in.py."""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from nemo_oprd.vllm.server_lifecycle import WORKER_FOLDER

STAND_IN = Path(__file__).parents[1] / "functional" / "vllm_stand_in.py"


def stand_in(root: Path, faults: dict[str, Any]) -> Path:
    """Makes an interpreter with these faults in `root`, a new directory, whose `requests.jsonl` will have all calls."""
    package = root / "path" / "vllm" / "entrypoints" / "openai"
    package.mkdir(parents=True)
    run = f"import runpy\nrunpy.run_path({str(STAND_IN)!r}, run_name='__main__')\n"
    (package / "api_server.py").write_text(run)
    (root / "faults.json").write_text(json.dumps(faults))
    python = root / "python"
    torch = find_spec("torch")
    assert torch is not None and torch.origin is not None
    site = f"{Path(torch.origin).parents[1]}:{WORKER_FOLDER}"  # of what servers import besides
    variables = f"STAND_IN={root} PYTHONPATH={root}/path STAND_IN_SITE={site}"
    python.write_text(f'#!/bin/sh\n{variables} exec {sys.executable} -S "$@"\n')
    python.chmod(0o700)
    return python
