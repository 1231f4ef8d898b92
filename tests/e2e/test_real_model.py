"""`scripts/real_model.sh`, with few updates: a first start, a second one, and bad input."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from real_language_model import MODEL, ROOT, real_model

SHORT = ("--heldout", "3", "train.steps=2", "train.prompts_per_step=2", "rollout.max_new_tokens=6")


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A copy of the project that has the model, in this process's environment."""
    real_model()
    copy = tmp_path_factory.mktemp("clone") / "nemo_oprd"
    ignored = shutil.ignore_patterns(".git", ".venv*", "runs", "__pycache__", ".*_cache")
    shutil.copytree(ROOT, copy, ignore=lambda place, names: {*ignored(place, names), *_top(place, "models")})
    (copy / ".venv" / "bin").mkdir(parents=True)
    (copy / ".venv" / "bin" / "activate").write_text("")
    (copy / ".venv" / "ready").write_text("")
    (copy / "models").mkdir()
    (copy / "models" / MODEL.name).symlink_to(MODEL)
    yield copy
    shutil.rmtree(copy)


def _top(place: str, name: str) -> set[str]:
    return {name} if Path(place) == ROOT else set()


def run(project: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(project), "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    words = ["bash", "scripts/real_model.sh", *arguments]
    return subprocess.run(words, cwd=project, env=environment, capture_output=True, text=True, check=False, timeout=900)


@pytest.mark.slow
@pytest.mark.smollm
@pytest.mark.parametrize("student", ["pruned", "quantised"])
def test_the_command(project: Path, student: str) -> None:
    arguments = ("--student", student, *SHORT)
    first = run(project, *arguments)
    assert first.returncode == 0, first.stderr[-3000:]
    output = project / "runs" / "real_model" / f"distilled-{student}"
    layers = json.loads((output / "hf" / "config.json").read_text())["num_hidden_layers"]
    assert layers == {"pruned": 20, "quantised": 30}[student]
    heading = next(line for line in first.stdout.splitlines() if line.startswith("s: student, t: teacher"))
    assert heading.split()[-2:] == ["before", "distilled"]
    results = {name: json.loads((output / "compare" / f"{name}.json").read_text()) for name in ("before", "distilled")}
    assert results["before"]["on_teacher"] != results["distilled"]["on_teacher"]
    page = (output / "report.html").read_text()
    assert "Responses to held-out prompts" in page and page.count('class="sample"') == 3
    steps = [json.loads(line)["step"] for line in (output / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2]

    if student == "quantised":
        return
    # the file that names compare as their maker stands beside its results
    made = [*project.glob(f"runs/real_model/{student}/*.safetensors"), *output.glob("compare/*")]
    kept = {file: file.stat().st_mtime_ns for file in made}
    again = run(project, *arguments)
    assert again.returncode == 0, again.stderr[-3000:]
    assert {file: file.stat().st_mtime_ns for file in kept} == kept and len(kept) == 8
    assert again.stdout == first.stdout  # nothing is trained or measured again
    assert len((output / "metrics.jsonl").read_text().splitlines()) == 2


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--student", "small"], "--student small: expected pruned or quantised"),
        (["--student"], "--student needs a value"),
    ],
)
def test_bad_input(tmp_path: Path, arguments: list[str], says: str) -> None:
    """Refused before anything is fetched or made."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "real_model.sh", tmp_path / "scripts")
    (tmp_path / "scripts" / "environment.sh").write_text('cd "$(dirname "${BASH_SOURCE[0]}")/.."\n')
    done = run(tmp_path, *arguments)
    assert done.returncode == 2 and says in done.stderr
    assert sorted(file.name for file in tmp_path.iterdir()) == ["scripts"]
