"""Writes the random models and rollouts of one case of `benchmarks.peers`, in a process of its own.

The benchmark's own process stays small: a child's `ru_maxrss` begins with the memory of the process that started it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from benchmarks.peer_parts.cases import PROMPT, SHAPES
from tests.support.random_pair import Shape, save_random_model, save_random_rollouts


def main() -> None:
    """Writes a shape's models if they are not there, and the rollouts."""
    spec = json.loads(Path(sys.argv[1]).read_text())
    fields, model_type, tied = SHAPES[spec["shape"]]
    shape = Shape(*fields)
    for seed, role in enumerate(("student", "teacher")):
        path = Path(spec[role])
        if not path.exists():
            save_random_model(path, shape, seed=seed, std=0.02, dtype=torch.float32, model_type=model_type, tied=tied)
    save_random_rollouts(Path(spec["rollouts"]), shape, prompt=PROMPT, responses=spec["responses"])


if __name__ == "__main__":
    main()
