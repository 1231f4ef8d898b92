"""`rollout.mode=stream` beside stand-in servers: steps that take what is complete, and long responses that go on."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from golden_runs import metrics
from lag_cases import GENERATE, requests
from pool import Pools, WorkerError
from vllm_engine_cases import make_bench
from vllm_stand_in import sample, whole_length

from nemo_oprd.run.timeline import read_timeline
from nemo_oprd.tools.toy.pair import make_tiny_pair

STEPS, BATCH, LAG, PER_PROMPT = 8, 4, 4, 2
# of prompt and response: some take ten times as long as the others, and longer than a step
WHOLE = [40, 40, 40, 110]
TOKEN_S = 0.02


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    root = tmp_path_factory.mktemp("stream")
    make_tiny_pair(root, log=lambda line: None)
    return [
        *(f"{role}.hf_path={root / role}" for role in ("student", "teacher")),
        *("student.checkpoint=null", "teacher.checkpoint=null", "student.parallel.tensor=2"),
        f"data.train={root / 'prompts' / 'train.jsonl'}",
        *("data.validation={}", "evaluation.every=0", "evaluation.teacher=false", "logging.tensorboard=false"),
        *(f"train.prompts_per_step={BATCH}", f"rollout.per_prompt={PER_PROMPT}", f"train.steps={STEPS}"),
        *("train.export_hf=false", "train.lr=1e-2", "train.schedule=constant", "train.warmup_fraction=0"),
        *("train.save_every=1", "train.keep_checkpoints=0", "rollout.save=true", "rollout.max_new_tokens=101"),
        *("rollout.engine=vllm", "rollout.vllm.check_tokens=0", "rollout.vllm.replicas=2", "rollout.max_batch=32"),
        *("rollout.mode=stream", f"rollout.max_lag={LAG}"),
    ]


def saved(run: Path) -> list[list[dict[str, Any]]]:
    """The rollouts of each step."""
    texts = [(run / "rollouts" / f"step_{step:07d}.jsonl").read_text() for step in range(1, STEPS + 1)]
    return [[json.loads(line) for line in text.splitlines()] for text in texts]


def check_stream(run: Path, calls: list[dict[str, Any]], known: int) -> int:
    """That each place is taken once, in time, and each token is of the weights that it names; responses in parts.

    The servers' tokens are a function of the digest of the weights, the seed and the prompt, so they are recomputed.
    """
    rollouts = saved(run)
    assert [len(step) for step in rollouts] == [BATCH * PER_PROMPT] * STEPS
    taken = Counter(tuple(one["prompt_ids"]) for step in rollouts for one in step)
    # the tiny pair has more prompts than the run, so each has all of its samples
    assert len(taken) == STEPS * BATCH and set(taken.values()) == {PER_PROMPT}
    versions = [line["version"] for line in calls if line["call"] == "/finish_weight_update"]
    digests = {int(steps): digest for steps, _, digest in (version.partition("-") for version in versions)}
    asked = {(tuple(line["prompt"]), line["seed"]): line for line in calls if line["call"] == GENERATE}
    parts = differs = 0
    for step, of_step in enumerate(rollouts):
        for one in of_step:
            prompt, ids, spans = one["prompt_ids"], one["response_ids"], one["weight_versions"]
            assert len(prompt) + len(ids) == whole_length(prompt, WHOLE) and one["finish_reason"] == "stop"
            assert [span["start"] for span in spans[1:]] == [span["end"] for span in spans[:-1]]
            assert spans[0]["start"] == 0 and spans[-1]["end"] == len(ids)
            assert all(step - LAG <= span["version"] <= step for span in spans)
            parts += len(spans) > 1
            for span in spans:
                own, version = ids[span["start"] : span["end"]], span["version"]
                read = (*prompt, *ids[: span["start"]])
                lines = [line for (given, _), line in asked.items() if given == read]
                assert own in [sampled(line, digests[version], known)[: len(own)] for line in lines]
                differs += own not in [sampled(line, digests[max(0, version - 1)], known)[: len(own)] for line in lines]
    assert differs > 0, "other weights sample other tokens"
    return parts


def sampled(line: dict[str, Any], digest: str, known: int) -> list[int]:
    """What a server answers to a request if nothing ends it early."""
    asked = line["seed"], line["prompt"], line["max_tokens"]
    return sample(digest, *asked, known, line["stop_token_ids"], {"whole": WHOLE})["ids"]


@pytest.mark.parametrize(
    "faults",
    [
        pytest.param({}, marks=pytest.mark.slow, id="whole"),
        pytest.param({"die": {"call": GENERATE, "at": 20}}, id="a server dies"),
    ],
)
def test_steps_take_each_response_once(
    pools: Pools, settings: list[str], tmp_path: Path, faults: dict[str, Any]
) -> None:
    """And long ones, which go on over updates, in time; a server that dies loses the tokens that it has not sent."""
    bench = make_bench(tmp_path / "bench", lengths={"whole": WHOLE}, token_s=TOKEN_S, **faults)
    run = tmp_path / "run"
    overrides = [*settings, f"rollout.vllm.python={bench / 'python'}", f"output={run}"]
    pools[2].run("lag_cases:train", overrides=overrides)
    assert check_stream(run, requests(bench), known_ids(settings)) > 0
    measured = metrics(run)
    assert max(line["rollout/lag_max"] for line in measured) <= LAG
    assert measured[-1]["rollout/server_deaths"] == len(faults)
    during = [each for each in read_timeline(run) if each.phase in ("teacher", "gradient")]
    samplings = [each for each in read_timeline(run) if each.phase == "sampling"]
    assert any(each.began < work.began < each.ended for each in samplings for work in during)
    check_a_refused_start_changes_nothing(pools, run, overrides)


def check_a_refused_start_changes_nothing(pools: Pools, run: Path, overrides: list[str]) -> None:
    """The pending responses of the checkpoint are refused before a line of a later step is dropped."""
    shutil.rmtree(run / "checkpoints" / f"iter_{STEPS:07d}")
    before = {path.name: path.read_bytes() for path in run.glob("[!.]*") if path.is_file()}
    assert json.loads(before["metrics.jsonl"].splitlines()[-1])["step"] == STEPS
    with pytest.raises(WorkerError, match="this run has rollout.mode=exact; expected stream until the end"):
        pools[2].run(
            "lag_cases:train", overrides=[*overrides, "rollout.mode=exact", "train.allow_changes=[rollout.mode]"]
        )
    assert {path.name: path.read_bytes() for path in run.glob("[!.]*") if path.is_file()} == before


def known_ids(settings: list[str]) -> int:
    """The ids of the tiny pair."""
    student = next(each.partition("=")[2] for each in settings if each.startswith("student.hf_path"))
    return json.loads((Path(student) / "config.json").read_text())["vocab_size"]
