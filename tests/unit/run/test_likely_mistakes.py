"""The likely mistakes of which `train` warns: prompts that render alike, and a teacher smaller than its student."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from family_configs import QWEN2

from nemo_oprd.config.loading import load_config
from nemo_oprd.models import parse_model_spec
from nemo_oprd.models.served import read_served_spec
from nemo_oprd.run.data import TrainingData, read_training_data
from nemo_oprd.run.likely_mistakes import likely_mistakes, prompts_alike, smaller_teacher
from nemo_oprd.run.models import RunFiles
from nemo_oprd.run.resolve import resolve
from nemo_oprd.tools.doctor.examination import static_findings
from nemo_oprd.tools.toy.pair import make_tiny_pair


@pytest.mark.parametrize(
    ("prompts", "says"),
    [
        ([], None),
        (["a"], None),
        (["a", "b"], None),
        (["a", "a"], "all 2 prompts render alike, to 'a' at their end"),
        (["b", *"a" * 9], "9 of 10 prompts render alike, to 'a'"),
        ([*"aaaa", "b", "c", *"aaaa"], None),
        ([*"abababab"], None),
    ],
)
def test_nearly_all_prompts(prompts: list[str], says: str | None) -> None:
    found = prompts_alike("data.train", prompts)
    assert found is None if says is None else found is not None and found.startswith(f"data.train: {says}")
    # ids are compared as texts are
    assert (prompts_alike("data.train", [[ord(each)] for each in prompts]) is None) == (says is None)


def test_a_teacher_of_fewer_layers(tmp_path: Path) -> None:
    small, large = (parse_model_spec({**QWEN2, "num_hidden_layers": layers}) for layers in (2, 4))
    assert smaller_teacher(small, large) is None and smaller_teacher(large, large) is None
    found = smaller_teacher(large, small)
    assert found is not None and "exchange the two paths" in found
    # of a model that servers compute, only depth and width are known
    (tmp_path / "config.json").write_text(json.dumps(QWEN2))
    assert smaller_teacher(large, read_served_spec(tmp_path)) is None


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("pair")
    make_tiny_pair(root, log=lambda line: None)
    return root


def said(pair: Path, *overrides: str) -> tuple[list[str], list[str]]:
    """(What `train` says, what `doctor` finds of prompts that render alike)."""
    models = [f"{role}.hf_path={pair / role}" for role in ("student", "teacher")]
    prompts = {"data.train": "train", "data.validation.sums": "tune"}
    files = [f"{key}={pair / 'prompts' / name}.jsonl" for key, name in prompts.items()]
    given = [*models, *files, "evaluation.every=1", "evaluation.judge=text", "loss.representation.k=4", *overrides]
    config = load_config("verify", given)
    spec = resolve(config, 1)
    run_files = RunFiles(config, spec.models)
    data: TrainingData = read_training_data(spec, run_files)
    plan: Any = SimpleNamespace(spec=spec, files=run_files)
    found = [each.text for each in static_findings(config, run_files) if each.code == "prompts-alike"]
    return list(likely_mistakes(plan, data)), found


def test_a_template_without_the_message(pair: Path, tmp_path: Path) -> None:
    """Training prompts, problems, and what a teacher reads: doctor's findings are the same lines."""
    assert said(pair) == ([], [])
    (tmp_path / "empty.jinja").write_text("1+2=")
    train, doctor = said(pair, f"data.chat_template={tmp_path / 'empty.jinja'}")
    assert [line.partition(": ")[0] for line in train] == ["data.train", "data.validation.sums"]
    assert train == doctor and "render alike, to '1+2=' at their end; expected different ones; fix: " in train[0]


def test_a_teacher_that_is_evaluated_in_another_conversation(pair: Path, tmp_path: Path) -> None:
    """Only where an evaluation samples it."""
    given = "evaluation.teacher=true", "teacher.system_prompt=Add."
    (line,) = said(pair, *given)[0]
    assert line.startswith("evaluation.teacher=true: the teacher is evaluated after the student's prompts")
    assert said(pair, *given, "evaluation.every=0")[0] == []


def test_a_teacher_that_reads_one_text(pair: Path, tmp_path: Path) -> None:
    """The teacher's own template alone leaves the message out, or the files have one problem."""
    teacher = tmp_path / "teacher"
    teacher.mkdir()
    for file in (pair / "teacher").iterdir():
        (teacher / file.name).symlink_to(file)
    (teacher / "chat_template.jinja").write_text("1+2=")
    one = [f"teacher.hf_path={teacher}", "teacher.prompt='{prompt}'"]
    train, doctor = said(pair, *one)
    assert [line.partition(": ")[0] for line in train] == ["data.train as the teacher reads it"] and train == doctor
    # the second of two teachers, whose prompts are a part of all
    first = f"{{hf_path: {pair / 'teacher'}, data_sources: [toy_addition]}}"
    several = f"teachers=[{first}, {{hf_path: {teacher}, system_prompt: Add.}}]"
    rest = [json.dumps({"prompt": f"{i}+2=", "answer": str(i + 2), "data_source": "other"}) for i in range(9)]
    (tmp_path / "rest.jsonl").write_text("\n".join(rest) + "\n")
    files = f"data.train=[{pair / 'prompts' / 'train.jsonl'},{tmp_path / 'rest.jsonl'}]"
    train, doctor = said(pair, "teacher.hf_path=null", several, files)
    assert [line.partition(": ")[0] for line in train] == ["data.train as teachers[1] reads it"] and train == doctor
    rows = [json.dumps({"prompt": "1+2=", "answer": "3"})] * 12
    (tmp_path / "same.jsonl").write_text("\n".join(rows) + "\n")
    (line,) = said(pair, f"data.train={tmp_path / 'same.jsonl'}")[0]
    assert line.startswith("data.train: all 12 prompts render alike") and "a file with different prompts" in line
