"""The Dockerfile: its stages, what it copies, its pins, hadolint; and the CPU image, where a container engine runs."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

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
        "no_base": "python:3.12-slim-bookworm", "source": "scratch", "vllm": "scratch",
        "cpu": "python:3.12-slim-bookworm", "gpu": "${BASE}",
    }  # fmt: skip
    for name in ("cpu", "gpu"):
        lines = STAGES[name][1]
        assert "WORKDIR /opt/nemo_oprd" in lines and 'ENTRYPOINT ["nemo-oprd"]' in lines
        arguments = {line.removeprefix("ARG ").split("=")[0] for line in lines if line.startswith("ARG ")}
        assert arguments == {"cpu": {"VLLM", "TORCH_INDEX"}, "gpu": {"VLLM", "NEMO", "NCCL"}}[name]


def test_a_gpu_image_without_base_says_what_to_give() -> None:
    """The stage that stands for it can't be built."""
    assert re.findall(r"^ARG BASE=(.*)", DOCKERFILE, flags=re.MULTILINE) == ["no_base"]
    (instruction,) = STAGES["no_base"][1]
    ended = subprocess.run(["sh", "-c", instruction.removeprefix("RUN ")], capture_output=True, text=True)
    assert ended.returncode == 1 and len(ended.stderr.splitlines()) == 1
    tag = re.search(r"--build-arg BASE=REGISTRY/pytorch:(\d\d\.\d\d)-py3", ended.stderr)
    assert tag is not None and tag[1] in (ROOT / "docs" / "cluster.md").read_text()
    assert re.findall(r"BASE=REGISTRY/pytorch:([\d.]+)-py3", DOCKERFILE) == [tag[1]] * 2


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
    """Pinned packages have the version of requirements-cpu.txt; Transformer Engine's is checked, not chosen. No pip but
    that of the interpreter that the packages are for."""
    pinned = re.findall(r"\b([a-z_-]+)==(\d[\d.]*)", DOCKERFILE)
    assert pinned
    known = (ROOT / "requirements-cpu.txt").read_text().splitlines()
    for name, version in pinned:
        assert f"{name}=={version}" in [line.partition(";")[0].strip() for line in known]
    assert any("check_gpu_environment.py --without-gpu" in line for line in STAGES["gpu"][1])
    instructions = [line for _, lines in STAGES.values() for line in lines]
    assert {before for line in instructions for before in re.findall(r"(\S+) pip ", line)} == {"-m"}


# of an image: what its torch was built with, and what it has besides
IMAGE = {
    "torch": "2.14.0a0+b2c75dd062.nv26.09", "transformer_engine": "2.19.0+70f53666", "triton": "3.8.0+git1",
    "apex": "0.1", "numpy": "2.1.0",
}  # fmt: skip
# builds this project
BUILDS = ("hatchling", "editables", "pathspec", "pluggy", "packaging", "trove_classifiers")


def install_step() -> str:
    """The line of the GPU image that installs the project."""
    (line,) = [line.removeprefix("RUN ") for line in STAGES["gpu"][1] if "--editable ." in line]
    return line


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter with the packages of an image by name; `index` has every pin of the tests and a later release."""
    folder = tmp_path_factory.mktemp("image")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "venv")], check=True)
    (packages,) = (folder / "venv").glob("lib/python3*/site-packages")
    for name, version in {**IMAGE, "setuptools": "80.10.2"}.items():
        information = packages / f"{name}-{version}.dist-info"
        information.mkdir()
        (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    for name in BUILDS:
        there = importlib.util.find_spec(name)
        assert there is not None and there.origin is not None
        shutil.copytree(Path(there.origin).parent, packages / name, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "index").mkdir()
    for name, version in pins().items():
        try:
            metadata = distribution(name).read_text("METADATA")
        except PackageNotFoundError:
            continue  # of another platform
        assert metadata is not None
        for offered in (version, f"{version}.post9"):
            text = re.sub(r"^Version: .*", f"Version: {offered}", metadata, count=1, flags=re.MULTILINE)
            stem = f"{name.replace('-', '_')}-{offered}"
            with zipfile.ZipFile(folder / "index" / f"{stem}-py3-none-any.whl", "w") as wheel:
                wheel.writestr(f"{stem}.dist-info/METADATA", text)
                wheel.writestr(f"{stem}.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
                wheel.writestr(f"{stem}.dist-info/RECORD", "")
    return folder


def pins() -> dict[str, str]:
    """Distribution -> version of the tests' packages, for this Python."""
    lines = (ROOT / "requirements-cpu.txt").read_text().splitlines()
    parsed = [Requirement(line) for line in lines if re.match(r"[\w.-]+==", line)]
    kept = [each for each in parsed if each.marker is None or each.marker.evaluate()]
    return {canonicalize_name(each.name): str(each.specifier).removeprefix("==") for each in kept}


def chosen(image: Path, constraints: str) -> dict[str, str]:
    """What the image's line would install with these constraints."""
    (step,) = re.findall(r"python -m pip (install --constraint .*?--editable \.)", install_step())
    (image / "constraints.txt").write_text(constraints)
    words = step.replace("/tmp/constraints.txt", str(image / "constraints.txt")).split()
    python = str(image / "venv" / "bin" / "python")
    report = image / "report.json"
    words[:1] = ["--python", python, "install", "--quiet", "--dry-run", "--no-index"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "PYTHON"))}
    subprocess.run(
        [sys.executable, "-m", "pip", *words, "--find-links", str(image / "index"), "--report", str(report)],
        cwd=ROOT, env={**environment, "PIP_CONFIG_FILE": os.devnull}, check=True,
    )  # fmt: skip
    found = [each["metadata"] for each in json.loads(report.read_text())["install"]]
    return {canonicalize_name(each["name"]): each["version"] for each in found if each["name"] != "nemo-oprd"}


def test_what_pip_installs_into_an_image(image: Path) -> None:
    """The pins of the tests; what the image's torch was built with stays. Without them pip takes later releases."""
    script = ROOT / "scripts" / "check_gpu_environment.py"
    check = [str(image / "venv" / "bin" / "python"), str(script), "--constraints"]
    constraints = subprocess.run(check, check=True, capture_output=True, text=True).stdout
    installed = chosen(image, constraints)
    assert len(installed) > 30 and not set(installed) & {canonicalize_name(name) for name in IMAGE}
    assert installed == {name: pins()[name] for name in installed}
    free = chosen(image, "")
    assert free["transformers"].endswith(".post9") and set(free) == set(installed)
    kept = subprocess.run([*check, "kept"], check=True, capture_output=True, text=True).stdout.splitlines()
    assert sorted(kept) == sorted(f"{name.replace('_', '-')}=={version}" for name, version in IMAGE.items())


@pytest.mark.parametrize(
    ("vllm", "nccl", "installed", "compared"),
    [("1", "", False, True), ("1", "2.30.7", True, True), ("1", "any", False, False), ("", "2.30.7", False, False)],
)
def test_nccl_of_the_image(tmp_path: Path, vllm: str, nccl: str, installed: bool, compared: bool) -> None:
    """It is compared with that of vLLM's environment, and this one gets another where the build is told so."""
    stand_in = f'#!/bin/sh\necho "$0 $*" >>{tmp_path}/ran\ncase "$*" in *torch.version*) echo 13 ;; esac\n'
    for name in ("bin/python", "bin/nemo-oprd", ".venv-vllm/bin/python"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(stand_in)
        (tmp_path / name).chmod(0o755)
    step = install_step().replace("/tmp/constraints.txt", str(tmp_path / "constraints.txt"))
    environment = {"PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin", "VLLM": vllm, "NCCL": nccl, "NEMO": ""}
    subprocess.run(["sh", "-c", step], cwd=tmp_path, env=environment, check=True)
    ran = (tmp_path / "ran").read_text()
    assert (".venv-vllm/bin/python -m pip install --no-deps nvidia-nccl-cu13==2.30.7" in ran) == installed
    assert ("check_gpu_environment.py --without-gpu --vllm .venv-vllm/bin/python" in ran) == compared
    assert "check_gpu_environment.py --without-gpu" in ran and "check_gpu_environment.py --constraints\n" in ran


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
    engines = re.findall(r"\bengine=(\d[\d.]+)", setup)
    wanted = [
        *re.findall(r"\btorch=(torch==\S+)", setup),
        *(line for line in re.findall(r"nvidia-[\w-]+==[\d.*]+", setup)),
        *(f"{name}=={version}" for version in engines for name in ("transformer-engine", "transformer-engine-torch")),
        *re.findall(r"^vllm==.*", (ROOT / "requirements-vllm-cuda.txt").read_text(), flags=re.MULTILINE),
        *(f"nemo-toolkit=={version}" for version in re.findall(r"--build-arg NEMO=([\d.]+)", DOCKERFILE)),
        *project["optional-dependencies"]["te"],
    ]
    assert len(wanted) == 17
    with ThreadPoolExecutor(2) as pool:
        requirements = [Requirement(line) for line in wanted]
        for requirement, offered in zip(requirements, pool.map(versions, [r.name for r in requirements]), strict=True):
            assert any(requirement.specifier.contains(version) for version in offered), f"{requirement}: {offered[:9]}"


def test_vllm_is_where_the_project_looks_for_it() -> None:
    """setup_vllm.sh makes it in the working directory, and the project is installed from there, editable."""
    from nemo_oprd.vllm.launch import DEFAULT_PYTHON

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
