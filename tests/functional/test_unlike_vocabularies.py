"""A student with rows without a token, and a teacher that knows more tokens: what is sampled, and the output loss."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from golden_runs import metrics
from pool import Pools

from nemo_oprd.batch.types import Rollout
from nemo_oprd.config.loading import load_config
from nemo_oprd.data.token_ids import TokenIds
from nemo_oprd.rollout.replay import read_rollouts, write_rollouts
from nemo_oprd.run.data import read_prompts
from nemo_oprd.run.models import RunFiles
from nemo_oprd.run.resolve import resolve_models, servers_ids
from nemo_oprd.tools.doctor.files import vocabularies
from nemo_oprd.tools.toy import pair as task
from nemo_oprd.tools.toy.pair import make_tiny_pair
from tests.support.wide_vocabulary import add_tokens, make_likely, widen

ROWS, TEACHER_ROWS = 32, 40
# ids 25 and 26 are a gap between the student's tokens, those from 28 on are padding
KNOWN = TokenIds(28, ((25, 27),))
PLANTED = (25, 30)
TEXTS = [task.encode(task.prompt_text(a, b) + task.response_text(a, b)) for a, b in ((1234, 5678), (4016, 3409))]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both models find the planted ids likely, for which the teacher alone has tokens."""
    pair = tmp_path_factory.mktemp("unlike") / "pair"
    make_tiny_pair(pair)
    for role, rows, more in (("student", ROWS, {}), ("teacher", TEACHER_ROWS, {"ü": 25, "ö": 30, "ä": 34})):
        widen(pair / role, rows)
        add_tokens(pair / role, {"é": 27, **more})
        assert make_likely(pair / role, PLANTED, TEXTS) > 0.5
    return pair


def settings(pair: Path, *more: str) -> list[str]:
    return [
        f"student.hf_path={pair / 'student'}",
        f"teacher.hf_path={pair / 'teacher'}",
        f"data.train={pair / 'prompts' / 'train.jsonl'}",
        "data.validation={}",
        "train.prompts_per_step=6",
        "train.steps=1",
        "train.schedule=constant",
        "train.warmup_fraction=0",
        "train.export_hf=false",
        "evaluation.every=0",
        "evaluation.teacher=false",
        "rollout.max_new_tokens=24",
        "rollout.save=true",
        "logging.every=1",
        "seed=1",
        *more,
    ]


def over_known(pair: Path, rollouts: list[Rollout]) -> dict[str, float]:
    """Means over all response tokens in float64, where both models have the student's tokens alone."""
    from transformers import AutoModelForCausalLM

    student, teacher = (
        AutoModelForCausalLM.from_pretrained(pair / role, dtype=torch.float64) for role in ("student", "teacher")
    )
    place = torch.from_numpy(np.cumsum(KNOWN.mask) - 1)
    divergence, estimate = [], []
    for rollout in rollouts:
        ids, first = torch.tensor(rollout.ids).long()[None], len(rollout.prompt_ids) - 1
        with torch.no_grad():
            log_p, log_q = (
                model(ids).logits[0, first:-1, : KNOWN.limit][:, KNOWN.mask].log_softmax(-1)
                for model in (student, teacher)
            )
        divergence.append((log_p.exp() * (log_p - log_q)).sum(-1))
        estimate.append((log_p - log_q).gather(1, place[ids[0, first + 1 :], None]))
    return {"full_vocab": float(torch.cat(divergence).mean()), "sampled_token": float(torch.cat(estimate).mean())}


@pytest.mark.parametrize("kind", ["full_vocab", "sampled_token"])
def test_a_run(pools: Pools, tmp_path: Path, pair: Path, kind: str) -> None:
    """No planted id is sampled at two tensor ranks, and the output loss leaves these ids out.

    The teacher sends final states, or log-probabilities of the sampled tokens.
    """
    loss = [f"loss.output.kind={kind}", "loss.output.weight=1", "loss.output.aggregation=token_mean"]
    overrides = settings(pair, *loss, "logging.output_metrics_every=0", f"output={tmp_path / 'run'}")
    pools[2].run("cases:run_train", overrides=overrides, config="quickstart")
    rollouts = read_rollouts(tmp_path / "run" / "rollouts" / "step_0000001.jsonl", ROWS)
    assert not [i for rollout in rollouts for i in KNOWN.outside(rollout.response_ids.tolist())]
    (found,) = metrics(tmp_path / "run")
    assert found["output/loss"] == pytest.approx(over_known(pair, rollouts)[kind], rel=1e-4)


def test_recorded_ids_need_no_token(pools: Pools, tmp_path: Path, pair: Path) -> None:
    """They are compared on all rows that both models have."""
    write_rollouts(tmp_path / "rollouts.jsonl", [Rollout([3, 4], [30, 25, 31, 5]), Rollout([5], [28, 1])])
    overrides = [f"{role}.hf_path={pair / role}" for role in ("student", "teacher")]
    overrides += [f"rollout.replay={tmp_path / 'rollouts.jsonl'}", f"output={tmp_path / 'out'}"]
    pools[2].run("cases:run_verify", overrides=[*overrides, "loss.output.kind=full_vocab", "loss.output.weight=1"])
    assert json.loads((tmp_path / "out" / "losses.json").read_text())["output/loss"] > 0


def test_which_ids_are_sampled_and_shared(pair: Path, tmp_path: Path) -> None:
    """A teacher with more tokens is taken with the student's; one for which an id means another token is not."""

    def files(*more: str, **tokens: int) -> RunFiles:
        teacher = shutil.copytree(pair / "teacher", tmp_path / "teacher", dirs_exist_ok=True)
        add_tokens(teacher, tokens)
        config = load_config("quickstart", [*settings(pair), f"teacher.hf_path={teacher}", *more])
        return RunFiles(config, resolve_models(config))

    found = files()
    assert (found.sampled_ids, found.shared_ids(0)) == (KNOWN, KNOWN)
    finding = vocabularies(found.student, found.teachers[0], "ids")
    assert finding.verdict == "ok" and finding.numbers["sampled_ids"] == len(KNOWN) == 26
    assert "which knows 3 more, and only the ids 0..27 without 25..26 are sampled" in finding.text
    config = load_config("quickstart", settings(pair))
    assert servers_ids(config, found.models.student) == KNOWN
    assert read_prompts(config, found, found.models.routing)[1] == [None]

    replayed = files("rollout.replay=unused")
    assert replayed.sampled_ids == TokenIds(ROWS)
    other = files(é=28)
    assert (other.sampled_ids, other.shared_ids(0)) == (KNOWN, None)
    assert vocabularies(other.student, other.teachers[0], "ids").verdict == "wrong"
    with pytest.raises(ValueError, match="expected the same tokenizer, or one that knows more tokens"):
        read_prompts(config, other, other.models.routing)
    same = RunFiles(
        config, replace(found.models, teachers=(replace(found.models.teachers[0], model=found.models.student),))
    )
    assert same.shared_ids(0) == TokenIds(ROWS)
