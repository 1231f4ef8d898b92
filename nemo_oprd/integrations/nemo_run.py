"""Recipes for nemo-run: every configuration in conf/ as a function, and executors for torchrun here and under Slurm.

    nemo oprd train --factory oprd_1p5b run.executor=local_torchrun run.executor.ntasks_per_node=8 train.steps=100

nemo-run finds this module by the entry point group `nemo_run.cli`. `--factory` names a configuration, the keys after it
are those of docs/configuration.md, and `run.executor` names one of the two executors at the end of this file. A new
file in conf/ is a new recipe. nemo-run makes its command line from annotations, so this file has no postponed ones.
See docs/nemo.md. Left out: `teachers.0.KEY=VALUE`; use `overrides` for it.
"""

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Optional

import nemo_run as run

from nemo_oprd.config.loading import default_config_dir
from nemo_oprd.config.overrides import as_overrides
from nemo_oprd.config.schema import Config

# ruff: noqa: UP045  (nemo-run cannot parse a value for the annotation X | None)


@run.cli.entrypoint(namespace="oprd", name="train")
def train(
    config_name: str = "quickstart",
    config_dir: Optional[str] = None,
    overrides: Optional[list[str]] = None,
    directory: Optional[str] = None,
    output: Optional[str] = None,
    precision: Optional[str] = None,
    seed: Optional[int] = None,
    student: Optional[dict] = None,
    teacher: Optional[dict] = None,
    teachers: Optional[list] = None,
    bridge: Optional[dict] = None,
    alignment: Optional[dict] = None,
    loss: Optional[dict] = None,
    rollout: Optional[dict] = None,
    data: Optional[dict] = None,
    train: Optional[dict] = None,
    evaluation: Optional[dict] = None,
    logging: Optional[dict] = None,
) -> None:
    """Distils a student: `nemo-oprd train --config-name CONFIG_NAME` on every rank that the executor starts.

    Args:
        config_name: a YAML file in the configuration directory.
        config_dir: that directory (default: the project's conf/).
        overrides: KEY=VALUE as on the command line of `nemo-oprd`, after the other keys.
        directory: where relative paths start (default: the working directory of the process).
    """
    from nemo_oprd.cli import main

    given = {name: value for name, value in locals().items() if name in _TOP_LEVEL and value is not None}
    arguments = ["train", "--config-name", config_name, *(["--config-dir", config_dir] if config_dir else [])]
    if directory is not None:
        os.chdir(directory)
    main([*arguments, *as_overrides(given), *(overrides or [])], alone=True)


_TOP_LEVEL = tuple(field.name for field in dataclasses.fields(Config))


def group(**keys: Any) -> dict[str, Any]:
    """Makes a group of keys. nemo-run 0.11.1 cannot send a `run.Config(dict)` to an executor."""
    return keys


def _groups(schema: type) -> dict[str, Any]:
    """Makes an empty `run.Config(group)` for each group of keys in `schema`, and for the groups in it.

    nemo-run sets `student.parallel.tensor=2` only where the recipe has a `student.parallel`.
    """
    return {
        name: run.Config(group, **_groups(type(value)) if dataclasses.is_dataclass(value) else {})
        for name, value in vars(schema()).items()
        if dataclasses.is_dataclass(value) or isinstance(value, dict)
    }


def recipe(config_name: str, config_dir: Optional[str] = None) -> Callable[[], Any]:
    """Makes a function that returns the training run of a configuration, for nemo-run's `--factory` and `run.run`.

    Args:
        config_name: a YAML file in `config_dir`.
        config_dir: default: the project's conf/.
    """

    def make() -> run.Partial[train]:
        where = None if config_dir is None else os.path.abspath(config_dir)
        return run.Partial(
            train, config_name=config_name, config_dir=where, overrides=[], directory=os.getcwd(), **_groups(Config)
        )

    make.__name__ = make.__qualname__ = config_name
    lines = (Path(config_dir or default_config_dir()) / f"{config_name}.yaml").read_text().splitlines()
    make.__doc__ = "\n".join(line.removeprefix("#").strip() for line in lines if line.startswith("#")) or config_name
    return run.cli.factory(make, target=train, name=config_name)


for _file in sorted(default_config_dir().glob("*.yaml")):
    globals()[_file.stem] = recipe(_file.stem)


@run.cli.factory
def local_torchrun(ranks: int = 2) -> run.Config[run.LocalExecutor]:
    """torchrun on this machine."""
    return run.Config(run.LocalExecutor, ntasks_per_node=ranks, launcher="torchrun")


@run.cli.factory
def slurm_torchrun(nodes: int = 1, ranks: int = 8, account: str = "default") -> run.Config[run.SlurmExecutor]:
    """torchrun on every node of a Slurm job that is submitted from this machine.

    Nothing is copied to the nodes: they see the same environment and files, or have them in `container_image`.

    Args:
        ranks: per node.
    """
    return run.Config(
        run.SlurmExecutor,
        account=account,
        nodes=nodes,
        ntasks_per_node=ranks,
        launcher=run.Config(run.Torchrun),
        packager=run.Config(run.Packager),
        time="04:00:00",
    )
