"""Stand-ins for the programs of a cluster: each writes down how it was called and does the little that a script needs.

`install(folder)` makes them; `calls(folder)` reads what they wrote. sbatch runs the script as a job with Slurm's
variables, srun and apptainer run the command that they are given, python makes environments of stand-ins. Containers
set variables of their own over those of the job, as images do.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ACT = ("sbatch", "srun", "scontrol", "apptainer", "python", "python3", "python3.11", "python3.12")
RECORD = ("squeue", "scancel", "tail", "docker", "enroot", "nvidia-smi", "nemo-oprd", "torchrun", "hf", "c++")
# what the environment's torch says of itself
TORCH = "2.14.1 13.0"
# environment variables that matter to a task
NOTED = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS", "CONTAINER", "CPATH",
    "CUDA_DEVICE_MAX_CONNECTIONS", "PYTORCH_CUDA_ALLOC_CONF",
)  # fmt: skip
# what the image of a container sets, whatever the job has
IMAGE = {"MASTER_ADDR": "image", "OMP_NUM_THREADS": "99", "CONFIG": "image"}
CPUS_ON_NODE, GPUS_ON_NODE = 100, 8
# options with a value in the next word
TWO_WORDS = ("--pwd", "--bind")


@dataclass(frozen=True)
class Call:
    """One call of a stand-in."""

    program: str
    arguments: list[str]
    environment: dict[str, str]
    directory: str


def install(folder: Path) -> dict[str, str]:
    """Makes the stand-ins in `folder`/bin; returns the environment in which they are found, without other settings."""
    (folder / "bin").mkdir(parents=True)
    for name in (*ACT, *RECORD):
        _make(folder, name, folder / "bin" / name)
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("SLURM_", "PYTHON", "OMP_", "MASTER_", "PIP_", "NEMO_OPRD_"))
        and name not in ("SRUN_ARGS", "LAUNCH_PREFIX", "CONFIG", "BRIDGE", "CPATH")
    }
    return {**clean, "PATH": f"{folder / 'bin'}:/usr/bin:/bin"}


def calls(folder: Path, program: str | None = None) -> list[Call]:
    """What was called, in order."""
    file = folder / "calls.jsonl"
    found = [Call(**json.loads(line)) for line in file.read_text().splitlines()] if file.exists() else []
    return [call for call in found if program is None or call.program == program]


def _make(folder: Path, name: str, file: Path) -> None:
    file.write_text(f'#!/bin/sh\nexec {sys.executable} -S -E {__file__} {folder} {name} "$@"\n')
    file.chmod(0o755)


def _command(arguments: list[str]) -> list[str]:
    """The words after a program's options."""
    words = list(arguments)
    while words and words[0].startswith("-"):
        words = words[2:] if words[0] in TWO_WORDS else words[1:]
    return words


def _option(name: str, lines: list[str]) -> str | None:
    found = [line.removeprefix(f"--{name}=") for line in lines if line.startswith(f"--{name}=")]
    return found[-1] if found else None


def _sbatch(folder: Path, arguments: list[str]) -> int:
    script, *settings = _command(arguments)
    lines = Path(script).read_text().splitlines()
    options = [line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH ")]
    options += arguments[: arguments.index(script)]
    nodes, tasks = int(_option("nodes", options) or 1), int(_option("ntasks-per-node", options) or 1)
    job = {
        "SLURM_JOB_ID": "7", "SLURM_NNODES": str(nodes), "SLURM_NTASKS": str(nodes * tasks),
        "SLURM_NTASKS_PER_NODE": str(tasks), "SLURM_JOB_NODELIST": f"n[0-{nodes - 1}]",
        "SLURM_SUBMIT_DIR": os.getcwd(), "SLURM_CPUS_ON_NODE": str(CPUS_ON_NODE),
    }  # fmt: skip
    if gpus := _option("gpus-per-node", options):
        # a whole node, as with --exclusive; what the tasks get is the second one (as on Slurm 22.05)
        job |= {"SLURM_GPUS_ON_NODE": str(GPUS_ON_NODE), "SLURM_GPUS_PER_NODE": gpus}
    if given := _option("cpus-per-task", options):
        job["SLURM_CPUS_PER_TASK"] = given
    spool = folder / "slurm_script"
    shutil.copy(script, spool)
    print("Submitted batch job 7", flush=True)
    place = _option("chdir", arguments) or os.getcwd()
    return subprocess.run(["bash", str(spool), *settings], env={**os.environ, **job}, cwd=place).returncode


def _srun(arguments: list[str]) -> int:
    """The second task, as it would be on the first node."""
    tasks = _option("ntasks", arguments) or os.environ.get("SLURM_NTASKS", "1")
    task = {"SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_NTASKS": tasks}
    if _option("container-image", arguments):
        task |= {**IMAGE, "CONTAINER": "pyxis"}
    return subprocess.run(_command(arguments), env={**os.environ, **task}).returncode


def _apptainer(arguments: list[str]) -> int:
    _, *after = arguments  # exec
    _, *command = _command(after)  # the image
    return subprocess.run(command, env={**os.environ, **IMAGE, "CONTAINER": "apptainer"}).returncode


def _python(folder: Path, arguments: list[str]) -> int:
    if arguments[:2] == ["-m", "venv"]:
        environment = Path(arguments[-1])
        (environment / "bin").mkdir(parents=True, exist_ok=True)
        (environment / "bin" / "activate").write_text(f'PATH="{environment.resolve() / "bin"}:$PATH"\n')
        for name in ("python", "nemo-oprd"):
            _make(folder, name, environment / "bin" / name)
    if arguments[:1] == ["-c"] and "torch.version.cuda" in arguments[1]:
        print(TORCH)
    if arguments[:1] == ["-c"] and os.environ.get("STAND_IN_PACKAGES") == "none":
        return 1
    return int(os.environ.get("STAND_IN_EXIT", "0")) if "nemo_oprd" in arguments else 0


def main() -> int:
    """Called by the files that `install` makes."""
    folder, name, arguments = Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
    environment = {variable: os.environ[variable] for variable in NOTED if variable in os.environ}
    with (folder / "calls.jsonl").open("a") as file:
        call = {"program": name, "arguments": arguments, "environment": environment, "directory": os.getcwd()}
        file.write(json.dumps(call) + "\n")
    if name == "sbatch":
        return _sbatch(folder, arguments)
    if name == "srun":
        return _srun(arguments)
    if name == "apptainer" and arguments[0] == "exec":
        return _apptainer(arguments)
    if name == "scontrol" and arguments[0] == "show":
        print("n0\nn1")
    return _python(folder, arguments) if name.startswith("python") else 0


if __name__ == "__main__":
    sys.exit(main())
