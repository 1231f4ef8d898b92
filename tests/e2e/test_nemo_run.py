"""`nemo oprd train`: real training by nemo-run's local executor, and by its Slurm executor on a loopback cluster."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import nemo_environment as nemo
import pytest
import slurm_cluster

from nemo_oprd.config.loading import default_config_dir
from tests.support.forked_run import differences

# the groups of `data` whose keys are the user's: an override may add to them
DATA: dict[str, dict] = {"chat_template_args": {}, "validation": {}}

pytestmark = [
    pytest.mark.nemo,
    pytest.mark.skipif(nemo.missing(nemo.RUN) is not None, reason=str(nemo.missing(nemo.RUN))),
]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return nemo.make_pair(tmp_path_factory.mktemp("pair") / "toy")


@pytest.fixture(scope="module")
def plain(pair: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return nemo.plain_run(pair, tmp_path_factory.mktemp("plain") / "run")


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[slurm_cluster.SlurmCluster]:
    reason = slurm_cluster.missing()
    if reason:
        pytest.skip(reason)
    cluster = slurm_cluster.SlurmCluster(tmp_path / "cluster")
    yield cluster
    cluster.stop()


def run(home: Path, command: list[str], **variables: str) -> str:
    """What the command prints. Its own files are below `home`, where relative paths start, too."""
    environment = nemo.environment(nemo.RUN, NEMORUN_HOME=str(home / "nemo-run"), COLUMNS="200", **variables)
    ended = subprocess.run(
        command, cwd=home, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, timeout=nemo.PATIENCE_S,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout[-4000:]
    return ended.stdout


def test_every_configuration_is_a_recipe(tmp_path: Path) -> None:
    """Also one in a folder of the user's; their parts are those of the schema. The example of docs/nemo.md works."""
    (tmp_path / "mine.yaml").write_text("# My run.\n# In two lines.\nseed: 3\n")
    code = """if True:
        import json, sys, fiddle, nemo_run
        from nemo_oprd.integrations import nemo_run as recipes
        factories = nemo_run.cli.list_factories("nemo_oprd.integrations.nemo_run.train")
        shipped = {factory.__name__: factory for factory in factories}
        mine = recipes.recipe("mine", sys.argv[1])
        built = fiddle.build(mine()).keywords
        nemo_run.run = lambda task, executor: calls.append([fiddle.build(task).keywords, fiddle.build(executor)])
        calls = []
        exec(sys.argv[2])
        (task, executor), = calls
        print(json.dumps({
            "page": [task["config_name"], task["train"], task["output"], executor.ntasks_per_node],
            "shipped": {name: make().config_name for name, make in shipped.items()},
            "importable": [name for name in shipped if getattr(recipes, name, None) is shipped[name]],
            "mine": [mine.__doc__, built["config_dir"], built["student"], built["data"]],
        }))
    """
    (example,) = re.findall(r"```python\n(import nemo_run.*?)```", nemo.PAGE.read_text(), flags=re.DOTALL)
    command = [str(nemo.RUN / "bin" / "python"), "-c", code, str(tmp_path), example]
    ended = subprocess.run(command, env=nemo.environment(nemo.RUN), capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr[-3000:]
    found = json.loads(ended.stdout.splitlines()[-1])
    names = sorted(file.stem for file in default_config_dir().glob("*.yaml"))
    assert found["shipped"] == {name: name for name in names} and sorted(found["importable"]) == names
    assert found["page"] == ["oprd_1p5b", {"steps": 100}, "runs/a", 8]
    assert found["mine"] == ["My run.\nIn two lines.", str(tmp_path), {"parallel": {}}, DATA]


@pytest.mark.slow
def test_the_local_executor_trains(pair: Path, plain: Path, tmp_path: Path) -> None:
    """Two ranks at TP2 by torchrun: bit for bit the run of `nemo-oprd train`; relative paths start where `nemo` was."""
    command = nemo.documented("nemo oprd train --yes --factory quickstart run.executor=local_torchrun")
    said = run(tmp_path, [*command, *nemo.settings(pair), *nemo.models(pair), "output=runs/local"])
    assert nemo.updates(tmp_path / "runs" / "local") == list(range(1, nemo.STEPS + 1)), said[-4000:]
    assert differences(tmp_path / "runs" / "local", plain) == []


@pytest.mark.slurm
def test_the_slurm_executor_trains(
    pair: Path, plain: Path, tmp_path: Path, cluster: slurm_cluster.SlurmCluster
) -> None:
    """One rank on each of two nodes, submitted by sbatch."""
    command = nemo.documented("nemo oprd train --yes --detach --factory quickstart run.executor=slurm_torchrun")
    command += [*nemo.settings(pair), *nemo.models(pair), "output=runs/slurm"]
    path = f"{nemo.RUN / 'bin'}:{cluster.environment['PATH']}"
    said = run(tmp_path, command, PATH=path, SLURM_CONF=cluster.environment["SLURM_CONF"])
    job = re.search(r"Job id: (\d+)", said)
    assert job is not None, said[-4000:]
    state = cluster.wait_for_job(job[1], nemo.PATIENCE_S)
    logs = "\n".join(file.read_text()[-3000:] for file in (tmp_path / "nemo-run").rglob("*.out"))
    assert state == "COMPLETED", logs
    assert nemo.updates(tmp_path / "runs" / "slurm") == list(range(1, nemo.STEPS + 1)), logs
    assert differences(tmp_path / "runs" / "slurm", plain) == []
