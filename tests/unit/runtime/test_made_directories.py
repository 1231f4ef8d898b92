"""Who may write into which directory: every command against what every other command made, and foreign files."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from kept_responses import write_generations

from nemo_oprd.cli import main
from nemo_oprd.config.loading import load_config, to_yaml
from nemo_oprd.runtime.disk import check_place
from nemo_oprd.runtime.output_directories import MAKERS, MARKER, check_directory, check_file, maker_of, mark


def a_run(directory: Path) -> None:
    (directory / "rollouts").mkdir(parents=True)
    config = load_config("verify", ["student.hf_path=a", "teacher.hf_path=b", f"output={directory}"])
    (directory / "config.yaml").write_text(to_yaml(config))
    (directory / "metrics.jsonl").write_text('{"step": 1, "time": 0.0, "rep/loss": 1.0}\n')


def file(name: str, text: str = "{}") -> Callable[[Path], None]:
    def make(directory: Path) -> None:
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text)

    return make


MADE: dict[str, Callable[[Path], None]] = {
    "train": a_run,
    "compare": file("teacher.json"),
    "evaluate": lambda directory: [write_generations(directory), None][1],
    "grade": file("grades/sums.jsonl"),
    "fit-bridge": file("bridge.json"),
    "verify": file("losses.json"),
    "capture": file("hidden_states/hs_0.safetensors"),
    "toy": file("toy.json"),
    "export": file("config.json", '{"model_type": "qwen2"}'),
}
COMMANDS = ("train", "compare", "evaluate", "grade", "fit-bridge", "verify", "export")


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_all_makers_are_tried() -> None:
    assert set(MADE) == set(MAKERS)


@pytest.mark.parametrize("maker", MADE)
@pytest.mark.parametrize("command", COMMANDS)
def test_one_commands_directory_is_no_others(tmp_path: Path, command: str, maker: str) -> None:
    place = tmp_path / "place"
    check_directory(place, command)
    place.mkdir()
    (place / ".lock").touch()
    check_directory(place, command)
    MADE[maker](place)
    found = maker_of(place)
    assert found is not None and found.command == maker
    if command == maker:
        check_directory(place, command)
        return
    with pytest.raises(
        ValueError, match=rf"--output=.*place exists and is not .*; choose another directory: it is {found.what}"
    ) as raised:
        check_directory(place, command, "--output")
    assert "\n" not in str(raised.value)


def test_an_old_run_into_which_an_evaluation_was_written_is_a_run(tmp_path: Path) -> None:
    a_run(tmp_path / "run")
    write_generations(tmp_path / "run")
    check_directory(tmp_path / "run", "train")
    with pytest.raises(ValueError, match="it is a training run that train made"):
        check_directory(tmp_path / "run", "evaluate")


@pytest.mark.parametrize("command", COMMANDS)
def test_foreign_files(tmp_path: Path, command: str) -> None:
    """A log beside the results is left alone, except by what replaces its results; a file's name is never taken."""
    (tmp_path / "job.log").write_text("started")
    if command in ("fit-bridge", "verify", "export"):
        with pytest.raises(ValueError, match=r"job\.log"):
            check_directory(tmp_path, command)
    else:
        check_directory(tmp_path, command)
    with pytest.raises(ValueError, match=r"job\.log is a file, expected a directory; choose another output"):
        check_directory(tmp_path / "job.log", command)


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("train", "metrics.jsonl"),
        ("train", "config.yaml"),
        ("evaluate", "evaluation.json"),
        ("compare", "teacher.jsonl"),
    ],
)
def test_a_file_of_that_name_is_not_overwritten(tmp_path: Path, command: str, name: str) -> None:
    (tmp_path / name).write_text("train: {lr: 1}\n")  # a configuration of the user's, and not a complete one
    with pytest.raises(ValueError, match=rf"holds {name}, which {command} would overwrite and did not make"):
        check_directory(tmp_path, command)


def test_inside_a_run(tmp_path: Path) -> None:
    a_run(tmp_path / "run")
    check_directory(tmp_path / "run" / "compare", "compare")
    check_directory(tmp_path / "run" / "mine", "evaluate")
    for inside in ("evaluations/mine", "hf", "rollouts/x"):
        with pytest.raises(ValueError, match=r"belongs to .*run, a training run that train made, which writes"):
            check_directory(tmp_path / "run" / inside, "evaluate")


def test_an_interrupted_comparison_goes_on(tmp_path: Path) -> None:
    """Killed between its two files of the teacher, by an earlier version, too, which wrote no marker."""
    line = {"prompt": "1+1", "response": "2", "ended": True, "prompt_ids": [1], "response_ids": [2]}
    (tmp_path / "teacher.jsonl").write_text(json.dumps(line) + "\n")
    check_directory(tmp_path, "compare")
    mark(tmp_path, "compare")
    check_directory(tmp_path, "compare")


@pytest.mark.parametrize("command", MADE)
def test_a_marked_directory_is_that_commands_from_its_first_file_on(tmp_path: Path, command: str) -> None:
    """An emptied one is everybody's, although `rm *` leaves the hidden marker, and empty folders are no results."""
    place = tmp_path / "place"
    mark(place, command)
    (place / "vllm").mkdir()
    (place / "hidden_states").mkdir()
    assert sorted(path.name for path in place.iterdir()) == [MARKER, "hidden_states", "vllm"]
    for other in MADE:
        if other not in ("fit-bridge", "verify"):  # which want no other folders beside their results
            check_directory(place, other)
    (place / "hidden_states").rmdir()
    first = MAKERS[command].writes[0].replace("*", "model.safetensors")
    (place / first).write_text("begun")
    for other in MADE:
        if other == command:
            check_directory(place, other)
        else:
            with pytest.raises(ValueError, match=f"it is {MAKERS[command].what}"):
                check_directory(place, other)


def test_a_marker_is_not_replaced_and_a_damaged_one_is_none(tmp_path: Path) -> None:
    """The results in a directory show their command, where a marker does not."""
    write_generations(tmp_path)
    mark(tmp_path, "grade")
    assert not (tmp_path / MARKER).exists(), "evaluate made this directory"
    for text in ("", "{", '{"command": "another"}'):
        (tmp_path / MARKER).write_text(text)
        found = maker_of(tmp_path)
        assert found is not None and found.command == "evaluate"
    (tmp_path / MARKER).write_text('{"command": "capture"}')
    mark(tmp_path, "grade")
    found = maker_of(tmp_path)
    assert found is not None and found.command == "capture"


def test_single_files(tmp_path: Path) -> None:
    own, other = tmp_path / "own.json", tmp_path / "other.json"
    own.write_text('{\n "ranks": 8}')
    other.write_text('{"settings": 1}')
    for place in (own, tmp_path / "new.json", tmp_path / "nowhere" / "new.json"):
        check_file(place, "plan", "--json", r'\{\s*"ranks":')
    with pytest.raises(ValueError, match=r"--json .*other\.json exists, and plan did not make it"):
        check_file(other, "plan", "--json", r'\{\s*"ranks":')
    a_run(tmp_path / "run")
    with pytest.raises(ValueError, match=r"belongs to .*run, .* which writes data\.json there"):
        check_file(tmp_path / "run" / "data.json", "data", "--json", ".")


def test_report_replaces_its_own_page_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a_run(tmp_path / "run")
    for _ in range(2):
        main(["report", str(tmp_path / "run")])
    notes = tmp_path / "notes.html"
    notes.write_text("<!doctype html><title>mine</title>")
    before = contents(tmp_path)
    for output in (notes, tmp_path / "run" / "config.yaml", tmp_path / "run" / "metrics.jsonl"):
        with pytest.raises(SystemExit):
            main(["report", str(tmp_path / "run"), "--output", str(output)])
        assert "report did not make it" in capsys.readouterr().err
    assert contents(tmp_path) == before


def test_grade_writes_over_no_other_evaluation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine, other = tmp_path / "mine", tmp_path / "other"
    write_generations(mine)
    write_generations(other, name="others")
    before = contents(other)
    with pytest.raises(SystemExit):
        main(["grade", str(mine), "--output", str(other)])
    assert (
        "exists and is not grades of an evaluation; choose another directory: it is an evaluation"
        in capsys.readouterr().err
    )
    assert contents(other) == before
    for _ in range(2):  # again into a directory of its own, and beside the responses
        main(["grade", str(mine), "--output", str(tmp_path / "graded")])
        main(["grade", str(mine)])


def test_grade_of_an_old_mixed_run_grades_all_of_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a_run(tmp_path / "run")
    for inner in ("evaluations/step_0000000", "evaluations/step_0000002", "."):
        write_generations(tmp_path / "run" / inner)
    main(["grade", str(tmp_path / "run")])
    out = capsys.readouterr().out
    assert "run step 0" in out and "run step 2" in out
    graded = sorted(
        str(path.parent.relative_to(tmp_path / "run")) for path in (tmp_path / "run").rglob("evaluation.json")
    )
    assert graded == [".", "evaluations/step_0000000", "evaluations/step_0000002"]


def test_megatrons_own_checkpoints_make_no_run(tmp_path: Path) -> None:
    """A project folder may hold them; what lies beside them is nobody's."""
    file("checkpoints/latest_checkpointed_iteration.txt", "5")(tmp_path)
    file("checkpoints/iter_0000005/metadata.json")(tmp_path)
    check_directory(tmp_path / "evaluations" / "base", "evaluate")
    file("checkpoints/iter_0000005/state.json")(tmp_path)
    with pytest.raises(ValueError, match="a training run that train made, which writes evaluations there"):
        check_directory(tmp_path / "evaluations" / "base", "evaluate")


def test_a_start_that_was_killed_early_can_be_repeated(tmp_path: Path) -> None:
    """Logs of vLLM's servers, and directories that are still empty, are no results."""
    file("vllm/server_0.log", "log")(tmp_path)
    (tmp_path / "rollouts").mkdir()
    for command in ("fit-bridge", "train"):
        check_directory(tmp_path, command)
    file("rollouts/about.json")(tmp_path)
    check_directory(tmp_path, "fit-bridge")


def test_a_file_above_that_cannot_be_read(tmp_path: Path) -> None:
    """As root nothing is unreadable, so a file that is a directory stands for it: both are an OSError."""
    for name in ("config.yaml", "config.json", "teacher.jsonl"):
        (tmp_path / name).mkdir()
    check_directory(tmp_path / "runs" / "a", "train")


@pytest.mark.parametrize(
    ("place", "what"),
    [
        ("/", "the root of the file system"),
        ("/usr/../", "the root of the file system"),
        ("/tmp", "a directory of the system"),
        ("/dev/run", "a place of the kernel's"),
        ("/proc/self/run", "a place of the kernel's"),
        ("~", "a home directory"),
        ("/dev/shm/run", None),
        ("/output", None),
        ("/tmp/run", None),
    ],
)
def test_places_that_belong_to_everybody(place: str, what: str | None) -> None:
    """Also for a user who may write there, as in a container; a volume may be mounted at the top."""
    if what is None:
        check_place(place, "output")
    else:
        with pytest.raises(ValueError, match=rf"^output=\S+ is {what}, .* expected a directory of its own"):
            check_place(Path(place).expanduser(), "output")


def test_a_pipe_is_not_replaced_by_a_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for file, what in ((tmp_path / "pipe", r"a named pipe \(FIFO\)"), (Path("/dev/null"), "a device")):
        with pytest.raises(ValueError, match=rf"--json {file} is {what}, expected a file to write"):
            check_file(file, "plan", "--json", "x")
