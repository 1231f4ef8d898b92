"""What test_shrunk_models.py runs in Megatron-Bridge's environment: `python THIS_FILE CASE ARGUMENTS`.

The arguments are those of the function, as JSON. torchrun starts the ranks.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from megatron_bridge_family_cases import verify

from tests.support.shrunk_models import write


def compute(published: dict[str, str], routes: dict[str, str], directory: str, runs: dict[str, list[str]]) -> None:
    """Makes the pairs, verifies with each list of settings, and converts the students both ways.

    Args:
        published: model -> the directory with its config.json.
        routes: model -> the provider.
        directory: DIRECTORY/MODEL gets `student`, `teacher`, what they stand for, and `back`.
    """
    if dist.get_rank() == 0:
        for model, source in published.items():
            for seed, role in enumerate(("student", "teacher")):
                write(Path(source), Path(directory) / model, role, seed)
    dist.barrier()
    verify(runs)
    if dist.get_rank() == 0:
        for model in published:
            convert(Path(directory) / model, routes[model])


def convert(root: Path, provider: str) -> None:
    """ROOT/back: the student, to a Megatron checkpoint and back."""
    from checkpoint_tools._convert import hf_to_megatron, megatron_to_hf
    from nemo_oprd.run.provider import find_family

    kind = find_family(provider, hf_path=str(root / "student"))
    hf_to_megatron(root / "student", root / "ours", tensor=2, family=kind, progress=False)
    megatron_to_hf(root / "ours", root / "back", family=kind, progress=False)


if __name__ == "__main__":
    torch.set_num_threads(1)
    from nemo_oprd.megatron.parallel import init_distributed

    init_distributed()
    globals()[sys.argv[1]](**json.loads(sys.argv[2]))
    dist.destroy_process_group()
