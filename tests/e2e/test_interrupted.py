"""Runs that are interrupted: signals, a failure, a second start, other layouts, a full disk. They are made by
`interrupted_runs.py`."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pool import Pools, WorkerError

DISK_MB = 8


@pytest.fixture(scope="module")
def small_disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path | None]:
    """A file system in memory of a few MB, None where this user may not mount one."""
    place = tmp_path_factory.mktemp("disk")
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m", "tmpfs", str(place)], capture_output=True, text=True
    )
    yield place if mounted.returncode == 0 else None
    if mounted.returncode == 0:
        subprocess.run(["umount", str(place)], check=True)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, small_disk: Path | None, pools: Pools) -> dict[str, Any]:
    directory = tmp_path_factory.mktemp("interrupted")
    try:
        return pools.once(1, "interrupted_runs:interrupt", timeout=400, directory=directory, disk=small_disk)
    except WorkerError as error:
        logs = "\n".join(f.read_text()[-1500:] for f in sorted(directory.glob("log*.txt"))[-2:])
        raise AssertionError(f"{error}\n{logs}") from error


def errors(said: list[str]) -> list[str]:
    return [line for line in said if line.startswith(("error:", "Traceback", "RuntimeError", "OSError"))]


def test_signals_end_the_run_after_its_step_and_it_goes_on(results: dict[str, Any]) -> None:
    """SIGTERM during the rollout, which is cancelled, SIGUSR1 (to one rank) during backward, SIGINT during a save, and
    signals during evaluations, which are deferred: 75, and the same end."""
    starts = results["signals"]["starts"]
    print(results["signals"])
    assert [start["codes"] for start in starts] == [[75, 75]] * 7
    assert [start["done"] for start in starts] == [0, 2, 2, 2, 4, 5, 6]
    assert [start["orphans"] for start in starts] == [[]] * 7
    first, evaluation, owed, rollout, save, backward, last = (start["said"] for start in starts)
    nothing_lost = "nothing was trained since the last save; the same command starts again from there"
    assert first == [f"stopped by SIGUSR1 in the evaluation before training: {nothing_lost}"]
    assert evaluation == [
        "step 2: the evaluation is deferred to the next start: asked to stop",
        "stopped by SIGUSR1 after step 2 of 6, and saved; the same command resumes from there",
    ]
    assert owed == [
        "step 2: the evaluation that was deferred",
        f"stopped by SIGTERM in the evaluation after step 2: {nothing_lost}",
    ]
    assert rollout[0] == "step 2: the evaluation that was deferred"
    # the rank that is not held may complete its half before it is asked; the next start samples the rest
    cancelled = r"stopped by SIGTERM while sampling step 3 of 6, with [02] of 4 responses complete and kept; .* resumes"
    assert len(rollout) == 2 and re.match(cancelled, rollout[1])
    assert [len(lines) for lines in (save, backward)] == [1, 1]
    assert "SIGINT" in save[0]
    assert "a signal to another rank" in backward[0]
    assert last[0] == "step 6: the evaluation is deferred to the next start: asked to stop"
    assert "after step 6 of 6, and saved" in last[1]
    assert "step 6: the evaluation that was deferred" in results["signals"]["said_at_last"]
    assert results["signals"]["differences"] == []


def test_the_newest_and_the_best_are_kept(results: dict[str, Any]) -> None:
    """The tiny pair solves nothing, so the first evaluation (of step 2) stays the best."""
    found = results["signals"]
    assert found["best"] == {"step": 2, "metric": "val/heldout/avg@2", "value": 0.0}
    assert found["kept"] == [
        "best.json", "iter_0000002", "iter_0000005", "iter_0000006", "latest_checkpointed_iteration.txt"
    ]  # fmt: skip


def test_a_second_interrupt_ends_it_at_once(results: dict[str, Any]) -> None:
    found = results["second_interrupt"]
    assert found["codes"][0] == -2  # by the signal itself
    assert found["codes"][1] in (1, -2)  # or by the watchdog, where it waited for the first in a collective
    assert found["seconds"] < 15  # a step that is held would go on for minutes
    assert found["orphans"] == []


def test_a_failing_rank_ends_all_with_one_traceback(results: dict[str, Any]) -> None:
    found = results["failing"]
    assert found["codes"] == [1, 1]
    assert found["errors"] == ["RuntimeError: injected failure"]
    assert found["log"].count("in fail_at_step_2") == 1
    assert found["seconds"] < 15  # from the failure to the end of all ranks
    assert found["orphans"] == []


def test_a_directory_in_use_is_refused_and_a_crash_leaves_no_lock(results: dict[str, Any]) -> None:
    found = results["lock"]
    assert found["code"] == 2
    assert len(errors(found["said"])) == 1
    assert f"is in use by process {found['holder']} on " in errors(found["said"])[0]
    assert found["touched"] == []
    assert found["after"] == 0
    assert found["same"]


def test_one_run_in_three_layouts(results: dict[str, Any]) -> None:
    """TP2, PP2, then DP2: the rollouts and the curve of the run that stayed at TP2."""
    found = results["layouts"]
    assert found["code"] == 0
    assert any("after 4 of 6 steps" in line for line in found["said"])
    assert found["steps"] == 6
    assert found["same_rollouts"]
    whole, parts = found["curves"]
    assert [line["step"] for line in parts] == [line["step"] for line in whole]
    for expected, got in zip(whole, parts, strict=True):
        assert got == pytest.approx(expected, rel=1e-5, abs=1e-7)


def test_rollouts_of_an_interrupted_step_are_taken_up(results: dict[str, Any]) -> None:
    """Killed after sampling: not sampled again, unless temperature or prompts are others."""
    same, *changed = (results["pending"][name] for name in ("same", "temperature", "prompts"))
    line = "step 3 resumes with the 4 rollouts sampled before the interruption"
    assert (same["code"], same["sampled"], same["said"].count(line)) == (0, 0, 1)
    assert [(found["code"], found["sampled"], found["said"].count(line)) for found in changed] == [(0, 1, 0)] * 2


def test_changed_settings_need_leave_and_are_kept(results: dict[str, Any]) -> None:
    """Refused once and before anything is written; with leave, both configurations stay, and the report shows both."""
    found = results["pending"]
    refused = found["refused"]
    assert refused["code"] == 2 and not refused["touched"]
    (line,) = errors(refused["said"])
    assert "rollout.temperature: 1.0 -> 0.9, train.steps: 6 -> 3; expected the same" in line
    assert "parallel" not in line and "allow_changes=[rollout.temperature,train.steps]" in line
    assert "changed: rollout.temperature: 1.0 -> 0.9" in found["temperature"]["said"]
    assert not any(line.startswith("changed: train.lr") for line in found["temperature"]["said"])
    assert set(found["files"]) == {"config.yaml", "config.1.yaml"}
    assert found["files"]["config.yaml"] == found["first"]
    assert "temperature: 0.9" in found["files"]["config.1.yaml"]
    section = found["page"].split('<section id="changed">')[1].split("</section>")[0]
    assert "<td>1 to 2</td><td><code>config.yaml</code>" in section
    assert "<td>3</td><td><code>config.1.yaml</code>" in section
    assert "<code>rollout.temperature</code>: <code>1.0</code> → <code>0.9</code>" in section


def test_a_full_disk_stops_the_run_and_leaves_the_checkpoint_before(results: dict[str, Any]) -> None:
    if "full_disk" not in results:
        pytest.skip("no tmpfs could be mounted (needs root)")
    found = results["full_disk"]
    assert max(found["codes"]) == 2
    assert len(errors(found["said"])) == 1
    assert "iter_000000" in errors(found["said"])[0]
    assert "free some space" in errors(found["said"])[0]
    assert found["orphans"] == []
    assert 1 <= found["done"] < 6
    assert found["after"] == 0
    assert any(f"after {found['done']} of 6 steps" in line for line in found["said_after"])
    assert found["last"] == 6
