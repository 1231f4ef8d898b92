"""Servers that sleep for each token instead of computing it, so that a timeline can be measured on any machine.

They are those of `tests/functional/vllm_stand_in.py`: they take part in weight updates as vLLM does.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from nemo_oprd.vllm.server import WORKER_FOLDER

STAND_IN = Path(__file__).parents[1] / "tests" / "functional" / "vllm_stand_in.py"


def interpreter(root: Path, token_s: float, lengths: list[int] | dict[str, list[int]]) -> Path:
    """What `rollout.vllm.python` can name: its servers take `token_s` seconds per token, whatever else they sample.

    Args:
        root: a directory that is made; `requests.jsonl` in it will have all calls.
        lengths: a response has one of them, drawn by its prompt and its seed; {"whole": [...]}: by its prompt, one of
            these numbers of tokens of prompt and response, also if it is sampled in parts.
    """
    package = root / "path" / "vllm" / "entrypoints" / "openai"
    package.mkdir(parents=True)
    run = f"import runpy\nrunpy.run_path({str(STAND_IN)!r}, run_name='__main__')\n"
    (package / "api_server.py").write_text(run)
    (root / "faults.json").write_text(json.dumps({"token_s": token_s, "lengths": lengths}))
    python = root / "python"
    variables = f"STAND_IN={root} PYTHONPATH={root}/path:{WORKER_FOLDER}"
    python.write_text(f'#!/bin/sh\n{variables} exec {sys.executable} -S "$@"\n')
    python.chmod(0o700)
    return python
