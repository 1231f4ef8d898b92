"""The record of when the parts of a run began and ended, and its figure in the report."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nemo_oprd.run.timeline import FILE, Interval, PhaseTimer, Timeline, hidden_share, read_timeline
from nemo_oprd.tools.report.panels import parse_steps, shown


def interval(step: int, phase: str, began: float, ended: float, batch: int = 0) -> Interval:
    return Interval(step, phase, began, ended, batch)


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path, 0, writes=True)
    for step in (1, 2):
        timeline.begin(step)
        timeline.note("teacher", 10.0 * step, 10.0 * step + 1.23456)
        timeline.note("check", 5.0, 5.0005)  # too short to be seen
        timeline.note("sampling", 4.0, 5.0, batch=step, submitted=3.5, collected=5.5, servers={"1": (4.0, 5.0)})
    Timeline(tmp_path, 0, writes=False).note("teacher", 0.0, 9.0)  # another rank
    found = read_timeline(tmp_path)
    assert [(each.step, each.phase) for each in found] == [(s, p) for s in (1, 2) for p in ("teacher", "sampling")]
    assert found[0] == Interval(1, "teacher", 10.0, 11.2346)
    assert found[3] == Interval(2, "sampling", 4.0, 5.0, 2, 3.5, 5.5, {"1": (4.0, 5.0)})
    resumed = Timeline(tmp_path, 1, writes=True)  # repeats what follows step 1
    assert len(read_timeline(tmp_path)) == 4  # a start that is refused leaves the file as it is
    resumed.drop_later_steps()
    resumed.note("sync", 20.0, 21.0)
    assert [(each.step, each.phase) for each in read_timeline(tmp_path)][2:] == [(1, "sync")]
    Timeline(tmp_path, 0, writes=False).drop_later_steps()
    assert read_timeline(tmp_path)
    Timeline(tmp_path, 0, writes=True).drop_later_steps()  # starts over
    assert read_timeline(tmp_path) == []


def test_a_damaged_file(tmp_path: Path) -> None:
    assert read_timeline(tmp_path) == []
    good = json.dumps({"step": 1, "phase": "sync", "began": 1.0, "ended": 2.0}) + "\n"
    (tmp_path / FILE).write_text(good + '{"step": 2, "pha')
    assert read_timeline(tmp_path) == [Interval(1, "sync", 1.0, 2.0)]
    for line in ("[]", '{"step": 1}', '{"step": 1, "phase": "a", "began": "b", "ended": 2}', "no JSON"):
        (tmp_path / FILE).write_text(good + line + "\n")
        with pytest.raises(ValueError, match=f"{FILE}, line 2.*remove the line"):
            read_timeline(tmp_path)


def test_the_timer_tells_parts_of_a_phase_apart() -> None:
    noted: list[tuple[str, float, float]] = []
    timer = PhaseTimer(lambda *each: noted.append(each))
    for part in ("gradient", "optimizer"):
        with timer("update", part):
            pass
    with timer("sync"):
        pass
    assert [name for name, *_ in noted] == ["gradient", "optimizer", "sync"]
    assert all(began <= ended for _, began, ended in noted)
    assert set(timer.take()) == {"update", "sync"} and timer.take() == {}


def test_the_share_that_is_hidden() -> None:
    """Of six seconds of sampling, the ranks waited for three and did nothing in one."""
    waited = [interval(1, "sampling", 0, 4), interval(1, "generate", 0, 3), interval(1, "teacher", 3, 3.5)]
    assert hidden_share(waited) == 0.5 / 4
    early = interval(1, "teacher_ahead", 0, 3)  # a teacher's servers computed while the ranks waited
    assert hidden_share([*waited, early]) == 0.5 / 4
    hidden = [*waited, interval(1, "gradient", 3.5, 7), interval(1, "sampling", 5, 7)]
    assert hidden_share(hidden) == (1 + 2) / 6
    assert hidden_share([interval(1, "gradient", 0, 1)]) is None


def test_the_steps_that_are_shown() -> None:
    """From second 0; what is sampled for other steps meanwhile is cut off at the ends."""
    rows = [each for step in range(1, 9) for each in (
        interval(step, "generate", 10 * step, 10 * step + 1), interval(step, "gradient", 10 * step + 1, 10 * step + 9),
        interval(step, "sampling", 10 * step - 5, 10 * step + 4, step + 1),
    )]  # fmt: skip
    assert [each.step for each in shown(rows, None) if each.phase == "gradient"] == [4, 5, 6, 7, 8]
    found = shown(rows, (2, 3))
    assert [(e.phase, e.batch, e.began, e.ended) for e in found if e.phase == "sampling"] == [
        ("sampling", 3, 0, 4), ("sampling", 4, 5, 14), ("sampling", 5, 15, 19),
    ]  # fmt: skip
    assert [(e.began, e.ended) for e in found if e.phase == "gradient"] == [(1, 9), (11, 19)]
    assert shown(rows, (20, 30)) == [] and shown([], None) == []


def test_ranges_of_steps() -> None:
    assert (parse_steps("8-12"), parse_steps("7")) == ((8, 12), (7, 7))
    for wrong in ("", "a", "0", "3-2", "1-2-3", "-4"):
        with pytest.raises(ValueError, match="expected a step or a range of steps"):
            parse_steps(wrong)
