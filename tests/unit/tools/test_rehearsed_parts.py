"""`nemo-oprd rehearse` without a rehearsal: which ranks and parts are chosen, and where ranks must agree."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from family_configs import QWEN2

from nemo_oprd.batch.plan import StepPlan
from nemo_oprd.batch.token_table import make_rows
from nemo_oprd.batch.types import Rollout
from nemo_oprd.cli import main, make_parser
from nemo_oprd.config.loading import load_config
from nemo_oprd.run.resolve import RunSpec, resolve
from nemo_oprd.tools.plan.estimate import Lengths, estimate
from nemo_oprd.tools.plan.gpus import GPUS, Cluster
from nemo_oprd.tools.plan.memory import rows_on_rank
from nemo_oprd.tools.rehearse import PARTS, disagreements, planned_bytes, ranks_of_interest

TWO_STAGES = ("student.parallel.tensor=2", "student.parallel.pipeline=2", "teacher.parallel.tensor=2")


@pytest.fixture
def run(tmp_path: Path) -> Any:
    """(Ranks, overrides) -> the run of two small models."""
    shape = {**QWEN2, "num_attention_heads": 4, "num_key_value_heads": 4}  # which four tensor ranks divide
    (tmp_path / "config.json").write_text(json.dumps(shape))
    models = [f"{role}.hf_path={tmp_path}" for role in ("student", "teacher")]

    def resolved(ranks: int, *overrides: str) -> RunSpec:
        return resolve(load_config("oprd_1p5b", [*models, *overrides], None), ranks)

    return resolved


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ((), {0: "student stage 0, teacher stage 0"}),
        (
            (*TWO_STAGES, "teacher.parallel.pipeline=2"),
            {rank: f"student stage {rank // 4}, teacher stage {rank // 4}" for rank in (0, 1, 4, 5)},
        ),
        # the fullest tensor rank of a colocated teacher may be another one than the student's
        (("teacher.parallel.tensor=2",), dict.fromkeys((0, 1), "student stage 0, teacher stage 0")),
        (
            ("teacher.placement=dedicated", "teacher.parallel.tensor=2", "teacher.parallel.pipeline=2"),
            {
                0: "student stage 0",
                4: "teacher stage 0",
                5: "teacher stage 0",
                6: "teacher stage 1",
                7: "teacher stage 1",
            },
        ),
    ],
)
def test_the_first_and_the_fullest_rank_of_each_kind_are_of_interest(
    run: Any, overrides: tuple[str, ...], expected: dict[int, str]
) -> None:
    spec = run(8, *overrides)
    planned = estimate(spec, Cluster(8, GPUS["h100"]))
    assert {rank: planned.of_rank(rank).name for rank in ranks_of_interest(spec, planned)} == expected


def test_ranks_are_chosen_in_one_way_and_parts_are_known(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["rehearse", "--config-name", "oprd_1p5b", "--ranks", "8"]
    assert make_parser().parse_args(command).phases == tuple(PARTS)
    assert make_parser().parse_args([*command, "--phases", "none"]).phases == ()
    assert make_parser().parse_args([*command, "--ranks-of-interest"]).rank is None
    for wrong, named in ((["--rank", "1", "--ranks-of-interest"], "--rank"), (["--phases", "weights,x"], "'x'")):
        with pytest.raises(SystemExit, match="2"):
            main([*command, *wrong])
        (line,) = capsys.readouterr().err.splitlines()
        assert named in line


def test_a_plan_of_building_grows_from_part_to_part(run: Any) -> None:
    spec = run(8)
    (kind,) = estimate(spec, Cluster(8, GPUS["h100"])).kinds
    sizes = [planned_bytes(kind, f"build {part}", spec) for part in ("engine", "student", "optimizer", "teachers")]
    assert sizes == sorted(sizes)
    always = kind.memory.always
    assert sizes[1] == always["rollout copy"] + always["weights"]
    assert planned_bytes(kind, "weights", spec) is None
    assert planned_bytes(kind, "generation", spec) > sum(always.values())


SP, TEACHER_SP = "student.parallel.sequence=true", "teacher.parallel.sequence=true"
OUTPUT = "loss.output.weight=1"


@pytest.mark.parametrize("per_pack", [1, 2, 3])
@pytest.mark.parametrize("positions", ["all", "last_k", "first_k", "first_k with all tokens"])
@pytest.mark.parametrize(
    "layout",
    [
        ("student.parallel.tensor=2",),
        ("student.parallel.tensor=2", SP),
        ("student.parallel.tensor=4", SP),
        ("student.parallel.context=2",),
        ("student.parallel.context=2", "student.parallel.tensor=2", SP),
    ],
)
def test_the_rows_of_a_rank_are_those_of_a_batch(
    run: Any, layout: tuple[str, ...], positions: str, per_pack: int
) -> None:
    """Compared with the batch plan of such responses, which a step makes."""
    prompt, response, k = 20, 44, 12  # of lengths that need no padding
    whole = "all tokens" in positions
    needed = prompt + (k if positions == "first_k" else response)
    settings = [f"loss.representation.positions={positions.split()[0]}", f"loss.representation.k={k}"]
    settings += [f"rollout.max_new_tokens={response}", f"train.tokens_per_microbatch={per_pack * needed}"]
    settings += ["train.prompts_per_step=12", "rollout.per_prompt=2", "logging.output_metrics_every=0"]
    settings += [OUTPUT, "loss.output.kind=top_k"] if whole else []
    spec = run(4, *layout, *settings)
    found = estimate(spec, Cluster(4, GPUS["h100"]), Lengths(prompt, response))
    work, student = found.longest_work, found.student
    assert (work.needed, work.on(student).per_pack) == (needed, per_pack)
    options = {"position": "token", "aggregation": "sequence_mean"}
    rollouts = [Rollout([1] * prompt, [2] * response, [1] * response) for _ in range(24)]
    rows = make_rows(rollouts, positions=positions.split()[0], k=k, **options)
    output = make_rows(rollouts, positions="all", k=0, **options) if whole else None
    plan = StepPlan.build(rows, output, 24, student, per_pack * needed)
    places = [student.coordinates(rank) for rank in student.ranks]
    held = [len(plan.hidden.local_rows(at)[0].table_index) for at in places]
    assert [rows_on_rank(work, student, work.rows, at) for at in places] == held
    assert rows_on_rank(work, student, work.rows) == max(held)


def test_a_rank_without_the_ends_of_responses_has_no_targets(run: Any) -> None:
    """The plan is that of the fullest tensor rank; `rehearse` compares a rank with what the plan says of this one."""
    layout = ("student.parallel.tensor=4", SP, "teacher.parallel.tensor=4", TEACHER_SP)
    lengths = ("loss.representation.k=12", "rollout.max_new_tokens=44", "train.tokens_per_microbatch=64")
    lengths += ("logging.output_metrics_every=0",)
    spec = run(4, *layout, *lengths)
    found = estimate(spec, Cluster(4, GPUS["h100"], 8, "local"), Lengths(20))
    (fullest,) = found.kinds
    first, last = found.of_rank(0).memory, found.of_rank(3).memory
    assert last == fullest.memory
    assert first.always == last.always
    for phase, part in (("update", "targets"), ("teacher", "captured rows"), ("transfer", "targets")):
        assert first.phases[phase][part] == 0 < last.phases[phase][part]


def test_the_first_fake_tensor_makes_none_on_a_device() -> None:
    """In torch 2.11 it does, to start CUDA, where `is_available` says that there is a device."""
    code = """
import functools
from nemo_oprd.tools.rehearse import shim
shim.load()
import torch.nn.attention.bias  # before the functions of torch.cuda are replaced
from torch._subclasses import fake_tensor

@functools.cache
def init_gpu_context(device):  # as in torch 2.11
    if torch.cuda.is_available() or torch.xpu.is_available():
        torch.empty(1, device=device) if torch.version.hip is None else torch.zeros(1, device=device)

assert callable(fake_tensor.init_gpu_context)
fake_tensor.init_gpu_context = init_gpu_context
from nemo_oprd.tools.rehearse import fake_cuda
fake_cuda.install(1 << 30, live=lambda: 0, peak=lambda: 0, wait=lambda what: None)
fake_tensor.FakeTensorMode.avoid_device_init = property(lambda self: True)
with fake_tensor.FakeTensorMode(allow_non_fake_inputs=True):
    made = torch.empty(3, device="cuda", requires_grad=True)
    (2 * made).sum().backward()
    print(type(made).__name__, made.grad.device)
import os
os._exit(0)
"""
    done = subprocess.run([sys.executable, "-c", code + "\n"], capture_output=True, text=True)
    assert done.stdout.split() == ["FakeTensor", "cuda:0"], done.stderr[-2000:]


def test_who_gathers_has_more_tensors_than_who_gives() -> None:
    def seen(shapes: list[list[int]], dtype: str = "float32") -> dict[str, Any]:
        message = {
            "kind": "gather_",
            "ranks": [0, 1],
            "peer": None,
            "rows": None,
            "shapes": shapes,
            "dtype": dtype,
            "place": "a.py:1",
        }
        return {"phases": {"save": {"messages": [message]}}}

    first = seen([[8], [8], [8]])
    assert disagreements({0: first, 1: seen([[8]])}) == []
    assert len(disagreements({0: first, 1: seen([[4]])})) == 1
    assert len(disagreements({0: first, 1: seen([[8]], "bfloat16")})) == 1
