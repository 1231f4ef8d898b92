"""`resolve` says once what a run is; the numbers here are written out by hand, from the models' config.json."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from nemo_oprd.config.loading import load_config
from nemo_oprd.run.resolve import resolve, resolve_models, resolve_sampling, servers_ids

GOLDEN = Path(__file__).parents[2] / "golden"
PAIR = [f"student.hf_path={GOLDEN / 'student'}", f"teacher.hf_path={GOLDEN / 'teacher'}", "output=unused"]


@pytest.fixture
def larger_teacher(tmp_path: Path) -> Path:
    """The golden teacher with 7 ids more than the student."""
    shutil.copytree(GOLDEN / "teacher", tmp_path / "larger")
    file = tmp_path / "larger" / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, "vocab_size": config["vocab_size"] + 7}))
    return tmp_path / "larger"


def test_a_run() -> None:
    """3 student layers, 5 teacher layers: l_T = 1 + round((l_S - 1) * 4 / 2)."""
    settings = ["loss.representation.layers=[1,3]", "loss.representation.layer_weights=[2,1]"]
    run = resolve(
        load_config("verify", [*PAIR, *settings, "student.parallel.tensor=2", "teacher.parallel.pipeline=2"]), 4
    )
    depth = json.loads((GOLDEN / "teacher" / "config.json").read_text())["num_hidden_layers"]
    (teacher,) = run.models.teachers
    assert teacher.pairs == {1: 1, 3: depth} and run.models.layer_weights == {1: 2.0, 3: 1.0}
    assert (run.student_layout.tensor, run.student_layout.data) == (2, 2)
    assert (run.teacher_layout.pipeline, run.teacher_layout.data) == (2, 2)
    assert (run.models.student.key, teacher.model.key) == ("student", "teacher")
    with pytest.raises(dataclasses.FrozenInstanceError):
        run.config = None  # type: ignore[misc]


def test_ids_that_may_be_sampled(larger_teacher: Path) -> None:
    """Those that the student and all teachers of ids know; a teacher of text reads its own ids."""
    small = json.loads((GOLDEN / "student" / "config.json").read_text())["vocab_size"]
    student = f"student.hf_path={larger_teacher}"
    shorter = load_config("verify", [*PAIR, student])
    assert resolve_models(shorter).vocab_limit == small
    assert resolve_models(load_config("verify", [*PAIR, student, "teacher.reads=text"])).vocab_limit == small + 7


def test_a_teacher_of_the_students_weights_is_the_same_model() -> None:
    own = ["teacher.hf_path=null", "teacher.weights=ema", "teacher.prompt='{prompt}!'"]
    models = resolve_models(load_config("verify", [*PAIR, *own]))
    assert models.teachers[0].model is models.student


def test_sampling_needs_no_teacher() -> None:
    """`evaluate` reads teachers only where it samples from servers that training runs use, too."""
    missing = [PAIR[0], "teacher.hf_path=/nowhere", "output=unused"]
    found = resolve_sampling(load_config("verify", [*missing, "rollout.tensor=2"]), 4)
    assert found.ranks.size == 4
    served = [PAIR[0], "output=unused", "teacher.hf_path=/nowhere", "teacher.engine=vllm"]
    assert resolve_sampling(load_config("verify", [*served, "teacher.vllm.placement=dedicated"]), 1).ranks.size == 1
    with pytest.raises(ValueError, match="/nowhere"):
        servers_ids(found.config, found.student)


def test_it_imports_no_torch() -> None:
    code = (
        "import sys; from nemo_oprd.config.loading import load_config; from nemo_oprd.run.resolve import resolve; "
        f"resolve(load_config('verify', {PAIR!r}), 2); assert 'torch' not in sys.modules"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
