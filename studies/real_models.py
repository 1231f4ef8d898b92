"""The models of the study on a real language model: the teacher, and two students made from it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
TRAIN, HELDOUT = ROOT / "examples/real_model/train.jsonl", ROOT / "examples/real_model/heldout.jsonl"
KEEP = 20
BITS = 2
STUDENTS = ("pruned", "quantised")
# for a pruned student: the teacher layer whose weights it has, the paper's rule, or the last layer before its next one
LAYER_MAPS = ("kept", "uniform", "next_input")


def make_models(root: Path, model: Path) -> None:
    """Writes the models that are missing below `root`: teacher (a link to `model`), pruned, quantised.

    Raises:
        ValueError: there is no such model.
    """
    root.mkdir(parents=True, exist_ok=True)
    teacher = root / "teacher"
    if not teacher.is_dir():
        if not model.is_dir():
            raise ValueError(
                f"{model}: no such directory; expected the teacher: bash scripts/fetch_smollm2.sh makes it"
            )
        teacher.symlink_to(model.resolve())
    common = ["--hf-path", str(teacher), "--output"]
    if not (root / "pruned.txt").is_file():
        chosen = ["--keep", str(KEEP), "--prompts", str(TRAIN), "--count", "64"]
        text = run_tool("prune_layers", *common, str(root / "pruned"), *chosen)
        (root / "pruned.txt").write_text(text)
    if not (root / "quantised").is_dir():
        run_tool("round_weights", *common, str(root / "quantised"), "--bits", str(BITS))


def kept_layers(root: Path) -> list[int]:
    """The teacher's layers whose weights the pruned student has, in its order."""
    found = re.search(r": ([\d,]+)$", (root / "pruned.txt").read_text(), re.MULTILINE)
    assert found is not None, "prune_layers prints the kept layers"
    return [int(layer) for layer in found[1].split(",")]


def layer_map(name: str, kept: list[int], depth: int) -> dict[int, int] | None:
    """Student layer -> teacher layer of one of `LAYER_MAPS`; None leaves the choice to the paper's rule."""
    if name == "uniform":
        return None
    following = [layer - 1 for layer in kept[1:]] + [depth]
    return dict(enumerate(kept if name == "kept" else following, start=1))


def run_tool(name: str, *arguments: str) -> str:
    """What a tool of checkpoint_tools/ prints; raises RuntimeError if it fails."""
    command = [sys.executable, str(ROOT / "checkpoint_tools" / f"{name}.py"), *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return done.stdout
