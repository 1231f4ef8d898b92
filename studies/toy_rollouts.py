"""What the samples of a step may be: beginnings of responses, and responses of earlier weights. On toy pairs.

    python -m studies.toy_rollouts run --output runs/rollouts --jobs 2
    python -m studies.toy_rollouts table

A run is `nemo-oprd train` in one process with one thread on a pair of `studies/toy_study.py`, with `rollout.stop_after`
or `rollout.max_lag`; the in-process engine samples after the same weights as servers would. Each student is measured on
held-out problems: both divergences from the teacher on the teacher's whole responses, exactly and by position, and the
share of problems that it solves. The small JSON of each finished run is written to studies/results/toy_rollouts/ and is
not run again. `studies/toy_rollout_tables.py` makes the tables, docs/results_rollouts.md says what follows from them.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nemo_oprd.commands.plan.operations import step_flops
from nemo_oprd.commands.plan.workload import make_workload
from nemo_oprd.commands.toy import task
from nemo_oprd.commands.toy.pair import make_pair, sample_responses
from nemo_oprd.config.loading import load_config
from nemo_oprd.setup.resolve import resolve_models
from studies.real_study import write_json
from studies.toy_models import PAIR_WIDTH
from studies.toy_rollout_tables import RESULTS, SEED, SEEDS, STEPS, details, read_results, tables
from studies.toy_study import run_command

RESPONSES, WHOLE = 64, 30  # a right response has 29 or 30 tokens
TUNE, HELDOUT = 200, 300
# the second rate depends on what was best in the study of objectives
RATE, HIGHER, LOWER = 5e-4, 1e-3, 2e-4

OUTPUT = ("loss.representation.layers=none", "loss.output.weight=1")
SAMPLED = (*OUTPUT, "loss.output.kind=sampled_token", "rollout.correction=truncate")
LOSSES: dict[str, tuple[str, ...]] = {
    "mse token": (),
    "mse predicting": ("loss.representation.position=predicting",),
    "forward_kl": (*OUTPUT, "loss.output.kind=forward_kl"),
    "full_vocab": (*OUTPUT, "loss.output.kind=full_vocab"),
    # a range around 1 makes all weights 1: with a lag, a run without a correction is refused
    "sampled_token": (*SAMPLED, "rollout.correction_range=[0.999999,1.000001]"),
    "sampled_token corrected": SAMPLED,
}  # fmt: skip
TOKENS = {"all": "all", "first": "first_k", "last": "last_k"}


@dataclass(frozen=True)
class Arm:
    """One run. `tokens` are the supervised ones, such as `first 8`; sampling ends with the last of the first tokens."""

    loss: str
    tokens: str = "all"
    lag: int = 0
    rate: float = RATE
    seed: int = SEED
    steps: int = STEPS

    @property
    def name(self) -> str:
        """The name of the run's result file."""
        parts = [
            self.loss,
            self.tokens,
            f"lag {self.lag}",
            f"{self.rate:.0e}".replace("e-0", "e-"),
            f"seed {self.seed}",
        ]
        return "-".join([*parts, *([f"{self.steps} updates"] if self.steps != STEPS else [])]).replace(" ", "_")

    @property
    def length(self) -> int:
        """Tokens of a response that are sampled."""
        kind, _, count = self.tokens.partition(" ")
        return int(count) if kind == "first" else WHOLE

    @property
    def settings(self) -> tuple[str, ...]:
        """What differs between arms."""
        kind, _, count = self.tokens.partition(" ")
        stop = ("rollout.stop_after=supervised",) if kind == "first" else ()
        where = (f"loss.representation.positions={TOKENS[kind]}", f"loss.representation.k={count or 1}")
        return (*LOSSES[self.loss], *where, *stop, f"rollout.max_lag={self.lag}", f"train.lr={self.rate}",
                f"train.steps={self.steps}", f"seed={self.seed}")  # fmt: skip


# Hydra composes one configuration at a time; the measurements share one thread
_COMPOSING, _MEASURING = threading.Lock(), threading.Lock()


@dataclass
class Study:
    """The study in the directory `root`, which holds pairs and runs."""

    root: Path

    def pair(self, seed: int) -> Path:
        """The directory of a seed's pair."""
        return self.root / "pairs" / str(seed)

    def settings(self, arm: Arm) -> list[str]:
        """Of the training run, without its output directory."""
        pair = self.pair(arm.seed)
        return [
            f"student.hf_path={pair}/student", f"teacher.hf_path={pair}/teacher", "student.parallel.tensor=1",
            f"data.train={pair}/prompts/train.jsonl", f"data.validation.heldout={pair}/prompts/heldout.jsonl",
            "evaluation.teacher=false", "evaluation.every=0", "train.save_every=0", "logging.every=50",
            f"train.prompts_per_step={RESPONSES}", *arm.settings,
        ]  # fmt: skip

    def operations(self, arm: Arm) -> dict[str, float]:
        """Counted floating-point operations of an update in 10^9, by `nemo-oprd plan`'s formulas, without metrics."""
        # only an engine that records log-probabilities may have a correction
        plain = ["logging.output_metrics_every=0", "rollout.max_lag=0", "rollout.correction=off"]
        with _COMPOSING:
            config = load_config("quickstart", [*self.settings(arm), *plain])
        work = make_workload(config, resolve_models(config), prompt=task.PROMPT_LENGTH, response=arm.length)
        return {kind: value / 1e9 for kind, value in asdict(step_flops(work)).items()}

    def work(self, arm: Arm) -> float:
        """The sum of `operations`."""
        return sum(self.operations(arm).values())

    def run(self, arm: Arm) -> None:
        """Trains and measures one arm, unless its result is there."""
        if result_file(arm).is_file():
            return
        directory = self.root / "runs" / arm.name
        shutil.rmtree(directory, ignore_errors=True)
        module = "studies.recording_engine" if "sampled_token" in arm.loss else "nemo_oprd"
        began = time.monotonic()
        run_command("train", [*self.settings(arm), f"output={directory}"], directory, module)
        records = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
        with _MEASURING:
            measured = measure(directory / "hf", self.pair(arm.seed))
        content = {"arm": asdict(arm), "settings": arm.settings, "operations": self.operations(arm),
                   "training": training(records), **measured, "seconds": round(time.monotonic() - began)}  # fmt: skip
        write_json(result_file(arm), content)
        shutil.rmtree(directory, ignore_errors=True)
        kl = np.mean(measured["heldout"]["reverse_kl"])
        solved = np.mean(measured["heldout"]["solved"])
        print(f"{time.strftime('%H:%M:%S')} {arm.name}: reverse KL {kl:.4f}, solved {solved:.1%}", flush=True)

    def start(self, seed: int) -> None:
        """Makes the pair of a seed, and measures its student before training."""
        with _MEASURING:
            make_pair(self.pair(seed), seed=seed, hidden=PAIR_WIDTH, log=lambda _: None)
            file = RESULTS / f"start-seed_{seed}.json"
            if not file.is_file():
                write_json(file, {"seed": seed, **measure(self.pair(seed) / "student", self.pair(seed))})


def stages(study: Study) -> Iterator[list[Arm]]:
    """The arms in their order, the decisive ones first."""
    losses = [(loss, "all", lag) for lag in (0, 8) for loss in LOSSES if (loss, lag) != ("sampled_token corrected", 0)]
    parts = [("mse token", tokens, 0) for tokens in ("first 8", "last 8", "first 4", "first 16")]
    late = [("mse token", tokens, 8) for tokens in ("first 8", "last 8")]
    yield [Arm(*key) for key in (*losses, *parts[:3])]
    # all tokens with as many operations as the beginnings need in all their updates
    whole = Arm("mse token")
    shorter = [round(STEPS * study.work(Arm(*key)) / study.work(whole)) for key in parts if "first" in key[1]]
    yield [replace(whole, steps=shorter[0])]
    # by the study of objectives the sampled token and few tokens want a lower rate than the others
    yield [Arm(*key, LOWER) for key in reversed(losses) if "sampled" in key[0]]
    yield [Arm(*key) for key in late]
    yield [Arm(*parts[3]), *(replace(whole, steps=steps) for steps in shorter[1:])]
    yield [Arm(*key, LOWER) for key in parts[:2]]
    yield [Arm(loss, "all", 2, LOWER if "sampled" in loss else RATE) for loss in LOSSES]
    # the comparisons whose sides are close, with other pairs, prompts and samples
    close = [whole, Arm(*parts[0]), replace(whole, steps=shorter[0]), replace(whole, lag=8)]
    close += [Arm("mse predicting", lag=lag) for lag in (0, 8)]
    for seed in SEEDS[1:]:
        yield [replace(arm, seed=seed) for arm in close]
    yield [Arm(*key, rate) for rate in (LOWER, HIGHER) for key in reversed(losses) if "mse" in key[0]]
    yield [Arm(*key, HIGHER) for key in losses if "sampled" not in key[0]]


def result_file(arm: Arm) -> Path:
    """Where the measurements of an arm are kept."""
    return RESULTS / f"{arm.name}.json"


def training(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Tokens that were sampled, and means over the second half of the updates."""
    late = records[len(records) // 2 :]
    names = ("loss/total", "actor/grad_norm", "response_length/mean", "rollout/lag_mean", "rollout/drift_kl",
             "rollout/drift_effective_sample_size", "rollout/correction_mean")  # fmt: skip
    means = {name: float(np.mean([r[name] for r in late])) for name in names if name in late[0]}
    return {"sampled_tokens": round(sum(r["response_length/mean"] for r in records) * RESPONSES), **means}


@torch.no_grad()
def measure(student: Path, pair: Path) -> dict[str, Any]:
    """Per problem of two sets: means of both divergences over the teacher's response, and the share solved.

    `by_position` has the divergences' means over held-out problems, for the positions that all responses have.
    """
    from nemo_oprd.evaluation.agreement import load_model
    from studies.theory import read_problems

    models = [load_model(directory, torch.float32) for directory in (student, pair / "teacher")]
    found: dict[str, Any] = {}
    for name, count in (("tune", TUNE), ("heldout", HELDOUT)):
        problems = read_problems(pair / "prompts" / f"{name}.jsonl")[:count]
        responses = sample_responses(models[1], problems, temperature=1.0, seed=0)
        forward, reverse = divergences(models, problems, responses)
        own = [sample_responses(models[0], problems, temperature=0.7, seed=seed) for seed in (1, 2)]
        right = [
            [task.is_correct(ids, a, b) for ids, (a, b) in zip(each, problems.tolist(), strict=True)] for each in own
        ]
        found[name] = {"forward_kl": np.nanmean(forward, 1).tolist(), "reverse_kl": np.nanmean(reverse, 1).tolist(),
                       "solved": np.mean(right, 0).tolist()}  # fmt: skip
        shortest = min(map(len, responses))
        by_position = {"forward_kl": forward, "reverse_kl": reverse}
        found["by_position"] = {key: np.nanmean(kl[:, :shortest], 0).tolist() for key, kl in by_position.items()}
    return found


def divergences(models: list[Any], problems: np.ndarray, responses: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """KL(t|s) and KL(s|t) at every response position, [problems, positions] in nats; NaN behind a response's end."""
    longest, prompt = max(map(len, responses)), task.PROMPT_LENGTH
    rows = [
        task.encode(task.prompt_text(a, b)) + ids + [task.PAD_ID] * (longest - len(ids))
        for (a, b), ids in zip(problems.tolist(), responses, strict=True)
    ]
    student, teacher = (
        model(input_ids=torch.tensor(rows)).logits[:, prompt - 1 : -1].double().log_softmax(-1) for model in models
    )
    beyond = np.arange(longest) >= np.array([len(ids) for ids in responses])[:, None]
    pairs = ((teacher, student), (student, teacher))
    forward, reverse = (np.where(beyond, np.nan, (p.exp() * (p - q)).sum(-1).numpy()) for p, q in pairs)
    return forward, reverse


def run_all(study: Study, arms: Iterable[Arm], jobs: int) -> None:
    """Runs arms in their order, `jobs` at a time; a failed one is reported and the others go on."""

    def one(arm: Arm) -> None:
        try:
            study.start(arm.seed)
            study.run(arm)
        except Exception as error:  # whatever stopped this run need not stop the others
            print(f"{arm.name} failed: {type(error).__name__}: {error}", file=sys.stderr, flush=True)

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(one, arms))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=["run", "table"])
    parser.add_argument("--output", default="runs/rollouts", metavar="DIR")
    parser.add_argument("--jobs", type=int, default=1, help="number of simultaneous runs; each has one thread")
    parser.add_argument("--only", nargs="+", metavar="TEXT", help="run only arms whose names contain one of these")
    options = parser.parse_args()
    if options.command == "run":
        torch.set_num_threads(1)
        study = Study(Path(options.output).absolute())
        study.start(SEED)
        for arms in stages(study):
            wanted = [arm for arm in arms if not options.only or any(text in arm.name for text in options.only)]
            run_all(study, wanted, options.jobs)
    print(f"{tables(read_results())}\n\n{details(read_results())}")


if __name__ == "__main__":
    main()
