"""Checks which command may write into a directory: one rule for all commands (docs/runs.md, "Whose directory it is").

    A command writes into a directory that is missing or empty, or that it made itself. It refuses one that another
    command made, a place in any command's directory that belongs to that command, and one with a file whose name the
    command writes. Other files, such as a log, stay as they are; but a command that replaces its own
    earlier results (`replaces`) accepts no other files beside them.

`mark` writes the file `MARKER`, which names the command that made the directory. Without it, a run is recognised by its
config.yaml, other results by the file that their command completes (`result`), and a model by its config.json. Other
hidden files are ignored. `check_file` is for commands that write a single file. Imports nothing but the standard
library, `runtime/disk.py` and `runtime/files.py`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from nemo_oprd.runtime.disk import check_place
from nemo_oprd.runtime.files import kind_of, write_atomically

# {"command": NAME}; hidden, as it is no result
MARKER = ".made_by"


@dataclass(frozen=True)
class Maker:
    """A command, and a name for its results (`what`).

    Attributes:
        writes: the names that the command writes.
        result: patterns of files that show, without a marker, that the command made a directory.
        replaces: it replaces its earlier results as a whole.
    """

    command: str
    what: str
    writes: tuple[str, ...]
    result: tuple[str, ...] = ()
    replaces: bool = False


_MOST_BYTES = 1 << 20
# logs of vLLM's servers, which may exist before all other files and do not identify a directory
_LOGS = {"vllm"}
_RUN = (
    *("config.yaml", "metrics.jsonl", "timeline.jsonl", "data.json", "environment.json", "tensorboard"),
    *("rollouts", "evaluations", "checkpoints", "bridge", "hf", "wandb", "wandb_id", "libraries.log"),
)
_GRADED = ("disagreements", "evaluation.json", "differences.json")
MAKERS = {
    maker.command: maker
    for maker in (
        # Megatron's own checkpoints have no state.json and no hf
        Maker("train", "a training run", _RUN, ("checkpoints/iter_*/state.json", "checkpoints/iter_*/hf")),
        Maker("compare", "a comparison of models", ("teacher.json", "teacher.jsonl"), ("teacher.json",)),
        Maker("evaluate", "an evaluation", ("generations", "grades", *_GRADED), ("generations",)),
        Maker("grade", "grades of an evaluation", ("grades", *_GRADED), ("grades",)),
        Maker(
            "fit-bridge",
            "a bridge",
            ("bridge.json", "bridge.safetensors", "rollouts"),
            ("bridge.json", "bridge.safetensors", "rollouts/about.json"),
            replaces=True,
        ),
        Maker(
            "verify",
            "a verify result",
            ("losses.json", "grads.safetensors"),
            ("losses.json", "grads.safetensors"),
            replaces=True,
        ),
        Maker(
            "capture",
            "captured states",
            ("manifest.json", "hidden_states"),
            ("manifest.json", "hidden_states/hs_*.safetensors"),
            replaces=True,
        ),
        Maker("toy", "a toy pair", ("toy.json", "student", "teacher", "prompts"), ("toy.json",)),
        Maker("export", "a model", ("*",), (".metadata",)),
    )
}


def mark(directory: Path, command: str) -> None:
    """Makes `directory` if it is missing, and marks it as made by `command`, unless a command made it before."""
    directory.mkdir(parents=True, exist_ok=True)
    if maker_of(directory) is None:
        write_atomically(directory / MARKER, json.dumps({"command": command}) + "\n")


def maker_of(directory: Path) -> Maker | None:
    """Returns the command that made a directory; None for a missing or empty one, and for one that no command made."""
    if not directory.is_dir():
        return None
    marked = re.match(rb'\{"command": "([a-z-]+)"', _content(directory / MARKER))
    if marked and marked[1].decode() in MAKERS and not all(_is_empty(path) for path in _visible(directory)):
        return MAKERS[marked[1].decode()]
    if _has_run_config(directory):
        return MAKERS["train"]
    for maker in MAKERS.values():
        if any(any(directory.glob(pattern)) for pattern in maker.result):
            return maker
    if _has_responses_of_compare(directory):
        return MAKERS["compare"]
    return MAKERS["export"] if b'"model_type"' in _content(directory / "config.json") else None


def _visible(directory: Path) -> list[Path]:
    """Lists what is in a directory, without hidden files and logs of servers, by name."""
    return sorted(path for path in directory.glob("[!.]*") if path.name not in _LOGS)


def _has_run_config(directory: Path) -> bool:
    """Returns whether config.yaml is the complete configuration of a run, and not another file of that name."""
    groups = set(re.findall(rb"^(\w+):", _content(directory / "config.yaml"), flags=re.MULTILINE))
    return {b"output", b"student", b"teacher", b"loss", b"rollout", b"train"} <= groups


def _has_responses_of_compare(directory: Path) -> bool:
    """Returns whether `compare` wrote teacher.jsonl: earlier versions wrote this file first, and no marker."""
    line = _content(directory / "teacher.jsonl").partition(b"\n")[0]
    return all(f'"{name}": '.encode() in line for name in ("prompt", "response", "ended", "prompt_ids"))


def _content(file: Path) -> bytes:
    """Returns the beginning of a file; b"" if it can't be read: directories above may belong to other users."""
    try:
        with file.open("rb") as stream:
            return stream.read(_MOST_BYTES)
    except OSError:
        return b""


def check_directory(
    directory: Path, command: str, key: str = "output", *, writes: Collection[str] = (), others: Collection[str] = ()
) -> None:
    """Raises ValueError, naming the option `key`, unless `command` may write into `directory`; writes nothing.

    Args:
        writes: names that this call writes besides those of the `Maker`.
        others: commands whose directories this call may write into, too.
    """
    mine, fix = MAKERS[command], f"choose another {key.removeprefix('--')}"
    if directory.exists() and not directory.is_dir():
        what = kind_of(directory) or "a file"
        raise ValueError(f"{key}={directory}: {directory} is {what}, expected a directory; {fix}")
    check_place(directory, key)
    visible = [path.name for path in _visible(directory)] if directory.is_dir() else []
    own = {*mine.writes, *writes}
    maker = maker_of(directory)
    strange = [name for name in visible if not any(fnmatchcase(name, each) for each in own)]
    why = None
    if maker is not None and maker.command not in (command, *others):
        why = f"it is {maker.what}{_made_by(maker)}"
    elif mine.replaces and strange:
        why = f"it holds {strange[0]}, which {command} did not make"
    if why is not None:
        raise ValueError(f"{key}={directory} exists and is not {mine.what}; choose another directory: {why}")
    taken = [name for name in visible if name not in strange and not _is_empty(directory / name)]
    if maker is None and taken:
        raise ValueError(
            f"{key}={directory} holds {taken[0]}, which {command} would overwrite and did not make; expected a missing "
            f"or empty directory, or {mine.what}: {fix}"
        )
    _check_above(directory, key)


def check_file(file: Path, command: str, key: str, mark: str) -> None:
    """Raises ValueError, naming the option `key`, unless `command` may write the single file `file`.

    `mark` is a pattern that matches the beginning of every file that the command writes; other files are refused.
    """
    if file.is_dir():
        raise ValueError(f"{key} {file} is a directory, expected a file to write; add a name to it")
    if kind := kind_of(file):
        raise ValueError(f"{key} {file} is {kind}, expected a file to write; choose another name")
    if file.is_file() and file.stat().st_size:
        with file.open("rb") as stream:
            begins = stream.read(1 << 12).decode("utf-8", errors="replace")
        if not re.match(mark, begins, flags=re.DOTALL):
            raise ValueError(
                f"{key} {file} exists, and {command} did not make it; expected a new file, or one to replace that "
                f"{command} made: choose another name"
            )
    _check_above(file, key)


def _check_above(path: Path, key: str) -> None:
    """Raises ValueError if `path` is in a directory that a command made, under a name that the same command writes."""
    for parent in path.absolute().parents:
        above, name = maker_of(parent), path.absolute().relative_to(parent).parts[0]
        if above is not None and name in above.writes:
            raise ValueError(
                f"{key}={path} belongs to {parent}, {above.what}{_made_by(above)}, which writes {name} there; expected "
                f"another place: choose another {key.removeprefix('--')}"
            )


def _is_empty(path: Path) -> bool:
    """Returns whether a path is an empty directory, as a command that was killed at its start leaves it."""
    return path.is_dir() and not any(path.iterdir())


def _made_by(maker: Maker) -> str:
    return "" if maker.command == "export" else f" that {maker.command} made"
