"""Mistakes in options: one line with the fix, from one rank, for every command and every checkpoint tool."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from nemo_oprd.cli import Parser, main

ROOT = Path(__file__).parents[3]
TOOLS = sorted(file for file in (ROOT / "checkpoint_tools").glob("[!_]*.py"))


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ([], "nemo-oprd: COMMAND missing; expected COMMAND: give it (nemo-oprd --help)"),
        (["trian"], "nemo-oprd trian: expected one of doctor, train, verify, fit-bridge, evaluate, serve, data, plan, "
         "rehearse, families, toy, report, compare, capture, grade, from-nemo-rl; did you mean 'train'?"),
        (["train"], "nemo-oprd train: --config-name missing; expected --config-name NAME: give it (nemo-oprd train "
         "--help)"),
        (["train", "--config-name"], "nemo-oprd train: --config-name has no value; expected --config-name NAME: give "
         "one"),
        (["train", "--config-name", "verify", "--train.lr=1"], "nemo-oprd train: --train.lr=1: settings have no "
         "dashes; expected KEY=VALUE: write train.lr=1"),
        (["train", "--config_name", "verify"], "nemo-oprd train: --config-name missing; expected --config-name NAME: "
         "give it (nemo-oprd train --help)"),
        (["train", "--config-name", "verify", "--port", "1"], "nemo-oprd train: unknown argument --port; expected one "
         "of its options: it is an option of serve: leave it out"),
        (["report", "a", "--outptu", "b"], "nemo-oprd report: unknown argument --outptu; expected one of its options: "
         "did you mean --output?"),
        (["serve", "--config-name", "verify", "--port", "many"], "nemo-oprd serve: --port 'many': expected a whole "
         "number; give one"),
        (["report", "a", "--follow", "soon"], "nemo-oprd report: --follow 'soon': expected a number; give one"),
        (["plan", "--config-name", "verify", "--ranks", "8", "--gpu", "h1000"], "nemo-oprd plan --gpu h1000: expected "
         "one of a100, b200, h100, h200; did you mean 'h100'?"),
        (["plan", "--config-name", "verify", "--ranks", "0"], "nemo-oprd plan: argument --ranks: '0': expected a whole "
         "number of at least 1; correct it (nemo-oprd plan --help)"),
        (["toy"], "nemo-oprd toy: --output missing; expected --output DIR: give it (nemo-oprd toy --help)"),
        (["toy", "--output", "a", "b"], "nemo-oprd toy: unknown argument b; expected no such argument: leave it out, "
         "or see nemo-oprd toy --help"),
        (["grade"], "nemo-oprd grade: RUN_OR_FILE missing; expected RUN_OR_FILE: give it (nemo-oprd grade --help)"),
        (["verify", "--config-name", "verify", "--against", "x"], "nemo-oprd verify --against x: expected one of "
         "reference; choose one (nemo-oprd verify --help)"),
    ],
)  # fmt: skip
def test_one_line_with_the_fix(capsys: pytest.CaptureFixture[str], arguments: list[str], line: str) -> None:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert capsys.readouterr() == ("", f"error: {line}\n")


def test_one_rank_speaks(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit):
        main(["train"])
    assert capsys.readouterr() == ("", "")


def test_help_is_whole(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["grade", "--help"])
    shown = capsys.readouterr().out
    assert shown.startswith("usage: nemo-oprd grade")
    assert "--against RUN_OR_FILE" in shown


def test_an_option_without_a_name_for_its_value(capsys: pytest.CaptureFixture[str]) -> None:
    parser = Parser(prog="p")
    parser.add_argument("--size", required=True)
    with pytest.raises(SystemExit):
        parser.parse_args([])
    assert capsys.readouterr().err == "error: p: --size missing; expected --size SIZE: give it (p --help)\n"


@pytest.mark.parametrize("tool", TOOLS, ids=lambda tool: tool.stem)
def test_tools(tool: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run([sys.executable, tool, "--nosuch"], env=environment, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith(f"error: {tool.name}: ") and ended.stderr.count("\n") == 1, ended.stderr
