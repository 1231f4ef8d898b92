"""Interrupts runs in the ways of test_interrupted.py and says what happened; forks ranks as benchmarks/sigkill.py does,
in a process of its own because forking wants one without threads.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.sigkill import PHASES, Attempt, Bench, Target
from nemo_oprd.distillation.student import Student
from nemo_oprd.runtime.signals import Signals
from nemo_oprd.tools.report.page import write_report
from tests.support.forked_run import metrics

enter = Signals.__enter__
PHASE = {phase.name: phase for phase in PHASES}
STEPS = 6
SCENARIOS = ("signals", "second_interrupt", "failing", "lock", "layouts", "pending")


def _late_after_the_first(signals: Signals) -> Signals:
    """In place of `Signals.__enter__`: other ranks come late, as on a busy machine."""
    time.sleep(0.3 * int(os.environ["RANK"] != "0"))
    return enter(signals)


def wait_until_kept(run: Path, steps: int = 0) -> None:
    """Waits for the rollouts of the step at work, and of `steps` steps before it, which are written aside."""
    deadline, folder = time.monotonic() + 60, run / "rollouts"
    files = [folder / "pending.safetensors", *(folder / f"step_{step:07d}.jsonl" for step in range(1, steps + 1))]
    while not all(file.exists() for file in files):
        assert time.monotonic() < deadline
        time.sleep(0.01)


class Driver:
    """The scenarios; each returns what its test looks at."""

    def __init__(self, directory: Path) -> None:
        self.bench = Bench(directory, STEPS, ("rollout.save=true",))
        self.bench.whole()

    def start(
        self, output: str, phase: str | None = None, step: int = 0, extra: tuple[str, ...] = (), hold: bool = False
    ) -> Attempt:
        """A start with a log of its own, which `said` reads; `hold`: it waits at the target until `go_on`."""
        number = time.monotonic_ns()
        self.log = self.bench.directory / f"log-{number}.txt"
        self.go_on = self.bench.directory / f"go-on-{number}"
        target = Target(PHASE[phase], step, self.go_on if hold else None) if phase else None
        where = output if output.startswith("/") else str(self.bench.directory / output)
        return Attempt([*self.bench.overrides, f"output={where}", *extra], self.log, target)

    def said(self) -> list[str]:
        """Lines of the last start that are the project's own."""
        return [line for line in self.log.read_text().splitlines() if "Warning" not in line and line[:1].strip()]

    def signals(self) -> dict[str, Any]:
        """One run, asked to stop by each signal in turn (one of them reaches one rank only), then left to end."""
        found: dict[str, Any] = {"starts": []}
        asked = (
            (signal.SIGUSR1, "evaluation", 0, 2),  # before training
            (signal.SIGUSR1, "evaluation", 1, 2),  # after step 2
            (signal.SIGTERM, "evaluation", 0, 2),  # the same, made up for
            (signal.SIGTERM, "rollout", 2, 2),
            (signal.SIGINT, "save", 3, 2),
            (signal.SIGUSR1, "backward", 4, 1),
            (signal.SIGTERM, "evaluation", 5, 2),  # after the last step
        )
        for number, phase, step, ranks in asked:
            with mock.patch.object(Signals, "__enter__", _late_after_the_first):
                attempt = self.start("killed", phase, step, hold=True)  # a save is shorter than a busy machine's nap
            attempt.wait_for_target()
            for pid in attempt.ranks[-ranks:]:
                os.kill(pid, number)
            self.go_on.touch()
            got = attempt.codes()
            said = [line for line in self.said() if "stopped by" in line or "deferred" in line]
            done = self.bench.done(self.bench.directory / "killed")
            found["starts"].append({"codes": got, "said": said, "done": done, "orphans": attempt.orphans()})
        self.start("killed").wait()
        found["said_at_last"] = self.said()
        kept = self.bench.directory / "killed" / "checkpoints"
        found["kept"] = sorted(path.name for path in kept.iterdir())
        found["best"] = json.loads((kept / "best.json").read_text())
        return {**found, "differences": self.bench.differences()}

    def second_interrupt(self) -> dict[str, Any]:
        """Ctrl-C twice while the first rank is held in the middle of a step."""
        attempt = self.start("twice", "rollouts kept")
        attempt.wait_for_target()
        began = time.monotonic()
        for _ in range(2):
            for pid in attempt.ranks:
                os.kill(pid, signal.SIGINT)
            time.sleep(0.5)  # two signals of a kind at once are one
        return {"codes": attempt.codes(), "seconds": time.monotonic() - began, "orphans": attempt.orphans()}

    def lock(self) -> dict[str, Any]:
        """A second start while a run is held; then SIGKILL to the first, and another start."""
        holder = self.start("locked", "rollouts kept", 3)
        holder.wait_for_target()
        directory = self.bench.directory / "locked"
        wait_until_kept(directory, steps=3)

        def files() -> dict[str, Any]:
            return {str(f): (f.stat().st_mtime_ns, f.stat().st_size) for f in sorted(directory.rglob("*"))}

        before = files()
        second = self.start("locked")
        code = os.waitstatus_to_exitcode(os.waitpid(second.ranks[0], 0)[1])
        now = files()
        touched = [name for name in {**before, **now} if before.get(name) != now.get(name)]
        os.kill(second.ranks[1], signal.SIGKILL)  # what a launcher does; it waits for its first rank
        os.waitpid(second.ranks[1], 0)
        refused = self.said()
        holder.kill()
        after = self.start("locked").wait()
        return {
            "code": code, "touched": touched, "said": refused, "holder": holder.ranks[0], "after": after,
            "same": metrics(directory) == metrics(self.bench.directory / "whole"),
        }  # fmt: skip

    def failing(self) -> dict[str, Any]:
        """The second rank fails in the middle of a run, while the first computes."""
        update, failed = Student.optimizer_step, self.bench.directory / "failed"

        def fail_at_step_2(student: Student, step: int, *args: Any) -> Any:
            if step == 1 and os.environ["RANK"] == "1":
                failed.write_text(str(time.monotonic()))
                raise RuntimeError("injected failure")
            return update(student, step, *args)

        with mock.patch.object(Student, "optimizer_step", fail_at_step_2):
            attempt = self.start("failing")
        codes = attempt.codes()
        seconds = time.monotonic() - float(failed.read_text())
        found = {"codes": codes, "seconds": seconds, "orphans": attempt.orphans()}
        text = self.log.read_text()
        return {**found, "errors": re.findall("^(?:error: .*|RuntimeError: .*)$", text, re.MULTILINE), "log": text}

    def layouts(self) -> dict[str, Any]:
        """TP2, killed; PP2, killed; TP1 with DP2 to the end."""
        for layout, step in (((), 2), (("student.parallel.tensor=1", "student.parallel.pipeline=2"), 4)):
            attempt = self.start("layouts", "weight sync", step, layout)
            attempt.wait_for_target()
            attempt.kill()
        code = self.start("layouts", extra=("student.parallel.tensor=1",)).wait()
        runs = [self.bench.directory / name for name in ("whole", "layouts")]
        sampled = [
            [
                [(r["prompt_ids"], r["response_ids"]) for r in map(json.loads, file.read_text().splitlines())]
                for file in sorted((run / "rollouts").glob("step_*.jsonl"))
            ]
            for run in runs
        ]
        return {
            "code": code, "said": self.said(), "curves": [metrics(run) for run in runs],
            "same_rollouts": sampled[0] == sampled[1], "steps": len(sampled[1]),
        }  # fmt: skip

    def pending(self) -> dict[str, Any]:
        """Killed with the rollouts of step 3 kept; gone on with from copies of the run, as it was and changed.

        The rate follows a cosine over all steps, so fewer steps need leave, like another temperature and other prompts.
        """
        attempt = self.start("kept", "rollouts kept", 2)
        attempt.wait_for_target()
        wait_until_kept(self.bench.directory / "kept")
        attempt.kill()
        prompts = self.bench.directory / "toy" / "prompts" / "tune.jsonl"
        changes = {"same": (), "temperature": ("rollout.temperature=0.9",), "prompts": (f"data.train={prompts}",)}
        short = ("train.steps=3", "evaluation.every=0", "train.keep_best=null", "train.export_hf=false")
        found: dict[str, Any] = {}
        for name, change in changes.items():
            run = self.bench.directory / name
            shutil.copytree(self.bench.directory / "kept", run)
            if name == "temperature":
                found["refused"] = self.refused(run, (*short, *change, "student.parallel.tensor=1"))
            leave = ",".join(["train.steps", *(key.split("=")[0] for key in change)])
            attempt = self.start(name, extra=(*short, *change, f"train.allow_changes=[{leave}]"))
            code = attempt.wait()
            found[name] = {"code": code, "said": self.said(), "sampled": len(attempt.durations.get("rollout", []))}
        run = self.bench.directory / "temperature"
        found["files"] = {file.name: file.read_text() for file in run.glob("config*.yaml")}
        found["first"] = (self.bench.directory / "kept" / "config.yaml").read_text()
        found["page"] = write_report([run], self.bench.directory / "page.html").read_text()
        return found

    def refused(self, run: Path, extra: tuple[str, ...]) -> dict[str, Any]:
        """A start without leave: it ends before models are built, and leaves everything as it was."""

        def files() -> dict[str, int]:
            return {str(file): file.stat().st_mtime_ns for file in run.rglob("*") if file.is_file()}

        before = files()
        attempt = self.start(run.name, extra=extra)
        code = os.waitstatus_to_exitcode(os.waitpid(attempt.ranks[0], 0)[1])
        os.kill(attempt.ranks[1], signal.SIGKILL)  # what a launcher does; it waits for its first rank
        os.waitpid(attempt.ranks[1], 0)
        return {"code": code, "said": self.said(), "touched": files() != before}

    def full_disk(self, disk: Path) -> dict[str, Any]:
        """All checkpoints kept on a small disk until it is full; then space is made, and the same command again."""
        output, extra = (
            disk / "run",
            ("train.keep_checkpoints=0", "train.save_every=1", "evaluation.every=0", "train.keep_best=null"),
        )
        filler = disk / "filler"
        first = self.start(str(output), extra=(*extra, "train.steps=1", "train.export_hf=false"))
        first.wait()
        checkpoint = sum(f.stat().st_size for f in (output / "checkpoints").rglob("*") if f.is_file())
        free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
        # what is left at a start must do for the check at its beginning, and not for all that is saved
        filler.write_bytes(bytes(free - (1 << 20) - checkpoint // 2))
        extra = (*extra, "train.allow_changes=[train.steps]")  # the rate follows a cosine over all steps
        attempt = self.start(str(output), extra=extra)
        stopped = {"codes": attempt.codes(), "said": self.said(), "orphans": attempt.orphans()}
        stopped["done"] = self.bench.done(output)
        filler.unlink()
        code = self.start(str(output), extra=(*extra, "train.keep_checkpoints=1")).wait()
        return {**stopped, "after": code, "said_after": self.said(), "last": metrics(output)[-1]["step"]}


def interrupt(directory: Path, disk: Path | None) -> dict[str, Any]:
    """All scenarios, that of the full disk if there is a small `disk`."""
    driver = Driver(directory)
    scenarios = {name: getattr(driver, name) for name in SCENARIOS}
    if disk is not None:
        scenarios["full_disk"] = lambda: driver.full_disk(disk)
    results: dict[str, Any] = {}
    for name, scenario in scenarios.items():
        began = time.monotonic()
        results[name] = {**scenario(), "took_s": time.monotonic() - began}
        print(name, f"{time.monotonic() - began:.1f} s", file=sys.stderr)
    return results
