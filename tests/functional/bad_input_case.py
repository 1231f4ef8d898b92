"""One bad input: good inputs to spoil, what is wrong with them, and what the message must say."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

GOLDEN = Path(__file__).parents[1] / "golden"
ROLLOUT = {"prompt_ids": [5, 6, 7], "response_ids": [8, 9]}
PROMPT = {"prompt": "1+1=", "answer": "2"}
TEXT = "teacher.reads=text"


class Place:
    """A directory of good inputs, made once; a case gets a copy in `root` and spoils it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.student, self.teacher = root / "student", root / "teacher"
        self.converted, self.output = root / "student-megatron", root / "run"
        self.prompts, self.rollouts = root / "prompts.jsonl", root / "rollouts.jsonl"

    def make(self) -> None:
        """Writes the good inputs."""
        from checkpoint_tools._convert import hf_to_megatron
        from nemo_oprd.tools.toy.pair import write_tokenizer

        for role in ("student", "teacher"):
            shutil.copytree(GOLDEN / role, self.root / role)
            write_tokenizer(self.root / role)
        hf_to_megatron(self.student, self.converted, progress=False)
        self.write(self.prompts, [PROMPT] * 3)
        self.write(self.rollouts, [ROLLOUT] * 2)

    @staticmethod
    def write(file: Path, rows: list[Any]) -> None:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def config(self, role: str = "student", **changes: Any) -> None:
        """Changes keys of a model's config.json; None removes one."""
        self.edit(self.root / role / "config.json", **changes)

    @staticmethod
    def edit(file: Path, **changes: Any) -> None:
        content = {**json.loads(file.read_text()), **changes}
        file.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))

    def tensors(self, change: Callable[[dict], Any], role: str = "student") -> None:
        file = self.root / role / "model.safetensors"
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file)

    def write_state(self, directory: Path | None = None) -> None:
        """Writes state.json for the files that a checkpoint has now."""
        directory = directory or self.output / "checkpoints" / "iter_0000002"
        files = {str(f.relative_to(directory)): f.stat().st_size for f in directory.rglob("*") if f.is_file()}
        files.pop("state.json", None)
        state = {
            "format": 2,
            "step": 2,
            "seed": 0,
            "precision": "fp32",
            "distributed_optimizer": True,
            "deepest_trained_layer": 3,
            "final_norm_trained": True,
            "head_trained": False,
            "trained_projectors": None,
            "partially_trained": False,
            "moving_average_layers": 0,
            "files": files,
        }
        (directory / "state.json").write_text(json.dumps(state))

    def checkpoint(self, tracker: str = "2\n") -> Path:
        """A run directory with a checkpoint after two steps, made of the converted student."""
        directory = self.output / "checkpoints" / "iter_0000002"
        shutil.copytree(self.converted, directory)
        self.write_state(directory)
        (directory.parent / "latest_checkpointed_iteration.txt").write_text(tracker)
        return directory


@dataclass(frozen=True)
class Case:
    """One bad input.

    Attributes:
        what: in words, for the document.
        says: texts that the message must hold: the value, the expectation, the fix.
        overrides: what is given on the command line besides good inputs; `{root}` is the case's directory.
        prepare: spoils the inputs.
        wrap: a context in which the command runs, for what can't be made of files.
        library: the part of the message that a library words, shortened in the document.
    """

    name: str
    category: str
    what: str
    says: tuple[str, ...]
    overrides: tuple[str, ...] = ()
    prepare: Callable[[Place], Any] = lambda place: None
    command: str = "train"
    ranks: int = 1
    wrap: Callable[[], contextlib.AbstractContextManager] = field(default=contextlib.nullcontext)
    library: str = ""
    arguments: tuple[str, ...] = ()


def cut(file: Path, keep: int) -> None:
    file.write_bytes(file.read_bytes()[:keep])


class Category:
    """Cases of one group of docs/errors.json, in their order.

    Args:
        title: the section's.
    """

    def __init__(self, title: str) -> None:
        self.title = title
        self.cases: list[Case] = []

    def __call__(self, name: str, what: str, says: str, *overrides: str, **settings: Any) -> None:
        """Adds a case; `says` holds texts separated by " | "."""
        self.cases.append(Case(name, self.title, what, tuple(says.split(" | ")), overrides, **settings))
