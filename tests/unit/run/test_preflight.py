"""A mistake that the configuration and the models' config.json show is reported before torch is imported."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from nemo_oprd.config.keys import keys
from nemo_oprd.config.loading import load_config
from nemo_oprd.config.schema import Config
from nemo_oprd.models.checkpoint_directory import check_torch_dist
from nemo_oprd.run.inputs import input_checks
from nemo_oprd.run.preflight import (
    StartRequest,
    config_checks,
    preflight,
    preflight_evaluation,
    refused_start,
    run_checks,
)
from nemo_oprd.run.resolve import RunSpec

GOLDEN = Path(__file__).parents[2] / "golden"
# The command line as `python -m nemo_oprd` runs it; at exit the modules that a mistake must not have waited for.
WRAPPER = """
import atexit, sys
heavy = ("torch", "megatron", "transformers", "numpy")
atexit.register(lambda: print("imported:", *[name for name in heavy if name in sys.modules]))
from nemo_oprd.cli import main
main(sys.argv[1:])
"""
PAIR = [f"student.hf_path={GOLDEN / 'student'}", f"teacher.hf_path={GOLDEN / 'teacher'}"]
LINES = GOLDEN / "rollouts.jsonl"  # of which nobody looks at the content
PROMPTS, SET, RECORDED = f"data.train={LINES}", f"data.validation.x={LINES}", f"rollout.replay={LINES}"
SAMPLED_TEACHER = SET, "evaluation.every=1", "evaluation.teacher=true"
HEADS = "student.parallel.tensor=3 does not divide the model's 4 attention heads"


def run(command: str, *overrides: str, ranks: int = 1) -> str:
    """The error line of a command that must end with status 2, in a process of its own, without heavy imports."""
    ended = subprocess.run(
        [sys.executable, "-c", WRAPPER, command, "--config-name", "verify", *PAIR, *overrides],
        env={**os.environ, "WORLD_SIZE": str(ranks), "RANK": "0"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (ended.returncode, ended.stdout) == (2, "imported:\n"), (ended.stdout, ended.stderr)
    assert ended.stderr.startswith("error: ") and ended.stderr.count("\n") == 1
    return ended.stderr


@pytest.mark.parametrize(
    ("command", "overrides", "ranks", "message"),
    [
        ("train", ["train.lrr=1"], 1, "unknown key 'train.lrr'; did you mean 'train.lr'?"),
        ("verify", ["train.steps=0"], 1, "train.steps=0: expected more than 0"),
        ("train", [PROMPTS, "student.parallel.tensor=3"], 3, HEADS),
        ("verify", [RECORDED, "student.parallel.tensor=2"], 3, "= 2 does not divide the 3 rank(s) of this role"),
        ("train", [PROMPTS, "loss.representation.layers=[1,9]"], 1, "distinct layers in 1..3; [9] are not"),
        ("evaluate", [SET, "rollout.tensor=2"], 1, "rollout.tensor=2 does not divide the student's 1 rank(s)"),
        ("fit-bridge", [PROMPTS, "bridge.rank=99"], 1, "bridge.rank=99: expected at most 32"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_it_is_reported_without_torch(command: str, overrides: list[str], ranks: int, message: str) -> None:
    assert message in run(command, *overrides, ranks=ranks)


def test_a_file_that_only_the_yaml_names_is_missing() -> None:
    """The first command of a newcomer: the models and prompts are there, the shipped configuration's sets are not."""
    message = run("train", "--config-name", "oprd_1p5b", PROMPTS)
    assert message.startswith("error: data.validation.aime24=data/aime24.parquet: no such file (")
    assert "conf/oprd_1p5b.yaml names it, not the command line); expected a .parquet or .jsonl file" in message
    assert "set data.validation.aime24=FILE, or do without by data.validation={} evaluation.every=0" in message


@pytest.mark.parametrize(
    ("command", "overrides", "says"),
    [
        ("train", ["data.train=pipe.jsonl"], "data.train=pipe.jsonl: is a named pipe (FIFO); expected a .parquet"),
        ("train", ["data.train=[p.jsonl,/dev/zero]"], "data.train=/dev/zero: is a device; expected"),
        ("train", ["data.train={p.jsonl:1,gone.jsonl:2}"], "data.train=gone.jsonl: is a link to nowhere, which does"),
        ("train", ["data.train=."], "data.train=.: is a directory, with p.jsonl in it; expected"),
        ("train", ["data.train=p.jsonl", "data.chat_template=pipe.jsonl"], "data.chat_template=pipe.jsonl: is a named"),
        (
            "fit-bridge",
            ["data.train=p.jsonl", "data.chat_template=/dev/zero"],
            "data.chat_template=/dev/zero: is a",
        ),
        ("train", ["data.train=p.jsonl", "bridge.path=nowhere"], "bridge.path=nowhere: no such directory; expected a"),
        (
            "verify",
            ["rollout.replay=pipe.jsonl"],
            "rollout.replay=pipe.jsonl: is a named pipe (FIFO); expected",
        ),
        ("evaluate", ["data.validation.a=q.jsonl"], "data.validation.a=q.jsonl: no such file; expected"),
        ("evaluate", ["data.validation.a=q.jsonl"], "or all sets by 'data.validation={NAME:FILE}'"),
        ("train", ["data.train=p.jsonl", "data.validation.a=q.jsonl"], None),  # which nothing reads
        ("train", ["data.train=p.jsonl", "teacher.hf_path=pipe.jsonl"], "teacher.hf_path=pipe.jsonl: is a named pipe"),
        (
            "train",
            ["data.train=p.jsonl", "student.hf_path=null", "student.checkpoint=q"],
            "student.checkpoint=q: no",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_named_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, overrides: list[str], says: str | None
) -> None:
    """What stands in place of a file is named by its key, and nothing that could wait or never end is opened."""
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe.jsonl")
    Path("p.jsonl").write_text("{}\n")
    Path("gone.jsonl").symlink_to("nowhere")
    config = load_config("verify", [*PAIR, *overrides])

    def check() -> object:
        return preflight_evaluation(config, 1) if command == "evaluate" else preflight(config, 1, command)

    if says is None:
        check()
    else:
        with pytest.raises(ValueError) as error:
            check()
        assert says in str(error.value)


def test_an_unsupported_family_is_reported_without_torch(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "teacher", tmp_path / "teacher")
    file = tmp_path / "teacher" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "model_type": "gpt2"}))
    message = run("train", PROMPTS, f"teacher.hf_path={tmp_path / 'teacher'}")
    assert f"{file}: model_type 'gpt2' is not supported; expected one of ['llama'" in message


def test_the_config_of_a_checkpoint_is_read_without_torch(tmp_path: Path) -> None:
    """The config.json of a Megatron checkpoint lies beside its tensors, which stay unread."""
    (tmp_path / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    (tmp_path / ".metadata").write_bytes(b"not looked at")
    shutil.copytree(GOLDEN / "student", tmp_path / "hf")
    source = ["student.hf_path=null", f"student.checkpoint={tmp_path}"]
    assert HEADS in run("train", PROMPTS, *source, "student.parallel.tensor=3", ranks=3)


@pytest.mark.parametrize(
    ("command", "overrides", "message"),
    [
        ("train", [], "data.train=null: expected a file of prompts"),
        ("train", [PROMPTS, "loss.representation.weight=0"], "are both 0"),
        ("train", [PROMPTS], None),
        ("train", [PROMPTS, f"student.hf_path={GOLDEN}/run/hf", f"output={GOLDEN}/run"], "choose another output"),
        ("train", [PROMPTS, "loss.representation.layer_map={1:1}"], "layer_map names the student layers [1]"),
        ("train", [PROMPTS, "loss.representation.layer_weights=[1]"], "expected 3 weights"),
        ("train", [PROMPTS, f"teacher.hf_path={GOLDEN / 'wide_teacher'}"], "of the same width"),
        ("train", [PROMPTS, f"teacher.hf_path={GOLDEN / 'wide_teacher'}", f"bridge.path={GOLDEN}"], None),
        ("fit-bridge", [PROMPTS, f"teacher.hf_path={GOLDEN / 'wide_teacher'}"], None),
        (
            "train",
            [PROMPTS, f"teacher.hf_path={GOLDEN / 'wide_teacher'}", "bridge.path=x", *SAMPLED_TEACHER],
            "differ in num_layers 3 and 5, hidden_size 32 and 48",
        ),
        (  # a run that does not evaluate samples no teacher
            "train",
            [PROMPTS, f"teacher.hf_path={GOLDEN / 'wide_teacher'}", f"bridge.path={GOLDEN}", "evaluation.teacher=true"],
            None,
        ),
        ("train", [PROMPTS, "student.parallel.tensor=2", "rollout.tensor=2"], None),
        (
            "train",
            [PROMPTS, "student.recompute=full", "student.recompute_num_layers=9"],
            "at most the model's 3 layers",
        ),
        (
            "train",
            [PROMPTS, "student.parallel.pipeline=2", "teacher.placement=dedicated"],
            "does not divide the 1 rank",
        ),
        ("verify", [], "verify works on recorded rollouts"),
        ("verify", [RECORDED], None),
        ("fit-bridge", [PROMPTS, "teacher.weights=ema", "teacher.prompt='{prompt}!'", "teacher.hf_path=null"], "ema"),
        ("evaluate", [], "data.validation is empty"),
        # it samples, also where training replays: the engine is checked
        (
            "evaluate",
            [SET, RECORDED, "rollout.engine=vllm", "rollout.vllm.python=nowhere"],
            "rollout.vllm.python=nowhere",
        ),
        ("evaluate", [SET, "student.parallel.tensor=3"], None),  # of the layout only rollout.tensor counts
    ],
)
def test_what_each_command_needs(command: str, overrides: list[str], message: str | None) -> None:
    """None: nothing is wrong on two ranks."""
    config = load_config("verify", [*PAIR, *overrides])

    def check() -> object:
        return preflight_evaluation(config, 2) if command == "evaluate" else preflight(config, 2, command)

    if message is None:
        check()
    else:
        with pytest.raises(ValueError) as error:
            check()
        assert message in str(error.value)


def test_the_reference_needs_hugging_face_models() -> None:
    config = load_config("verify", [*PAIR, RECORDED, "teacher.hf_path=null", "teacher.checkpoint=x"])
    with pytest.raises(ValueError, match="verify --against reference needs all models as hf_path"):
        preflight(config, 1, "verify", against_reference=True)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"sharded_backend": ', "metadata.json: not valid JSON"),
        ("[]", "metadata.json: holds a list, expected an object with sharded_backend"),
        ('{"sharded_backend": "torch_dist", "other": 1}', "expected sharded_backend and at most"),
        ('{"sharded_backend": "zarr"}', "format 'zarr'; expected 'torch_dist'"),
    ],
)
def test_a_checkpoint_of_another_kind(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "metadata.json").write_text(content)
    (tmp_path / ".metadata").write_bytes(b"")
    with pytest.raises(ValueError) as error:
        check_torch_dist(tmp_path)
    assert message in str(error.value)


def test_doctor_reports_every_refusal_of_a_stage_and_train_the_first(tmp_path: Path) -> None:
    """Each check has a code of its own, and the mistakes of all stages before torch are found in one visit."""
    given = ["loss.representation.weight=0", "student.parallel.tensor=3", "rollout.tensor=2", "data.train=gone.jsonl"]
    config = load_config("verify", [*PAIR, "rollout.replay=null", *given])
    refused = refused_start(StartRequest(config, 3, "doctor"))
    assert [each.code for each in refused] == [
        "no-loss", "parallel-sizes", "sampling-ranks", "file-missing"
    ]  # fmt: skip
    assert [HEADS in str(each.error) for each in refused] == [False, True, False, False]
    with pytest.raises(ValueError) as error:
        preflight(config, 3, "train")
    assert str(error.value) == str(refused[0].error)
    # without a model there are no later stages
    absent = load_config("verify", [*PAIR, "rollout.replay=null", *given, "student.hf_path=nowhere"])
    assert [each.code for each in refused_start(StartRequest(absent, 3, "doctor"))] == ["no-loss", "model-missing"]


def test_codes_of_the_start() -> None:
    """Codes are unique within a command, and docs/doctor.md names those that `doctor` writes."""
    page = (GOLDEN.parents[1] / "docs" / "doctor.md").read_text()
    for command in ("train", "verify", "fit-bridge", "doctor", "plan", "evaluate"):
        request = StartRequest(load_config("verify", [*PAIR, *SAMPLED_TEACHER]), 1, command)  # type: ignore
        tables = config_checks(request), run_checks(request), input_checks(command, request.config)  # type: ignore
        codes = [each.code for table in tables for each in table]
        assert len(codes) == len(set(codes))
        assert command != "doctor" or [code for code in codes if f"`{code}`" not in page] == []


def test_doctor_writes_its_refusals(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    command = ["doctor", "--config-name", "verify", *PAIR, "rollout.replay=null", f"--json={file}"]
    ended = subprocess.run(
        [sys.executable, "-m", "nemo_oprd", *command, "loss.representation.weight=0", "data.train=null"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 2 and ended.stderr.startswith("error: loss.representation.weight and loss.output.weight")
    lines = [line for line in ended.stdout.splitlines() if line.startswith("wrong    start")]
    found = json.loads(file.read_text())["findings"]
    assert [each["numbers"]["check"] for each in found] == ["no-loss", "no-prompts"] and len(lines) == 2
    assert {each["code"] for each in found} == {"train-refuses"}


def test_the_stages_of_a_start_are_frozen() -> None:
    from nemo_oprd.run.inputs import RunInputs
    from nemo_oprd.run.start import TrainingRun

    groups = {key.owner for key in keys(Config)}
    assert Config in groups and len(groups) > 15
    for stage in (*groups, StartRequest, RunSpec, RunInputs, TrainingRun):
        assert stage.__dataclass_params__.frozen, stage
    config = load_config("oprd_1p5b", PAIR)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.train.steps = 1
