"""The wheel: which files it has, and that commands run from it where the source tree can't be imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.support.recipe_models import SHAPES

ROOT = Path(__file__).parent.parent.parent
GOLDEN = ROOT / "tests" / "golden"
# what is not imported, but read or started as a program by its path
PROGRAMS = {
    "nemo_oprd/evaluation/grading/math_verify_child.py",  # grades answers, in a process that may be killed
    "nemo_oprd/vllm/worker/nemo_oprd_guard.py",  # ends servers when a run dies
    "nemo_oprd/vllm/worker/nemo_oprd_buckets.py",  # these run in vLLM's environment
    "nemo_oprd/vllm/worker/nemo_oprd_middleware.py",
    "nemo_oprd/vllm/worker/nemo_oprd_files.py",
    "nemo_oprd/vllm/worker/nemo_oprd_group.py",
    "nemo_oprd/vllm/worker/nemo_oprd_reload.py",
    "nemo_oprd/vllm/worker/nemo_oprd_serve.py",
    "nemo_oprd/vllm/worker/nemo_oprd_worker.py",
}
PAGES = {f"nemo_oprd/tools/report/{name}.html.jinja" for name in ("evaluation", "macros", "page", "responses", "runs")}
PAGES |= {"nemo_oprd/tools/report/style.css.jinja"}
SHIM = {"nemo_oprd/tools/rehearse/shim.cpp"}
# runs a command, and checks where its code comes from; the source tree is off the path, on which an editable
# installation puts it
STARTED = """
import sys
from pathlib import Path
site, *arguments = sys.argv[1:]
sys.path = [path for path in sys.path if path == site or not (Path(path) / "nemo_oprd" / "__init__.py").exists()]
import nemo_oprd
from nemo_oprd.cli import main
from nemo_oprd.config.loading import default_config_dir
assert Path(nemo_oprd.__file__) == Path(site) / "nemo_oprd" / "__init__.py", nemo_oprd.__file__
assert default_config_dir() == Path(site) / "nemo_oprd" / "_conf"
main(arguments)
loaded = {name: module.__spec__ for name, module in sys.modules.items() if name.split(".")[0] == "nemo_oprd"}
# a folder without __init__.py has no file
files = {name: spec.origin or [*spec.submodule_search_locations][0] for name, spec in loaded.items()}
assert files and all(Path(file).is_relative_to(site) for file in files.values()), files
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the source tree, without a network."""
    place = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(place)],
        cwd=ROOT, check=True, capture_output=True,
    )  # fmt: skip
    (built,) = place.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The installed wheel; what it depends on comes from this environment."""
    place = tmp_path_factory.mktemp("installed") / "site"
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--disable-pip-version-check",
         "--target", str(place), str(wheel)],
        check=True,
    )  # fmt: skip
    return place


def environment(site: Path) -> dict[str, str]:
    """This environment with the wheel in place of the source tree, as the only rank of a job."""
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return {**kept, "PYTHONPATH": str(site), "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}


def run(site: Path, elsewhere: Path, *arguments: str) -> str:
    """Runs a command from the wheel in the directory `elsewhere`; returns what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", STARTED, str(site), *arguments],
        cwd=elsewhere, env=environment(site), capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def golden(output: Path) -> list[str]:
    models = [f"{role}.hf_path={GOLDEN / role}" for role in ("student", "teacher")]
    replay = [f"rollout.replay={GOLDEN / 'rollouts.jsonl'}", "loss.representation.k=4", "logging.tensorboard=false"]
    return ["--config-name", "verify", *models, *replay, f"output={output}"]


def test_the_files_of_the_wheel(wheel: Path) -> None:
    """All code, the list of rooms, the configurations, the templates of reports, the shim of rehearsals and the
    programs that run by themselves; nothing else: no scripts, tests, benchmarks, checkpoint tools, examples, models or
    prompts."""
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    sources = {file.relative_to(ROOT).as_posix() for file in (ROOT / "nemo_oprd").rglob("*.py")}
    configurations = {f"nemo_oprd/_conf/{file.name}" for file in (ROOT / "conf").glob("*.yaml")}
    assert packed == sources | configurations | PAGES | SHIM | {"nemo_oprd/rooms.txt"}
    assert packed >= PROGRAMS and len(configurations) == 18


def test_the_entry_points(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (name,) = [name for name in archive.namelist() if name.endswith("entry_points.txt")]
    assert "nemo-oprd = nemo_oprd.cli:main" in archive.read(name).decode()
    assert "oprd = nemo_oprd.integrations.nemo_run" in archive.read(name).decode()


def test_plan_runs_from_the_wheel(site: Path, tmp_path: Path) -> None:
    """As the installed program, with a configuration that the wheel has."""
    for name in ("DeepSeek-R1-Distill-Qwen-1.5B", "JustRL-DeepSeek-1.5B"):
        (tmp_path / "models" / name).mkdir(parents=True)
        (tmp_path / "models" / name / "config.json").write_text(json.dumps({"rope_theta": 10000, **SHAPES[name]}))
    arguments = ["plan", "--config-name", "opd_top16_1p5b", "--ranks", "8", "student.parallel.tensor=2"]
    shown = run(site, tmp_path, *arguments)
    assert "opd_top16_1p5b on 8 x H100" in shown and "it fits:" in shown
    program = subprocess.run(
        [sys.executable, str(site / "bin" / "nemo-oprd"), *arguments],
        cwd=tmp_path, env=environment(site), capture_output=True, text=True,
    )  # fmt: skip
    assert program.returncode == 0 and program.stdout == shown


def test_a_step_of_training_runs_from_the_wheel(site: Path, tmp_path: Path) -> None:
    run(site, tmp_path, "train", *golden(tmp_path / "run"), "train.steps=1", "train.save_every=1")
    (record,) = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert record["step"] == 1
    assert (tmp_path / "run" / "hf" / "model.safetensors").is_file()


@pytest.mark.slow
def test_verify_runs_from_the_wheel(site: Path, tmp_path: Path) -> None:
    """The loss of a golden case, which a plain Hugging Face program in float64 computed."""
    run(site, tmp_path, "verify", *golden(tmp_path / "run"))
    losses = json.loads((tmp_path / "run" / "losses.json").read_text())
    expected = json.loads((GOLDEN / "expected.json").read_text())["mse_all_last_k"]["loss/total"]
    assert losses["loss/total"] == pytest.approx(expected, rel=1e-5)
    assert (tmp_path / "run" / "grads.safetensors").is_file()
