"""Ranks without a response, and the seconds of the fullest data-parallel rank, by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from family_configs import QWEN_1P5B

from nemo_oprd.batch.layout import Layout
from nemo_oprd.cli import main
from nemo_oprd.config.loading import load_config
from nemo_oprd.run.idle_ranks import IdleRanks, idle_ranks, shares
from nemo_oprd.run.resolve import resolve, resolve_models
from nemo_oprd.tools.plan.estimate import Estimate, Lengths, estimate
from nemo_oprd.tools.plan.gpus import GPUS, Cluster
from nemo_oprd.tools.plan.workload import make_workload

PROMPT, RESPONSE = 48, 2000
# operations of one response of the 1.5B model, forward: the weights of a layer and the causal half of attention
WEIGHTS = 1536 * (1536 + 2 * 256) + 1536 * 1536 + 3 * 1536 * 8960
FORWARD = 28 * (PROMPT + RESPONSE) * (2 * WEIGHTS + 2 * 1536 * (PROMPT + RESPONSE))
RATE = 0.4 * 989e12


@pytest.fixture
def pair(tmp_path: Path) -> list[str]:
    for role in ("student", "teacher"):
        (tmp_path / role).mkdir()
        (tmp_path / role / "config.json").write_text(json.dumps(QWEN_1P5B))
    models = [f"{role}.hf_path={tmp_path / role}" for role in ("student", "teacher")]
    plain = ["student.recompute=none", "logging.output_metrics_every=0", "evaluation.every=0"]
    return [*models, *plain, f"rollout.max_new_tokens={RESPONSE}", f"train.tokens_per_microbatch={PROMPT + RESPONSE}"]


def planned(pair: list[str], ranks: int, *settings: str) -> Estimate:
    """16 responses, if `settings` don't say otherwise."""
    return estimate(
        resolve(load_config("oprd_1p5b", [*pair, *settings]), ranks), Cluster(ranks, GPUS["h100"]), Lengths(PROMPT)
    )


@pytest.mark.parametrize(
    ("ranks", "settings", "responses"),
    [
        (4, [], 4),
        (12, [], 2),  # 16 responses on 12 ranks: some have two, and the others wait
        (16, [], 1),
        (64, [], 1),  # a response is not divided
        (64, ["train.prompts_per_step=40"], 2),
        (64, ["train.prompts_per_step=32"], 1),
    ],
)
def test_a_step_takes_as_long_as_its_fullest_rank(
    pair: list[str], ranks: int, settings: list[str], responses: int
) -> None:
    """The update has the operations of three forward passes, the teacher those of one, of `responses` responses."""
    seconds = planned(pair, ranks, *settings).seconds
    assert seconds["update"] == pytest.approx(responses * 3 * FORWARD / RATE)
    assert seconds["teacher"] == pytest.approx(responses * FORWARD / RATE)


def test_pipeline_stages_divide_a_response(pair: list[str]) -> None:
    """Two stages, 8 data-parallel ranks, 2 microbatches of one response each: 3 slots of half a response's time."""
    found = planned(pair, 16, "student.parallel.pipeline=2", "teacher.parallel.pipeline=2")
    assert found.work.on(found.student).count == 2
    assert found.seconds["teacher"] == pytest.approx(3 / 2 * FORWARD / RATE, rel=0.05)  # and what moves between stages
    assert found.bubbles == {"student": pytest.approx(1 / 3), "teacher": pytest.approx(1 / 3)}


def test_packs_hold_whole_responses(pair: list[str]) -> None:
    """5 responses of 2,048 tokens on the fullest of 3 ranks, 2 to a pack of 5,000 tokens: 3 microbatches."""
    settings = [*pair, "train.tokens_per_microbatch=5000", "train.prompts_per_step=7"]
    config = load_config("oprd_1p5b", settings)
    batches = make_workload(config, resolve_models(config), prompt=PROMPT).on(Layout(data=3))
    assert (batches.responses, batches.per_pack, batches.count, batches.tokens) == (5, 2, 3, 4096)


@pytest.mark.parametrize(
    ("resident", "student", "teacher", "fullest"),
    [
        ("null", 4, 8, 2),  # all 16 responses at once on 8 ranks
        ("1", 4, 8, 4),  # 4 waves of 4 responses, which leave 4 of 8 ranks without one each time
        ("3", 4, 8, 3),  # 12 responses, then 4: 2 + 1
        ("2", 4, 3, 6),  # 8 responses on 3 ranks twice: 3 + 3
    ],
)
def test_a_teacher_computes_wave_by_wave(
    pair: list[str], resident: str, student: int, teacher: int, fullest: int
) -> None:
    config = load_config("oprd_1p5b", [*pair, f"teacher.resident_microbatches={resident}"])
    work = make_workload(config, resolve_models(config), prompt=PROMPT)
    assert work.teacher_share(Layout(data=student), Layout(data=teacher)) == fullest / 16


def test_each_teachers_responses_are_divided_on_their_own(pair: list[str]) -> None:
    """Of 16 responses two teachers have 8 each: on 16 ranks the same 8 compute both, on 8 ranks all have two."""
    assert shares(16, 2) == [8, 8] and shares(5, 3) == [2, 2, 1]
    model = pair[1].partition("=")[2]
    listed = [setting for setting in pair if not setting.startswith("teacher.")]
    teachers = f"teachers=[{{hf_path:{model},data_sources:[a]}},{{hf_path:{model},data_sources:[b],name:b}}]"
    found = planned([*listed, "teacher.hf_path=null", teachers], 16)
    assert found.work.on(found.student).responses == 2
    assert found.seconds["update"] == pytest.approx(2 * 3 * FORWARD / RATE)
    assert found.idle is not None and found.idle.roles[0].idle == 8


def numbers(idle: IdleRanks | None) -> dict[str, Any]:
    return {} if idle is None else {each.role: (each.idle, each.ranks, each.groups) for each in idle.roles}


@pytest.mark.parametrize(
    ("ranks", "settings", "expected"),
    [
        (16, [], {}),
        (64, ["train.prompts_per_step=32"], {}),
        (64, [], {"student": (48, 64, 64), "sampling": (48, 64, 64)}),
        (64, ["student.parallel.tensor=2"],
         {"student": (32, 64, 32), "teacher": (48, 64, 64), "sampling": (48, 64, 64)}),
        (64, ["student.parallel.tensor=2", "student.parallel.pipeline=2", "teacher.parallel.tensor=2",
              "teacher.parallel.context=2", "rollout.tensor=2"], {"sampling": (32, 64, 32)}),
        # a dedicated teacher on the last 32 of 48 ranks
        (48, ["teacher.placement=dedicated", "teacher.ranks=32"], {"teacher": (16, 32, 32)}),
        (32, ["rollout.engine=vllm"], {"student": (16, 32, 32), "sampling": (16, 32, 32)}),
        (32, ["rollout.engine=vllm", "rollout.vllm.replicas=4"], {"student": (16, 32, 32)}),
        (34, ["rollout.engine=vllm", "rollout.vllm.placement=dedicated", "rollout.vllm.tensor=2"],
         {"student": (16, 32, 32)}),
    ],
)  # fmt: skip
def test_idle_ranks_of_16_responses(pair: list[str], ranks: int, settings: list[str], expected: dict[str, Any]) -> None:
    assert numbers(planned(pair, ranks, *settings).idle) == expected


def test_what_is_said(pair: list[str]) -> None:
    idle = planned(pair, 64, "student.parallel.tensor=2").idle
    assert idle is not None
    assert idle.line == (
        "warning (idle_ranks): 32 of 64 student ranks, 48 of 64 teacher ranks and 48 of 64 sampling ranks have no "
        "response in a step of 16, because a response is not divided over data-parallel ranks; expected at least one "
        "for each of 64 groups of ranks: raise train.prompts_per_step from 8 to 32, start fewer ranks, or raise what "
        "divides a response (student.parallel.tensor, context or pipeline; teacher.parallel.tensor, context or "
        "pipeline; rollout.tensor)"
    )


def test_the_fix_is_enough(pair: list[str]) -> None:
    assert planned(pair, 64, "student.parallel.tensor=2", "train.prompts_per_step=32").idle is None
    assert planned(pair, 64, "student.parallel.tensor=2", "train.prompts_per_step=31").idle is not None


def test_recorded_responses_and_ranks_without_gpus(pair: list[str]) -> None:
    """Every step replays all recorded responses; without GPUs colocated servers are not on ranks of their own."""
    replayed = load_config("oprd_1p5b", [*pair, "rollout.replay=some.jsonl"])
    idle = idle_ranks(replayed, Layout(data=4), Layout(data=4), recorded=3)
    assert numbers(idle) == {"student": (1, 4, 4)}
    assert idle is not None and idle.text.endswith("replay at least 4 responses, or start fewer ranks")
    assert idle_ranks(replayed, Layout(data=4), Layout(data=4), recorded=4) is None
    served = load_config("oprd_1p5b", [*pair, "rollout.engine=vllm", "rollout.vllm.tensor=1"])
    wide = Layout(tensor=4, data=8)
    assert idle_ranks(served, wide, wide, has_gpus=False) is None
    assert numbers(idle_ranks(served, wide, wide)) == {"sampling": (16, 32, 32)}


def test_the_report_and_its_json(pair: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.json"
    for ranks, found in (("32", True), ("16", False)):
        main(["plan", "--config-name", "oprd_1p5b", "--json", str(file), "--ranks", ranks, *pair])
        findings = json.loads(file.read_text())["findings"]
        assert [each["code"] for each in findings] == ["idle_ranks"] * found
        assert capsys.readouterr().out.count("warning (idle_ranks): 16 of 32 student ranks") == found
    main(["plan", "--config-name", "oprd_1p5b", "--json", str(file), "--ranks", "32", *pair])
    (finding,) = json.loads(file.read_text())["findings"]
    assert finding["numbers"] == {
        "responses": 16,
        "roles": [{"role": role, "idle": 16, "ranks": 32, "groups": 32} for role in ("student", "sampling")],
    }
    assert finding["text"] in capsys.readouterr().out
