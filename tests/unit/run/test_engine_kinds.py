"""The records of rollout engines and teachers: one for every name of a configuration, compared nowhere else."""

from __future__ import annotations

import ast
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch

from nemo_oprd.config.loading import load_config
from nemo_oprd.config.rollout_schema import RolloutConfig, VllmConfig
from nemo_oprd.config.teacher_kinds import RECORDS, TEACHER_KINDS, EngineName, TeacherWeights
from nemo_oprd.run import inputs, start
from nemo_oprd.run.engine_kinds import ENGINES, Groups

ROOT = Path(__file__).parents[3] / "nemo_oprd"


def test_every_name_has_its_records() -> None:
    assert set(get_args(EngineName)) == set(RECORDS) == set(ENGINES)
    assert set(get_args(TeacherWeights)) == set(TEACHER_KINDS)


@pytest.mark.parametrize("key", ["rollout.engine", "teacher.weights"])
def test_nothing_compares_names(key: str) -> None:
    """No comparison in the package has an attribute or a variable of the key's name, and a text on the other side."""
    found = []
    for file in sorted(ROOT.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.Compare):
                continue
            sides = [node.left, *node.comparators]
            named = any(isinstance(part, ast.Constant) and part.value for side in sides for part in ast.walk(side))
            if named and any(ast.unparse(side).split(".")[-1] == key.split(".")[-1] for side in sides):
                found.append(f"{file.relative_to(ROOT)}:{node.lineno}")
    assert not found


@pytest.mark.parametrize(
    ("engine", "settings", "ranks", "groups"),
    [
        ("megatron", {}, 8, Groups(4, 2)),
        ("vllm", {}, 8, Groups(8, 1, "colocated", 0.4)),
        ("vllm", {"tensor": 4}, 2, Groups(1, 4, "colocated", 0.4)),
        ("vllm", {"replicas": 3, "gpu_memory_utilization": 0.9}, 8, Groups(3, 1, "colocated", 0.9)),
        ("vllm", {"replicas": 3, "tensor": 2, "placement": "dedicated"}, 8, Groups(3, 2, "dedicated", 0.9)),
        ("vllm", {"endpoints": ["http://a:1", "http://b:1"]}, 8, Groups(2, 1, "elsewhere", 0.4)),
    ],
)
def test_groups(engine: EngineName, settings: dict, ranks: int, groups: Groups) -> None:
    rollout = RolloutConfig(engine=engine, tensor=2, vllm=VllmConfig(**settings))
    assert ENGINES[engine].groups(rollout, ranks) == groups


@pytest.mark.parametrize(
    ("more", "refused"),
    [([], True), (["rollout.vllm.placement=dedicated"], False), (["rollout.max_lag=0"], False)],
    ids=["colocated", "dedicated", "no lag"],
)
def test_servers_on_the_students_gpus_refuse_a_lag_before_models_are_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: list[str], refused: bool
) -> None:
    """In one line; a run comes to its plan, and so to its models, only with GPUs for the servers."""
    settings = [
        "student.hf_path=a",
        "teacher.hf_path=b",
        f"output={tmp_path / 'run'}",
        "rollout.replay=null",
        "rollout.engine=vllm",
    ]
    config = load_config("verify", [*settings, "rollout.max_lag=1", *more])

    class Planned(Exception):  # noqa: N818 - not an error
        """The first thing after the check."""

    def plan(*_: Any, **__: Any) -> None:
        raise Planned

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    files = SimpleNamespace(student=SimpleNamespace(spec=None))
    monkeypatch.setattr(inputs, "RunFiles", lambda *_: files)
    monkeypatch.setattr(inputs, "read_training_data", lambda *_, **__: SimpleNamespace(recorded=None))
    monkeypatch.setattr(inputs, "make_plan", plan)
    spec: Any = SimpleNamespace(config=config, models=None)
    with pytest.raises(ValueError if refused else Planned) as found, start.start_training(spec):
        pass
    said = str(found.value)
    begin = "rollout.max_lag=1 with rollout.vllm.placement=colocated: "
    assert not refused or (said.startswith(begin) and "\n" not in said)
    assert not (tmp_path / "run").exists(), "a start that is refused leaves no directory"
