"""Every command of docs/data.md, as written, on prompt files where the quickstart has them."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest

from nemo_oprd.cli import main
from nemo_oprd.tools.toy import pair

PAGE = (Path(__file__).parents[3] / "docs" / "data.md").read_text()
COMMANDS = [line for block in re.findall(r"```bash\n(.*?)```", PAGE, flags=re.DOTALL) for line in block.splitlines()]


@pytest.fixture
def prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with the prompts of the toy pair."""
    rng = np.random.default_rng(0)
    sets = pair.disjoint_problems(rng, {"train": 300, "tune": 60, "heldout": 50})
    (tmp_path / "runs" / "toy" / "prompts").mkdir(parents=True)
    for name, rows in sets.items():
        pair.write_prompts(tmp_path / "runs" / "toy" / "prompts" / f"{name}.jsonl", rows)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_there_are_commands() -> None:
    assert len(COMMANDS) == 4 and all(command.startswith("nemo-oprd data ") for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_command(command: str, prompts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(shlex.split(command)[1:])
    said = capsys.readouterr().out
    assert said.startswith("runs/toy/prompts/train.jsonl: 300 prompts, ")
    assert "heldout" in said and "was found in data.train" in said
    if "held_out" in command:
        found = json.loads((prompts / "runs" / "data.json").read_text())
        assert 0 < found["held_out"]["problems"] < 20 and found["duplicates"]["dropped"] is True
    if ":3" in command:
        assert "75.0% from runs/toy/prompts/train.jsonl (300 prompts), 25.0% from" in said
