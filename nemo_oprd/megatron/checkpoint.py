"""Training checkpoints: torch_dist (loadable at any TP/PP/DP), written beside their final place and renamed into it.

`checkpoints/iter_0000050/` holds the model and optimizer shards, `state.json` (the step) and `hf/` (config and
tokenizer of the student's source, so that a checkpoint can be exported by itself).
`checkpoints/latest_checkpointed_iteration.txt` names the newest one. Data order, learning rate and the randomness of
sampling are pure functions of (seed, step), so the step is all the state they have; training itself draws nothing.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from nemo_oprd.megatron.student import Student

LATEST = "latest_checkpointed_iteration.txt"


def iteration_directory(root: Path, step: int) -> Path:
    """Where the checkpoint after `step` updates lies."""
    return root / f"iter_{step:07d}"


def latest_step(root: Path) -> int | None:
    """Updates done in the newest complete checkpoint, None without one.

    Raises:
        ValueError: the tracker file names a checkpoint that isn't there, or holds no number.
    """
    tracker = root / LATEST
    if not tracker.is_file():
        return None
    text = tracker.read_text().strip()
    if not text.isdigit():
        raise ValueError(f"{tracker} holds {text!r}; expected the number of a checkpoint such as 50")
    if not (iteration_directory(root, int(text)) / "state.json").is_file():
        raise ValueError(
            f"{tracker} names {iteration_directory(root, int(text)).name}, which is missing or incomplete; "
            "write the number of an existing checkpoint into it, or remove it to start over"
        )
    return int(text)


def save_checkpoint(root: Path, step: int, student: Student, source: Path, keep: int) -> None:
    """Writes the checkpoint after `step` updates; every rank of the world calls this.

    Args:
        source: HF directory whose config and tokenizer files are carried along.
        keep: checkpoints to keep, the newest first; 0 keeps all.
    """
    from megatron.core import dist_checkpointing

    from nemo_oprd.tokens.tokenizer import copy_tokenizer_files

    final = iteration_directory(root, step)
    partial = root / f".partial_{final.name}"
    if dist.get_rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier()
    dist_checkpointing.save(_sharded_state(student, is_loading=False), str(partial))
    if dist.get_rank() == 0:
        (partial / "hf").mkdir()
        shutil.copy(source / "config.json", partial / "hf")
        copy_tokenizer_files(source, partial / "hf")
        (partial / "state.json").write_text(json.dumps({"step": step, "seed": student.config.seed}) + "\n")
        shutil.rmtree(final, ignore_errors=True)  # a restarted run writes the same step again
        partial.rename(final)
        tracker = root / f".{LATEST}"
        tracker.write_text(f"{step}\n")
        tracker.rename(root / LATEST)
        _prune(root, keep)
    dist.barrier()


def load_checkpoint(root: Path, step: int, student: Student) -> None:
    """Loads model and optimizer, at whatever layout the student has now; every rank of the world calls this."""
    from megatron.core import dist_checkpointing

    directory = iteration_directory(root, step)
    state = _sharded_state(student, is_loading=True)
    loaded = dist_checkpointing.load(state, str(directory)) if state else None
    if not student.role.here:
        return
    assert loaded is not None
    for i, chunk in enumerate(student.ddp):
        chunk.module.load_state_dict(loaded[f"model{i}"])
    student.optimizer.load_state_dict(loaded["optimizer"])


def _sharded_state(student: Student, *, is_loading: bool) -> dict[str, Any]:
    """Megatron's sharded state; empty on ranks without the role, which only join the collectives."""
    if not student.role.here:
        return {}
    metadata = {
        "dp_cp_group": student.role.groups.dp_cp,  # type: ignore[union-attr]
        # the one format that can be loaded at another TP and PP
        "distrib_optim_sharding_type": "fully_reshardable",
        "chained_optim_avoid_prefix": True,
    }
    model = {
        f"model{i}": chunk.module.sharded_state_dict(metadata=metadata) for i, chunk in enumerate(student.ddp)
    }
    optimizer = student.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=metadata)
    return {**model, "optimizer": optimizer}


def _prune(root: Path, keep: int) -> None:
    for old in sorted(root.glob("iter_*"))[: -keep or None] if keep else []:
        shutil.rmtree(old)


def rng_fingerprint() -> int:
    """A number that changes if anything draws from torch's global generator (tests assert that training doesn't)."""
    return int(torch.get_rng_state().sum())
