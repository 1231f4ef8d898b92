"""`scripts/setup_gpu.sh` with an interpreter that records what it is asked to install, and the check at its end."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[3]
CHECK = ROOT / "scripts" / "check_gpu_environment.py"
ENGINE = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["te"]
PIP = "-m|pip|install|--disable-pip-version-check|--constraint|.venv-gpu/constraints.txt"
BUILDERS = "setuptools>=61|wheel|packaging|ninja|pybind11|cmake|hatchling|editables"
# the order that works: torch, headers and what builds, Transformer Engine against that torch, this project
STEPS = [
    "-m|venv|--clear|.venv-gpu",
    f"{PIP}|torch==2.14.1",
    f"{PIP}|nvidia-cuda-crt==13.0.*|nvidia-cuda-cccl==13.0.*|{BUILDERS}",
    f"{PIP}|--no-build-isolation|--no-cache-dir|transformer-engine[pytorch]==2.20.2",
    f"{PIP}|--no-build-isolation|--editable|.[te]",
    "scripts/check_gpu_environment.py|--without-gpu",
]
CUDNN = f"{PIP}|--no-deps|nvidia-cudnn-cu12==9.24.0.43"
STEPS_12 = [
    STEPS[0],
    f"{PIP}|torch==2.10.0",
    CUDNN,
    f"{PIP}|nvidia-cuda-nvcc-cu12==12.8.*|nvidia-cuda-cccl-cu12==12.8.*|{BUILDERS}",
    *STEPS[3:5],
    CUDNN,  # the steps before bring back what torch asks for
    STEPS[5],
]
# writes its arguments down; `-m venv` puts itself into the environment, and `-c` is asked for versions and headers
INTERPRETER = """#!/bin/bash
case "$1 $2" in
  "-c "*version_info*) echo "${MINOR:-3.12}"; exit ;;
  "-c "*sysconfig*) echo "$HEADERS"; exit ;;
  "-c "*torch*) echo "2.14.1 ${TORCH_CUDA:-13.0}"; exit ;;
esac
(IFS='|'; echo "$*") >>"$RAN"
if [ "$2" = venv ]; then
  mkdir -p .venv-gpu/bin .venv-gpu/lib/python3.12/site-packages/nvidia/{cudnn,nccl,cu13}/include
  touch .venv-gpu/lib/python3.12/site-packages/nvidia/cu13/include/cuda_runtime.h
  cp "$0" .venv-gpu/bin/python
fi
case $* in *"$FAIL"*) exit 1 ;; esac
case $* in *transformer-engine*) env >"$RAN.environment" ;; esac
"""
NO_DRIVER = "echo NVIDIA-SMI has failed; exit 9"
COMPILER = 'echo "$*" >>"$RAN.compiled"; /bin/cat >>"$RAN.compiled"'


def run(
    folder: Path, *arguments: str, fail: str = "nothing", programs: dict[str, str] | None = None, **variables: str
) -> tuple[int, list[str], str]:
    """Exit status, what the interpreter was given, and stderr; `programs` are stand-ins in bash."""
    project, interpreter, ran = folder / "project", folder / "interpreter", folder / "ran"
    (project / "scripts").mkdir(parents=True)
    for name in ("scripts/setup_gpu.sh", "scripts/interpreter.sh", "pyproject.toml", "requirements-cpu.txt"):
        shutil.copy(ROOT / name, project / name)
    found = {"nvidia-smi": NO_DRIVER, "c++": COMPILER, **(programs or {})}
    for name, text in {"interpreter": INTERPRETER, **{f"bin/{name}": text for name, text in found.items()}}.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text if text.startswith("#!") else f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
    clean = {"PATH": f"{folder / 'bin'}:/usr/bin:/bin", "HEADERS": str(folder), "FAIL": fail, "RAN": str(ran)}
    ended = subprocess.run(
        ["bash", str(project / "scripts" / "setup_gpu.sh"), *arguments],
        env={"PYTHON_FOR_GPU": str(interpreter), **clean, **variables},
        capture_output=True, text=True,
    )  # fmt: skip
    return ended.returncode, ran.read_text().splitlines() if ran.exists() else [], ended.stderr


def environment(folder: Path) -> dict[str, str]:
    """The environment variables of Transformer Engine's build."""
    lines = (folder / "ran.environment").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if "=" in line)


def test_the_order(tmp_path: Path) -> None:
    """Torch stays the one that was installed first; the headers that come with it are found by the compiler."""
    status, ran, _ = run(tmp_path, CUDA_HOME="/opt/cuda-12.4", CPLUS_INCLUDE_PATH="/opt/cuda-12.4/include")
    assert status == 0 and ran == STEPS
    assert (tmp_path / "project" / ".venv-gpu" / "ready").exists()
    constraints = (tmp_path / "project" / ".venv-gpu" / "constraints.txt").read_text().splitlines()
    assert constraints[-1] == "torch==2.14.1" and "torch==2.13.0" not in constraints
    assert {f"{name}==2.20.2" for name in ("transformer-engine", "transformer-engine-torch")} <= set(constraints)
    assert "transformers==5.23.0" in constraints
    built = environment(tmp_path)
    folders = [Path(folder).relative_to(tmp_path / "project") for folder in built["CPATH"].split(":")]
    assert [folder.parts[-2:] for folder in folders] == [(name, "include") for name in ("cu13", "cudnn", "nccl")]
    # a toolkit that a module has loaded
    assert not {"CUDA_HOME", "CPLUS_INCLUDE_PATH"} & set(built) and built["NVTE_BUILD_USE_NVIDIA_WHEELS"] == "1"


def test_cuda_12(tmp_path: Path) -> None:
    """Transformer Engine 2.20.2 looks for the runtime's library in nvidia/cuda_cudart/lib."""
    status, ran, _ = run(tmp_path, CUDA="12", TORCH_CUDA="12.8")
    assert status == 0 and ran == STEPS_12
    site = tmp_path / "project" / ".venv-gpu" / "lib" / "python3.12" / "site-packages" / "nvidia"
    assert (site / "cuda_cudart").readlink() == Path("cuda_runtime")


def test_python_3_11(tmp_path: Path) -> None:
    """The last Transformer Engine that its Megatron-core supports has to be told where the headers are."""
    status, ran, _ = run(tmp_path, MINOR="3.11")
    assert status == 0 and ran[3] == f"{PIP}|--no-build-isolation|--no-cache-dir|transformer-engine[pytorch]==2.11.0"
    assert ran[2].split("|")[-10:-8] == ["nvidia-cuda-nvcc==13.0.*", "nvidia-nvvm==13.0.*"]
    assert environment(tmp_path)["CUDA_HOME"].endswith("site-packages/nvidia/cu13")


def test_the_pinned_engines_are_those_of_the_project() -> None:
    """What pyproject.toml asks for holds for the versions that are installed, with each Python."""
    text = (ROOT / "scripts" / "setup_gpu.sh").read_text()
    pinned = re.findall(r"\bengine=(\d[\d.]+)", text)
    assert pinned == ["2.20.2", "2.11.0"]
    for requirement in (Requirement(line) for line in ENGINE):
        for version, python in zip(pinned, ("3.12", "3.11"), strict=True):
            assert requirement.marker is not None
            if requirement.marker.evaluate({"python_version": python}):
                assert requirement.specifier.contains(version), f"{version} with Python {python}: {requirement}"


def test_other_torch_and_apex(tmp_path: Path) -> None:
    _, ran, said = run(tmp_path, TORCH="torch==2.11.0", APEX="/src/apex", ENGINE="2.19.0")
    engine = STEPS[3].replace("2.20.2", "2.19.0")
    apex = f"{PIP}|--no-build-isolation|/src/apex"
    assert ran == [STEPS[0], f"{PIP}|torch==2.11.0", STEPS[2], engine, apex, *STEPS[4:]]
    assert "+ env APEX_CPP_EXT=1 APEX_CUDA_EXT=1 .venv-gpu/bin/python -m pip install" in said


@pytest.mark.parametrize(("variables", "steps"), [({}, STEPS), ({"CUDA": "12"}, STEPS_12)])
def test_dry_run_prints_the_same_commands(tmp_path: Path, variables: dict[str, str], steps: list[str]) -> None:
    status, ran, said = run(tmp_path, "--dry-run", **variables)
    assert status == 0 and ran == [] and not (tmp_path / "project" / ".venv-gpu").exists()
    commands = [line for line in said.splitlines() if line.startswith("+ ") and not line.startswith("+ ln ")]
    shown = [re.sub(r"^\+ (env .*? )?\S*(interpreter|python) ", "", line) for line in commands]
    assert ["|".join(line.split()) for line in shown] == steps
    assert not (tmp_path / "ran.compiled").exists()


@pytest.mark.parametrize("step", [1, 3, 5])
def test_a_step_that_fails_ends_it(tmp_path: Path, step: int) -> None:
    status, ran, _ = run(tmp_path, fail=STEPS[step].split("|")[-1])
    assert status != 0 and ran == STEPS[: step + 1]
    assert not (tmp_path / "project" / ".venv-gpu" / "ready").exists()  # jobs refuse such an environment


@pytest.mark.parametrize(
    ("arguments", "variables", "line"),
    [
        (["--dryrun"], {}, "--dryrun: expected --dry-run or nothing"),
        ([], {"CUDA": "12.8"}, "CUDA=12.8: expected 13 or 12, "),
        ([], {"PYTHON_FOR_GPU": "/no/python"}, "PYTHON_FOR_GPU=/no/python: expected a command that runs Python 3.11, "),
    ],
)
def test_mistakes(tmp_path: Path, arguments: list[str], variables: dict[str, str], line: str) -> None:
    status, ran, said = run(tmp_path, *arguments, **variables)
    assert (status, ran) == (2, []) and said.startswith(line) and len(said.splitlines()) == 1


@pytest.mark.parametrize(
    ("driver", "cuda", "line"),
    [
        ("550.90.07", "13", "driver 550.90.07: expected 580 or later for CUDA 13; .*: CUDA=12 bash .*setup_gpu.sh$"),
        ("470.256.02", "12", "driver 470.256.02: expected 525 or later for CUDA 12$"),
        ("580.65.06", "13", None),
        ("1000.1", "13", None),
        ("550.90.07", "12", None),
    ],
)
def test_the_driver_is_read_before_downloads(tmp_path: Path, driver: str, cuda: str, line: str | None) -> None:
    smi = f'case $1 in --query-gpu=driver_version) echo {driver}; echo {driver} ;; -L) echo "GPU 0: H100" ;; esac'
    variables = {"CUDA": cuda, "TORCH_CUDA": f"{cuda}.0"}
    status, ran, said = run(tmp_path, programs={"nvidia-smi": smi}, **variables)
    if line is None:
        assert status == 0 and ran[-1] == "scripts/check_gpu_environment.py"  # with the GPU
        assert "no driver" not in said and "expected" not in said
    else:
        assert (status, ran) == (2, []) and len(said.splitlines()) == 1
        assert re.search(f"^{line}", said.strip())


@pytest.mark.parametrize("programs", [{}, {"nvidia-smi": "echo No devices were found; exit 6"}])
def test_a_login_node_is_told_which_driver_jobs_need(tmp_path: Path, programs: dict[str, str]) -> None:
    status, _, said = run(tmp_path, programs=programs)
    assert status == 0
    assert said.splitlines()[0] == (
        "no driver on this machine (nvidia-smi): where jobs run, CUDA 13 needs driver 580 or later; "
        "for drivers from 525 on: CUDA=12 bash scripts/setup_gpu.sh"
    )


def test_the_compiler_is_tried_before_downloads(tmp_path: Path) -> None:
    old = "echo \"c++: error: unrecognized command-line option '-std=c++20'\" >&2; echo more >&2; exit 1"
    status, ran, said = run(tmp_path / "a", programs={"c++": old})
    assert (status, ran) == (2, [])
    assert said.splitlines()[1:] == [
        "c++ can't compile C++20 with Python.h: c++: error: unrecognized command-line option '-std=c++20'; expected "
        f"g++ 11 or clang 14, or later, and the headers of {tmp_path / 'a' / 'interpreter'} (python3-dev): load a "
        "module of your site, or name a compiler with CXX="
    ]
    status, ran, said = run(tmp_path / "b", CXX="no-such-compiler")
    assert (status, ran) == (2, []) and "no-such-compiler can't compile C++20" in said.splitlines()[1]
    assert "not found" in said.splitlines()[1]


@pytest.mark.skipif(shutil.which("c++", path="/usr/bin:/bin") is None, reason="no C++ compiler")
def test_a_real_compiler(tmp_path: Path) -> None:
    """With the interpreter's headers the compiler here does it, without them the line names the file."""
    (tmp_path / "Python.h").touch()
    real = {"c++": f'exec {shutil.which("c++", path="/usr/bin:/bin")} "$@"'}
    assert run(tmp_path / "a", programs=real, HEADERS=str(tmp_path))[:2] == (0, STEPS)
    status, ran, said = run(tmp_path / "b", programs=real)
    assert (status, ran) == (2, []) and "Python.h" in said.splitlines()[1] and "No such file" in said.splitlines()[1]


def test_a_torch_of_another_cuda(tmp_path: Path) -> None:
    status, ran, said = run(tmp_path / "a", TORCH_CUDA="12.8")
    assert (status, ran) == (2, STEPS[:2])
    assert said.splitlines()[-1].startswith("torch 2.14.1 is a build for CUDA 12.8: expected CUDA 13; ")
    assert "a build for CUDA none: expected" in run(tmp_path / "b", TORCH_CUDA="None")[2]


@pytest.mark.parametrize(
    ("cores", "gigabytes", "group", "given", "jobs"),
    [
        (64, 16, "max", None, 4),
        (2, 500, "max", None, 2),
        (8, 1, "max", None, 1),
        (64, 500, 10 * 1024**3, None, 2),  # a login node's limit of a user
        (64, 16, "max", "7", 7),
    ],
)
def test_compilers_fit_cores_and_memory(
    tmp_path: Path, cores: int, gigabytes: int, group: object, given: str | None, jobs: int
) -> None:
    """A compiler takes up to 4 GB."""
    programs = {
        "nproc": f"echo {cores}", "awk": f"echo {gigabytes * 1024**2}", "sed": "echo /user.slice/user-7.slice/s-1",
        "cat": f"case $1 in *user-7.slice/memory.max) echo {group} ;; *s-1/memory.max) echo max ;; *) exit 1 ;; esac",
    }  # fmt: skip
    run(tmp_path, programs=programs, **({} if given is None else {"MAX_JOBS": given}))
    assert environment(tmp_path)["MAX_JOBS"] == str(jobs)


def check(
    folder: Path,
    installed: dict[str, str],
    *arguments: str,
    cuda: str = "'13.0'",
    gpu: bool = True,
    cudnn: int = 92400,
) -> str:
    """What the check says with these versions of packages: its last line, which is an error or about the device."""
    for name, version in installed.items():
        information = folder / f"{name.replace('-', '_')}-{version}.dist-info"
        information.mkdir(parents=True)
        (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    device = f"is_available=lambda: {gpu}, device_count=lambda: 8, get_device_name=lambda: 'H100'"
    torch = (
        f"from types import SimpleNamespace as S\n__version__ = 'x'\nversion = S(cuda={cuda})\n"
        f"cuda = S({device})\nbackends = S(cudnn=S(version=lambda: {cudnn}))\n"
    )
    modules = {"torch": torch, "megatron/core": "", "transformer_engine/pytorch": ""}
    for module, text in modules.items():
        (folder / module).mkdir(parents=True)
        (folder / module / "__init__.py").write_text(text)
    shutil.copytree(Path(pytest.__file__).parent.parent / "packaging", folder / "packaging")
    environment = {"PYTHONPATH": str(folder), "PATH": "/usr/bin:/bin"}
    ended = subprocess.run([sys.executable, "-S", CHECK, *arguments], env=environment, capture_output=True, text=True)
    assert (ended.returncode == 0) == (not ended.stderr), ended.stderr
    if ended.stderr:
        assert ended.returncode == 1 and len(ended.stderr.splitlines()) == 1
    return (ended.stderr or ended.stdout).splitlines()[-1]


GOOD = {"torch": "2.11.0", "megatron-core": "0.16.1", "transformer-engine": "2.11.0"}


# what NVIDIA's containers have are builds before or after a release
BUILDS = {"torch": "2.14.0a0+b2c75dd062.nv26.09", "transformer-engine": "2.11.0.dev0+70f53666"}


@pytest.mark.parametrize("installed", [GOOD, {**GOOD, **BUILDS}])
def test_a_good_environment(tmp_path: Path, installed: dict[str, str]) -> None:
    assert check(tmp_path, installed).startswith("8 x H100")


# what pyproject.toml asks of the Python that runs the tests
CORES, ENGINES = ("<0.20,>=0.16.1", ">=2.10") if sys.version_info >= (3, 12) else ("<0.17,>=0.16.1", "<2.12,>=2.10")


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        # of the container 25.11
        ({"transformer-engine": "2.9.0+70f53666"}, f"error: transformer-engine 2.9.0+70f53666: expected {ENGINES} "),
        ({"megatron-core": "0.20.0"}, f"error: megatron-core 0.20.0: expected {CORES} "),
        ({"torch": "2.7.1"}, "error: torch 2.7.1: expected >=2.8 "),
        (
            {"transformer-engine": None},
            f"error: transformer-engine is not installed; expected transformer-engine{ENGINES}",
        ),
    ],
)
def test_other_versions(tmp_path: Path, changed: dict[str, str | None], said: str) -> None:
    installed = {name: version for name, version in {**GOOD, **changed}.items() if version is not None}
    assert check(tmp_path, installed).startswith(said)


def test_torch_without_cuda_or_gpu(tmp_path: Path) -> None:
    assert "is a build without CUDA" in check(tmp_path / "a", GOOD, cuda="None")
    assert "torch.cuda.is_available() is False" in check(tmp_path / "b", GOOD, gpu=False)
    assert check(tmp_path / "c", GOOD, "--without-gpu", gpu=False) == "cuDNN 9.24.0"


def test_a_cudnn_with_wrong_gradients(tmp_path: Path) -> None:
    said = check(tmp_path / "a", GOOD, "--without-gpu", cudnn=91002)
    assert said.startswith("error: cuDNN 9.10: expected 9.18 or later, before which gradients of packed sequences")
    assert check(tmp_path / "b", GOOD, "--without-gpu", cudnn=91801) == "cuDNN 9.18.1"


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ("echo 2.30.7", "NCCL 2.30.7, in vLLM's environment 2.30.7"),
        ("echo 2.28.9", "error: NCCL 2.30.7 here and 2.28.9 in vLLM's environment: expected one version, .* --no-deps "
         "nvidia-nccl-cu13==2.30.7, or of an image --build-arg NCCL=2.30.7$"),
        ("echo a line >&2; echo no nccl >&2; exit 1", "error: .*/vllm does not say which NCCL it has: no nccl; "),
    ],
)  # fmt: skip
def test_nccl_of_vllm(tmp_path: Path, other: str, said: str) -> None:
    """The library that is loaded counts; here ctypes finds one that says 2.30.7."""
    interpreter = tmp_path / "vllm"
    interpreter.write_text(f'#!/bin/sh\n[ "$1" = -c ] || exit 9\n{other}\n')
    interpreter.chmod(0o755)
    library = (
        "from types import SimpleNamespace\nclass c_int:\n    value = 0\ndef byref(x):\n    return x\n"
        "def CDLL(name):\n    assert name == 'libnccl.so.2'\n"
        "    return SimpleNamespace(ncclGetVersion=lambda x: setattr(x, 'value', 23007))\n"
    )
    (tmp_path / "a" / "ctypes").mkdir(parents=True)
    (tmp_path / "a" / "ctypes" / "__init__.py").write_text(library)
    assert re.match(said, check(tmp_path / "a", GOOD, "--without-gpu", "--vllm", str(interpreter)))
