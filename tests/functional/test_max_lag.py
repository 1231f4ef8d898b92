"""Sampling ahead of the updates: which weights sampled what, and a run that stops in between."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from golden_runs import metrics
from lag_cases import GENERATE, picked_otherwise, requests
from pool import Pools
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from vllm_engine_cases import make_bench

from nemo_oprd.megatron.weights.megatron_checkpoint import MegatronCheckpoint
from nemo_oprd.run.timeline import Interval, hidden_share, read_timeline
from nemo_oprd.tools.toy.pair import make_tiny_pair
from nemo_oprd.vllm.sampler import seed_of

STEPS, BATCH = 4, 4
DELAY_S = 0.05  # of a response
CLOCK_S = 0.002  # two clocks are compared, one of them rounded


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    root = tmp_path_factory.mktemp("lag")
    make_tiny_pair(root, log=lambda line: None)
    return [
        *(f"{role}.hf_path={root / role}" for role in ("student", "teacher")),
        *("student.checkpoint=null", "teacher.checkpoint=null", "student.parallel.tensor=2"),
        f"data.train={root / 'prompts' / 'train.jsonl'}",
        *("data.validation={}", "evaluation.every=0", "evaluation.teacher=false", "logging.tensorboard=false"),
        *(f"train.prompts_per_step={BATCH}", f"train.steps={STEPS}", "train.export_hf=false", "train.lr=1e-2"),
        *("train.save_every=1", "train.keep_checkpoints=0", "train.schedule=constant", "train.warmup_fraction=0"),
        *("rollout.max_new_tokens=16", "rollout.save=true"),
    ]


@pytest.mark.parametrize("lag", [pytest.param(1, marks=pytest.mark.slow), 2])
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
        for rollout in rollouts:
            whole = {"version": sampled_by, "start": 0, "end": len(rollout["response_ids"])}
            assert rollout["weight_versions"] == [whole] and rollout["weight_version"] == sampled_by
        assert line["rollout/lag_mean"] == line["rollout/lag_max"] == step - sampled_by
        found = []
        for steps in (sampled_by, step):
            weights = str(run / "checkpoints" / f"iter_{steps:07d}") if steps else None
            again = pools[2].run("cases:resample", overrides=overrides, step=step, checkpoint=weights)
            found.append(again)
        assert [rollout["response_ids"] for rollout in rollouts] == found[0]
        differs += found[0] != found[1]
    assert differs > 0, "other weights sample other responses"
    files = sorted(file.name for file in (run / "checkpoints" / "iter_0000001" / "rollouts").iterdir())
    assert files == [f"step_{step:07d}.safetensors" for step in range(2, 2 + lag)]


@pytest.mark.parametrize(("lag", "tokens", "updates"), [(1, 10, 1), (2, 6, 1), (2, 8, 2)])
def test_each_token_is_of_the_weights_that_it_names(
    pools: Pools, settings: list[str], tmp_path: Path, lag: int, tokens: int, updates: int
) -> None:
    """Plain models find token t of step s to be what the weights after max(0, s - lag + t // tokens) steps pick.

    Versions count the `updates` of each step.
    """
    run = tmp_path / "run"
    segments = ["rollout.mode=segments", f"rollout.segment_tokens={tokens}", f"rollout.max_lag={lag}"]
    segments.append(f"train.updates_per_rollout={updates}")
    pools[2].run("cases:run_train", overrides=[*settings, *segments, f"output={run}"], config="quickstart")
    student = Path(next(each.split("=")[1] for each in settings if each.startswith("student.hf_path")))

    @functools.cache
    def read(version: int) -> Any:
        model = AutoModelForCausalLM.from_pretrained(student, attn_implementation="eager")
        if version:
            trained = MegatronCheckpoint(run / "checkpoints" / f"iter_{version // updates:07d}")
            model.load_state_dict({name: trained[name] for name in load_file(student / "model.safetensors")})
        return model

    differs = 0
    for step, line in enumerate(metrics(run)):
        first = tokens * max(1, lag - step + 1)  # of the initial weights, or of the first ones

        def parts(length: int, step: int = step, first: int = first) -> list[tuple[int, int]]:
            starts = [0, *range(first, length, tokens)]
            return [(start, updates * max(0, step - lag + start // tokens)) for start in starts]

        rows = (run / "rollouts" / f"step_{step + 1:07d}.jsonl").read_text().splitlines()
        rollouts, lags = [json.loads(row) for row in rows], []
        for rollout in rollouts:
            found = parts(length := len(rollout["response_ids"]))
            ends = [*(start for start, _ in found[1:]), length]
            spans = [{"version": v, "start": a, "end": b} for (a, v), b in zip(found, ends, strict=True)]
            assert rollout["weight_versions"] == spans
            lags += [updates * step - span["version"] for span in spans for _ in range(span["start"], span["end"])]
        assert line["rollout/lag_mean"] == pytest.approx(sum(lags) / len(lags))
        assert line["rollout/lag_max"] == max(lags)
        assert picked_otherwise(rollouts, step, parts, read, tokens) == 0

        def relabelled(length: int, step: int = step, parts: Any = parts) -> list[tuple[int, int]]:
            return [(start, updates * step) for start, _ in parts(length)]

        differs += picked_otherwise(rollouts, step, relabelled, read, tokens)
    assert differs > 0, "other weights pick other tokens"


def test_recorded_experts_cover_responses_in_parts(pools: Pools, settings: list[str], tmp_path: Path) -> None:
    """And are replayed in training, which fails without one set per token."""
    make_tiny_pair(tmp_path, steps=2, experts=4, log=lambda line: None)
    models = [f"{role}.hf_path={tmp_path / role}" for role in ("student", "teacher")]
    layout = ["student.parallel.tensor=1", "student.parallel.expert=2", "teacher.parallel.expert=2"]
    more = [*models, *layout, "student.router_replay=true", "rollout.max_lag=2", "rollout.mode=segments"]
    run = [*settings, *more, "rollout.segment_tokens=6", f"output={tmp_path / 'run'}"]
    pools[2].run("cases:run_train", overrides=run, config="quickstart")
    longest = 0
    for step in range(1, STEPS + 1):
        for line in (tmp_path / "run" / "rollouts" / f"step_{step:07d}.jsonl").read_text().splitlines():
            rollout = json.loads(line)
            tokens = len(rollout["prompt_ids"]) + len(rollout["response_ids"])
            assert np.shape(rollout["expert_routes"])[0] == tokens - 1
            assert np.min(rollout["expert_routes"]) >= 0
            longest = max(longest, len(rollout["weight_versions"]))
    assert longest == 3


@pytest.mark.parametrize(
    "mode", [("rollout.max_lag=1",), ("rollout.max_lag=2", "rollout.mode=segments", "rollout.segment_tokens=6")]
)
@pytest.mark.parametrize("fault", ["none", "stale", "stale replica", "stale prefix"])
def test_an_engine_that_samples_from_other_weights_than_it_says_ends_the_run(
    pools: Pools, settings: list[str], tmp_path: Path, mode: tuple[str, ...], fault: str
) -> None:
    """The check compares every part with the student of its version, which still has these weights."""
    case = {"overrides": [*settings, *mode, f"output={tmp_path / 'run'}"], "fault": fault}
    message, gaps = pools[2].run("lag_cases:train_with_a_fault", **case)
    assert len(gaps) >= 2 and max(gaps) < 1e-3
    if fault == "none":
        assert message is None and len(gaps) >= STEPS
    else:
        assert message is not None and message.startswith("the engine does not sample from the student: ")
        assert "\n" not in message


SEGMENTS = ("rollout.mode=segments", "rollout.max_new_tokens=9", "rollout.segment_tokens=3")


def beside_servers(pools: Pools, settings: list[str], root: Path, *more: str, **faults: Any) -> tuple[Path, Path, Any]:
    """(The directory of the stand-in servers, that of the run, what `lag_cases.train_beside_servers` returns)."""
    bench, run = make_bench(root, lengths="of whole prompts", **faults), root.with_name(f"{root.name}_run")
    vllm = ["rollout.engine=vllm", f"rollout.vllm.python={bench / 'python'}", "rollout.vllm.check_tokens=0"]
    overrides = [*settings, *vllm, "rollout.max_batch=2", *more, f"output={run}"]
    case = {"overrides": overrides, "root": str(bench), "batch": 0, "steps": STEPS}
    return bench, run, pools[2].run("lag_cases:train_beside_servers", **case)


@pytest.mark.parametrize("lag", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_servers_continue_responses_over_updates(pools: Pools, settings: list[str], tmp_path: Path, lag: int) -> None:
    """By the servers' own log: what each version is asked for. With a death, the responses are the same."""
    rollouts = []
    for name, faults in (("whole", {"delay_s": 0.05}), ("dies", {"die": {"call": GENERATE, "at": 12}})):
        root, run, noted = beside_servers(
            pools, settings, tmp_path / name, *SEGMENTS, f"rollout.max_lag={lag}", **faults
        )
        saved = [(run / "rollouts" / f"step_{step:07d}.jsonl").read_text() for step in range(1, STEPS + 1)]
        rollouts.append([[json.loads(line) for line in text.splitlines()] for text in saved])
        if name == "whole":
            calls, times = requests(root), noted
    for one in (one for each in rollouts for step in each for one in step):
        assert one.pop("logprobs") is not None
    assert rollouts[0] == rollouts[1]
    asked: dict[int, list[Any]] = {version: [] for version in range(STEPS)}
    for step, of_step in enumerate(rollouts[0]):
        for i, one in enumerate(of_step):
            for span in one["weight_versions"]:
                start, version = span["start"], span["version"]
                assert version == max(0, step - lag + start // 3)
                seed = seed_of((0, 1, step, i, *([start // 3] if start else [])))
                most = min(9, 3 * (version - step + lag + 1)) - start
                asked[version].append(([*one["prompt_ids"], *one["response_ids"][:start]], seed, most))
    assert max(len(one["weight_versions"]) for step in rollouts[0] for one in step) > 1
    seen: dict[int, list[Any]] = {version: [] for version in range(-1, STEPS + 1)}
    version, overlaps = -1, 0
    for call in calls:
        version += call["call"] == "/finish_weight_update"
        if call["call"] == GENERATE:
            seen[version].append((call["prompt"], call["seed"], call["max_tokens"]))
            overlaps += version < STEPS and times[version]["began"] < call["time"] < times[version]["optimizer"]
    assert {version: sorted(each) for version, each in seen.items() if each} == {
        version: sorted(each) for version, each in asked.items() if each
    }
    assert overlaps > 0, "nothing is sampled while an update is computed"


OVER_TWO = ("rollout.max_lag=2", *SEGMENTS)
# so many that the last ones cannot have been sampled before update 2, however fast the servers are
LONGER = ("train.steps=9",)


@pytest.mark.parametrize(
    ("faults", "mode"),
    [
        ({"spans": {"kind": "swapped"}}, OVER_TWO),
        ({"spans": {"kind": "older"}}, OVER_TWO),
        ({"stale": {"from": 2}}, (*OVER_TWO, *LONGER)),
        ({"stale": {"from": 2}}, ("rollout.max_lag=1",)),
        ({"stale": {"from": 2}}, ("rollout.max_lag=4", "rollout.mode=stream", *LONGER)),
    ],
    ids=["swapped spans", "older version", "one stale server of two", "of two, exact", "of two, stream"],
)
def test_a_server_that_samples_from_other_weights_ends_the_run(
    pools: Pools, settings: list[str], tmp_path: Path, faults: dict[str, Any], mode: tuple[str, ...]
) -> None:
    with pytest.raises(Exception, match=r"sampled response \d+ from the weights [01]-") as caught:
        beside_servers(pools, settings, tmp_path / "bench", *mode, "rollout.vllm.replicas=2", **faults)
    (line,) = re.findall(r"ServerRefused: (.*)", str(caught.value))[:1]
    assert re.search(r"expected [1-3]-\w{32} for all tokens: does somebody else use or update this server\?$", line)


def test_servers_sample_during_an_update_and_never_during_a_push(
    pools: Pools, settings: list[str], tmp_path: Path
) -> None:
    """By the server's own log. A server that dies meanwhile gets the same weights again, and samples the same."""
    rollouts, logs = [], []
    for name, faults in (("whole", {}), ("dies", {"die": {"call": GENERATE, "at": 6}})):
        root = make_bench(tmp_path / name, delay_s=DELAY_S, **faults)
        run = tmp_path / f"{name}_run"
        vllm = ["rollout.engine=vllm", f"rollout.vllm.python={root / 'python'}", "rollout.vllm.check_tokens=0"]
        overrides = [*settings, *vllm, "rollout.max_lag=1", "rollout.max_batch=2", f"output={run}"]
        case = {"overrides": overrides, "root": str(root), "batch": BATCH, "steps": STEPS}
        noted = pools[2].run("lag_cases:train_beside_servers", **case)
        saved = [(run / "rollouts" / f"step_{step:07d}.jsonl").read_text() for step in range(1, STEPS + 1)]
        rollouts.append([json.loads(line) for text in saved for line in text.splitlines()])
        logs.append((requests(root), noted))
    for one in rollouts[0]:
        del one["logprobs"]
    assert rollouts[0] == [{name: value for name, value in one.items() if name != "logprobs"} for one in rollouts[1]]
    versions = [[span["version"] for span in one["weight_versions"]] for one in rollouts[0]]
    assert versions == [[0]] * 2 * BATCH + [[1]] * BATCH + [[2]] * BATCH
    calls, noted = logs[0]
    sampled = [number for number, line in enumerate(calls) if line["call"] == GENERATE]
    pushed = [number for number, line in enumerate(calls) if line["call"] == "/finish_weight_update"]
    assert len(sampled) == STEPS * BATCH and len(pushed) == STEPS + 1
    for step in range(1, STEPS):  # the batch of step `step` is sampled during update `step - 1`
        batch, update = sampled[step * BATCH : (step + 1) * BATCH], noted[step - 1]
        assert pushed[step - 1] < batch[0] and batch[-1] < pushed[step]
        assert calls[batch[-1]]["time"] < update["optimizer"]
        assert step == 1 or calls[batch[0]]["time"] > noted[step - 2]["optimizer"]
    agrees_with_the_server(read_timeline(tmp_path / "whole_run"), calls, noted)
    # the other run's server died once, and its successor got weights of a version that was pushed before
    again = [line for line in logs[1][0] if line["call"] == "/finish_weight_update"]
    assert len(again) == STEPS + 2


def agrees_with_the_server(
    intervals: list[Interval], calls: list[dict[str, Any]], noted: list[dict[str, float]]
) -> None:
    """The run's own record against what the server and the trainer have seen."""
    asked = [line["time"] for line in calls if line["call"] == GENERATE]
    samplings = [each for each in intervals if each.phase == "sampling"]
    assert [(each.batch, each.step) for each in samplings] == [
        (1, 1),
        *((step, step - 1) for step in range(2, STEPS + 1)),
    ]
    for each in samplings:
        own = asked[(each.batch - 1) * BATCH : each.batch * BATCH]
        assert each.submitted <= each.began < own[0] and own[-1] + DELAY_S < each.ended + CLOCK_S
        assert each.ended < each.collected + CLOCK_S and each.servers == {"0": (each.began, each.ended)}
    of = {(each.step, each.phase): each for each in intervals}
    for step in range(1, STEPS + 1):
        gradient, optimizer, push = (of[step, phase] for phase in ("gradient", "optimizer", "sync"))
        assert gradient.ended <= optimizer.began + CLOCK_S and optimizer.ended <= push.began + CLOCK_S
        assert optimizer.began <= noted[step - 1]["optimizer"] + CLOCK_S <= optimizer.ended + 2 * CLOCK_S
        apart = [each for each in samplings if each.ended < push.began + CLOCK_S or push.ended < each.began + CLOCK_S]
        assert apart == samplings, "nothing is sampled during a push"
    ends = [line["time"] for line in calls if line["call"] == "/finish_weight_update"]
    pushes = [each for each in intervals if each.phase == "sync"]
    assert all(each.began < end < each.ended for each, end in zip(pushes, ends, strict=True))
    during = [each for each in intervals if each.phase in ("teacher", "gradient")]
    assert all(any(each.began < work.ended and work.began < each.ended for work in during) for each in samplings[1:])
    share = hidden_share(intervals)
    assert share is not None and 0 < share < 1


def test_an_evaluation_beside_training_is_that_of_its_step(pools: Pools, settings: list[str], tmp_path: Path) -> None:
    """By the server's log it is sampled with the next responses; otherwise it is the one that is sampled alone.

    With `train.keep_best` evaluations are sampled alone, because the checkpoint waits for them. A run that dies before
    the evaluation is graded makes it when it is started again, of the responses that it has kept.
    """
    runs, calls = {}, {}
    for name, more in (("beside", []), ("alone", ["train.keep_best=val/heldout/avg@2"]), ("dies", [])):
        root, run = make_bench(tmp_path / name, lengths=[3, 5, 8], delay_s=0.02), tmp_path / f"{name}_run"
        heldout = Path(settings[0].partition("=")[2]).parent / "prompts" / "heldout.jsonl"
        overrides = [
            *(each for each in settings if not each.startswith(("data.validation", "evaluation.every"))),
            *(f"data.validation.heldout={heldout}", "evaluation.every=1", "evaluation.limit=2"),
            *("rollout.engine=vllm", f"rollout.vllm.python={root / 'python'}", "rollout.vllm.check_tokens=0"),
            *("rollout.max_lag=1", f"output={run}", *more),
        ]
        if name == "dies":
            assert pools[2].run("lag_cases:train_until_graded", overrides=overrides)
            assert [line["step"] for line in metrics(run)] == [0, 1]
        pools[2].run("lag_cases:train", overrides=overrides)
        runs[name], calls[name] = run, requests(root)
    beside, alone, dies = runs.values()
    assert metrics(beside) == metrics(alone)
    # a start that finds all responses of a step asks no server about deaths
    plain = [
        [{k: v for k, v in line.items() if k != "rollout/server_deaths"} for line in metrics(run)]
        for run in (alone, dies)
    ]
    assert plain[0] == plain[1]
    assert [line["step"] for line in metrics(beside)] == [0, *sorted([1, 2, 3, 4] * 2)]
    files = sorted(file.relative_to(beside / "evaluations") for file in (beside / "evaluations").rglob("*.json*"))
    assert [str(file.parent) for file in files if file.name == "evaluation.json"] == [
        f"step_{step:07d}" for step in range(STEPS + 1)
    ]
    for file in files:
        texts = [nameless((run / "evaluations" / file).read_text()) for run in runs.values()]
        assert texts[0] == texts[1] == texts[2], file
    assert sum(line["call"] == GENERATE and line["temperature"] == 0.7 for line in calls["dies"]) == 4 * (STEPS + 1)
    for name, run in (("beside", beside), ("alone", alone)):
        pushes = [line["time"] for line in calls[name] if line["call"] == "/finish_weight_update"]
        asked = [line["time"] for line in calls[name] if line["call"] == GENERATE and line["temperature"] == 0.7]
        assert len(asked) == 4 * (STEPS + 1)
        intervals = read_timeline(run)
        during = {each.batch: each for each in intervals if each.phase == "sampling"}
        of = {(each.step, each.phase): each for each in intervals if each.step}
        graded = [
            each.step
            for each in intervals
            if each.phase == "evaluation" and each.step and each.ended < of[each.step, "optimizer"].began + CLOCK_S
        ]
        assert graded == ([2, 3] if name == "beside" else []), "before the weights of the step before change"
        for step in range(STEPS + 1):
            own = asked[4 * step : 4 * step + 4]
            assert pushes[step] < own[0] and all(own[-1] < push for push in pushes[step + 1 :])
            found = [batch for batch, each in during.items() if each.began < own[0] and own[-1] < each.ended + CLOCK_S]
            ahead = name == "beside" and 0 < step < STEPS - 1
            assert found == ([step + 2] if ahead else [])


def nameless(text: str) -> str:
    """Without the random name of the weights after a step."""
    return re.sub(r'"(weights|name|model)": "[^"]*"|student@[0-9a-f]+', "", text)
