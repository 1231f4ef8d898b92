"""Interrupts evaluations in the ways of test_interrupted_evaluations.py and says what happened.

The ranks are forked by tests/support/forked_run.py, and inherit `generate_batch` as it is here: it notes its calls, one
file per rank, and can hold a rank at one of them.
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

from benchmarks.sigkill import Bench
from nemo_oprd.rollout import in_process_engine as megatron_engine
from nemo_oprd.runtime import exits
from tests.support.forked_run import RANKS, ForkedRun, metrics

generate_batch = megatron_engine.generate_batch
# 8 problems x 2 samples on 2 ranks in batches of 2: an evaluation is 4 batches per rank, a step of training is 1
SETTINGS = ("evaluation.limit=8", "rollout.max_batch=2", "train.export_hf=false", "train.keep_best=null")
HELD_S = 100


class Start:
    """One start of a command, whose batches are counted.

    Args:
        hold: the number of the batch (from 1) at whose beginning every rank waits until `go_on`.
    """

    def __init__(
        self, bench: Bench, command: str, output: str, overrides: tuple[str, ...] = (), *, hold: int | None = None
    ) -> None:
        self.notes = bench.directory / f"start-{time.monotonic_ns()}"
        self.notes.mkdir()
        self.log, self.hold = self.notes / "log.txt", hold
        megatron_engine.generate_batch = self._noting  # type: ignore[assignment]
        arguments = [*bench.overrides, f"output={bench.directory / output}", *overrides]
        self.attempt = ForkedRun(arguments, self.log, lambda _: None, command=command)
        megatron_engine.generate_batch = generate_batch

    def _noting(self, *args: Any, **kwargs: Any) -> Any:
        """In place of `generate_batch`, in a rank."""
        file = self._file(int(os.environ["RANK"]))
        with file.open("a") as notes:
            notes.write("batch\n")
        deadline = time.monotonic() + HELD_S
        while self._count(file) == self.hold and not (self.notes / "go-on").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        return generate_batch(*args, **kwargs)

    def _file(self, rank: int) -> Path:
        return self.notes / str(rank)

    @staticmethod
    def _count(file: Path) -> int:
        return file.read_text().count("\n") if file.exists() else 0

    @property
    def batches(self) -> list[int]:
        """Per rank, how many batches it began."""
        return [self._count(self._file(rank)) for rank in range(RANKS)]

    def wait_until_held(self) -> None:
        deadline = time.monotonic() + HELD_S
        while self.batches != [self.hold] * RANKS:
            if time.monotonic() > deadline:
                raise RuntimeError(f"{self.batches} batches, not {self.hold}:\n{self.log.read_text()[-2000:]}")
            time.sleep(0.01)

    def kill(self) -> list[int]:
        """SIGKILL to all ranks while they are held."""
        self.wait_until_held()
        self.attempt.kill()
        return self.batches

    def ask_to_stop(self) -> dict[str, Any]:
        """SIGTERM to all ranks while they are held, which then finish their batch."""
        self.wait_until_held()
        for pid in self.attempt.ranks:
            os.kill(pid, signal.SIGTERM)
        (self.notes / "go-on").touch()
        return self.end()

    def end(self) -> dict[str, Any]:
        codes = self.attempt.codes()
        return {"codes": codes, "batches": self.batches, "said": self.said()}

    def said(self) -> list[str]:
        """The project's own lines about evaluations and mistakes."""
        words = ("error:", "Traceback", "kept from an earlier start", "deferred", "stopped by")
        return [line for line in self.log.read_text().splitlines() if any(word in line for word in words)]


def results_of(directory: Path) -> dict[str, str]:
    """Every file of an evaluation but about.json, by its path: it names the weights of a run at random."""
    files = [file for file in sorted(directory.rglob("*")) if file.is_file()]
    names = ("about.json", ".lock")
    return {str(file.relative_to(directory)): file.read_text() for file in files if file.name not in names}


def evaluate(bench: Bench) -> dict[str, Any]:
    """`evaluate`, killed in its third batch and in the second batch of the next start; then left alone."""
    found: dict[str, Any] = {"whole": Start(bench, "evaluate", "evaluated", SETTINGS).end()}
    output = bench.directory / "evaluated_in_parts"
    found["killed"] = [Start(bench, "evaluate", output.name, SETTINGS, hold=3).kill()]
    parts = sorted((output / "generations").glob(".*.jsonl"))
    found["parts"] = {part.name: len(part.read_text().splitlines()) for part in parts}
    with parts[0].open("a") as part:  # as if it had been killed while it wrote
        part.write(parts[0].read_text().splitlines()[0][:-20])
    found["killed"].append(Start(bench, "evaluate", output.name, SETTINGS, hold=2).kill())
    found["last"] = Start(bench, "evaluate", output.name, SETTINGS).end()
    found["same"] = results_of(output) == results_of(bench.directory / "evaluated")
    found["files"] = sorted(results_of(output))
    found["again"] = Start(bench, "evaluate", output.name, SETTINGS).end()
    before = results_of(output)
    found["temperature"] = Start(bench, "evaluate", output.name, (*SETTINGS, "evaluation.temperature=0.5")).end()
    weights = bench.directory / "toy" / "student" / "model.safetensors"
    os.utime(weights, ns=(0, 0))
    found["weights"] = Start(bench, "evaluate", output.name, SETTINGS).end()
    found["untouched"] = results_of(output) == before
    return found


def train(bench: Bench) -> dict[str, Any]:
    """Two steps: asked to stop in the evaluation before training, and twice in the one after them."""
    settings = (*SETTINGS, "train.steps=2")
    found: dict[str, Any] = {"whole": Start(bench, "train", "trained", settings).end()}
    found["starts"] = [
        Start(bench, "train", "trained_in_parts", settings, hold=2).ask_to_stop(),
        # 2 batches of the first evaluation, 2 of the steps, 2 of the last evaluation
        Start(bench, "train", "trained_in_parts", settings, hold=6).ask_to_stop(),
        Start(bench, "train", "trained_in_parts", settings, hold=1).ask_to_stop(),
        Start(bench, "train", "trained_in_parts", settings).end(),
    ]
    runs = [bench.directory / name for name in ("trained", "trained_in_parts")]
    found["same_metrics"] = metrics(runs[0]) == metrics(runs[1])
    evaluations = [results_of(run / "evaluations") for run in runs]
    found["files"] = sorted(evaluations[1])
    found["same_grades"] = all(
        evaluations[0][name] == evaluations[1][name] for name in evaluations[0] if "gen" not in name
    )
    found["evaluation"] = json.loads(evaluations[1]["step_0000002/evaluation.json"])
    found["logged"] = metrics(runs[1])[-1]
    return found


def reached_anew(bench: Bench) -> dict[str, Any]:
    """Killed in the last evaluation, before a checkpoint: the step comes again, and its evaluation begins afresh."""
    settings = (*SETTINGS, "train.steps=2")
    killed = Start(bench, "train", "anew", settings, hold=8).kill()
    kept = len(list((bench.directory / "anew" / "evaluations" / "step_0000002" / "generations").glob(".*.jsonl")))
    return {"killed": killed, "parts": kept, "last": Start(bench, "train", "anew", settings).end()}


def interrupt(directory: Path) -> dict[str, Any]:
    """All scenarios, in a process that does nothing else."""
    bench = Bench(directory)
    # the rank that is not the first waits for a launcher to end it, and there is none here
    assert exits._WAIT_BEFORE_JOINING_S > 2
    exits._WAIT_BEFORE_JOINING_S = 2
    return {"train": train(bench), "anew": reached_anew(bench), "evaluate": evaluate(bench)}
