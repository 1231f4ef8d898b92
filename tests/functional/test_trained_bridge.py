"""Projectors that are trained with the student, from a bridge and at full width: gradients, one update, resuming.

Against plain Hugging Face models in float64, derivatives by autograd (`distillation/reference.py`).
Student and teacher have other depths and widths, and are laid out differently.
"""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from layout_cases import VOCABULARY, Case, make_rollouts, read_result, save_model
from pairwise import mark_slow, of_settings
from pool import Pools, WorkerError
from reference_adamw import ReferenceAdamW
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from nemo_oprd.bridge.artifact import load_bridge
from nemo_oprd.bridge.maps import draw_projector
from nemo_oprd.config.loading import load_config
from nemo_oprd.distillation.reference import agreement, reference
from nemo_oprd.rollout.replay import read_rollouts, write_rollouts

GOLDEN = Path(__file__).parent.parent / "golden"
MODELS = [f"student.hf_path={GOLDEN / 'student'}", f"teacher.hf_path={GOLDEN / 'wide_teacher'}"]
BASE = [*MODELS, f"rollout.replay={GOLDEN / 'rollouts.jsonl'}", "bridge.train=true"]
WIDTHS = 48, 32  # teacher, student
TOLERANCE = 1e-5
SMALL = "train.tokens_per_microbatch=20"
LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "TP1": (1, [SMALL]),
    "TP1, recomputed": (1, ["student.recompute=full"]),
    "TP2, teacher PP2": (2, ["student.parallel.tensor=2", "teacher.parallel.pipeline=2", SMALL]),
    "TP2+SP, teacher DP2": (2, ["student.parallel.tensor=2", "student.parallel.sequence=true", SMALL]),
    "PP2, teacher TP2": (2, ["student.parallel.pipeline=2", "teacher.parallel.tensor=2", SMALL]),
    "DP2, teacher CP2": (2, ["teacher.parallel.context=2"]),
    "CP2, teacher PP2": (2, ["student.parallel.context=2", "teacher.parallel.pipeline=2", "student.recompute=full"]),
    "TP2, groups, dedicated teacher": (
        3,
        ["student.parallel.tensor=2", "teacher.placement=dedicated", SMALL, "teacher.resident_microbatches=1"],
    ),
    "TP2+SP PP2, teacher CP2 DP2": (
        4,
        ["student.parallel.tensor=2", "student.parallel.sequence=true", "student.parallel.pipeline=2", SMALL]
        + ["teacher.parallel.context=2"],
    ),
}
OBJECTIVES = {
    "from a bridge": ["loss.representation.kind=normalized_mse", "loss.representation.dim_reduction=sum"],
    "some layers, with biases": ["loss.representation.layers=[1,3]", "loss.representation.kind=mse"],
    "full width": ["bridge.path=full_width", "loss.representation.kind=mse", "loss.output.kind=full_vocab"]
    + ["loss.output.weight=0.5"],
}


@pytest.fixture(scope="module")
def bridges(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`with_bias` and `plain`: the golden bridge with a bias in every layer and in none."""
    root = tmp_path_factory.mktemp("bridges")
    tensors = load_file(GOLDEN / "bridge.safetensors")
    plain = {name: value for name, value in tensors.items() if not name.endswith("student_bias")}
    draw = torch.Generator().manual_seed(0)
    biases = {
        name.replace("student_projector", "student_bias"): torch.randn(len(value), generator=draw)
        for name, value in plain.items()
        if name.endswith("student_projector")
    }
    for name, content in (("plain", plain), ("with_bias", {**plain, **biases})):
        (root / name).mkdir()
        save_file(content, root / name / "bridge.safetensors")
    return root


def settings(objective: str, bridges: Path) -> list[str]:
    path = bridges / ("with_bias" if "biases" in objective else "plain")
    named = [] if "full" in objective else [f"bridge.path={path}"]
    return [*BASE, *named, *OBJECTIVES[objective]]


@cache
def expected(*overrides: str) -> dict[str, Any]:
    """The plain computation of a configuration; the layouts of an objective share it."""
    return reference(load_config("verify", [*overrides, "output=unused"]), read_rollouts(GOLDEN / "rollouts.jsonl", 61))


@pytest.mark.parametrize(
    ("layout", "objective"),
    mark_slow(
        [(layout, objective) for layout in LAYOUTS for objective in OBJECTIVES],
        lambda case: of_settings(*LAYOUTS[case[0]], objective=case[1]),
    ),
)
def test_gradients(pools: Pools, tmp_path: Path, bridges: Path, layout: str, objective: str) -> None:
    ranks, sizes = LAYOUTS[layout]
    shared = settings(objective, bridges)
    pools[ranks].run("cases:run_verify", overrides=[*shared, *sizes, f"output={tmp_path / 'out'}"])
    losses, gradients = read_result(tmp_path / "out")
    theirs = expected(*shared)
    assert losses["loss/total"] == pytest.approx(theirs["loss/total"], rel=TOLERANCE)
    layers = 2 if "some layers" in objective else 3
    trained = [name for name in gradients if name.startswith("bridge.")]
    assert len(trained) == layers * (2 if "biases" in objective else 1)
    assert all(gradients[name].norm() > 0 for name in trained)
    deviations = agreement(gradients, theirs["gradients"])
    worst = max(deviations, key=deviations.__getitem__)
    assert deviations[worst] < TOLERANCE, f"{worst}: {deviations[worst]:.1e}"


@pytest.mark.parametrize("student", [pytest.param("pp2 vpp2", marks=pytest.mark.slow), "tp2 sp pp2 vpp2"])
def test_virtual_stages(pools: Pools, tmp_path: Path, student: str) -> None:
    """Each model chunk has the projectors of its own layers, of which some have none."""
    for seed, role in enumerate(("student", "teacher")):
        save_model(tmp_path / role, "qwen3", seed)
    write_rollouts(tmp_path / "rollouts.jsonl", make_rollouts())
    models = [f"{role}.hf_path={tmp_path / role}" for role in ("student", "teacher")]
    shared = [*models, f"rollout.replay={tmp_path / 'rollouts.jsonl'}", "bridge.path=full_width", "bridge.train=true"]
    shared += ["loss.representation.layers=[1,2,5,8]", "loss.representation.k=48"]
    case = Case(student, recompute="uniform 1", tokens=120)
    pools[case.ranks].run("cases:run_verify", overrides=[*shared, *case.overrides, f"output={tmp_path / 'out'}"])
    _, gradients = read_result(tmp_path / "out")
    config = load_config("verify", [*shared, "output=unused"])
    theirs = reference(config, read_rollouts(tmp_path / "rollouts.jsonl", VOCABULARY))["gradients"]
    assert max(agreement(gradients, theirs).values()) < TOLERANCE


STEP = ["train.lr=1e-2", "train.weight_decay=0.1", "train.betas=[0.9,0.95]", "train.adam_eps=1e-2"]
STEP += ["logging.tensorboard=false"]


def start(objective: str, bridges: Path) -> dict[str, torch.Tensor]:
    """Name -> projectors and biases before training."""
    if "full" in objective:
        pairs = {1: 1, 2: 3, 3: 5}
        return {f"s{s}.t{t}.student_projector": draw_projector(0, s, *WIDTHS) for s, t in pairs.items()}
    tensors = load_file(bridges / ("with_bias" if "biases" in objective else "plain") / "bridge.safetensors")
    kept = ("s1.", "s3.") if "some" in objective else ("s",)
    return {name: value for name, value in tensors.items() if ".student_" in name and name.startswith(kept)}


def one_step(overrides: list[str], projectors: dict[str, torch.Tensor], clip: float) -> tuple[dict, float]:
    """Weights and projectors ("bridge." before their names) after one update in float64; the norm before clipping."""
    gradients = expected(*overrides)["gradients"]
    model = AutoModelForCausalLM.from_pretrained(GOLDEN / "student", dtype=torch.float64)
    everything = dict(model.named_parameters())
    everything |= {f"bridge.{name}": torch.nn.Parameter(value.double()) for name, value in projectors.items()}
    norm = ReferenceAdamW(everything).step(gradients, clip)
    return {name: p.detach() for name, p in everything.items()}, norm


def results(output: Path) -> dict[str, torch.Tensor]:
    """The run's exported weights and trained projectors."""
    bridge = load_file(output / "bridge" / "bridge.safetensors")
    ours = {f"bridge.{name}": value for name, value in bridge.items() if ".student_" in name}
    return {**load_file(output / "hf" / "model.safetensors"), **ours}


STEP_LAYOUTS = {
    "TP1": (1, []),
    "TP2, teacher PP2": LAYOUTS["TP2, teacher PP2"],
    "TP2+SP": (2, ["student.parallel.tensor=2", "student.parallel.sequence=true"]),
    "PP2": (2, ["student.parallel.pipeline=2"]),
    "DP2 without the distributed optimizer": (2, ["train.distributed_optimizer=false"]),
}


@pytest.mark.parametrize("objective", ["some layers, with biases", "full width"])
@pytest.mark.parametrize("layout", STEP_LAYOUTS)
def test_one_step_is_one_adamw_step(pools: Pools, tmp_path: Path, bridges: Path, layout: str, objective: str) -> None:
    """Student and projectors in one AdamW: clipped by their common norm, biases not decayed."""
    ranks, sizes = STEP_LAYOUTS[layout]
    shared, clip, output = [*settings(objective, bridges), *STEP], 0.5, tmp_path / "run"
    arguments = [*shared, *sizes, f"train.clip_grad={clip}", "train.steps=1", f"output={output}"]
    pools[ranks].run("cases:run_train", overrides=arguments)
    projectors = start(objective, bridges)
    theirs, norm = one_step(shared, projectors, clip)
    ours = results(output)
    assert set(ours) == set(theirs)
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name].double(), value, rtol=1e-6, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
    assert all(not torch.equal(ours[f"bridge.{name}"], value) for name, value in projectors.items())
    line = json.loads((output / "metrics.jsonl").read_text())
    assert line["actor/grad_norm"] == pytest.approx(norm, rel=1e-5)


COPIES = {
    "TP2": (2, ["student.parallel.tensor=2"], 2),
    "TP2+SP": (2, ["student.parallel.tensor=2", "student.parallel.sequence=true"], 2),
    "CP2": (2, ["student.parallel.context=2"], 2),
    "DP2": (2, [], 2),
    "DP2 without the distributed optimizer": (2, ["train.distributed_optimizer=false"], 2),
    "TP2 PP2": (4, ["student.parallel.tensor=2", "student.parallel.pipeline=2"], 2),
}


# the plain optimizer with bf16 is refused: bad_inputs.py
@pytest.mark.parametrize(
    ("layout", "precision"),
    mark_slow(
        [(layout, p) for layout in COPIES for p in ("fp32", "bf16") if p == "fp32" or "without" not in layout],
        lambda case: of_settings(*COPIES[case[0]][:2], precision=case[1]),
    ),
)
def test_copies_stay_equal(pools: Pools, bridges: Path, layout: str, precision: str) -> None:
    """All ranks of a stage hold the same projectors, bit by bit, after updates."""
    ranks, sizes, copies = COPIES[layout]
    objective = "some layers, with biases"
    shared = [*settings(objective, bridges), *STEP, SMALL, f"precision={precision}", *sizes]
    everyone = pools[ranks].run("cases:projectors_on_all_ranks", overrides=shared)
    for layer in (1, 3):
        found = [held[layer] for held in everyone if layer in held]
        assert len(found) == copies and len(found[0]) == 2
        assert all(parts == found[0] for parts in found)


TP2, SP, PP2 = "student.parallel.tensor=2", "student.parallel.sequence=true", "student.parallel.pipeline=2"
RESUMES = [
    ("full width", 1, [], 1, []),
    ("some layers, with biases", 1, ["precision=bf16"], 1, ["precision=bf16"]),
    ("full width", 2, [TP2, SP, "precision=bf16"], 2, [TP2, SP, "precision=bf16"]),
    ("some layers, with biases", 2, [TP2], 2, [PP2]),
    ("full width", 2, [PP2, "precision=bf16"], 2, [PP2, "precision=bf16"]),
    ("some layers, with biases", 2, ["precision=bf16"], 2, ["precision=bf16"]),
    ("full width", 2, [PP2, "train.distributed_optimizer=false"], 2, [TP2, "train.distributed_optimizer=false"]),
]


@pytest.mark.parametrize(
    ("objective", "ranks", "first", "then_ranks", "then"),
    [
        *mark_slow(
            RESUMES, lambda case: of_settings(case[1], case[2], objective=case[0], same_layout=case[2] == case[4])
        ),
        # by default at this layout: the same at full width in bf16
        pytest.param("some layers, with biases", 2, [PP2], 2, [PP2], marks=pytest.mark.slow),
    ],
)
def test_resume_goes_on_where_it_stopped(
    pools: Pools, tmp_path: Path, bridges: Path, objective: str, ranks: int, first: list, then_ranks: int, then: list
) -> None:
    """Two steps, a new start, two more: the same as four at once, bit by bit at the same layout."""
    shared = [*settings(objective, bridges), *STEP, "train.save_every=2"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    pools[ranks].run("cases:run_train", overrides=[*shared, *first, "train.steps=4", f"output={whole}"])
    pools[ranks].run("cases:run_train", overrides=[*shared, *first, "train.steps=2", f"output={parts}"])
    shutil.rmtree(parts / "hf")
    shutil.rmtree(parts / "bridge")
    pools[then_ranks].run("cases:run_train", overrides=[*shared, *then, "train.steps=4", f"output={parts}"])
    ours, theirs = results(parts), results(whole)
    assert set(ours) == set(theirs)
    for name, value in theirs.items():
        if first == then:
            assert torch.equal(ours[name], value), name
        else:
            torch.testing.assert_close(ours[name], value, rtol=1e-5, atol=2e-5)


def test_resume_with_virtual_stages_in_bf16(pools: Pools, tmp_path: Path) -> None:
    """Several model chunks on a rank, each with parameters of both precisions."""
    for seed, role in enumerate(("student", "teacher")):
        save_model(tmp_path / role, "qwen3", seed)
    write_rollouts(tmp_path / "rollouts.jsonl", make_rollouts())
    shared = [f"{role}.hf_path={tmp_path / role}" for role in ("student", "teacher")]
    shared += [f"rollout.replay={tmp_path / 'rollouts.jsonl'}", "bridge.path=full_width", "bridge.train=true", *STEP]
    shared += ["loss.representation.k=8", "precision=bf16", "train.save_every=1", *Case("pp2 vpp2").overrides]
    for name, steps in (("whole", [2]), ("parts", [1, 2])):
        for count in steps:
            arguments = [*shared, f"train.steps={count}", f"output={tmp_path / name}"]
            pools[2].run("cases:run_train", overrides=arguments)
    ours, theirs = results(tmp_path / "parts"), results(tmp_path / "whole")
    start_of = load_file(tmp_path / "student" / "model.safetensors")
    for name, value in start_of.items():  # two updates of a rate of 1e-2, and bf16 rounding
        assert float((ours[name].float() - value).abs().max()) < 0.05, name
    assert all(torch.equal(ours[name], value) for name, value in theirs.items())
    moved = ours["bridge.s8.t8.student_projector"] - draw_projector(0, 8, 32, 32)
    assert 1e-3 < float(moved.abs().max()) < 0.05


def test_what_a_run_leaves(pools: Pools, tmp_path: Path, bridges: Path) -> None:
    """Its bridge can be used, frozen or trained on; its checkpoint is a student's; a frozen run can't go on from it."""
    shared = [*settings("full width", bridges), *STEP]
    output = tmp_path / "run"
    pools[1].run("cases:run_train", overrides=[*shared, "train.save_every=1", "train.steps=1", f"output={output}"])
    bridge = load_bridge(output / "bridge")
    assert bridge.full_width and bridge.rank == WIDTHS[0]
    assert bridge.report == {"trained_with_student": {"steps": 1, "from": "full_width"}}
    checkpoint = output / "checkpoints" / "iter_0000001"
    for train in ("true", "false"):
        again = [*shared, f"bridge.path={output / 'bridge'}", f"bridge.train={train}", f"output={tmp_path / train}"]
        trained = [f"student.hf_path={output / 'hf'}"]
        pools[1].run("cases:run_verify", overrides=[*again, *trained])
        losses, gradients = read_result(tmp_path / train)
        theirs = expected(*again, *trained)
        assert losses["loss/total"] == pytest.approx(theirs["loss/total"], rel=TOLERANCE)
        assert max(agreement(gradients, theirs["gradients"]).values()) < TOLERANCE
        # the checkpoint holds projectors besides the student, which is what is read from it
        pools[1].run("cases:run_verify", overrides=[*again, "student.hf_path=null", f"student.checkpoint={checkpoint}"])
        assert read_result(tmp_path / train)[0]["loss/total"] == pytest.approx(losses["loss/total"], rel=TOLERANCE)
    assert set(load_file(output / "hf" / "model.safetensors")) == set(
        load_file(GOLDEN / "student" / "model.safetensors")
    )
    frozen = [*shared, f"bridge.path={output / 'bridge'}", "bridge.train=false", "train.steps=2", f"output={output}"]
    with pytest.raises(WorkerError, match="trained_projectors=rank 48, layers 1:1 2:3 3:5, this run has None"):
        pools[1].run("cases:run_train", overrides=frozen)
