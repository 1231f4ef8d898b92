"""Runs the parts of `gpu_check`, each in a process that is forked off one process that has imported everything.

The runner itself never asks CUDA: a process that has can't be forked. Where an import has done so, a part begins as a
fresh interpreter (`python -m benchmarks.gpu_parts.runner TASK.json`). Every part has a time limit, after which its
whole process group is killed; what it had measured by then is kept.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import json
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.gpu_parts.machine import describe
from benchmarks.gpu_parts.outcome import Outcome, Settings
from benchmarks.gpu_parts.registry import PARTS, Part, stages
from benchmarks.gpu_parts.table import table

ROOT = Path(__file__).parents[2]
# a part begins only with this share of its limit left; a CPU is slower than a GPU
SHARE_TO_BEGIN = 1 / 3
CPU_FACTOR = 4.0
# of a rehearsal, which makes every tensor of a step in Python
REHEARSAL_FACTOR = 8.0
# reserved at the end for the report
REPORT_SECONDS = 2.0
POLL_SECONDS = 0.02
# what the parts import themselves, once they run
PRELOADED = (
    "transformers.models.qwen2.modeling_qwen2",
    "torch.nn.attention.bias",
    "nemo_oprd.train",
    "nemo_oprd.tools.plan.estimate",
    "nemo_oprd.run.verify",
    "nemo_oprd.megatron.weights.megatron_checkpoint",
    "nemo_oprd.distillation.reference",
    "nemo_oprd.rollout.in_process_engine",
    "benchmarks.gpu_parts.rehearsed",
)


@dataclass(frozen=True)
class Options:
    """What the user asked for.

    Attributes:
        parts: names of parts; None: all, in order of value, as far as the time goes.
    """

    output: Path
    json: Path
    scratch: Path
    minutes: float
    parts: tuple[str, ...] | None = None
    quick: bool = False
    layers: int | None = None
    rehearsed: bool = False
    others: Path | None = None


@dataclass
class Job:
    """A part that is running."""

    part: Part
    process: int
    folder: Path
    began: float
    limit: float

    @property
    def result(self) -> Path:
        """The complete results."""
        return self.folder / "result.json"


@dataclass
class Report:
    """The JSON file, written again after every part; its fields are in docs/gpu_check.md."""

    options: Options
    started: float
    machine: dict[str, Any]
    parts: list[dict[str, Any]] = field(default_factory=list)
    within: float = 0.0  # seconds in which a part ran

    def write(self) -> None:
        """Writes the file as a whole."""
        seconds = time.monotonic() - self.started
        run = {
            "quick": self.options.quick,
            "rehearsed": self.options.rehearsed,
            "minutes": self.options.minutes,
            "seconds": round(seconds, 1),
            "overhead_seconds": round(seconds - self.within, 1),
            "ok": all(part["ok"] for part in self.parts),
        }
        written = self.options.json.with_name(f"{self.options.json.name}.part")
        written.write_text(json.dumps({"machine": self.machine, "run": run, "parts": self.parts}, indent=1) + "\n")
        os.replace(written, self.options.json)

    def add(self, name: str, seconds: float, found: dict[str, Any]) -> None:
        """Adds a part's results, prints its lines, and writes the file."""
        self.parts.append({"name": name, "ok": found["ok"], "seconds": round(seconds, 1), **_fields(found)})
        skipped = found["numbers"].get("skipped")
        said = f"skipped: {skipped}" if skipped else "ok" if found["ok"] else f"failed: {'; '.join(found['problems'])}"
        print(f"{name:<20}{seconds:7.1f} s  {said}", flush=True)
        for line in found["lines"]:
            print(f"{'':<31}{line}", flush=True)
        self.write()


def _fields(found: dict[str, Any]) -> dict[str, Any]:
    return {"numbers": found["numbers"], "problems": found["problems"]}


def check(options: Options, started: float) -> bool:
    """Runs the parts within `options.minutes`; whether all are ok.

    Args:
        started: `time.monotonic()` when the program began; imports count.
    """
    chosen = options.parts or tuple(name for name, part in PARTS.items() if part.memory or not options.rehearsed)
    import_everything(list(chosen), rehearsed=options.rehearsed)
    report = Report(options, started, describe())
    log = options.output / "gpu_check.log"
    log.unlink(missing_ok=True)
    print(f"imports {time.monotonic() - started:.1f} s; {_named(report.machine)}", flush=True)
    deadline = started + 60 * options.minutes - REPORT_SECONDS
    running: list[Job] = []
    try:
        for stage in _at_a_time(list(chosen), options):
            began = time.monotonic()
            for part in stage:
                left = deadline - time.monotonic()
                if part.missing():
                    report.add(part.name, 0.0, _skipped(f"needs the package {' and '.join(part.missing())}"))
                elif left < SHARE_TO_BEGIN * _limit(part, options):
                    report.add(part.name, 0.0, _not_run(part, options, left))
                else:
                    running.append(begin(part, options, min(_limit(part, options), left)))
            while running:
                for job in list(running):
                    found = ended(job)
                    if found is not None:
                        running.remove(job)
                        _keep_log(job, log)
                        shutil.rmtree(job.folder)
                        report.within += time.monotonic() - began if not running else 0.0
                        report.add(job.part.name, time.monotonic() - job.began, found)
                time.sleep(POLL_SECONDS)
    finally:
        for job in running:  # left over only if this process is stopped early
            _kill(job)
        report.write()
    print(table(json.loads(options.json.read_text()), _others(options)))
    return all(part["ok"] for part in report.parts)


def _at_a_time(names: list[str], options: Options) -> Iterator[list[Part]]:
    """The stages; a rehearsal, whose seconds mean nothing, runs as many parts as there are CPUs."""
    if not options.rehearsed:
        yield from stages(names)
        return
    parts = [part for stage in stages(names) for part in stage]
    count = os.cpu_count() or 1
    for first in range(0, len(parts), count):
        yield parts[first : first + count]


def _named(machine: dict[str, Any]) -> str:
    return ", ".join(str(machine[key]) for key in ("gpu", "torch") if machine.get(key))


def _others(options: Options) -> dict[str, Any] | None:
    return None if options.others is None else json.loads(options.others.read_text())


def _limit(part: Part, options: Options) -> float:
    return part.limit * (REHEARSAL_FACTOR if options.rehearsed else CPU_FACTOR if options.quick else 1.0)


def _not_run(part: Part, options: Options, left: float) -> dict[str, Any]:
    """Of a part that has no time: a failure if it was asked for by name, or belongs to every check."""
    said = f"{max(0.0, left):.0f} s left, it begins with {SHARE_TO_BEGIN * _limit(part, options):.0f}: give --minutes"
    if part.needed or options.parts is not None:
        return {"ok": False, "numbers": {}, "problems": [f"not run: {said}"], "lines": []}
    return _skipped(f"no time: {said}")


def _skipped(reason: str) -> dict[str, Any]:
    return Outcome(skipped=reason).as_json()


def import_everything(names: list[str], *, rehearsed: bool) -> None:
    """Imports what the parts need; a rehearsal's stand-in for a device is loaded with torch."""
    if rehearsed:
        os.environ["TORCHDYNAMO_DISABLE"] = "1"  # Megatron compiles small functions, for which there is no GPU
        from nemo_oprd.tools.rehearse import shim

        shim.load()
    import torch

    torch.set_float32_matmul_precision("highest")  # no TF32
    for name in PRELOADED:
        importlib.import_module(name)
    for name in names:
        PARTS[name].load()


def begin(part: Part, options: Options, limit: float) -> Job:
    """Starts a part in a process group of its own."""
    folder = options.scratch / part.name
    (folder / "files").mkdir(parents=True)
    settings = Settings(folder / "files", options.quick, options.layers, options.rehearsed, limit)
    job = Job(part, 0, folder, time.monotonic(), limit)
    sys.stdout.flush()
    process = os.fork()
    if process == 0:
        _child(job, settings)
    with contextlib.suppress(ProcessLookupError, PermissionError):  # as the child does: whoever is first
        os.setpgid(process, process)
    return replace(job, process=process)


def _child(job: Job, settings: Settings) -> None:
    """What the forked process does; does not return."""
    import torch

    try:
        os.setpgid(0, 0)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        log = os.open(job.folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        if torch.cuda.is_initialized() or torch.cuda._is_in_bad_fork():
            task = {"name": job.part.name, "folder": str(job.folder), "settings": vars(settings)}
            (job.folder / "task.json").write_text(json.dumps(task, default=str))
            os.execv(sys.executable, [sys.executable, "-m", __spec__.name, str(job.folder / "task.json")])
        carry_out(job.part, settings, job.folder)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # no destructors: those of torch and NCCL may wait


def carry_out(part: Part, settings: Settings, folder: Path) -> None:
    """Runs a part in this process and writes its results, or what ended it."""
    from nemo_oprd.runtime.messages import show

    faulthandler.enable()
    show()  # the messages of a run go to the log
    outcome = Outcome(file=folder / "partial.json")
    try:
        if settings.rehearsed:
            from benchmarks.gpu_parts.rehearsed import fake_device

            with fake_device(outcome):
                part.load()(settings, outcome)
        else:
            part.load()(settings, outcome)
    except BaseException as error:
        traceback.print_exc()
        # CUDA's first line names the error
        first_line = str(error).strip().partition("\n")[0][:300]
        frames = [f"{Path(f.filename).name}:{f.lineno}" for f in traceback.extract_tb(error.__traceback__)][-3:]
        outcome.problems.append(f"{type(error).__name__}: {first_line} (at {' < '.join(reversed(frames))})")
    outcome.file = folder / "result.json"
    outcome.save()


def ended(job: Job) -> dict[str, Any] | None:
    """The results of a part that has ended, or that is killed now; None while it may go on."""
    process, _ = os.waitpid(job.process, os.WNOHANG)
    if process == 0 and time.monotonic() - job.began <= job.limit:
        return None
    if process == 0:
        _kill(job)
    else:
        _kill_group(job)  # what the part has left behind
    if job.result.exists():
        return dict(json.loads(job.result.read_text()))
    partial = job.folder / "partial.json"
    found = json.loads(partial.read_text()) if partial.exists() else Outcome().as_json()
    why = f"killed after {job.limit:.0f} s" if process == 0 else f"died: {_last_line(job.folder / 'log')}"
    return {**found, "ok": False, "problems": [*found["problems"], why]}


def _kill(job: Job) -> None:
    _kill_group(job)
    os.waitpid(job.process, 0)


def _kill_group(job: Job) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(job.process, signal.SIGKILL)


def _last_line(file: Path) -> str:
    lines = [line.strip() for line in file.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else "no output"


def _keep_log(job: Job, log: Path) -> None:
    own = job.folder / "log"
    text = own.read_text(errors="replace") if own.exists() else ""
    with log.open("a") as file:
        file.write(f"==== {job.part.name}\n{text}\n")


def main() -> None:
    """A part in a fresh interpreter."""
    task = json.loads(Path(sys.argv[1]).read_text())
    settings = Settings(**{**task["settings"], "scratch": Path(task["settings"]["scratch"])})
    import_everything([task["name"]], rehearsed=settings.rehearsed)
    carry_out(PARTS[task["name"]], settings, Path(task["folder"]))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
