"""The command line's arguments: options may stand between settings, in every command that has both."""

from __future__ import annotations

import pytest

from nemo_oprd.cli import make_parser


@pytest.mark.parametrize(
    "command", ["doctor", "train", "verify", "fit-bridge", "evaluate", "serve", "data", "plan", "rehearse"]
)
def test_options_may_stand_between_settings(command: str) -> None:
    """Settings keep their order, in which Hydra applies them."""
    own = {"plan": ["--ranks", "8"], "rehearse": ["--ranks", "8"], "serve": ["--token-file", "t"]}.get(command, [])
    arguments = [command, "b.c=2", "--config-name", "x", "a=1", "+d=[3,4]", *own, "~e", "--config-dir", "y", "b.c=5"]
    options = make_parser().parse_args(arguments)
    assert options.overrides == ["b.c=2", "a=1", "+d=[3,4]", "~e", "b.c=5"]
    assert (options.command, options.config_name, options.config_dir) == (command, "x", "y")
    assert command != "plan" or (options.ranks, options.gpu) == (8, "h100")


def test_the_command_of_the_plan() -> None:
    text = "plan --config-name x train.lr=1 --ranks 8 student.parallel.tensor=2 --gpu h200"
    options = make_parser().parse_args(text.split())
    assert options.overrides == ["train.lr=1", "student.parallel.tensor=2"]
    assert (options.ranks, options.gpu) == (8, "h200")


@pytest.mark.parametrize("arguments", [["--config-name", "x"], ["a=1", "--config-name", "x", "--"]])
def test_no_settings_after_the_options(arguments: list[str]) -> None:
    assert make_parser().parse_args(["train", *arguments]).overrides == [word for word in arguments if "=" in word]


def test_other_commands_take_options_between_their_files() -> None:
    report = make_parser().parse_args(["report", "a", "--output", "page.html", "b"])
    assert (report.runs, report.output) == (["a", "b"], "page.html")
    compare = make_parser().parse_args(["compare", "--teacher", "t", "x=1", "--prompts", "p", "y=2", "--output", "o"])
    assert compare.students == ["x=1", "y=2"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("train --config-name x a=1 --rank 8 b=2", "unknown argument --rank; expected one of its options"),
        ("plan a=1 --ranks 8 b=2", "--config-name missing; expected --config-name NAME"),
        ("plan --config-name x --ranks 0 b=2", "argument --ranks: '0': expected a whole number"),
        ("report --output x", "RUN missing; expected RUN"),
    ],
)
def test_wrong_options_are_said(arguments: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        make_parser().parse_args(arguments.split())
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_help_names_the_settings(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        make_parser().parse_args(["plan", "--help"])
    shown = capsys.readouterr().out
    assert "[KEY=VALUE ...]" in shown.replace("\n", " ") and "e.g. train.lr=1e-4" in shown
