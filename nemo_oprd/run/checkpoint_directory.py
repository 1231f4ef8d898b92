"""The directory of a run's checkpoints: finds the one to resume from, removes old ones, and checks completeness.

    iter_0000050/state.json               format, step, resume signature, and size and SHA-256 of every file beside it
    latest_checkpointed_iteration.txt     number of the newest checkpoint; write an earlier number into it to go back
    best.json                             step, metric and value of the best checkpoint, if one is kept

A checkpoint is written under a temporary name, flushed to the disk, and renamed, so a killed run leaves the previous
checkpoint. A checkpoint that was damaged later (for example by an interrupted copy or a failing disk) is recognised by
the sizes and digests of its files and skipped. Checkpoints of earlier versions have sizes alone.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from nemo_oprd.megatron.parallel import everyones
from nemo_oprd.models.checkpoint_directory import LATEST
from nemo_oprd.models.megatron_bridge_config import RUN_CONFIG
from nemo_oprd.runtime.digests import find_difference, sha256_of
from nemo_oprd.runtime.files import PARTIAL, flush_tree, partial_path, read_json, write_atomically

BEST = "best.json"
STATE = "state.json"
FORMAT = 2  # of state.json
# Keys of state.json: the digest of each file in hex, and that of state.json's own content. Earlier versions lack both.
DIGESTS, STATE_DIGEST = "sha256", "state_sha256"
_REMOVED = ".removed_"
# Files that take long to digest: ranks share this work, if they can communicate.
_LARGE = (".distcp", ".safetensors")
# Above this size, digesting takes many seconds, and a line explains the wait.
_TOLD_BYTES = 16 << 30

logger = logging.getLogger(__name__)

# Format 1 had no "format" key. Its keys, and those of format 2; keys that are equal in both are not listed.
_FORMAT_1_KEYS = {
    "train.distributed_optimizer": "distributed_optimizer",
    "deepest trained layer": "deepest_trained_layer",
    "final norm is trained": "final_norm_trained",
    "head is trained": "head_trained",
    "trained projectors": "trained_projectors",
    "trained in parts": "partially_trained",
    "layers of the moving average": "moving_average_layers",
    "gaps": "adaptive_gaps",
    "partial training": "partial_training_updates",
    "evaluation is put off": "evaluation_deferred",
}
# Format 2 keys that the first checkpoints of format 1 lack, and what those checkpoints mean by that.
_FORMAT_1_DEFAULTS: dict[str, Any] = {"partially_trained": False, "moving_average_layers": 0}
_FORMAT_1_DEFAULTS |= {"trained_projectors": None, "adaptive_gaps": {}}


def iteration_directory(root: Path, step: int) -> Path:
    """Returns the directory of the checkpoint after `step` steps."""
    return root / f"iter_{step:07d}"


def partial_directory(root: Path, step: int) -> Path:
    """Returns the directory that holds the checkpoint after `step` steps until it is complete."""
    return partial_path(iteration_directory(root, step))


def find_checkpoint(root: Path, damaged: Mapping[int, str] | None = None) -> tuple[int | None, list[str]]:
    """Returns the step of the newest complete checkpoint (None: there is none), and a line per skipped checkpoint.

    Args:
        damaged: step of a checkpoint -> the damage that `find_damage_inside` found in it.

    Raises:
        ValueError: the tracker file holds no number, there are checkpoints and none is complete, or the newest one has
            a newer format than this version reads.
    """
    steps = sorted(_checkpoint_steps(root), reverse=True)
    tracker = root / LATEST
    if tracker.is_file():
        text = tracker.read_text(errors="replace").strip()
        if not (text.isascii() and text.isdigit()):
            raise ValueError(
                f"{tracker} holds {text[:40]!r}; expected the number of a checkpoint such as 50: write the number of "
                f"one of {steps} into it, or remove it to start from the newest checkpoint"
            )
        if int(text) not in steps:
            steps.insert(0, int(text))
        steps = [step for step in steps if step <= int(text)]
    skipped: list[str] = []
    for step in steps:
        directory = iteration_directory(root, step)
        damage = find_damage(directory) or (damaged or {}).get(step)
        if damage is None:
            return step, skipped
        skipped.append(f"{directory} {damage} and was skipped")
    if skipped:
        raise ValueError(
            f"no checkpoint in {root} is complete: {skipped[0]}; expected one to resume from: copy it again, or remove "
            f"{root} to start over"
        )
    return None, []


def newest_steps(root: Path) -> tuple[str | None, tuple[int, ...]]:
    """Returns the content of the tracker file (None: there is none), and the steps of all checkpoints, ascending.

    Two equal results show that no run has written a checkpoint in between.
    """
    tracker = root / LATEST
    text = tracker.read_text(errors="replace") if tracker.is_file() else None
    return text, tuple(sorted(_checkpoint_steps(root)))


def find_damage(directory: Path) -> str | None:
    """Returns the damage of a checkpoint ("is incomplete (...)"); None if the quick checks find none.

    None means: all files have their full size, and the small ones their recorded digests; `find_damage_inside` reads
    the others.

    Raises:
        ValueError: the checkpoint has a newer format than this version reads.
    """
    try:
        state = _load_state(directory)
    except ValueError as error:
        return f"is incomplete ({error})"
    _upgrade(state, directory)
    for name, size in state["files"].items():
        file = directory / name
        if not file.is_file():
            return f"is incomplete ({name} is missing)"
        if file.stat().st_size != size:
            return f"is incomplete ({name} has {file.stat().st_size} bytes of {size})"
    if STATE_DIGEST in state and state[STATE_DIGEST] != _digest_of(state):
        return f"is damaged ({STATE} has another content than when it was written)"
    difference = find_difference(directory, {n: d for n, d in _digests(state).items() if not n.endswith(_LARGE)})
    return None if difference is None else f"is damaged ({difference})"


def find_damage_inside(directory: Path, rank: int = 0, ranks: int = 1, *, of_weights: bool = False) -> str | None:
    """Returns the damage that reading files and comparing digests finds; None if there is none, or no digest.

    Each of several `ranks` reads its share. `of_weights` leaves out the model's description, which users may change.
    """
    try:
        state = _load_state(directory)
    except ValueError as error:
        return f"is incomplete ({error})"
    digests = _digests(state)
    if of_weights:
        digests = {name: digest for name, digest in digests.items() if "/" not in name and name != RUN_CONFIG}
    total = sum(state["files"].get(name, 0) for name in digests)
    if total > _TOLD_BYTES:
        logger.info(f"comparing {total / 1e9:.0f} GB in {directory} with their digests")
    difference = find_difference(directory, digests, rank, ranks)
    return None if difference is None else f"is damaged ({difference})"


def find_damage_together(directory: Path, *, of_weights: bool = False) -> str | None:
    """Returns the damage that `find_damage_inside` finds on any rank. Every rank of the world calls this."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    found = everyones(find_damage_inside(directory, rank, ranks, of_weights=of_weights))
    return next((damage for damage in found if damage is not None), None)


def refuse_damage(directory: Path, *, together: bool) -> None:
    """Checks the weights of a checkpoint from which a model is read, if a training run wrote it and left digests.

    Args:
        together: every rank of the world calls this, and reads its share of the files.

    Raises:
        ValueError: a file is not as it was written.
    """
    if not (directory / STATE).is_file():
        return
    damage = (find_damage_together if together else find_damage_inside)(directory, of_weights=True)
    if damage is not None:
        raise ValueError(
            f"{directory} {damage}; expected the files of the training run: copy them again, or name another checkpoint"
        )


def has_digests(directory: Path) -> bool:
    """Returns whether a complete checkpoint has digests: earlier versions wrote sizes alone."""
    return DIGESTS in _load_state(directory)


def _digests(state: Mapping[str, Any]) -> dict[str, str]:
    return dict(state.get(DIGESTS, {}))


def _digest_of(state: Mapping[str, Any]) -> str:
    """Returns the digest of the content of a state.json, without this digest itself."""
    told = {name: value for name, value in state.items() if name != STATE_DIGEST}
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()


def read_state(directory: Path) -> dict[str, Any]:
    """Reads a checkpoint's state.json; returns its content with the keys of the current format.

    Raises:
        ValueError: state.json is missing or damaged, or has a newer format than this version reads.
    """
    return _upgrade(_load_state(directory), directory)


def _load_state(directory: Path) -> dict[str, Any]:
    """Reads state.json as written; raises ValueError, whose message names no directory, if it is missing or damaged."""
    file = directory / STATE
    if not file.is_file():
        raise ValueError(f"{STATE} is missing")
    try:
        state = read_json(file, "an object with files", "copy the checkpoint again")
    except ValueError:
        raise ValueError(f"{STATE} is damaged") from None
    parts = state.get("files"), state.get(DIGESTS, {})
    if not all(isinstance(part, dict) for part in parts) or not isinstance(state.get("format", 1), int):
        raise ValueError(f"{STATE} is damaged")
    return state


def _upgrade(state: dict[str, Any], directory: Path) -> dict[str, Any]:
    """Returns `state` with the keys of the current format."""
    found = state.get("format", 1)
    if found > FORMAT:
        raise ValueError(
            f"{directory / STATE}: format={found}, expected at most {FORMAT}; resume with the version of nemo-oprd "
            "that wrote this checkpoint, or choose another output"
        )
    if found == FORMAT:
        return state
    renamed = {_FORMAT_1_KEYS.get(key, key): value for key, value in state.items()}
    return {**_FORMAT_1_DEFAULTS, **renamed, "format": FORMAT}


def commit_checkpoint(
    root: Path, state: dict[str, Any], best: dict[str, Any] | None = None, digests: Mapping[str, str] | None = None
) -> None:
    """Makes the checkpoint in the partial directory the newest one: writes state.json, flushes all files, renames.

    A run killed during this call resumes from this checkpoint or from the one before, and best.json stays correct.

    `state` is the content of state.json: "step" and any other keys, without "files", "format" and digests. `best` is
    the content of best.json, if this checkpoint is the best so far. `digests` has the files that were digested while
    they were written; this function reads and digests the other files, which are small.
    """
    partial, final = partial_directory(root, state["step"]), iteration_directory(root, state["step"])
    files = {str(f.relative_to(partial)): f.stat().st_size for f in sorted(partial.rglob("*")) if f.is_file()}
    known = digests or {}
    told = {"format": FORMAT, **state, "files": files}
    told[DIGESTS] = {name: known.get(name) or sha256_of(partial / name) for name in files}
    told = json.loads(json.dumps(told))  # as it will be read: keys are strings
    write_atomically(partial / STATE, json.dumps({**told, STATE_DIGEST: _digest_of(told)}, indent=1) + "\n")
    flush_tree(partial)
    earlier_best = read_best(root)
    if earlier_best is not None and earlier_best["step"] == state["step"]:
        (root / BEST).unlink()  # it describes the checkpoint that is replaced
    _remove_checkpoint(final)  # a run that went back writes the same step again
    partial.rename(final)
    if best is not None:
        mark_best(root, best)
    write_atomically(root / LATEST, f"{state['step']}\n")


def remove_leftovers(root: Path) -> None:
    """Removes the partial and the half-removed checkpoints of a killed run."""
    for prefix in (PARTIAL, _REMOVED):
        for path in root.glob(f"{prefix}*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def prune(root: Path, keep: int, newest: int) -> None:
    """Removes the checkpoints up to `newest`, except the last `keep` of them (0 keeps all) and the best one.

    Checkpoints after `newest` stay, too: they belong to a branch of training that the user went back from, and only the
    user may delete them.
    """
    best = read_best(root)
    steps = [step for step in sorted(_checkpoint_steps(root)) if step <= newest]
    for step in steps[:-keep] if keep else []:
        if best is None or step != best["step"]:
            _remove_checkpoint(iteration_directory(root, step))


def _remove_checkpoint(directory: Path) -> None:
    """Removes a checkpoint if it exists; renames it first, so that no reader takes a half-removed one for complete."""
    if directory.exists():
        removed = directory.with_name(f"{_REMOVED}{directory.name}")
        directory.rename(removed)
        shutil.rmtree(removed)


def read_best(root: Path) -> dict[str, Any] | None:
    """Returns {"step", "metric", "value"} of the best checkpoint or None; raises ValueError if best.json is damaged."""
    if not (root / BEST).is_file():
        return None
    return read_json(root / BEST, "an object with step, metric and value", "correct it, or remove it")


def mark_best(root: Path, best: dict[str, Any]) -> None:
    """Writes best.json: {"step", "metric", "value"} of a checkpoint that exists."""
    write_atomically(root / BEST, json.dumps(best) + "\n")


def _checkpoint_steps(root: Path) -> list[int]:
    names = (path.name.removeprefix("iter_") for path in root.glob("iter_*") if path.is_dir())
    return [int(name) for name in names if name.isascii() and name.isdigit()]
