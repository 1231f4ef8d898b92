"""The directory of a run's checkpoints: which one to resume from, which ones to keep, and whether one is complete.

    iter_0000050/state.json               format, step, resume signature, and the size of every file in the checkpoint
    latest_checkpointed_iteration.txt     number of the newest checkpoint; write an earlier number into it to go back
    best.json                             step, metric and value of the best checkpoint, if one is kept

A checkpoint is written beside its place, flushed to the disk, and renamed into it, so a killed run leaves the previous
checkpoint. A checkpoint that was damaged later (for example by an interrupted copy) is recognised by the sizes of its
files and skipped.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from nemo_oprd.models.checkpoint_directory import LATEST
from nemo_oprd.runtime.files import PARTIAL, flush_tree, partial_path, read_json, write_atomically

BEST = "best.json"
STATE = "state.json"
FORMAT = 2  # of state.json
_REMOVED = ".removed_"

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
    """The directory of the checkpoint after `step` updates."""
    return root / f"iter_{step:07d}"


def partial_directory(root: Path, step: int) -> Path:
    """The directory in which that checkpoint is written until it is complete."""
    return partial_path(iteration_directory(root, step))


def find_checkpoint(root: Path) -> tuple[int | None, list[str]]:
    """The number of updates in the newest complete checkpoint (None: there is none), and a line per skipped checkpoint.

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
        reason = find_damage(iteration_directory(root, step))
        if reason is None:
            return step, skipped
        skipped.append(f"{iteration_directory(root, step)} is incomplete ({reason}) and was skipped")
    if skipped:
        raise ValueError(
            f"no checkpoint in {root} is complete: {skipped[0]}; expected one to resume from: copy it again, or remove "
            f"{root} to start over"
        )
    return None, []


def find_damage(directory: Path) -> str | None:
    """What is wrong with a checkpoint; None if all its files are there in full.

    Raises:
        ValueError: the checkpoint has a newer format than this version reads.
    """
    try:
        state = _load_state(directory)
    except ValueError as error:
        return str(error)
    _upgrade(state, directory)
    for name, size in state["files"].items():
        file = directory / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != size:
            return f"{name} has {file.stat().st_size} bytes of {size}"
    return None


def read_state(directory: Path) -> dict[str, Any]:
    """The content of a checkpoint's state.json with the keys of the current format.

    Raises:
        ValueError: state.json is missing or damaged, or has a newer format than this version reads.
    """
    return _upgrade(_load_state(directory), directory)


def _load_state(directory: Path) -> dict[str, Any]:
    """state.json as it was written; ValueError, whose message names no directory, if it is missing or damaged."""
    file = directory / STATE
    if not file.is_file():
        raise ValueError(f"{STATE} is missing")
    try:
        state = read_json(file, "an object with files", "copy the checkpoint again")
    except ValueError:
        raise ValueError(f"{STATE} is damaged") from None
    if not isinstance(state.get("files"), dict) or not isinstance(state.get("format", 1), int):
        raise ValueError(f"{STATE} is damaged")
    return state


def _upgrade(state: dict[str, Any], directory: Path) -> dict[str, Any]:
    """`state` with the keys of the current format."""
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


def commit_checkpoint(root: Path, state: dict[str, Any], best: dict[str, Any] | None = None) -> None:
    """Makes the checkpoint in the partial directory the newest one: writes state.json, flushes all files, renames.

    A run that is killed in here resumes from this checkpoint or from the one before, and best.json stays true.

    `state` is the content of state.json: "step" and anything else, without "files" and "format"; `best` that of
    best.json if this checkpoint is the best one so far.
    """
    partial, final = partial_directory(root, state["step"]), iteration_directory(root, state["step"])
    files = {str(f.relative_to(partial)): f.stat().st_size for f in sorted(partial.rglob("*")) if f.is_file()}
    write_atomically(partial / STATE, json.dumps({"format": FORMAT, **state, "files": files}, indent=1) + "\n")
    flush_tree(partial)
    known = read_best(root)
    if known is not None and known["step"] == state["step"]:
        (root / BEST).unlink()  # it describes the checkpoint that is replaced
    _remove_checkpoint(final)  # a run that went back writes the same step again
    partial.rename(final)
    if best is not None:
        mark_best(root, best)
    write_atomically(root / LATEST, f"{state['step']}\n")


def remove_leftovers(root: Path) -> None:
    """Removes what a killed run left half-written or half-removed."""
    for prefix in (PARTIAL, _REMOVED):
        for path in root.glob(f"{prefix}*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def prune(root: Path, keep: int, newest: int) -> None:
    """Removes checkpoints before `newest` beyond the last `keep` (0 keeps all); the best checkpoint stays.

    Checkpoints after `newest` stay, too: they belong to a line of training from which the user went back, and only the
    user may delete them.
    """
    best = read_best(root)
    steps = [step for step in sorted(_checkpoint_steps(root)) if step <= newest]
    for step in steps[:-keep] if keep else []:
        if best is None or step != best["step"]:
            _remove_checkpoint(iteration_directory(root, step))


def _remove_checkpoint(directory: Path) -> None:
    """Removes a checkpoint if it exists; renames it first, so that a half-removed one is not taken for a checkpoint."""
    if directory.exists():
        removed = directory.with_name(f"{_REMOVED}{directory.name}")
        directory.rename(removed)
        shutil.rmtree(removed)


def read_best(root: Path) -> dict[str, Any] | None:
    """{"step", "metric", "value"} of the best checkpoint, None if none is kept; ValueError if best.json is damaged."""
    if not (root / BEST).is_file():
        return None
    return read_json(root / BEST, "an object with step, metric and value", "correct it, or remove it")


def mark_best(root: Path, best: dict[str, Any]) -> None:
    """Writes best.json: {"step", "metric", "value"} of a checkpoint that exists."""
    write_atomically(root / BEST, json.dumps(best) + "\n")


def _checkpoint_steps(root: Path) -> list[int]:
    names = (path.name.removeprefix("iter_") for path in root.glob("iter_*") if path.is_dir())
    return [int(name) for name in names if name.isascii() and name.isdigit()]
