"""Every command of docs/cluster.md, as written, in a copy of the project where stand-ins record what they are given."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import cluster_stand_ins
import pyarrow.parquet
import pytest
from cluster_stand_ins import Call

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs" / "cluster.md").read_text()
BLOCKS = re.findall(r"```bash\n(.*?)```", PAGE, flags=re.DOTALL)
COPIED = ("scripts", "conf", "checkpoint_tools", "benchmarks")
FILES = ("pyproject.toml", "Dockerfile", *(file.name for file in ROOT.glob("requirements*.txt")))
# the variables of the container that the page has exported
EXPORTED = re.compile(r"^export (SRUN_ARGS|LAUNCH_PREFIX)=", flags=re.MULTILINE)


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[tuple[str, list[Call]]]]:
    """The blocks in the page's order, each in a shell of its own, and what they called. What the page exports for a
    container holds until the other container's."""
    folder = tmp_path_factory.mktemp("page")
    project = folder / "nemo_oprd"
    for name in COPIED:
        shutil.copytree(ROOT / name, project / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in FILES:
        shutil.copy(ROOT / name, project / name)
    environment = cluster_stand_ins.install(folder)
    ran, exports, before = [], "", 0
    for block in BLOCKS:
        own = block if EXPORTED.search(block) else exports + block
        ended = subprocess.run(
            ["bash", "-euc", own], cwd=project, env={"SRUN_ARGS": "", "LAUNCH_PREFIX": "", **environment},
            capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert ended.returncode == 0, f"{block}\n{ended.stdout}{ended.stderr}"
        exports = "".join(f"{line}\n" for line in block.splitlines() if EXPORTED.match(line)) or exports
        calls = cluster_stand_ins.calls(folder)
        ran.append((block, calls[before:]))
        before = len(calls)
    yield ran
    shutil.rmtree(project)


def called(said: list[tuple[str, list[Call]]], text: str) -> list[Call]:
    """What the only block that contains `text` called."""
    (calls,) = [calls for block, calls in said if text in block]
    return calls


def trained(calls: list[Call]) -> list[Call]:
    return [call for call in calls if call.program == "python" and call.arguments[1:3] == ["nemo_oprd", "train"]]


def test_every_line_calls_something(said: list[tuple[str, list[Call]]]) -> None:
    """All blocks ended well, and no program of the page is missing among those that were called."""
    assert len(said) == len(BLOCKS) >= 12
    programs = {call.program for _, calls in said for call in calls}
    assert {"sbatch", "srun", "squeue", "scancel", "tail", "docker", "enroot", "apptainer", "nemo-oprd"} <= programs


def test_the_environment_is_made_in_the_order_that_works(said: list[tuple[str, list[Call]]]) -> None:
    installed = [call for call in called(said, "setup_gpu.sh --dry-run") if "install" in call.arguments]
    kinds = [next(word for word in call.arguments[::-1] if "/" not in word) for call in installed]
    assert kinds[0].startswith("torch==") and kinds[2].startswith("transformer-engine[pytorch]")
    assert kinds[3] == ".[te]" and any("vllm" in word for call in installed[4:] for word in call.arguments)


def test_the_pairs_are_those_of_the_script() -> None:
    """The table of drivers and versions is what setup_gpu.sh installs."""
    script = (ROOT / "scripts" / "setup_gpu.sh").read_text()
    rows = dict(re.findall(r"^\| (driver|torch|Transformer Engine)[^|]*\| (.*) \|$", PAGE, flags=re.MULTILINE))
    torch = re.findall(r"\btorch=torch==([\d.]+)", script)
    least = re.findall(r"\bleast=(\d+)", script)
    (engine, _) = re.findall(r"\bengine=(\d[\d.]+)", script)
    assert [cell.split()[0] for cell in rows["driver"].split(" | ")] == least == ["580", "525"]
    assert [cell.split()[0] for cell in rows["torch"].split(" | ")] == torch
    assert rows["Transformer Engine"].split(" | ") == [engine, engine]


def test_what_is_downloaded(said: list[tuple[str, list[Call]]]) -> None:
    """Every model and file of the configurations has a repository; downloads need the environment, not a job."""
    downloads = [call for call in called(said, "hf download") if call.program == "hf"]
    models = {Path(call.arguments[-1]).name: call.arguments[1] for call in downloads if "models/" in call.arguments[-1]}
    assert all(repository.split("/")[1] == folder for folder, repository in models.items()) and len(models) == 2
    table = PAGE.partition("| `models/` | repository |")[2].partition("\n\n")[0]
    configurations = "".join(file.read_text() for file in ROOT.glob("conf/*.yaml"))
    wanted = set(re.findall(r"hf_path: models/(\S+)", configurations))
    own = {"Qwen3-30B-A3B-specialist", "SmolLM2-135M-Instruct"}  # a user's, and that of scripts/real_model.sh
    assert wanted - own == set(models) | set(re.findall(r"`([\w.-]+)`", table))
    settings = (ROOT / "conf" / "oprd_1p5b.yaml").read_text()
    (block,) = [block for block in BLOCKS if "hf download" in block]
    assert set(re.findall(r"data/\w+\.parquet", settings)) <= set(re.findall(r"data/\w+\.parquet", block))


def test_rows_of_the_repositories_are_read(tmp_path: Path) -> None:
    """Rows of the shapes that the repositories have: the page's links and conversion, then its `nemo-oprd data`."""
    (block,) = [block for block in BLOCKS if "hf download" in block]
    prompt = [{"role": "user", "content": "Solve: 1+1. Answer: $Answer"}]
    dapo = {"data_source": "math_dapo", "prompt": prompt, "ability": "MATH", "reward_model": {"ground_truth": "2"}}
    rows = {
        "dapo/data/dapo-math-17k.parquet": [{**dapo, "extra_info": {"index": "a"}}] * 3,
        "aime_2024/data/train-00000-of-00001.parquet": [{"id": 60, "problem": "2+2", "solution": "4", "answer": "204"}],
        "amc/data/train-00000-of-00001.parquet": [{"id": 0, "problem": "3+3", "answer": 142.0, "url": "x"}],
    }
    for name, table in rows.items():
        (tmp_path / "data" / name).parent.mkdir(parents=True)
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(table), tmp_path / "data" / name)
    (tmp_path / "data" / "aime_2025").mkdir()
    row = json.dumps({"problem": "4+4", "answer": "70", "id": "0"})
    (tmp_path / "data" / "aime_2025" / "test.jsonl").write_text(row + "\n")
    lines = [line for line in block.splitlines() if line.startswith(("ln", "python", "nemo-oprd"))]
    assert len(lines) == 5
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    ended = subprocess.run(
        ["bash", "-euc", "\n".join(lines)], cwd=tmp_path, env={**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert "dapo_math_17k.parquet: 3 prompts, 1 to train on" in ended.stdout
    assert "no problem of aime24, aime25, aimo was found in data.train" in ended.stdout


def test_what_ranks_say_that_do_not_meet() -> None:
    """The lines of the table are those of the code."""
    table = PAGE.partition("| the line | what to try |")[2].partition("\n\n")[0]
    lines = re.findall(r"`([^`]+)`", "".join(row.split("|")[1] for row in table.splitlines()[2:]))
    code = re.sub(r'"\n\s*f?"', "", (ROOT / "nemo_oprd" / "runtime" / "rendezvous.py").read_text())
    parts = [part for line in lines for part in re.split(r" = \.\.\.: ", line)]
    assert len(parts) == 5 and all(part in code for part in parts)


def test_the_submit_command(said: list[tuple[str, list[Call]]]) -> None:
    (calls,) = [calls for block, calls in said if block == "sbatch scripts/oprd_1p5b.sh\n"]
    (rank,) = trained(calls)
    assert rank.arguments[2:5] == ["train", "--config-name", "oprd_1p5b"]


@pytest.mark.parametrize(
    ("variable", "container"), [("export SRUN_ARGS", "pyxis"), ("export LAUNCH_PREFIX", "apptainer")]
)
def test_containers(said: list[tuple[str, list[Call]]], variable: str, container: str) -> None:
    """A rank runs in the container; what is mounted is what the configurations name by relative paths."""
    calls = called(said, variable)
    (rank,) = trained(calls)
    assert rank.environment["CONTAINER"] == container
    mounts = re.findall(r"[^,=\s]+:/opt/nemo_oprd/(\w+)", " ".join(calls[-2].arguments + calls[-3].arguments))
    assert sorted(set(mounts)) == ["bridges", "data", "models", "runs"]
    settings = "".join(file.read_text() for file in ROOT.glob("conf/*1p*.yaml"))
    assert set(re.findall(r"^[^#\n]*: (\w+)/", settings, flags=re.MULTILINE)) <= set(mounts)


def test_plans(said: list[tuple[str, list[Call]]]) -> None:
    """By hand, without Slurm, in a job: one configuration, the ranks of the nodes."""
    by_hand = called(said, "nemo-oprd plan")
    in_a_job = called(said, "sbatch --nodes=2 scripts/oprd_1p5b.sh --dry-run")
    plans = [call.arguments for call in [*by_hand, *in_a_job] if "plan" in call.arguments and call.program != "srun"]
    assert [words[words.index("--ranks") + 1] for words in plans if "--ranks" in words][:3] == ["8", "16", "16"]
    assert all(words[words.index("--config-name") + 1] == "oprd_1p5b" for words in plans)


def test_gpu_check_in_the_containers_of_the_job(said: list[tuple[str, list[Call]]]) -> None:
    checks = [call for call in called(said, "gpu_check.sh") if "benchmarks/gpu_check.py" in call.arguments]
    assert [call.arguments[1] for call in checks] == ["--output"] * 3
    assert [call.environment.get("CONTAINER") for call in checks] == [None, None, "apptainer"]  # the last that was set


def test_evaluation_of_the_export(said: list[tuple[str, list[Call]]]) -> None:
    *_, evaluation = called(said, "megatron_to_hf.py")
    assert "student.hf_path=runs/oprd_1p5b/hf" in evaluation.arguments and "evaluate" in evaluation.arguments
