"""Kills a toy run repeatedly with SIGKILL and restarts it until it ends; then compares it with an uninterrupted run.

    python -m benchmarks.sigkill [--kills 20] [--seed 0] [--steps 16]
    python -m benchmarks.sigkill --experts 4         models with experts, which both roles split over the two ranks
    python -m benchmarks.sigkill --lag 2             responses of two later steps are sampled already
    python -m benchmarks.sigkill --lag 2 --mode segments     responses go on over three updates
    python -m benchmarks.sigkill --lag 4 --mode stream       as exact with half; sigkill_stream.py: servers
    python -m benchmarks.sigkill --engine vllm       kills processes of the vLLM server instead: sigkill_vllm.py
    python -m benchmarks.sigkill --teacher vllm      those of the teacher's server, and the trainer: sigkill_teacher.py

All ranks of a two-rank run (student TP2, teacher DP2, sampling, evaluation and a checkpoint every 2 steps, fp32 on a
CPU) are killed at once: at a random moment within a phase of a step, or while the run is held at a point that is too
short to hit by chance (between the renaming of a checkpoint and its tracker, after half a line of metrics.jsonl). At
the end, metrics (except time, timing/ and perf/) and exported weights must equal those of an uninterrupted run bit by
bit, and no process may be left.

The ranks are forked (`forked_run.py`). The launcher is not covered (tests/e2e/test_launchers.py uses torchrun), nor is
a loss of power.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tests.support.forked_run import (
    ATTEMPT_S,
    ORPHANS_GONE_S,
    RESPONSE_TOKENS,
    ForkedRun,
    differences,
    find_call,
    import_everything,
    metrics,
    toy_overrides,
)


@dataclass(frozen=True)
class Phase:
    """A place where a run can be killed: at a random moment `during` a call, or held `before`, `after` or `inside` it.

    `only` selects calls whose arguments contain that text in their repr. `once`: the phase occurs at the run's start or
    end, not in every step.
    """

    name: str
    call: str
    how: Literal["during", "before", "after", "inside"] = "during"
    only: str = ""
    once: Literal["", "start", "end"] = ""


PHASES = (
    Phase("reading the checkpoint", "nemo_oprd.run.start:load_checkpoint", once="start"),
    Phase("rollout", "nemo_oprd.rollout.in_process_engine:MegatronEngine.collect"),
    Phase("rollouts kept", "nemo_oprd.rollout.resume_cache:ResumeCache.put", "after"),
    Phase("teacher", "nemo_oprd.distillation.teacher:Teacher.targets"),
    Phase("backward", "nemo_oprd.distillation.step:GradientAccumulation.forward_backward"),
    Phase("optimizer", "nemo_oprd.distillation.student:Student.optimizer_step"),
    Phase("weight sync", "nemo_oprd.rollout.in_process_engine:MegatronEngine.update_weights"),
    Phase("half a log line", "nemo_oprd.run.metrics_log:MetricsLog.write", "inside"),
    Phase("evaluation", "nemo_oprd.evaluation.evaluator:Evaluator.evaluate"),
    Phase("save", "nemo_oprd.run.checkpointer:save_checkpoint"),
    Phase("save: rollouts ahead", "nemo_oprd.rollout.resume_cache:ResumeCache.write", "after"),
    Phase("save: shards written", "nemo_oprd.run.training_state:commit_checkpoint", "before"),
    Phase("save: renamed", "nemo_oprd.run.checkpoint_directory:write_atomically", "before", only="latest_checkpointed"),
    Phase("save: tracker written", "nemo_oprd.run.training_state:prune", "before"),
    Phase("save: pruning", "nemo_oprd.run.checkpoint_directory:_remove_checkpoint", "during"),
    Phase("export", "nemo_oprd.run.start:export_hf", once="end"),
)


@dataclass(frozen=True)
class Target:
    """Kill in `phase` at the first opportunity after `step` updates.

    With `until`, the first rank is held at the beginning of the phase until that file exists, and then resumes.
    """

    phase: Phase
    step: int
    until: Path | None = None


@dataclass
class Kill:
    """One line of the table."""

    phase: str
    step: int
    resumed_from: int | None
    after_ms: float


@dataclass
class Result:
    """The history of the killed run."""

    kills: list[Kill] = field(default_factory=list)
    starts: int = 0
    seconds: float = 0.0


class Bench:
    """One directory with the toy pair, the uninterrupted run `whole` and the killed run `killed`.

    Args:
        overrides: added to the configuration of both runs.
        experts: of each layer of the models, 0 for models without experts.
        phases: in which the run may be killed.
    """

    def __init__(
        self,
        directory: Path,
        steps: int = 16,
        overrides: tuple[str, ...] = (),
        experts: int = 0,
        phases: tuple[Phase, ...] = PHASES,
    ) -> None:
        from nemo_oprd.tools.toy.pair import make_tiny_pair

        self.directory, self.steps, toy = directory, steps, directory / "toy"
        make_tiny_pair(toy, steps=10, experts=experts, log=lambda _: None)
        self.overrides = [*toy_overrides(toy, steps), *overrides]
        self.log, self.phases = directory / "log.txt", phases
        import_everything(phase.call for phase in phases)

    def whole(self) -> dict[str, float]:
        """Runs without interruption; returns the median duration of each phase in seconds."""
        attempt = self.start("whole")
        code = attempt.wait()
        if code:
            raise RuntimeError(f"the uninterrupted run ended with {code}:\n{self.log.read_text()[-4000:]}")
        return {name: statistics.median(times) for name, times in attempt.durations.items()}

    def start(self, output: str, target: Target | None = None) -> Attempt:
        """Starts the run, which will be killed at `target`."""
        return Attempt(["output=" + str(self.directory / output), *self.overrides], self.log, target, self.phases)

    def kill_and_finish(self, phases: list[Phase], durations: dict[str, float], draw: random.Random) -> Result:
        """Kills the run in each of `phases` in turn, then lets it end.

        Raises:
            RuntimeError: the run ended before it was killed, left a process behind, or failed.
        """
        result, began = Result(), time.monotonic()
        output = self.directory / "killed"
        for number, phase in enumerate(phases):
            done = self.done(output)
            # Checkpoints are written every second step. If the run lags behind the kills, reach past the next one.
            lags = done < (self.steps - 4) * number / len(phases)
            reach = draw.choice((1, 2, 3)) if lags else 1
            target = Target(phase, 0 if phase.once else done + reach - 1)
            attempt = self.start("killed", target)
            step = attempt.wait_for_target()
            after = draw.uniform(0, durations.get(phase.name, 0.0)) if phase.how == "during" else 0.0
            time.sleep(after)  # the random moment
            attempt.kill()
            left = attempt.orphans()
            if left:
                raise RuntimeError(f"{ORPHANS_GONE_S} s after the kill in {phase.name!r} there still are: {left}")
            result.kills.append(Kill(phase.name, step, done or None, 1e3 * after))
            result.starts += 1
        last = self.start("killed")
        code = last.wait()
        result.starts += 1
        if code or last.orphans():
            raise RuntimeError(f"the last start ended with {code}:\n{self.log.read_text()[-4000:]}")
        result.seconds = time.monotonic() - began
        return result

    def done(self, output: Path) -> int:
        """Number of updates in the checkpoint from which the next start resumes."""
        from nemo_oprd.run.checkpoint_directory import find_checkpoint

        return find_checkpoint(output / "checkpoints")[0] or 0

    def differences(self) -> list[str]:
        """The differences between both runs: in metrics, except for times, and in exported weights."""
        return differences(self.directory / "whole", self.directory / "killed")


class Attempt(ForkedRun):
    """One start of the run, which is to be killed at `target`; the first rank reports its phases."""

    def __init__(
        self, overrides: list[str], log: Path, target: Target | None, phases: tuple[Phase, ...] = PHASES
    ) -> None:
        self.durations: dict[str, list[float]] = {}
        super().__init__(overrides, log, lambda pipe: Probe(pipe, target).install(phases))

    def wait_for_target(self) -> int:
        """Blocks until the target is reached; returns the step. Raises RuntimeError if the run ends earlier."""
        while True:
            line = self.line()
            if line.startswith("reached"):
                return int(line.split()[1])
            if not line:
                self.kill()
                raise RuntimeError("the run ended or hung before it reached the place where it was to be killed")

    def wait(self) -> int:
        """Waits for the run to end; returns the largest exit status of its ranks."""
        while line := self.line():
            kind, seconds, name = line.split(" ", 2)
            if kind == "left":
                self.durations.setdefault(name, []).append(float(seconds))
        return max(self.codes())


class Probe:
    """In the first rank: reports its phases through a pipe, and holds the rank at the target."""

    def __init__(self, pipe: int, target: Target | None) -> None:
        self.pipe, self.target, self.step, self.said = pipe, target, 0, False

    def install(self, phases: tuple[Phase, ...]) -> None:
        """Wraps the calls of all phases, and the call from which the step is known."""
        for phase in phases:
            owner, name = find_call(phase.call)
            setattr(owner, name, self._watched(phase, getattr(owner, name)))
        owner, name = find_call("nemo_oprd.rollout.training_rollouts:RolloutSampler.rollouts")
        setattr(owner, name, self._counting(getattr(owner, name)))

    def _counting(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(run: Any, step: int) -> Any:
            self.step = step
            return call(run, step)

        return counted

    def _watched(self, phase: Phase, call: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            if phase.only not in repr(args):
                return call(*args, **kwargs)
            if phase.how in ("during", "before"):
                self._reach(phase)
            if phase.how == "inside" and self._is_target(phase):
                run_log, step = args[:2]
                with run_log.path.open("a") as file:
                    file.write(json.dumps({"step": step, "time": 0.0, "loss/total": 0.0})[: 10 + step])
                self._reach(phase)
            began = time.monotonic()
            result = call(*args, **kwargs)
            self._send(f"left {time.monotonic() - began} {phase.name}")
            if phase.how == "after":
                self._reach(phase)
            return result

        return watched

    def _is_target(self, phase: Phase) -> bool:
        return self.target is not None and self.target.phase == phase and self.step >= self.target.step

    def _reach(self, phase: Phase) -> None:
        if self._is_target(phase) and not self.said:
            self.said = True
            self._send(f"reached {self.step} {phase.name}")
            if self.target is not None and self.target.until is not None:
                while not self.target.until.exists():
                    time.sleep(0.01)
            elif phase.how != "during":
                time.sleep(ATTEMPT_S)  # held until it is killed

    def _send(self, line: str) -> None:
        os.write(self.pipe, f"{line}\n".encode())


def choose(kills: int, draw: random.Random, phases: tuple[Phase, ...] = PHASES) -> list[Phase]:
    """Every phase at least once, if there are enough kills; in random order, with the run's end last."""
    steps = [phase for phase in phases if phase.once != "end"]
    ends = [phase for phase in phases if phase.once == "end"]
    chosen = draw.sample(steps, len(steps)) + [draw.choice(steps) for _ in range(kills)]
    chosen = chosen[: max(0, kills - len(ends))]
    draw.shuffle(chosen)
    chosen.sort(key=lambda phase: phase.once == "start")  # a checkpoint to read exists by then
    return chosen + ends[: kills - len(chosen)]


def table(result: Result) -> str:
    """One line per kill."""
    lines = [f"{'kill':>4}  {'phase':<24} {'in step':>7}  {'ms into it':>10}  resumed from"]
    for number, kill in enumerate(result.kills, start=1):
        resumed = "nothing" if kill.resumed_from is None else f"{kill.resumed_from} updates"
        lines.append(f"{number:>4}  {kill.phase:<24} {kill.step + 1:>7}  {kill.after_ms:>10.1f}  {resumed}")
    return "\n".join(lines)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description="Kill a toy run with SIGKILL and compare it with an uninterrupted one")
    parser.add_argument("--engine", choices=("megatron", "vllm"), default="megatron")
    parser.add_argument("--teacher", choices=("megatron", "vllm"), default="megatron")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0, help="seed of the random moments")
    parser.add_argument("--steps", type=int, help="default: 16, 6 with vllm, 8 with --teacher vllm")
    parser.add_argument("--experts", type=int, default=0, metavar="N", help="experts per layer, with --engine megatron")
    parser.add_argument("--lag", type=int, default=0, metavar="N", help="rollout.max_lag, with --engine megatron")
    modes = ("exact", "segments", "stream")
    parser.add_argument("--mode", choices=modes, default="exact", help="rollout.mode, with --engine megatron")
    vllm = parser.add_argument_group("with --engine vllm or --teacher vllm")
    vllm.add_argument("--repeat", choices=("step", "responses"), default="step", help="rollout.vllm.repeat")
    vllm.add_argument(
        "--strike",
        action="append",
        default=[],
        metavar="PROCESS/PHASE",
        help="this kill, in one run, in place of --kills",
    )
    vllm.add_argument("--python", help="rollout.vllm.python or teacher.vllm.python")
    vllm.add_argument("--processes", nargs="+", help="which processes of a teacher's server are killed; default: all")
    vllm.add_argument("--tensor", type=int, default=2, help="the most workers of a teacher's server")
    vllm.add_argument("--json", type=Path, help="file for the results")
    options = parser.parse_args()
    if options.teacher == "vllm":
        kill_teachers(options)
        return
    if options.engine == "megatron":
        overrides = ahead(options.lag, options.mode)
        # in mode stream a step keeps its responses in a checkpoint alone, and without a lag nothing is sampled ahead
        absent = {"rollouts kept"} if options.mode == "stream" else set() if options.lag else {"save: rollouts ahead"}
        phases = tuple(phase for phase in PHASES if phase.name not in absent)
        kill_trainers(options.kills, options.seed, options.steps or 16, options.experts, overrides, phases)
        return
    from benchmarks.sigkill_vllm import choose, parse_strikes, run_benchmark

    steps = options.steps or 6
    runs = [parse_strikes(options.strike)] if options.strike else choose(options.kills, random.Random(options.seed))
    run_benchmark(runs, steps, options.repeat, options.python, options.json)


def kill_teachers(options: argparse.Namespace) -> None:
    """Kills a teacher's servers and their trainer."""
    from benchmarks.server_killer import PROCESSES
    from benchmarks.sigkill_teacher import TeacherBench, choose, parse_strikes
    from benchmarks.sigkill_vllm import run_benchmark

    draw, processes = random.Random(options.seed), options.processes or PROCESSES
    runs = [parse_strikes(options.strike)] if options.strike else choose(options.kills, draw, processes)
    steps = options.steps or 8
    run_benchmark(runs, steps, "step", options.python, options.json, TeacherBench, options.tensor)


# models with experts are split over the ranks by their experts only
_SPLIT_BY_EXPERTS = ("student.parallel.tensor=1", "student.parallel.expert=2", "teacher.parallel.expert=2")


def ahead(lag: int, mode: str) -> tuple[str, ...]:
    """The settings of sampling ahead; in segments, the longest responses take all students that the lag allows."""
    segments = (f"rollout.segment_tokens={-(-RESPONSE_TOKENS // (lag + 1))}",) if mode == "segments" else ()
    return (f"rollout.max_lag={lag}", f"rollout.mode={mode}", *segments)


def kill_trainers(
    kills: int, seed: int, steps: int, experts: int, more: tuple[str, ...], phases: tuple[Phase, ...]
) -> None:
    """Kills all ranks of a run that samples itself; ends the process with a message if the run differs.

    `more`: overrides of the run.
    """
    draw = random.Random(seed)
    with tempfile.TemporaryDirectory() as directory:
        overrides = (*(_SPLIT_BY_EXPERTS if experts else ()), *more)
        bench = Bench(Path(directory), steps, overrides, experts, phases)
        durations = bench.whole()
        result = bench.kill_and_finish(choose(kills, draw, phases), durations, draw)
        print(table(result))
        differences = bench.differences()
        lines = len(metrics(bench.directory / "whole"))
    print(f"{len(result.kills)} kills, {result.starts} starts in {result.seconds:.0f} s; no process was left")
    if differences:
        sys.exit("the killed run differs: " + "; ".join(differences))
    print(f"{lines} lines of metrics and the exported weights are those of the uninterrupted run, bit by bit")


if __name__ == "__main__":
    main()
