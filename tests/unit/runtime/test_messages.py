"""What a command shows of the messages of `nemo_oprd`: which, where, and from which rank."""

from __future__ import annotations

import logging
import re
import sys
from pathlib import Path

import pytest

from nemo_oprd.cli import Parser
from nemo_oprd.commands.options import add_verbosity
from nemo_oprd.runtime import messages
from nemo_oprd.runtime.exits import run_as_command
from nemo_oprd.runtime.messages import ANY_RANK, ON_STDOUT, ranges, show

LOGGER = logging.getLogger("nemo_oprd.anything")


def say_everything() -> int:
    LOGGER.debug("detail")
    LOGGER.info("100% done")
    LOGGER.info("progress", extra=ON_STDOUT)
    LOGGER.info("mine alone", extra=ANY_RANK)
    LOGGER.warning("careful")
    return 0


@pytest.mark.parametrize(
    ("rank", "out", "err"),
    [
        ("0", "progress\n", "100% done\nmine alone\ncareful\n"),
        ("3", "", "mine alone\nrank 3: careful\n"),
    ],
)
def test_ranks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], rank: str, out: str, err: str
) -> None:
    monkeypatch.setenv("RANK", rank)
    run_as_command(say_everything, alone=False)
    run_as_command(lambda: 0, alone=False)
    assert capsys.readouterr() == (out, err)


def test_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    show("quiet")
    say_everything()
    assert capsys.readouterr() == ("", "careful\n")


def test_verbose(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("RANK", "3")
    show("verbose")
    say_everything()
    shown = capsys.readouterr()
    assert [line.partition(" rank 3 ")[2] for line in shown.err.splitlines()] == [
        f"nemo_oprd.anything: {text}" for text in ("detail", "100% done", "mine alone", "careful")
    ]
    assert shown.out.endswith(" rank 3 nemo_oprd.anything: progress\n")


def test_nothing_twice(capsys: pytest.CaptureFixture[str]) -> None:
    """A program around this one has a handler of its own, and starts several commands."""
    root, around = logging.getLogger(), logging.StreamHandler(sys.stderr)
    root.addHandler(around)
    try:
        show()
        show()
        LOGGER.warning("careful")
    finally:
        root.removeHandler(around)
    assert capsys.readouterr().err == "careful\n"


@pytest.fixture
def megatron(monkeypatch: pytest.MonkeyPatch) -> logging.Logger:
    """A logger of Megatron-core's, with a fresh log of libraries."""
    monkeypatch.setattr(messages, "_library_log", messages.LibraryLog())
    monkeypatch.setattr(logging.getLogger("megatron"), "handlers", [])
    return logging.getLogger("megatron.core.models.gpt")


def test_warnings_of_libraries_are_in_a_file_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], megatron: logging.Logger
) -> None:
    show()
    for _ in range(2):
        megatron.warning("GPTModel IS DEPRECATED")
    messages.write_library_log(tmp_path)
    megatron.warning("Rewrapping %s", "ModuleSpec")
    megatron.warning("GPTModel IS DEPRECATED")
    assert capsys.readouterr() == ("", "")
    megatron.error("no such group")
    assert capsys.readouterr().err == "no such group\n"
    assert (tmp_path / "libraries.log").read_text().splitlines() == [
        "WARNING megatron.core.models.gpt: GPTModel IS DEPRECATED",
        "WARNING megatron.core.models.gpt: Rewrapping ModuleSpec",
        "ERROR megatron.core.models.gpt: no such group",
    ]


def test_each_run_has_the_warnings_of_its_time(tmp_path: Path, megatron: logging.Logger) -> None:
    """A process may make several runs, and a directory may be gone after its run."""
    show()
    for name in "ab":
        (tmp_path / name).mkdir()
        messages.write_library_log(tmp_path / name)
        megatron.warning("GPTModel IS DEPRECATED")
        messages.write_library_log(None)
        megatron.warning("after %s", name)
    written = [(tmp_path / name / "libraries.log").read_text() for name in "ab"]
    line = "WARNING megatron.core.models.gpt: "
    assert written == [f"{line}GPTModel IS DEPRECATED\n", f"{line}after a\n{line}GPTModel IS DEPRECATED\n"]


def test_a_log_of_libraries_that_cannot_be_written_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], megatron: logging.Logger
) -> None:
    show()
    messages.write_library_log(tmp_path / "gone")
    for _ in range(2):
        megatron.warning("GPTModel IS DEPRECATED")
        megatron.warning("Rewrapping")
    file = tmp_path / "gone" / "libraries.log"
    assert capsys.readouterr().err == f"{file}: No such file or directory; warnings of libraries are not kept\n"


def test_warnings_of_libraries_are_shown_by_verbose(
    capsys: pytest.CaptureFixture[str], megatron: logging.Logger
) -> None:
    show("verbose")
    megatron.warning("GPTModel IS DEPRECATED")
    assert "megatron.core.models.gpt: GPTModel IS DEPRECATED" in capsys.readouterr().err


def test_other_ranks_write_no_log_of_libraries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, megatron: logging.Logger
) -> None:
    monkeypatch.setenv("RANK", "1")
    show()
    megatron.warning("GPTModel IS DEPRECATED")
    messages.write_library_log(tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_options(capsys: pytest.CaptureFixture[str]) -> None:
    parser = Parser(prog="p")
    add_verbosity(parser)
    found = [parser.parse_args(given).verbosity for given in ([], ["--quiet"], ["--verbose"])]
    assert found == ["usual", "quiet", "verbose"]
    with pytest.raises(SystemExit):
        parser.parse_args(["--quiet", "--verbose"])
    assert "not allowed with argument --quiet" in capsys.readouterr().err


def test_one_module_has_a_handler() -> None:
    """The others only log, so that a program that imports them keeps its own way to show messages."""
    files = (Path(__file__).parents[3] / "nemo_oprd").rglob("*.py")
    setting_up = [file.stem for file in files if re.search(r"addHandler|basicConfig|dictConfig", file.read_text())]
    assert setting_up == ["messages"]


def test_ranges() -> None:
    assert ranges({9, 1, 2, 3, 0, 7}) == "0-3, 7, 9"
    assert ranges([]) == ""
