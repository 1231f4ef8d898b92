"""Sampling that stops with the last supervised token: the update of whole responses, which evaluations sample."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from golden_runs import metrics
from pool import Pools

from nemo_oprd.tools.toy.pair import make_tiny_pair

K, LONGEST = 5, 24


def test_the_update_is_that_of_whole_responses(pools: Pools, tmp_path: Path) -> None:
    """Each response is the beginning of the one that the student would have written, and says why it ended."""
    make_tiny_pair(tmp_path, log=lambda line: None)
    settings = [
        *(f"{role}.hf_path={tmp_path / role}" for role in ("student", "teacher")),
        *("student.checkpoint=null", "teacher.checkpoint=null", "student.parallel.tensor=2"),
        f"data.train={tmp_path / 'prompts' / 'train.jsonl'}",
        f"data.validation={{heldout: {tmp_path / 'prompts' / 'heldout.jsonl'}}}",
        *("loss.representation.positions=first_k", f"loss.representation.k={K}", "logging.output_metrics_every=0"),
        *("train.prompts_per_step=8", "train.steps=1", "train.export_hf=false", "logging.tensorboard=false"),
        *("evaluation.every=1", "evaluation.samples=1", "evaluation.limit=4", "evaluation.teacher=false"),
        *(f"rollout.max_new_tokens={LONGEST}", "rollout.save=true"),
    ]
    lines, rollouts = [], []
    for name, stop in (("whole", "null"), ("prefix", "supervised")):
        run = tmp_path / name
        overrides = [*settings, f"rollout.stop_after={stop}", f"output={run}"]
        pools[2].run("cases:run_train", overrides=overrides, config="quickstart")
        lines.append({name: value for line in metrics(run) if line["step"] == 1 for name, value in line.items()})
        saved = (run / "rollouts" / "step_0000001.jsonl").read_text().splitlines()
        rollouts.append([json.loads(line) for line in saved])
    reasons = [one["finish_reason"] for one in rollouts[1]]
    assert "prefix" in reasons and any(one["finish_reason"] != "prefix" for one in rollouts[1])
    for whole, prefix in zip(*rollouts, strict=True):
        assert prefix["response_ids"] == whole["response_ids"][:K]
        ended = len(whole["response_ids"]) <= K
        assert prefix["finish_reason"] == (whole["finish_reason"] if ended else "prefix")
    # the same numbers but for the order of sums in longer sequences, in float32
    for name in ("loss/total", "rep/loss", "actor/grad_norm"):
        assert lines[1][name] == pytest.approx(lines[0][name], rel=1e-5)
    assert lines[1]["response_length/max"] == K and lines[0]["response_length/max"] > K
    assert lines[1]["rollout/prefix"] == reasons.count("prefix") / len(reasons)
    assert lines[1]["rollout/finished"] == reasons.count("stop") / len(reasons) and "rollout/prefix" not in lines[0]
    # the students differ by rounding only, so the same whole responses are evaluated
    assert lines[1]["val/heldout/avg_len"] == lines[0]["val/heldout/avg_len"] > K
