"""The settings that `nemo-oprd plan` names where a configuration does not fit: they fit, are valid and are the best."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from unittest import mock

import pytest
from family_configs import QWEN3_MOE

from nemo_oprd.batch.layout import Layout
from nemo_oprd.cli import main
from nemo_oprd.config.loading import load_config
from nemo_oprd.config.schema import Config
from nemo_oprd.run.preflight import preflight
from nemo_oprd.run.resolve import resolve, resolve_models
from nemo_oprd.tools.plan import alternatives as module
from nemo_oprd.tools.plan.alternatives import Alternative, Search, alternatives, changed
from nemo_oprd.tools.plan.estimate import Lengths, estimate
from nemo_oprd.tools.plan.gpus import GPUS, Cluster
from nemo_oprd.tools.plan.operations import step_bytes
from nemo_oprd.tools.plan.workload import make_workload
from tests.support.recipe_models import RECIPES, SHAPES, write_models

QWEN3_8B = {**SHAPES["Qwen3-4B"], "hidden_size": 4096, "intermediate_size": 12288, "tie_word_embeddings": False}
LAYOUT_KEYS = ("student.parallel.", "teacher.parallel.", "rollout.", "student.recompute", "teacher.")
# one takes some 15 milliseconds, and a user waits for all: the largest search of these cases makes 302
MOST_ESTIMATES = 400


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("models") / "models"
    write_models(place)
    (place / "Qwen3-8B").mkdir()
    (place / "Qwen3-8B" / "config.json").write_text(json.dumps({"rope_theta": 10000, **QWEN3_8B}))
    return place


def configured(models: Path, recipe: str, student: str, teacher: str, *settings: str) -> Config:
    return load_config(
        recipe, [f"student.hf_path={models / student}", f"teacher.hf_path={models / teacher}", *settings]
    )


def experts(models: Path, *settings: str) -> Config:
    return configured(models, "oprd_qwen3_30b_a3b", "Qwen3-30B-A3B", "Qwen3-30B-A3B-specialist", *settings)


def eight_billion(models: Path, *settings: str) -> Config:
    return configured(models, "oprd_1p5b", "Qwen3-8B", "Qwen3-8B", *settings)


def on(ranks: int) -> Cluster:
    return Cluster(ranks, GPUS["h100"])


def best(config: Config, ranks: int, most: int = 3) -> list[Alternative]:
    return alternatives(resolve(config, ranks), on(ranks), Lengths(), most)


def test_experts_on_two_nodes(models: Path) -> None:
    """Their weights, gradients and optimizer do not fit without expert parallelism; the best is not slower than the
    script's own layout."""
    config = experts(models)
    near = best(config, 16)
    assert len(near) == 3
    assert all(any("expert" in key for key in each.changes) for each in near)
    script = RECIPES["oprd_qwen3_30b_a3b"][2]
    theirs = estimate(resolve(experts(models, *script), 16), on(16))
    assert not theirs.problems and near[0].estimate.step_seconds <= theirs.step_seconds
    sizes = {(each.estimate.student.expert, each.estimate.student.pipeline) for each in best(config, 16, most=1000)}
    assert (8, 2) in sizes, "the script's layout of the student"


def test_tensor_parallelism_comes_before_a_pipeline(models: Path) -> None:
    """TP2 with 8 billion parameters on 8 GPUs is smaller and faster than PP2, whose stages wait for one another."""
    near = best(eight_billion(models), 8, most=1000)
    first = near[0]
    assert first.changes == {"student.parallel.tensor": 2, "student.parallel.sequence": True}
    (pipeline,) = [each for each in near if each.changes == {"student.parallel.pipeline": 2}]
    assert first.estimate.step_seconds < pipeline.estimate.step_seconds
    assert first.estimate.kinds[0].memory.peak < pipeline.estimate.kinds[0].memory.peak


CASES = [
    ("experts", 16, []),
    ("experts", 64, []),
    ("experts", 16, ["rollout.replay=some.jsonl"]),
    ("dense", 8, []),
    ("dense", 8, ["student.recompute=none"]),
    ("dense", 64, []),
    ("dense", 12, ["teacher.placement=dedicated", "teacher.ranks=4"]),
    ("dense", 4, ["rollout.replay=some.jsonl", "student.parallel.context=2"]),
    ("dense", 4, ["teacher.weights=ema", "teacher.hf_path=null", "teacher.prompt='{prompt} {answer}'"]),
]


@pytest.mark.parametrize(("kind", "ranks", "settings"), CASES, ids=lambda value: str(value))
def test_what_is_named_fits_and_is_valid_and_in_order(
    models: Path, monkeypatch: pytest.MonkeyPatch, kind: str, ranks: int, settings: list[str]
) -> None:
    """All that the search finds, not the first three: `train` accepts it on as many ranks, and plan says the same of
    the written arguments. The faster come first, of equally fast ones the smaller."""
    monkeypatch.chdir(models)
    Path("some.jsonl").write_text("{}\n" * 16)
    monkeypatch.setattr("nemo_oprd.run.engine_kinds.find_python", lambda settings: None)  # vLLM's environment
    monkeypatch.setattr("nemo_oprd.run.preflight.check_files", lambda *_: None)  # there are none
    config = (experts if kind == "experts" else eight_billion)(models, *settings)
    assert estimate(resolve(config, ranks), on(ranks)).problems
    with mock.patch.object(module, "estimate_works", wraps=module.estimate_works) as estimated:
        near = best(config, ranks, most=1000)
    assert near and estimated.call_count < MOST_ESTIMATES
    for each in near[:40]:
        candidate = changed(config, each.changes)
        preflight(candidate, ranks, "train")
        again = (experts if kind == "experts" else eight_billion)(models, *settings, *each.arguments.split())
        assert again == candidate
        found = estimate(resolve(candidate, ranks), on(ranks))
        assert not found.problems and found.step_seconds == pytest.approx(each.estimate.step_seconds)
        assert all(key.startswith(LAYOUT_KEYS) for key in each.changes)
    for one, other in itertools.pairwise(near):
        key, following = (
            (round(each.estimate.step_seconds, 1), round(each.estimate.kinds[0].memory.peak / 1e9, 1))
            for each in (one, other)
        )
        assert key <= following


def test_no_change_is_without_gain(models: Path) -> None:
    """None of the alternatives is another one with further changes that save less than a hundredth of a step."""
    near = best(eight_billion(models), 64, most=1000)
    for one, other in itertools.permutations(near, 2):
        if one.changes.items() < other.changes.items():
            assert other.estimate.step_seconds < 0.991 * one.estimate.step_seconds


def test_an_expert_is_split_only_where_ranks_would_have_none(tmp_path: Path) -> None:
    """4 experts: on 8 ranks of a stage each of 2 ranks has half an expert; on 4 ranks each has one."""
    (tmp_path / "config.json").write_text(json.dumps({**QWEN3_MOE, "num_experts": 4, "num_experts_per_tok": 2}))
    config = load_config("verify", [f"{role}.hf_path={tmp_path}" for role in ("student", "teacher")] + ["output=x"])
    search = Search(resolve(config, 8), on(8), Lengths())
    spec = search.works.longest.student
    assert search._expert_sizes(spec, 4, (1, 1)) == [(1, 1), (2, 1), (4, 1)]
    assert search._expert_sizes(spec, 8, (1, 1)) == [(1, 1), (2, 1), (4, 1), (4, 2)]


def test_a_split_experts_tokens_go_to_all_of_its_ranks(tmp_path: Path) -> None:
    """By hand: a token's state goes to E - 1 of E groups, and from there to the other ranks of the group."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_MOE))
    config = load_config("verify", [f"{role}.hf_path={tmp_path}" for role in ("student", "teacher")] + ["output=x"])
    work = make_workload(config, resolve_models(config), prompt=64)
    whole, split = (step_bytes(work, Layout(data=4, expert=2, expert_tensor=t)).experts for t in (1, 2))
    assert split == pytest.approx(3 * whole) and whole > 0  # 1/2 + 1 in place of 1/2


def test_the_command_names_them(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(
            ["plan", "--config-name", "oprd_1p5b", "--ranks", "8"]
            + [f"{role}.hf_path={models / 'Qwen3-8B'}" for role in ("student", "teacher")]
        )
    assert ended.value.code == 1
    shown = capsys.readouterr().out
    assert "fits: student.parallel.tensor=2 student.parallel.sequence=true   (" in shown
