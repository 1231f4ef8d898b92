"""The Dockerfile: its stages, what it copies, its pins, hadolint; and the CPU image, where a container engine runs."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[3]
DOCKERFILE = (ROOT / "Dockerfile").read_text()
# what a stage is made from, and its instructions: continued lines joined, comments left out
STAGES: dict[str, tuple[str, list[str]]] = {}
for line in re.sub(r"\\\n\s*", "", re.sub(r"^#.*\n", "", DOCKERFILE, flags=re.MULTILINE)).splitlines():
    if stage := re.fullmatch(r"FROM (\S+) AS (\w+)", line):
        STAGES[stage[2]] = (stage[1], [])
    elif STAGES and line:
        STAGES[list(STAGES)[-1]][1].append(line)


def copied(stage: str) -> list[str]:
    """What a stage copies from the project."""
    lines = [line.split()[1:] for line in STAGES[stage][1] if line.startswith("COPY ") and "--from" not in line]
    return [source for *sources, _ in lines for source in sources]


def test_stages() -> None:
    assert {name: base for name, (base, _) in STAGES.items()} == {
        "source": "scratch", "vllm": "scratch", "cpu": "python:3.12-slim-bookworm", "gpu": "${BASE}",
    }  # fmt: skip
    for name in ("cpu", "gpu"):
        lines = STAGES[name][1]
        assert "WORKDIR /opt/nemo_oprd" in lines and 'ENTRYPOINT ["nemo-oprd"]' in lines
        arguments = {line.removeprefix("ARG ").split("=")[0] for line in lines if line.startswith("ARG ")}
        assert arguments == {"cpu": {"VLLM", "TORCH_INDEX"}, "gpu": {"VLLM", "NEMO"}}[name]


def test_what_is_copied_exists_and_is_sent_to_the_builder() -> None:
    """.dockerignore sends nothing but what is named there."""
    sent = [line.removeprefix("!") for line in (ROOT / ".dockerignore").read_text().splitlines() if line[0] == "!"]
    sources = [source for stage in STAGES for source in copied(stage)]
    assert len(sources) >= 12
    for source in sources:
        assert (ROOT / source).exists(), f"COPY {source}"
        assert any(source == name or source.startswith(f"{name}/") for name in sent), (
            f"{source} is not in .dockerignore"
        )
    for stage in ("cpu", "gpu"):
        copies = [line.split()[1:3] for line in STAGES[stage][1] if line.startswith("COPY --from")]
        assert copies == [["--from=vllm", "/opt/nemo_oprd"], ["--from=source", "/opt/nemo_oprd"]]


def test_the_image_holds_what_its_commands_need() -> None:
    """Scripts and the files that they read; gpu_check reads the golden cases."""
    everything = copied("source") + copied("vllm")
    for instruction in STAGES["cpu"][1] + STAGES["gpu"][1]:
        for script in re.findall(r"scripts/[\w.]+", instruction):
            assert (ROOT / script).exists() and "scripts" in everything
    assert {"benchmarks", "tests/golden", "tests/support", "requirements-cpu.txt", "conf"} <= set(everything)
    worker = re.search(r"PYTHONPATH=(\S+)", (ROOT / "scripts" / "setup_vllm.sh").read_text())
    assert worker is not None and worker[1] in copied("vllm")


def test_pins_are_those_of_the_project() -> None:
    """Pinned packages have the version of requirements-cpu.txt; Transformer Engine's is checked, not chosen."""
    pinned = re.findall(r"\b([a-z_-]+)==(\d[\d.]*)", DOCKERFILE)
    assert pinned
    known = (ROOT / "requirements-cpu.txt").read_text().splitlines()
    for name, version in pinned:
        assert f"{name}=={version}" in [line.partition(";")[0].strip() for line in known]
    assert any("check_gpu_environment.py --without-gpu" in line for line in STAGES["gpu"][1])


def versions(name: str) -> list[str]:
    """The versions of a package that the index offers this Python; none if there is no index, or no such package."""
    command = [sys.executable, "-m", "pip", "index", "versions", name, "--retries", "0", "--timeout", "10"]
    shown = subprocess.run(command, capture_output=True, text=True).stdout
    found = re.search(r"Available versions: (.*)", shown)
    return found[1].split(", ") if found else []


@pytest.mark.slow
def test_pinned_versions_exist() -> None:
    """Those that no other test installs. The tags of the two base images can't be asked for without a registry."""
    if not versions("pip"):
        pytest.skip("no package index is reachable")
    setup = (ROOT / "scripts" / "setup_gpu.sh").read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [
        *re.findall(r"\$\{TORCH:-(.*?)\}", setup),
        *re.findall(r"^vllm==.*", (ROOT / "requirements-vllm-cuda.txt").read_text(), flags=re.MULTILINE),
        *(f"nemo-toolkit=={version}" for version in re.findall(r"--build-arg NEMO=([\d.]+)", DOCKERFILE)),
        *project["optional-dependencies"]["te"],
    ]
    assert len(wanted) == 5
    with ThreadPoolExecutor(2) as pool:
        requirements = [Requirement(line) for line in wanted]
        for requirement, offered in zip(requirements, pool.map(versions, [r.name for r in requirements]), strict=True):
            assert any(requirement.specifier.contains(version) for version in offered), f"{requirement}: {offered[:9]}"


def test_vllm_is_where_the_project_looks_for_it() -> None:
    """setup_vllm.sh makes it in the working directory, and the project is installed from there, editable."""
    from nemo_oprd.rollout.vllm.launch import DEFAULT_PYTHON

    assert DEFAULT_PYTHON == ROOT / ".venv-vllm" / "bin" / "python"
    for stage in ("cpu", "gpu"):
        assert any("bash scripts/setup_vllm.sh" in line for line in STAGES[stage][1])
        assert any(re.search(r"pip install .*--editable \.", line) for line in STAGES[stage][1])


def test_hadolint() -> None:
    hadolint = shutil.which("hadolint", path=f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin")
    if hadolint is None:
        pytest.skip("hadolint is not installed")
    linted = subprocess.run([hadolint, "--no-color", str(ROOT / "Dockerfile")], capture_output=True, text=True)
    assert linted.returncode == 0, linted.stdout + linted.stderr


def engine() -> str | None:
    """A container engine that runs here; docker's client alone is none."""
    for program in ("docker", "podman"):
        if shutil.which(program) and subprocess.run([program, "info"], capture_output=True).returncode == 0:
            return program
    return None


@pytest.mark.slow
def test_the_cpu_image() -> None:
    """Builds it and asks the project in it for its version and a configuration's mistake."""
    program = engine()
    if program is None:
        pytest.skip("no container engine runs here (docker info, podman info)")
    tag = "nemo_oprd:test-of-the-cpu-image"
    subprocess.run([program, "build", "--target", "cpu", "--tag", tag, str(ROOT)], check=True)
    try:
        shown = subprocess.run([program, "run", "--rm", tag, "--version"], check=True, capture_output=True, text=True)
        assert re.fullmatch(r"nemo-oprd [\w.]+\n", shown.stdout)
        wrong = [program, "run", "--rm", tag, "train", "--config-name", "quickstart", "train.lrr=1"]
        assert "did you mean 'train.lr'?" in subprocess.run(wrong, capture_output=True, text=True).stderr
    finally:
        subprocess.run([program, "image", "rm", tag])
