"""The directory of a run's checkpoints: which one to go on from, which to keep, and whether one is whole. Files only.

    iter_0000050/state.json               what it is of, and the size of every file in it
    latest_checkpointed_iteration.txt     number of the newest one; write an earlier number into it to go back
    best.json                             step, metric and value of the best one, if one is kept

A checkpoint is written beside its place, flushed to the disk, and renamed into it, so a run that is killed leaves the
one before. One that was damaged later (a copy that broke off) is recognised by the sizes, and passed over.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

LATEST = "latest_checkpointed_iteration.txt"
BEST = "best.json"
_PARTIAL, _REMOVED = ".partial_", ".removed_"


def iteration_directory(root: Path, step: int) -> Path:
    """Where the checkpoint after `step` updates lies."""
    return root / f"iter_{step:07d}"


def partial_directory(root: Path, step: int) -> Path:
    """Where it is written before it is whole."""
    return root / f"{_PARTIAL}{iteration_directory(root, step).name}"


def find_checkpoint(root: Path) -> tuple[int | None, list[str]]:
    """Updates done in the newest whole checkpoint (None without any), and what to tell about those passed over.

    Raises:
        ValueError: the tracker file holds no number, or there are checkpoints and none is whole.
    """
    steps = sorted(_steps(root), reverse=True)
    tracker = root / LATEST
    if tracker.is_file():
        text = tracker.read_text(errors="replace").strip()
        if not (text.isascii() and text.isdigit()):
            raise ValueError(
                f"{tracker} holds {text[:40]!r}; expected the number of a checkpoint such as 50: write that of one of "
                f"{steps} into it, or remove it to start from the newest"
            )
        if int(text) not in steps:
            steps.insert(0, int(text))
        steps = [step for step in steps if step <= int(text)]
    passed: list[str] = []
    for step in steps:
        reason = damage(iteration_directory(root, step))
        if reason is None:
            return step, passed
        passed.append(f"{iteration_directory(root, step)} is incomplete ({reason}) and was passed over")
    if passed:
        raise ValueError(
            f"no checkpoint in {root} is whole: {passed[0]}; expected one to go on from: copy it again, or remove "
            f"{root} to start over"
        )
    return None, []


def damage(directory: Path) -> str | None:
    """What is wrong with a checkpoint; None if all its files are there in full."""
    try:
        sizes = read_state(directory)["files"]
    except ValueError as error:
        return str(error)
    for name, size in sizes.items():
        file = directory / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != size:
            return f"{name} has {file.stat().st_size} bytes of {size}"
    return None


def read_state(directory: Path) -> dict[str, Any]:
    """What a checkpoint says of itself.

    Raises:
        ValueError: state.json is missing or damaged.
    """
    try:
        state = json.loads((directory / "state.json").read_text())
    except FileNotFoundError:
        raise ValueError("state.json is missing") from None
    except ValueError:
        raise ValueError("state.json is damaged") from None
    if not isinstance(state, dict) or not isinstance(state.get("files"), dict):
        raise ValueError("state.json is damaged")
    return state


def seal(root: Path, state: dict[str, Any], best: dict[str, Any] | None = None) -> None:
    """Makes the checkpoint that was written beside its place the newest one: sizes, flushed to the disk, renamed.

    Killed anywhere in here, a run goes on from this checkpoint or from the one before, and best.json tells the truth.

    Args:
        state: what the checkpoint says of itself: "step" and whatever else, without "files".
        best: what best.json is to say if this is the best checkpoint so far.
    """
    partial, final = partial_directory(root, state["step"]), iteration_directory(root, state["step"])
    files = {str(f.relative_to(partial)): f.stat().st_size for f in sorted(partial.rglob("*")) if f.is_file()}
    write_atomically(partial / "state.json", json.dumps({**state, "files": files}, indent=1) + "\n")
    for path in [*partial.rglob("*"), partial]:
        _flush(path)
    known = read_best(root)
    if known is not None and known["step"] == state["step"]:
        (root / BEST).unlink()  # said of the checkpoint that is replaced
    _remove(final)  # a run that went back writes the same step again
    partial.rename(final)
    if best is not None:
        mark_best(root, best)
    write_atomically(root / LATEST, f"{state['step']}\n")


def remove_leftovers(root: Path) -> None:
    """Removes what a killed run left half-written or half-removed."""
    for prefix in (_PARTIAL, _REMOVED):
        for path in root.glob(f"{prefix}*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def write_atomically(path: Path, text: str) -> None:
    """Writes a file so that a reader finds the old text or the new one, never a part."""
    partial = path.with_name(f".partial_{path.name}")
    partial.write_text(text)
    _flush(partial)
    partial.rename(path)
    _flush(path.parent)


def prune(root: Path, keep: int, newest: int) -> None:
    """Removes checkpoints before `newest` beyond the last `keep` (0 keeps all); the best one stays.

    Later ones stay, too: they are of a line of training that somebody went back from, and not ours to delete.
    """
    best = read_best(root)
    line = [step for step in sorted(_steps(root)) if step <= newest]
    for step in line[:-keep] if keep else []:
        if best is None or step != best["step"]:
            _remove(iteration_directory(root, step))


def _remove(directory: Path) -> None:
    """Removes a checkpoint, if there is one; renamed first, so that a half-removed one is not taken for one."""
    if directory.exists():
        removed = directory.with_name(f"{_REMOVED}{directory.name}")
        directory.rename(removed)
        shutil.rmtree(removed)


def read_best(root: Path) -> dict[str, Any] | None:
    """{"step", "metric", "value"} of the best checkpoint, None if none was kept."""
    file = root / BEST
    return json.loads(file.read_text()) if file.is_file() else None


def mark_best(root: Path, best: dict[str, Any]) -> None:
    """Says in best.json which checkpoint is the best: {"step", "metric", "value"}, of one that is there."""
    write_atomically(root / BEST, json.dumps(best) + "\n")


def _steps(root: Path) -> list[int]:
    names = (path.name.removeprefix("iter_") for path in root.glob("iter_*") if path.is_dir())
    return [int(name) for name in names if name.isascii() and name.isdigit()]


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
