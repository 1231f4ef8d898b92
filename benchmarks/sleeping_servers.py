"""Servers that sleep for each token instead of computing it, so that a timeline can be measured on any machine.

They are those of `tests/functional/vllm_stand_in.py`: they take part in weight updates as vLLM does.
"""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from nemo_oprd.vllm.server import WORKER_FOLDER

STAND_IN = Path(__file__).parents[1] / "tests" / "functional" / "vllm_stand_in.py"


def stand_in(root: Path, faults: dict[str, Any]) -> Path:
    """An interpreter whose `vllm` is the stand-in, with these faults; `requests.jsonl` in `root` will have all calls."""
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


def interpreter(root: Path, token_s: float, lengths: list[int] | dict[str, list[int]]) -> Path:
    """What `rollout.vllm.python` can name: its servers take `token_s` seconds per token, whatever else they sample.

    Args:
        root: a directory that is made.
        lengths: a response has one of them, drawn by its prompt and its seed; {"whole": [...]}: by its prompt, one of
            these numbers of tokens of prompt and response, also if it is sampled in parts.
    """
    return stand_in(root, {"token_s": token_s, "lengths": lengths})
