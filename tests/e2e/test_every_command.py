"""Every command of `nemo-oprd` once, on a pair that is made in seconds: each takes what the one before it has left.

`serve` and `capture` start servers of vLLM, which this lane has not: other tests run them with stand-ins. What the
commands compute is tested elsewhere: here, that they run, and that they leave what their pages say.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from forked_commands import python
from pool import Pools

from nemo_oprd.cli import COMMANDS
from tests.support.forked_run import toy_overrides

ROOT = Path(__file__).parents[2]
# the command, with fewer steps than it has without an argument
TOY = """
import functools, sys
from nemo_oprd import cli
from nemo_oprd.tools.toy import pair
pair.make_pair = lambda output, seed, **_: pair.make_tiny_pair(output, seed=seed, steps=10)
cli.main(["toy", "--output", "toy"])
"""
# commands that need a server or a recipe, and the tests that run them
ELSEWHERE = {
    "serve": "tests/functional/test_shared_teachers.py",
    "capture": "tests/functional/capture_cases.py",
    "from-nemo-rl": "tests/unit/integrations/test_from_nemo_rl.py",
}


@pytest.fixture(scope="module")
def command(pools: Pools, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Runs a command in one directory; returns what it prints."""
    place = tmp_path_factory.mktemp("commands")

    def run(*arguments: str) -> str:
        ran.append(arguments[0])
        made = ["-c", TOY] if arguments[0] == "toy" else ["-m", "nemo_oprd", *arguments]
        return python(pools, made, place, place / "logs" / str(len(ran)))

    ran: list[str] = []
    run.place, run.ran = place, ran  # type: ignore[attr-defined]
    return run


def test_every_command(command: Callable[..., str]) -> None:
    place, ran = command.place, command.ran  # type: ignore[attr-defined]
    command("toy")
    pair = ["--config-name", "quickstart", *toy_overrides(Path("toy"), 2), "student.parallel.tensor=1"]
    models = [f"{role}=toy/{role}" for role in ("student", "teacher")]
    assert command("families", *(model.partition("=")[2] for model in models)).count("qwen2") >= 2
    assert "64" in command("data", *pair, "output=run")
    assert "GB" in command("plan", *pair, "--ranks", "1")
    assert "the host waits" in command("rehearse", *pair, "--ranks", "1", "--rank", "0", "--phases", "none")
    assert "wrong" not in command("doctor", *pair, "output=run", "--prompts", "2", "--problems", "2").split()
    command("train", *pair, "output=run", "rollout.save=true")
    steps = [json.loads(line) for line in (place / "run" / "metrics.jsonl").read_text().splitlines()]
    assert steps[-1]["step"] == 2
    command("verify", *pair, "rollout.replay=run/rollouts/step_0000001.jsonl", "output=verified")
    assert json.loads((place / "verified" / "losses.json").read_text())["loss/total"] > 0
    command("fit-bridge", *pair, "output=bridge", "bridge.rank=4")
    assert (place / "bridge" / "bridge.safetensors").is_file()
    assert "avg@" in command("evaluate", *pair, "output=evaluated")
    assert "avg@" in command("grade", "evaluated")
    compared = "--prompts", "toy/prompts/heldout.jsonl", "--count", "2", "--max-new-tokens", "4"
    command("compare", "--teacher", "toy/teacher", *compared, "--output", "compared", models[0])
    command("report", "run", "--output", "page.html")
    assert "<svg" in (place / "page.html").read_text()
    assert {*COMMANDS} - {*ran} == {*ELSEWHERE}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_the_other_commands_are_run_by_this_lane_too(name: str) -> None:
    file = ELSEWHERE[name]
    assert f'"{name}"' in (ROOT / file).read_text()
    assert f"{file}\n" not in (ROOT / "tests" / "full.txt").read_text()
