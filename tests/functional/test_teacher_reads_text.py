"""Runs with a teacher of other tokens, start to end: bridge, training, recorded rollouts, going on, refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from golden_runs import metrics
from pool import Pools, WorkerError

from nemo_oprd.data.tokenizer import Tokenizer
from nemo_oprd.rollout.replay import TeacherLimits, read_rollouts
from nemo_oprd.tools.toy.pair import MAX_POSITIONS, make_tiny_pair
from nemo_oprd.tools.toy.pair import VOCAB_SIZE as STUDENT_VOCAB_SIZE
from tests.support.bpe_teacher import VOCAB_SIZE, make_bpe_teacher

BRIDGE = [
    "loss.representation.kind=normalized_mse",
    "loss.representation.dim_reduction=sum",
    "loss.representation.weight=10",
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("text")
    make_tiny_pair(root / "pair")
    make_bpe_teacher(root / "teacher", steps=2, layers=3, hidden=48, batch=4, log=lambda line: None)
    return root


@pytest.fixture(scope="module")
def settings(models: Path) -> list[str]:
    """A student of two layers in characters at TP2, a teacher of three in BPE at TP1."""
    return [
        f"student.hf_path={models / 'pair' / 'student'}",
        f"teacher.hf_path={models / 'teacher'}",
        f"data.train={models / 'pair' / 'prompts' / 'train.jsonl'}",
        "data.validation={}",
        "teacher.reads=text",
        "train.prompts_per_step=6",
        "train.save_every=1",
        "train.schedule=constant",
        "train.warmup_fraction=0",
        "train.export_hf=false",
        "evaluation.every=0",
        "evaluation.teacher=false",
        "rollout.max_new_tokens=24",
        "rollout.save=true",
        "seed=1",
    ]


@pytest.fixture(scope="module")
def bridge(pools: Pools, models: Path, settings: list[str]) -> Path:
    overrides = [*settings, "bridge.rank=3", "bridge.prompts=40", f"output={models / 'bridge'}"]
    pools[2].run("cases:run_fit_bridge", overrides=overrides, config="quickstart")
    return models / "bridge"


def test_a_run(pools: Pools, tmp_path: Path, models: Path, settings: list[str], bridge: Path) -> None:
    """It samples, aligns, trains; going on after a step gives the same; the rollouts replay without tokenizers."""
    manifest = json.loads((bridge / "bridge.json").read_text())
    student, teacher = (Tokenizer.load(models / name) for name in ("pair/student", "teacher"))
    assert manifest["student"]["tokenizer"] == student.fingerprint()
    assert manifest["teacher"]["tokenizer"] == teacher.fingerprint() != student.fingerprint()

    run, parts = tmp_path / "run", tmp_path / "parts"
    common = [*settings, *BRIDGE, f"bridge.path={bridge}"]
    pools[2].run("cases:run_train", overrides=[*common, "train.steps=2", f"output={run}"], config="quickstart")
    for steps in (1, 2):
        overrides = [*common, f"train.steps={steps}", f"output={parts}"]
        pools[2].run("cases:run_train", overrides=overrides, config="quickstart")
    first, second = metrics(run)
    assert first["align/coverage"] > 0.5 and first["align/coverage_lowest"] <= first["align/coverage"] <= 1
    assert metrics(parts) == [first, second]
    assert second["loss/total"] != first["loss/total"] > 0

    file = run / "rollouts" / "step_0000001.jsonl"
    limits = TeacherLimits(VOCAB_SIZE, MAX_POSITIONS)
    rollouts = read_rollouts(file, STUDENT_VOCAB_SIZE, MAX_POSITIONS, limits)
    for rollout in rollouts:
        read = rollout.as_read_by_teacher()
        assert teacher.decode(read.prompt_ids) == student.decode(rollout.prompt_ids)
        assert teacher.decode(read.response_ids) == student.decode(rollout.response_ids)
    replayed = tmp_path / "verify"
    replay = [f"rollout.replay={file}", "train.tokens_per_microbatch=80", f"output={replayed}"]
    representation = [*BRIDGE, f"bridge.path={bridge}", "loss.representation.k=24"]
    overrides = [*settings[:2], "teacher.reads=text", *representation, *replay]
    pools[1].run("cases:run_verify", overrides=overrides)
    again = json.loads((replayed / "losses.json").read_text())
    assert again["loss/total"] == pytest.approx(first["loss/total"], rel=1e-5)


def test_refusals(pools: Pools, tmp_path: Path, settings: list[str], bridge: Path) -> None:
    common = [*settings, *BRIDGE, "train.steps=1", "student.parallel.tensor=1", f"output={tmp_path / 'run'}"]
    ids = [*common, f"bridge.path={bridge}", "teacher.reads=ids"]
    with pytest.raises(WorkerError, match="or one that knows more tokens: set teacher.reads=text"):
        pools[1].run("cases:run_train", overrides=ids, config="quickstart")
    strict = [*common, f"bridge.path={bridge}", "alignment.exact=true", "alignment.min_coverage=1.0"]
    with pytest.raises(
        WorkerError, match=r"alignment coverage 0\.\d+ .* expected at least 1\.0; align without `exact`"
    ):
        pools[1].run("cases:run_train", overrides=strict, config="quickstart")
