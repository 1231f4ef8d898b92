"""What the samples of a step may be: beginnings of responses, and responses of earlier weights. On SmolLM2.

    bash scripts/fetch_smollm2.sh
    python -m studies.real_rollouts run --output runs/real_rollouts
    python -m studies.real_rollouts table

Student and teacher are those of `studies/real_study.py`: 20 of SmolLM2's 30 layers, and all of them. A run is
`nemo-oprd train` in one process with one thread, with `rollout.stop_after` or `rollout.max_lag`; the in-process engine
samples after the same weights as servers would. A run saves checkpoints on its way, because with a constant rate the
first updates of a long run are a shorter run: so one run has the student after as many updates as others, and after as
many operations. Runs with a lag, and those that they are compared with, start from the student after 8 updates, because
the pruned one ends nearly all of its responses after 4 tokens.

`studies/real_rollout_measure.py` measures the students on the teacher's responses to held-out prompts. The small JSON
of each finished run is written to studies/results/real_rollouts/ and is not run again; an unfinished one goes on from
its last checkpoint. `studies/real_rollout_tables.py` makes the tables, docs/results_smollm2.md says what follows.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from studies import real_arms, real_study
from studies.real_models import ROOT, run_tool
from studies.real_rollout_measure import measure, read_teacher, sample_teacher
from studies.real_rollout_tables import RESULTS, Results, read_results, tables

LIMIT, SHORT = 128, 32  # tokens of a response: of the study of beginnings, and of the study of lags
STEPS, LAG_STEPS = 22, 10
WARM = 8  # updates of the first arm after which the other study begins
WARMUP = 3  # updates
LAG = 4
TOKENS = {"all": "all", "first": "first_k", "last": "last_k"}
CORRECTED = "sampled_token corrected"
# of each loss the best of three rates in the study of losses, whose responses have 48 tokens
RATES = {"mse": 3e-4, "full_vocab": 3e-4, "sampled_token": 1e-4, CORRECTED: 1e-4}
# `plan` refuses a correction for an engine that records no log-probabilities; operations do not depend on either
UNLAGGED = ("rollout.max_lag=0", "rollout.correction=off")


@dataclass(frozen=True)
class Arm:
    """One run. `tokens` are the supervised ones, such as `first 16`; sampling ends with the last of the first tokens.

    `limit` is the longest response, `at` are the numbers of updates after which the student is measured. The student
    `warm` is that of the first arm after `WARM` updates.
    """

    student: str = "pruned"
    loss: str = "mse"
    tokens: str = "all"
    limit: int = LIMIT
    lag: int = 0
    seed: int = 0
    at: tuple[int, ...] = (STEPS,)

    @property
    def rate(self) -> float:
        """The learning rate."""
        return RATES[self.loss]

    @property
    def steps(self) -> int:
        """Updates of the run."""
        return max(self.at)

    @property
    def length(self) -> int:
        """Tokens of a response that are sampled at most."""
        kind, _, count = self.tokens.partition(" ")
        return int(count) if kind == "first" else self.limit

    @property
    def name(self) -> str:
        """The name of the run's result file."""
        rate = f"{self.rate:.0e}".replace("e-0", "e-")
        tokens = f"{self.tokens} of {self.limit}"
        parts = [self.loss, tokens, f"lag {self.lag}", rate, f"seed {self.seed}"]
        return "-".join([*(["warm"] if self.student == "warm" else []), *parts]).replace(" ", "_")

    @property
    def settings(self) -> tuple[str, ...]:
        """What differs between arms."""
        kind, _, count = self.tokens.partition(" ")
        where = () if kind == "all" else (f"loss.representation.positions={TOKENS[kind]}",
                                          f"loss.representation.k={count}")  # fmt: skip
        stop = ("rollout.stop_after=supervised",) if kind == "first" else ()
        lagged = ("rollout.correction=truncate",) if self.loss == CORRECTED else ()
        return (f"rollout.max_new_tokens={self.limit}", *where, *stop, f"rollout.max_lag={self.lag}", *lagged)

    @property
    def of_losses(self) -> real_arms.Arm:
        """The same run for the study of losses, which knows the models and the losses."""
        # rounded up to WARMUP updates, whatever the length of the run is
        warmup = f"train.warmup_fraction={(WARMUP - 0.5) / self.steps:.4f}"
        kept = (f"train.save_every={math.gcd(*self.at)}", "train.keep_checkpoints=0")
        common = ("logging.output_metrics_every=0", warmup, *kept)
        loss = self.loss.removesuffix(" corrected")
        settings = (*self.settings, *common)
        return real_arms.Arm(loss, self.rate, self.seed, self.student, steps=self.steps, settings=settings)


def arms() -> Iterator[Arm]:
    """The arms in their order, the decisive ones first."""
    # 8, 10 and 14 of 22 updates on all tokens take as many operations as 22 on the first 16, 32 and 64
    yield Arm(at=(WARM, 10, 14, STEPS))
    for tokens in ("first 16", "first 32"):
        yield Arm(tokens=tokens)
    yield Arm(tokens="last 32", at=(WARM,))
    for loss in ("mse", CORRECTED, "full_vocab"):
        for lag in (0, LAG):
            # without a lag all weights of a correction are 1
            named = loss if lag else loss.removesuffix(" corrected")
            yield Arm("warm", named, limit=SHORT, lag=lag, at=(LAG_STEPS,))
    yield Arm(tokens="first 64")


@dataclass
class Study(real_study.Study):
    """The study in the directory `root`, which holds models, runs and the teacher's distributions."""

    def prepare(self, teacher: Path) -> None:
        """Makes the models, the teacher's responses and the measurements before training that are missing."""
        self.make_models(teacher)
        sample_teacher(self.root / "models" / "teacher", LIMIT)
        if not (RESULTS / "start.json").is_file():
            measured = self._measure({"0": self.root / "models" / "pruned"})
            real_study.write_json(RESULTS / "start.json", {"measured": measured})

    def run_arm(self, arm: Arm) -> None:
        """Trains and measures one arm, unless its result is there."""
        if result_file(arm).is_file():
            return
        began = time.monotonic()
        directory = self.root / "runs" / arm.name
        settings = self.settings(arm.of_losses, directory)
        module = "studies.recording_engine" if arm.loss == CORRECTED else "nemo_oprd"
        self.command("train", ["--config-name", "real_model", *settings], f"{arm.name}.train", module)
        seconds = round(time.monotonic() - began)
        students = {str(update): self._export(directory, update) for update in arm.at}
        if arm == next(arms()) and not (self.root / "models" / "warm").is_dir():
            shutil.copytree(students[str(WARM)], self.root / "models" / "warm")
        records = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
        content = {"arm": asdict(arm), "rate": arm.rate, "settings": arm.settings,
                   "operations": real_study.operations([*settings, *UNLAGGED], arm.length),
                   "training": training(records), "measured": self._measure(students),
                   "machine": real_study.machine(), "seconds": seconds}  # fmt: skip
        real_study.write_json(result_file(arm), content)
        shutil.rmtree(directory, ignore_errors=True)
        print(f"{time.strftime('%H:%M:%S')} {arm.name}: {seconds} s", flush=True)

    def _export(self, directory: Path, update: int) -> Path:
        """The Hugging Face model after some updates of a run."""
        place = directory / f"hf_{update}"
        if not place.is_dir():
            checkpoint = directory / "checkpoints" / f"iter_{update:07d}"
            run_tool("megatron_to_hf", "--megatron-path", str(checkpoint), "--output", str(place), "--dtype", "float32")
        return place

    def _measure(self, students: dict[str, Path]) -> dict[str, Any]:
        models = self.root / "models"
        return measure(students, models / "teacher", read_teacher(), self.root / "teacher_logprobs.pt")


def result_file(arm: Arm) -> Path:
    """Where the measurements of an arm are kept."""
    return RESULTS / f"{arm.name}.json"


def training(records: list[dict[str, Any]]) -> dict[str, Any]:
    """The training's curves, tokens that were sampled, seconds, and what a lag changed in the second half."""
    late = records[len(records) // 2 :]
    # the engine records log-probabilities, and so a drift, only where a correction needs them
    names = ("rollout/lag_mean", "rollout/drift_kl", "rollout/drift_effective_sample_size", "rollout/correction_mean")
    means = {name: sum(record[name] for record in late) / len(late) for name in names if name in late[0]}
    sampled = sum(record["response_length/mean"] for record in records) * real_study.RESPONSES
    return {**real_study.curves(records), "sampled_tokens": round(sampled), **means}


def run_all(study: Study, chosen: list[Arm]) -> None:
    """Runs arms in their order; a failed one is reported and the others go on."""
    for arm in chosen:
        try:
            study.run_arm(arm)
        except Exception as error:  # whatever stopped this run need not stop the others
            print(f"{arm.name} failed: {type(error).__name__}: {error}", file=sys.stderr, flush=True)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=["run", "table"])
    parser.add_argument("--output", default="runs/real_rollouts", metavar="DIR")
    parser.add_argument("--teacher", default=str(ROOT / "models/SmolLM2-135M-Instruct"), metavar="DIR")
    parser.add_argument("--only", nargs="+", metavar="TEXT", help="run only arms whose names contain one of these")
    options = parser.parse_args()
    if options.command == "run":
        study = Study(Path(options.output).absolute())
        study.prepare(Path(options.teacher))
        wanted = [arm for arm in arms() if not options.only or any(text in arm.name for text in options.only)]
        run_all(study, wanted)
    results: Results = read_results()
    print(tables(results))


if __name__ == "__main__":
    main()
