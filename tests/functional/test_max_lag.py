"""Sampling ahead of the updates: which weights sampled what, and a run that stops in between."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from golden_runs import metrics
from pool import Pools

from nemo_oprd.commands.toy.pair import make_tiny_pair

STEPS = 4


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    root = tmp_path_factory.mktemp("lag")
    make_tiny_pair(root, log=lambda line: None)
    return [
        *(f"{role}.hf_path={root / role}" for role in ("student", "teacher")),
        *("student.checkpoint=null", "teacher.checkpoint=null", "student.parallel.tensor=2"),
        f"data.train={root / 'prompts' / 'train.jsonl'}",
        *("data.validation={}", "evaluation.every=0", "evaluation.teacher=false", "logging.tensorboard=false"),
        *("train.prompts_per_step=4", f"train.steps={STEPS}", "train.export_hf=false", "train.lr=1e-2"),
        *("train.save_every=1", "train.keep_checkpoints=0", "train.schedule=constant", "train.warmup_fraction=0"),
        *("rollout.max_new_tokens=16", "rollout.save=true"),
    ]


@pytest.mark.parametrize("lag", [1, 2])
def test_each_response_is_of_the_weights_that_it_names(
    pools: Pools, settings: list[str], tmp_path: Path, lag: int
) -> None:
    """Another engine samples the responses of step s again from the weights after max(0, s - lag) steps."""
    run = tmp_path / "run"
    overrides = [*settings, f"rollout.max_lag={lag}", f"output={run}"]
    pools[2].run("cases:run_train", overrides=overrides, config="quickstart")
    differs = 0
    for step, line in enumerate(metrics(run)):
        sampled_by = max(0, step - lag)
        rows = (run / "rollouts" / f"step_{step + 1:07d}.jsonl").read_text().splitlines()
        rollouts = [json.loads(row) for row in rows]
        assert {rollout["weight_version"] for rollout in rollouts} == {sampled_by}
        assert line["rollout/lag_mean"] == line["rollout/lag_max"] == step - sampled_by
        found = []
        for steps in (sampled_by, step):
            weights = str(run / "checkpoints" / f"iter_{steps:07d}") if steps else None
            again = pools[2].run("cases:resample", overrides=overrides, step=step, checkpoint=weights)
            found.append([ids for ids, _ in again])
        assert [rollout["response_ids"] for rollout in rollouts] == found[0]
        differs += found[0] != found[1]
    assert differs > 0, "other weights sample other responses"
    files = sorted(file.name for file in (run / "checkpoints" / "iter_0000001").glob("rollouts_*"))
    assert files == [f"rollouts_{step:07d}.safetensors" for step in range(2, 2 + lag)]
