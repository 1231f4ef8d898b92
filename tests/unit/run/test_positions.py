"""Positions that end before the longest sequences: `plan`, `rehearse` and `doctor` say what `train` does."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from nemo_oprd.cli import make_parser
from nemo_oprd.config.loading import load_config
from nemo_oprd.rollout.engine import Request, SamplingParams
from nemo_oprd.run.positions import known_prompt, longest_response, prompt_tokens, too_few_positions
from nemo_oprd.run.resolve import resolve, resolve_models
from nemo_oprd.tools import rehearse
from nemo_oprd.tools.plan.estimate import Lengths, estimate
from nemo_oprd.tools.plan.gpus import GPUS, Cluster, count, in_bytes
from nemo_oprd.tools.plan.report import as_json, lines
from nemo_oprd.tools.rehearse.rank import failure_of

GOLDEN = Path(__file__).parents[2] / "golden"  # models of 64 positions
PAIR = [f"student.hf_path={GOLDEN / 'student'}", f"teacher.hf_path={GOLDEN / 'teacher'}"]
LONG = "rollout.max_new_tokens=9000"


@pytest.fixture
def short(tmp_path: Path) -> str:
    """The teacher with 16 positions."""
    shutil.copytree(GOLDEN / "teacher", tmp_path / "short")
    file = tmp_path / "short" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "max_position_embeddings": 16}))
    return f"teacher.hf_path={tmp_path / 'short'}"


def found(*settings: str, prompt: int | None = None) -> dict[str, str]:
    config = load_config("verify", [*PAIR, *settings])
    models = resolve_models(config)
    teachers = dict(enumerate(models.teacher_specs))
    known = known_prompt(config, models.student.spec, prompt)
    return {each.role: each.text for each in too_few_positions(config, models.student.spec, teachers, known)}


@pytest.mark.parametrize(
    ("settings", "prompt", "lengths", "says"),
    [
        (["rollout.max_new_tokens=32"], None, (32, 32), None),
        (["rollout.max_new_tokens=60"], None, (4, 60), None),
        (["rollout.max_new_tokens=64"], None, (8, 56), "rollout.max_new_tokens=64: prompt and response end there"),
        ([LONG], None, (8, 56), "is 64, and rollout.max_new_tokens=9000: prompt and response end there; expected at"),
        ([LONG], 40, (40, 24), "rollout.max_new_tokens=9000 after prompts of 40 tokens: prompt and response end there"),
        (["rollout.max_new_tokens=32", "data.max_prompt_tokens=33"], None, (33, 31), "expected at least 65 positions"),
        ([LONG, "data.max_prompt_tokens=64"], None, (8, 56), "rollout.max_new_tokens=9000: prompt and response end"),
        (["rollout.max_new_tokens=32", "data.max_prompt_tokens=2048"], None, (32, 32), None),  # a limit without effect
        ([LONG, "rollout.replay=x"], None, (8, 56), None),
    ],
)
def test_the_student(settings: list[str], prompt: int | None, lengths: tuple[int, int], says: str | None) -> None:
    config = load_config("verify", [*PAIR, *settings])
    spec = resolve_models(config).student.spec
    longest = prompt_tokens(config, spec, prompt)
    assert (longest, longest_response(config, spec, longest)) == lengths
    limit = SamplingParams(1.0, 1.0, config.rollout.max_new_tokens, (0,)).limit_of(
        Request([1] * longest), spec.max_positions
    )
    assert limit == lengths[1]  # what an engine samples
    text = found(*settings, prompt=prompt)
    assert (says is None and not text) or (says or "") in text["student"]


def test_teachers(short: str) -> None:
    settings = ["rollout.max_new_tokens=32", "data.max_prompt_tokens=8"]
    assert (
        "is 16, and rollout.max_new_tokens=32 after prompts of 8 tokens: it reads positions"
        in (found(*settings, short)["teacher"])
    )
    assert (
        "later tokens of a response have no target"
        in (found(*settings, short, "teacher.prompt='{prompt} Think.'")["teacher"])
    )
    assert "its servers take no longer sequences" in found(*settings, short, "teacher.engine=vllm")["teacher"]
    assert "expected at least 64 positions" in found(LONG, short)["teacher"]  # the student's responses end there
    assert not found(*settings)
    himself = ["teacher.weights=ema", "teacher.hf_path=null", "teacher.prompt='{prompt} Think.'"]
    assert [*found(LONG, *himself)] == ["student"]


def test_the_plan() -> None:
    """The issue's case: it no longer plans responses that no run can have, and shows a small model's sizes."""
    config = load_config("verify", [*PAIR, LONG])
    run = resolve(config, 1)
    planned = estimate(run, Cluster(1, GPUS["h100"]))
    (finding,) = as_json(planned, [])["findings"]
    assert (finding["code"], finding["numbers"]) == (
        "positions-too-few", {"role": "student", "positions": 64, "tokens": 9001}
    )  # fmt: skip
    text = "\n".join(lines(planned, [], "verify"))
    assert f"warning (positions-too-few): {finding['text']} (planned: prompts of 8 and responses of at most 56" in text
    assert "8 responses of 56 tokens (at most 56) after prompts of 8" in text
    assert "MB per GPU, with the longest responses" in text and "student    36.48 k parameters" in text
    assert " GB" not in text.replace("H100 SXM 80 GB", "") and "0.00 B" not in text
    fitting = estimate(
        resolve(load_config("verify", [*PAIR, "rollout.max_new_tokens=56"]), 1), Cluster(1, GPUS["h100"])
    )
    assert fitting.kinds[0].memory == planned.kinds[0].memory and not fitting.positions
    with pytest.raises(ValueError, match="prompts of 64 tokens leave no room for a response in the student's 64 pos"):
        estimate(run, Cluster(1, GPUS["h100"]), Lengths(prompt=64))


def test_the_rehearsal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """It has the lengths of the plan, and says so before a process of a rank starts."""
    given: list[Any] = []

    def noted(options: Any, rank: int, *lengths: int) -> None:
        given.extend(lengths)
        raise KeyboardInterrupt

    monkeypatch.setattr(rehearse, "rehearse_rank", noted)
    arguments = ["rehearse", "--config-name", "verify", "--ranks", "1", *PAIR, LONG]
    with pytest.raises(KeyboardInterrupt):
        rehearse.run(make_parser().parse_args(arguments))
    assert given == [8, 56]
    out = capsys.readouterr().out
    assert "warning (positions-too-few): the student's max_position_embeddings is 64, and rollout" in out
    assert "(rehearsed: prompts of 8 and responses of 56 tokens)" in out
    with pytest.raises(ValueError, match="prompts of 99 tokens leave no room .* lower --prompt-tokens"):
        rehearse.run(make_parser().parse_args([*arguments, "--prompt-tokens", "99"]))


def test_a_failure_is_never_empty() -> None:
    try:
        assert GOLDEN is None
    except AssertionError as error:
        error.args = ()
        text = failure_of(error)["text"]
    assert text.startswith("AssertionError without a message at ") and text.endswith(": assert GOLDEN is None")


def test_units() -> None:
    sizes = [0, 12, 1234, 45_678_901, 78.94e9]
    assert [in_bytes(size) for size in sizes] == ["0 B", "12 B", "1.2 kB", "45.7 MB", "78.9 GB"]
    assert [count(number) for number in (7, 36_480, 25.3e6, 494e6, 1.5437e9)] == [
        "7", "36.48 k", "25.30 M", "0.49 B", "1.54 B"
    ]  # fmt: skip
