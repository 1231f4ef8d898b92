"""Kills processes of a run's vLLM server with SIGKILL, and compares the runs with one that was left alone.

    python -m benchmarks.sigkill --engine vllm [--kills 20] [--seed 0] [--steps 6] [--repeat responses] [--json FILE]

The trainer (two ranks, student TP2, teacher DP2, fp32 on a CPU) lives on while its server's guard, API server, engine
core, worker or whole process group is killed: while the server starts, during a weight update, while it samples for
training or evaluation, and while the trainer computes (`server_killer.py`). Every tenth kill hits the trainer's ranks
instead, while the server samples; then the server's guard has to clean up alone, and the run is started again.

With `--repeat step`, metrics (except times, deaths, and how far the engine's log-probabilities are from the trainer's)
and exported weights must equal those of the run that was left alone, bit by bit. With `--repeat responses` a response
may have been sampled in other company, which changes its rounding; the benchmark counts the responses that are equal.
In both, no process of a server and no new file in shared memory may be left.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.server_killer import (
    API_SERVER,
    CALLS,
    ENGINE_CORE,
    GENERATION,
    PHASES,
    PROCESSES,
    STARTING,
    TRAINER,
    WORKER,
    ServerKiller,
    Strike,
)
from nemo_oprd.vllm.worker.nemo_oprd_guard import group_members
from tests.support.forked_run import OF_THE_MACHINE, ForkedRun, differences, import_everything, metrics, toy_overrides

PER_RUN = 5
PATIENCE_S = 900.0
CLEAN_S = 40.0
LOOK_EVERY_S = 2.0
SHARED_MEMORY = Path("/dev/shm")
# rounding of the engine, which depends on the requests that it computes at the same time, and the deaths themselves
OF_THE_SERVER = (
    "rollout/server_deaths",
    "rollout/straggler",
    "rollout/logprob_gap_",
    "rollout/kl_engine_trainer",
)
# eight responses of which three are sampled at a time, so that some are done and others are not when a server dies
SETTINGS = (
    "rollout.engine=vllm",
    "rollout.save=true",
    "rollout.max_batch=3",
    "rollout.vllm.max_restarts=20",
    "train.prompts_per_step=8",
    "evaluation.limit=4",
)


@dataclass
class Hit:
    """One line of the table; `seconds`: until the call of the engine had ended that found the death."""

    process: str
    phase: str
    tensor: int
    run: int
    step: int = -1
    seconds: float | None = None


@dataclass
class Report:
    """What the benchmark found; written by `--json`."""

    repeat: str
    hits: list[Hit] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    responses: int = 0
    equal_responses: int = 0
    logprob_gap_max: float = 0.0
    server_starts: int = 0
    seconds: float = 0.0

    def table(self) -> str:
        """One line per kill."""
        lines = [f"{'kill':>4}  {'process':<14} {'phase':<26} {'run':>3} {'TP':>2} {'in step':>7}  goes on after"]
        for number, hit in enumerate(self.hits, start=1):
            after = "-" if hit.seconds is None else f"{hit.seconds:.0f} s"
            where = f"{hit.run:>3} {hit.tensor:>2} {hit.step + 1:>7}"
            lines.append(f"{number:>4}  {hit.process:<14} {hit.phase:<26} {where}  {after}")
        return "\n".join(lines)


class VllmBench:
    """One directory with a toy pair, runs that were left alone and runs whose servers are killed.

    Args:
        steps: of every run; the kills of one run need a step each.
        repeat: whether killed runs repeat whole steps ("step") or single responses; the report names it.
        overrides: added to the configuration of all runs.

    Attributes:
        settings: of all runs.
        key: of the servers' settings.
        calls, killer: what the killer wraps in the first rank, and the killer.
    """

    settings: tuple[str, ...] = SETTINGS
    key = "rollout.vllm"
    calls: Mapping[str, str] = CALLS
    killer: type[ServerKiller] = ServerKiller

    def __init__(self, directory: Path, steps: int, repeat: str, overrides: tuple[str, ...] = ()) -> None:
        from nemo_oprd.tools.toy.pair import Recipe, build_pair

        recipe = Recipe(
            seed=0, steps=10, student_step=5, layers=2, hidden=128, batch=16, warmup_steps=5,
            train_prompts=64, tune_prompts=16, heldout_prompts=16,
        )  # fmt: skip
        build_pair(recipe, directory / "toy", lambda _: None)
        self.directory, self.log, self.report = directory, directory / "log.txt", Report(repeat)
        self.overrides = [*toy_overrides(directory / "toy", steps), *self.settings, *overrides]
        self.before, self.foreign = set(os.listdir(SHARED_MEMORY)), set[str]()
        import_everything(self.calls.values())

    def whole(self, tensor: int) -> Path:
        """The run with servers of `tensor` workers that is left alone; made at the first call."""
        output = self.directory / f"whole_{tensor}"
        if not output.exists():
            self._run(output, tensor, [])
        return output

    def killed(self, number: int, tensor: int, strikes: list[Strike]) -> None:
        """Makes a run with these kills, and compares it with the one that was left alone.

        Raises:
            RuntimeError: the run failed, hung, or ended before all kills.
        """
        whole, output = self.whole(tensor), self.directory / f"killed_{number}"
        hits = [Hit(strike.process, strike.phase, tensor, number) for strike in strikes]
        self.report.hits += hits
        self._run(output, tensor, strikes, hits)
        found = differences(whole, output, OF_THE_MACHINE + OF_THE_SERVER)
        self.report.differences += [f"run {number}: {difference}" for difference in found]
        pairs = zip(responses(whole), responses(output), strict=True)
        equal = [one == other for one, other in pairs]
        self.report.responses += len(equal)
        self.report.equal_responses += sum(equal)
        gaps = [line.get("rollout/logprob_gap_max", 0.0) for line in metrics(output)]
        self.report.logprob_gap_max = max(self.report.logprob_gap_max, *gaps)

    def _run(self, output: Path, tensor: int, strikes: list[Strike], hits: list[Hit] | None = None) -> None:
        """Starts the run until it ends; again after every kill of the trainer."""
        done, since, groups = 0, None, list[int]()
        overrides = [*self.overrides, f"output={output}", f"{self.key}.tensor={tensor}"]
        while True:
            killer = partial(_install, self.killer, strikes[done:], done, since)
            run = ForkedRun(overrides, self.log, killer, PATIENCE_S)
            since = None
            while since is None and (line := self._line(run, groups)):
                message = json.loads(line)
                if "server" in message:
                    groups.append(message["server"])
                elif "repaired" in message and hits is not None:
                    hits[message["repaired"]].seconds = message["seconds"]
                elif hits is not None:
                    done, hits[message.get("kill", message.get("hold"))].step = done + 1, message["step"]
                    since = message["at"] if "hold" in message else None
            if since is not None:
                run.kill()
            codes = [0] if since is not None else _end(run)
            self.report.server_starts += since is None and len(groups)
            self.report.left += self.leftovers(groups, f"{output.name}, after {done} kills")
            if since is None:
                break
        if any(codes) or done < len(strikes) or any(hit.seconds is None for hit in hits or []):
            raise RuntimeError(
                f"{output.name} ended with {codes} after {done} of {len(strikes)} kills\n{self.report.table()}\n"
                f"{self.log.read_text()[-6000:]}"
            )

    def _line(self, run: ForkedRun, groups: list[int]) -> str:
        """The next message; notes meanwhile what the servers of other runs on this machine have in shared memory."""
        deadline = time.monotonic() + PATIENCE_S
        while not run.has_said(LOOK_EVERY_S) and time.monotonic() < deadline:
            self.foreign |= _in_use(set(os.listdir(SHARED_MEMORY)) - self.before, without=groups)
        return run.line()

    def leftovers(self, groups: list[int], when: str) -> list[str]:
        """Processes of these groups, and files in shared memory that are new and not of another run."""
        deadline = time.monotonic() + CLEAN_S
        while True:
            found = [f"{when}: process {pid} of group {group}" for group in groups for pid in group_members(group)]
            files = set(os.listdir(SHARED_MEMORY)) - self.before
            self.foreign |= _in_use(files, without=groups)
            found += [f"{when}: {SHARED_MEMORY / name}" for name in sorted(files - self.foreign)]
            if not found or time.monotonic() > deadline:
                self.before |= files  # named once
                return found
            time.sleep(0.5)


def _install(killer: type[ServerKiller], strikes: list[Strike], first: int, since: float | None, pipe: int) -> None:
    killer(pipe, list(strikes), first, since).install()


def _end(run: ForkedRun) -> list[int]:
    """The exit statuses of a run that said its last; it is killed if it hangs."""
    from multiprocessing.connection import wait

    pipes = [os.pidfd_open(pid) for pid in run.ranks]
    deadline = time.monotonic() + PATIENCE_S
    for pipe in pipes:
        if not wait([pipe], max(0.0, deadline - time.monotonic())):
            run.kill()
            return [-9]
    for pipe in pipes:
        os.close(pipe)
    return run.codes()


def _in_use(files: set[str], without: list[int]) -> set[str]:
    """Those of `files` that a process outside the groups `without` has mapped or names in its command."""
    used: set[str] = set()
    for entry in Path("/proc").glob("[0-9]*") if files else ():
        try:
            if os.getpgid(int(entry.name)) not in without:
                text = (entry / "maps").read_text() + (entry / "cmdline").read_bytes().decode(errors="replace")
                used |= {name for name in files if name in text}
        except OSError:  # ended meanwhile
            continue
    return used


def responses(run: Path) -> list[list[int]]:
    """The ids of all responses of a run, step by step."""
    files = sorted((run / "rollouts").glob("step_*.jsonl"))
    return [json.loads(line)["response_ids"] for file in files for line in file.read_text().splitlines()]


def choose(kills: int, draw: random.Random) -> list[list[Strike]]:
    """The kills of each run, at most `PER_RUN`; 20 kills meet every process and every phase.

    Every tenth kill is the trainer's, as the last one of its run, when a checkpoint exists. A run has at most one kill
    of a server that starts, because a server that dies twice before it is ready ends the run.
    """
    trainers = kills // 10
    processes, phases = list(PROCESSES), list(PHASES)
    draw.shuffle(processes)
    draw.shuffle(phases)
    # 5 and 7 have no common divisor, so 35 kills meet every pair
    chosen = [(processes[i % len(processes)], phases[i % len(phases)]) for i in range(kills - trainers)]
    chosen.sort(key=lambda pair: PHASES.index(pair[1]))
    runs: list[list[Strike]] = [[] for _ in range(-(-kills // PER_RUN))]
    for number, (process, phase) in enumerate(chosen):
        needs = draw.choice((API_SERVER, ENGINE_CORE, WORKER)) if process not in (ENGINE_CORE, WORKER) else process
        runs[number % len(runs)].append(Strike(process, phase, needs=needs if phase == STARTING else API_SERVER))
    for run in runs:
        draw.shuffle(run)
    for number in range(trainers):
        runs[-1 - number % len(runs)].append(Strike(TRAINER, GENERATION, step=2))
    return runs


def parse_strikes(texts: list[str]) -> list[Strike]:
    """The kills PROCESS/PHASE of one run, such as "guard/generation".

    Raises:
        ValueError: there is no such process or phase.
    """
    found = []
    for text in texts:
        process, _, phase = text.partition("/")
        if process not in (*PROCESSES, TRAINER) or phase not in PHASES:
            raise ValueError(f"{text!r}: expected PROCESS/PHASE of {(*PROCESSES, TRAINER)} and {PHASES}")
        found.append(Strike(process, phase, step=2 if process == TRAINER else 0))
    return found


def run_benchmark(
    runs: list[list[Strike]],
    steps: int,
    repeat: str,
    python: str | None,
    json_file: Path | None,
    kind: type[VllmBench] = VllmBench,
    most_tensor: int = 2,
) -> None:
    """Makes runs with these kills; ends the process with a message if one differs or something was left.

    Args:
        steps: of every run.
        repeat, python: `rollout.vllm.repeat` and `rollout.vllm.python`, or of the teacher.
        json_file: for the results.
        kind: whose servers are killed.
        most_tensor: workers of a server; every other run has this number, and the others one.
    """
    began = time.monotonic()
    overrides = () if python is None else (f"{kind.key}.python={python}",)
    if kind is VllmBench:
        overrides = (f"rollout.vllm.repeat={repeat}", *overrides)
    with tempfile.TemporaryDirectory() as directory:
        bench = kind(Path(directory), steps, repeat, overrides)
        report = bench.report
        for number, strikes in enumerate(runs, start=1):
            bench.killed(number, most_tensor if number % 2 else 1, strikes)
            print(f"run {number}: {len(strikes)} kills, {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
        report.seconds = time.monotonic() - began
    print(report.table())
    print(f"{len(report.hits)} kills, {report.server_starts} starts of a server in {report.seconds:.0f} s")
    print(f"{report.equal_responses} of {report.responses} responses are those of the runs that were left alone")
    if kind is VllmBench:
        print(f"the largest difference of a log-probability from the trainer's is {report.logprob_gap_max:.1e}")
    if json_file is not None:
        json_file.write_text(json.dumps(as_json(report), indent=2) + "\n")
    if not report.differences:
        print("metrics and exported weights are those of the runs that were left alone, bit by bit")
    elif repeat == "step":
        sys.exit("the killed runs differ: " + "; ".join(report.differences))
    if report.left:
        sys.exit("left behind: " + "; ".join(report.left))
    print("no process of a server and no file in shared memory was left")


def as_json(report: Report) -> dict[str, Any]:
    """The report with steps that count from 1."""
    hits = [{**vars(hit), "step": hit.step + 1} for hit in report.hits]
    return {**vars(report), "hits": hits}
