"""The sbatch scripts against stand-ins that write down their arguments: what srun, a container and a rank are given,
and what --dry-run plans. tests/e2e/test_slurm.py runs the same scripts on a real cluster.
"""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
from pathlib import Path

import cluster_stand_ins
import pytest
from cluster_stand_ins import CPUS_ON_NODE, Call, calls

from nemo_oprd.commands.plan.estimate import estimate
from nemo_oprd.commands.plan.gpus import GPUS, Cluster
from nemo_oprd.config.loading import load_config
from nemo_oprd.setup.resolve import resolve
from tests.support.recipe_models import OF_MEGATRON_BRIDGE, RANKS, SHAPES

ROOT = Path(__file__).parent.parent.parent
# configuration -> the command of docs/cluster.md that starts it
LAUNCHED = dict(re.findall(r"^\| `(\w+)` \| `([^`]+)`", (ROOT / "docs" / "cluster.md").read_text(), flags=re.MULTILINE))
SUBMITTED = {name: command for name, command in LAUNCHED.items() if "sbatch" in command}
CONFIGURATIONS = {file.stem for file in (ROOT / "conf").glob("*.yaml")}
OPRD = "scripts/oprd_1p5b.sh"
BRIDGES = (
    "bridge_qwen3_4b_to_1p7b",
    "bridge_phi4mini_to_qwen3_1p7b",
    "bridge_then_opd",
    *OF_MEGATRON_BRIDGE,
)
MOUNTS = "--container-mounts=/a:/b,/c:/d"


class Site:
    """A copy of the scripts, and the stand-ins."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.project = folder, folder / "project"
        self.environment = cluster_stand_ins.install(folder)
        shutil.copytree(ROOT / "scripts", self.project / "scripts")

    def run(self, command: str, code: int = 0, **variables: str) -> subprocess.CompletedProcess[str]:
        environment = {**self.environment, **variables}
        ended = subprocess.run(
            command,
            shell=True,
            executable="/bin/bash",
            cwd=self.project,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert ended.returncode == code, f"{ended.returncode}\n{ended.stdout}{ended.stderr}"
        return ended

    def ranks(self) -> list[Call]:
        """The calls of the program itself."""
        return [
            call for call in calls(self.folder) if call.program.startswith("python") and "nemo_oprd" in call.arguments
        ]

    def only(self, program: str) -> Call:
        (call,) = calls(self.folder, program)
        return call


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def test_a_job(site: Site) -> None:
    """What srun is given, and a rank: its numbers, the address of the first node, the settings in their order."""
    site.run(f"sbatch --nodes=2 {OPRD} train.steps=3 'data.validation={{a: b c}}'")
    cpus = CPUS_ON_NODE // 8
    assert site.only("srun").arguments[:3] == ["--kill-on-bad-exit=1", f"--cpus-per-task={cpus}", "bash"]
    (rank,) = site.ranks()
    assert rank.program == "python" and rank.directory == str(site.project)
    assert rank.arguments == [
        *("-m", "nemo_oprd", "train", "--config-name", "oprd_1p5b"),
        *("student.parallel.tensor=2", "teacher.parallel.tensor=1", "rollout.tensor=1"),
        *("train.steps=3", "data.validation={a: b c}"),
    ]
    assert rank.environment == {
        "RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "16", "MASTER_ADDR": "n0", "MASTER_PORT": "20007",
        "OMP_NUM_THREADS": "8", "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    }  # fmt: skip


def test_the_port_is_free_on_the_first_node(site: Site) -> None:
    """Another job, whose number gives the same port, listens there; a port that the user names stays."""
    with socket.socket() as one, socket.socket(socket.AF_INET6) as other:
        one.bind(("127.0.0.1", 20007))
        other.bind(("::1", 20008))
        one.listen()
        other.listen()
        site.run(f"sbatch {OPRD}")
        site.run(f"sbatch {OPRD}", MASTER_PORT="20007")
    found, given = (int(rank.environment["MASTER_PORT"]) for rank in site.ranks())
    assert found > 20008 and given == 20007
    with socket.socket() as probe:
        probe.bind(("", found))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("--cpus-per-task=5", 5),  # as asked, although odd
        ("--ntasks-per-node=6 --gpus-per-node=6", 16),  # 100 / 6, in whole cores of two threads
        ("--ntasks-per-node=100 --gpus-per-node=100", 1),
        ("--ntasks-per-node=128 --gpus-per-node=128", 1),
    ],
)
def test_cpus_per_task(site: Site, options: str, expected: int) -> None:
    """srun is told, because it inherits nothing."""
    site.run(f"sbatch {options} {OPRD}")
    assert f"--cpus-per-task={expected}" in site.only("srun").arguments


def test_the_container_of_pyxis(site: Site) -> None:
    """SRUN_ARGS reach srun word by word, and the job's variables come before those of the image."""
    site.run(f"sbatch {OPRD}", SRUN_ARGS=f"  --container-image=/i/n.sqsh\t{MOUNTS} --comment=*\n", CONFIG="mine")
    start = site.only("srun").arguments
    assert start[2:6] == ["--container-image=/i/n.sqsh", MOUNTS, "--comment=*", "bash"]
    (rank,) = site.ranks()
    assert rank.arguments[2:5] == ["train", "--config-name", "mine"]
    assert rank.environment["CONTAINER"] == "pyxis"
    assert rank.environment["MASTER_ADDR"] == "n0" and rank.environment["OMP_NUM_THREADS"] == "8"


def test_the_container_of_apptainer(site: Site) -> None:
    """LAUNCH_PREFIX stands between srun and the rank; all that a rank needs is set inside."""
    prefix = "apptainer exec --nv --cleanenv --pwd /opt/x --bind /a:/b image.sif"
    site.run(f"sbatch {OPRD} train.steps=1", LAUNCH_PREFIX=prefix, PYTHON="python3", OMP_NUM_THREADS="3")
    assert site.only("srun").arguments[2] == "bash"
    assert ["apptainer", *site.only("apptainer").arguments[:8]] == prefix.split()
    (rank,) = site.ranks()
    assert rank.program == "python3" and rank.arguments[-1] == "train.steps=1"
    assert {
        "CONTAINER": "apptainer",
        "RANK": "1",
        "WORLD_SIZE": "8",
        "MASTER_ADDR": "n0",
        "OMP_NUM_THREADS": "3",
    }.items() <= (rank.environment.items())


@pytest.mark.parametrize(
    ("variables", "own"),
    [
        ({}, True),
        ({"SRUN_ARGS": "--comment=x"}, True),
        ({"LAUNCH_PREFIX": "env A=1"}, True),
        ({"SRUN_ARGS": "--container-image=x"}, False),
        ({"LAUNCH_PREFIX": "apptainer exec x"}, False),
        ({"PYTHON": "python3"}, False),
    ],
)
def test_the_interpreter(site: Site, variables: dict[str, str], own: bool) -> None:
    """.venv-gpu, where it is and the task is not in a container, which has a Python of its own."""
    site.run("python3.12 -m venv .venv-gpu && touch .venv-gpu/ready")
    site.run(f"sbatch {OPRD}", **variables)
    lines = site.only("srun").arguments
    assert (str(site.project / ".venv-gpu/bin/python") in lines) == own
    assert own or variables.get("PYTHON", "python") in lines


def planned(call: Call) -> dict[str, str]:
    words = call.arguments[call.arguments.index("plan") + 1 :]
    return {name: words[words.index(name) + 1] for name in words if name.startswith("--")}


@pytest.mark.parametrize(
    ("arguments", "ranks", "more"),
    [
        ("", "8", {}),
        ("--nodes=3 ", "24", {}),
        ("--gpu=h200 --nodes=2 ", "16", {"--gpu": "h200"}),
        ("--gpu=a100 --gpu-memory=40 ", "8", {"--gpu": "a100", "--gpu-memory": "40"}),
    ],
)
def test_dry_run_without_slurm(site: Site, arguments: str, ranks: str, more: dict[str, str]) -> None:
    """The plan of the settings that the job would pass; nothing is started."""
    site.run(f"bash {OPRD} --dry-run {arguments}train.steps=3 student.parallel.pipeline=2")
    (plan,) = site.ranks()
    assert plan.program == "python" and {call.program for call in calls(site.folder)} == {"python"}
    assert planned(plan) == {"--config-name": "oprd_1p5b", "--ranks": ranks, "--gpus-per-node": "8", **more}
    settings = [word for word in plan.arguments if "=" in word]
    site.run(f"sbatch {OPRD} train.steps=3 student.parallel.pipeline=2")
    assert settings == [word for word in site.ranks()[-1].arguments if "=" in word]


def test_dry_run_in_a_job(site: Site) -> None:
    """One task, in the job's container, for the job's nodes."""
    shown = site.run(f"sbatch --nodes=4 {OPRD} --dry-run train.lr=1", SRUN_ARGS="--container-image=x").stdout
    assert "plan of train on 4 nodes of 8 GPUs:" in shown
    assert site.only("srun").arguments[:3] == ["--nodes=1", "--ntasks=1", "--ntasks-per-node=1"]
    (plan,) = site.ranks()
    assert planned(plan)["--ranks"] == "32" and plan.environment["CONTAINER"] == "pyxis"
    assert not calls(site.folder, "scontrol")


def test_a_dry_run_rehearses_on_request(site: Site) -> None:
    """The training, with the arguments of its plan; no rehearsal of what the plan refuses."""
    site.run("bash scripts/bridge_qwen3_4b_to_1p7b.sh --dry-run --rehearse --nodes=2 train.lr=1", BRIDGE="b")
    fit, train, rehearsal = (call.arguments[2:] for call in site.ranks())
    assert (fit[0], train[0], rehearsal[0]) == ("plan", "plan", "rehearse") and train[1:] == rehearsal[1:]
    site.run(f"bash {OPRD} --dry-run --rehearse", code=2, STAND_IN_EXIT="2")
    assert [call.arguments[2] for call in site.ranks()[3:]] == ["plan"]
    site.run(f"bash {OPRD} --rehearse", code=2)


@pytest.mark.parametrize("code", [1, 2, 75])
def test_dry_run_has_the_exit_code_of_the_plan(site: Site, code: int) -> None:
    site.run(f"bash {OPRD} --dry-run", code=code, STAND_IN_EXIT=str(code))
    site.run(f"sbatch {OPRD} --dry-run", code=code, STAND_IN_EXIT=str(code))
    assert not calls(site.folder, "scontrol")  # 75 asks nothing to be queued again


@pytest.mark.parametrize("script", BRIDGES)
def test_dry_run_of_both_stages(site: Site, script: str) -> None:
    """Both stages have a plan while there is no bridge; afterwards only the training has."""
    site.run(f"bash scripts/{script}.sh --dry-run --nodes=2 train.lr=1", BRIDGE="b")
    fit, train = site.ranks()
    assert planned(fit) == planned(train) and planned(fit)["--ranks"] == "16"
    assert fit.arguments[-2:] == ["train.lr=1", "output=b"] and train.arguments[-2:] == ["bridge.path=b", "train.lr=1"]
    (site.project / "b").mkdir()
    (site.project / "b" / "bridge.json").touch()
    site.run(f"bash scripts/{script}.sh --dry-run", BRIDGE="b")
    assert len(site.ranks()) == 3 and planned(site.ranks()[-1])["--ranks"] == str(RANKS.get(script, 8))


def test_the_sbatch_lines_are_those_of_the_script_that_was_called(site: Site) -> None:
    script = site.project / "scripts" / "bridge_then_opd.sh"
    script.write_text(script.read_text().replace("--nodes=1", "--nodes=5").replace("per-node=8", "per-node=4"))
    site.run("bash scripts/bridge_then_opd.sh --dry-run")
    assert planned(site.ranks()[-1]) == {
        "--config-name": "bridge_then_opd_qwen3_4b_to_1p7b", "--ranks": "20", "--gpus-per-node": "4",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (f"bash {OPRD}", "this is no Slurm job: submit it with sbatch"),
        (f"sbatch {OPRD} --nodes=2", "options of sbatch stand before the script's name"),
        (f"bash {OPRD} --dry-run --nodes=two", "--nodes=two: expected"),
        (f"bash {OPRD} --dryrun", "--dryrun: expected"),
        (f"bash {OPRD} --gpu-memory=24", "--nodes, --gpu, --gpu-memory and --rehearse belong to --dry-run"),
        (f"PYTHON=no/python sbatch {OPRD}", "PYTHON=no/python: expected the name of an interpreter"),
        # another directory than the project's
        (f"cd / && sbatch $OLDPWD/{OPRD}", "/ has no scripts/slurm_job.sh: submit from the project's directory"),
        (f"sbatch --chdir=/ {OPRD}", "/ has no scripts/slurm_job.sh: submit from the project's directory"),
        # other GPUs than tasks
        (f"sbatch --gpus-per-node=0 --gres=gpu:8 {OPRD}", "8 tasks, and the tasks get 0 GPUs (SLURM_GPUS_PER_NODE=0)"),
        (f"sbatch --gpus-per-node=0 --gres=gpu:8 {OPRD}", "submit with --gpus-per-node=8 --ntasks-per-node=8, without"),
        (f"sbatch --gres=gpu:4 --ntasks-per-node=4 {OPRD}", "4 tasks, and the tasks get 8 GPUs"),
        (
            f"sbatch --gres=gpu:4 --ntasks-per-node=4 {OPRD}",
            "submit with --gpus-per-node=4 --ntasks-per-node=4, without",
        ),
        (f"sbatch --gpus-per-node=4 {OPRD}", "8 tasks, and the tasks get 4 GPUs"),
        (f"sbatch --gpus-per-node=h100:4 {OPRD}", "8 tasks, and the tasks get 4 GPUs"),
        # environments that are not there, or not complete
        (f"python3 -m venv .venv-gpu && sbatch {OPRD}", "bash scripts/setup_gpu.sh makes it again"),
        (f"python3 -m venv .venv-gpu && bash {OPRD} --dry-run", "bash scripts/setup_gpu.sh makes it again"),
        (f"mkdir .venv-gpu && sbatch {OPRD}", ".venv-gpu is not complete (.venv-gpu/ready is missing)"),
        (
            f"rm ../bin/python && sbatch {OPRD}",
            "has torch and megatron-core: bash scripts/setup_gpu.sh makes",
        ),
        (f"STAND_IN_PACKAGES=none sbatch {OPRD}", "has torch and megatron-core: bash scripts/setup_gpu.sh makes"),
    ],
)
def test_mistakes(site: Site, command: str, said: str) -> None:
    """One line, and nothing is started."""
    ended = site.run(command, code=2)
    (line,) = ended.stderr.splitlines()
    assert said in line
    assert not site.ranks() and not calls(site.folder, "srun")


@pytest.mark.parametrize(
    "command",
    [
        f"sbatch --gpus-per-node=4 --ntasks-per-node=4 {OPRD}",
        f"sbatch --gpus-per-node=h100:8 {OPRD}",
        f"NEMO_OPRD_CPU=1 sbatch --gpus-per-node=0 {OPRD}",
        f"SRUN_ARGS=--gpus-per-task=1 sbatch --gpus-per-node=0 {OPRD}",
        f"cd / && sbatch --chdir=$OLDPWD $OLDPWD/{OPRD}",
        f"rm ../bin/python; SRUN_ARGS=--container-image=x LAUNCH_PREFIX='env PATH=/usr/bin' PYTHON=true sbatch {OPRD}",
    ],
)
def test_no_mistakes(site: Site, command: str) -> None:
    site.run(command)
    site.only("srun")


def test_a_slurm_that_counts_no_gpus(site: Site) -> None:
    """Its jobs have all GPUs of their nodes, which nvidia-smi lists."""
    tool = site.folder / "bin" / "nvidia-smi"
    tool.write_text('#!/bin/sh\nfor i in 0 1 2 3; do echo "GPU $i: NVIDIA H100 (UUID: GPU-$i)"; done\n')
    script = site.project / OPRD
    script.write_text(script.read_text().replace("#SBATCH --gpus-per-node=8\n", ""))
    site.run(f"sbatch --ntasks-per-node=4 {OPRD}")
    site.only("srun")
    assert "8 tasks, and nvidia-smi lists 4 GPUs; expected" in site.run(f"sbatch {OPRD}", code=2).stderr
    tool.unlink()
    assert "8 tasks, and nvidia-smi lists 0 GPUs; expected" in site.run(f"sbatch {OPRD}", code=2).stderr
    site.only("srun")


def test_every_sbatch_script_leaves_it_to_one_file() -> None:
    """None starts anything by itself, so all of them have --dry-run, containers and requeueing."""
    scripts = [file for file in (ROOT / "scripts").glob("*.sh") if "#SBATCH" in file.read_text()]
    assert len([file for file in scripts if file.name != "slurm_job.sh"]) == len(
        ("oprd_1p5b", "oprd_prefix_1p5b", "oprd_qwen3_30b_a3b", *BRIDGES)
    )
    for file in scripts:
        text = file.read_text()
        if file.name != "slurm_job.sh":
            assert "srun" not in text and "python" not in text.replace("PYTHON", "")
            assert "#SBATCH --mem=0\n" in text  # otherwise a site's default, which may be a part of the node
            assert ". scripts/slurm_job.sh" in text or "exec bash scripts/bridge_qwen3_4b_to_1p7b.sh" in text


def test_the_page_has_every_configuration() -> None:
    """docs/cluster.md starts each file of conf/, and the table of docs/features.md names each that is a run."""
    assert {name for name in LAUNCHED if "scripts/" in LAUNCHED[name] or "srun" in LAUNCHED[name]} == CONFIGURATIONS
    assert len(SUBMITTED) == len(CONFIGURATIONS) - len(("quickstart", "real_model", "verify"))
    page = (ROOT / "docs" / "features.md").read_text()
    table = page.partition("| configuration | objective |")[2].partition("\n\n")[0]
    named = [name for row in table.splitlines() for name in re.findall(r"`(\w+)`", row.partition(" | ")[0])]
    assert sorted(named) == sorted(CONFIGURATIONS - {"verify"})


@pytest.mark.parametrize("name", SUBMITTED)
def test_a_command_of_the_page_starts_its_configuration(site: Site, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Every rank is given the configuration, and settings with which it loads and fits the nodes of the script; a dry
    run plans the very same."""
    site.run(SUBMITTED[name])
    *_, rank = site.ranks()
    assert rank.arguments[:5] == ["-m", "nemo_oprd", "train", "--config-name", name]
    settings = rank.arguments[5:]
    config = load_config(name, settings)
    assert config.output == f"runs/{name}", "each configuration has a directory of its own"
    monkeypatch.chdir(site.project)
    for model in {str(source.hf_path) for source in (config.student, *config.teacher_sources)}:
        shape = SHAPES.get(Path(model).name, SHAPES["DeepSeek-R1-Distill-Qwen-1.5B"])  # of which the others are made
        Path(model).mkdir(parents=True)
        (Path(model) / "config.json").write_text(json.dumps({"rope_theta": 10000, **shape}))
    ranks = int(rank.environment["WORLD_SIZE"])
    if name in OF_MEGATRON_BRIDGE:  # tests/functional/test_bridge_recipes.py plans them, in its environment
        assert ranks == RANKS[name]
    else:
        assert not estimate(resolve(config, ranks), Cluster(ranks, GPUS["h100"])).problems
    site.run(SUBMITTED[name].replace("sbatch", "bash") + " --dry-run")
    plan = site.ranks()[-1]
    assert planned(plan)["--config-name"] == name and planned(plan)["--ranks"] == str(ranks)
    assert plan.arguments[-len(settings) :] == settings


@pytest.mark.parametrize("name", ["quickstart", "real_model"])
def test_the_scripts_without_slurm_start_their_configuration(name: str) -> None:
    (_, script) = LAUNCHED[name].split()
    text = (ROOT / script).read_text()
    assert re.findall(r"-m nemo_oprd train --config-name (\w+)", text) == [name]
    assert load_config(name).output.startswith(f"runs/{name}")
