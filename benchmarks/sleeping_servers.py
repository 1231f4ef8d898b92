"""Servers that sleep for each token instead of computing it, so that a timeline can be measured on any machine.

They are those of `tests/functional/vllm_stand_in.py`: they take part in weight updates as vLLM does.
"""

from __future__ import annotations

from pathlib import Path

from tests.support.stand_in_python import stand_in


def interpreter(root: Path, token_s: float, lengths: list[int] | dict[str, list[int]]) -> Path:
    """What `rollout.vllm.python` can name: its servers take `token_s` seconds per token, whatever else they sample.

    Args:
        root: a directory that is made.
        lengths: a response has one of them, drawn by its prompt and its seed; {"whole": [...]}: by its prompt, one of
            these numbers of tokens of prompt and response, also if it is sampled in parts.
    """
    return stand_in(root, {"token_s": token_s, "lengths": lengths})
