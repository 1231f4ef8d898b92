"""How long a step is with sampling ahead of the update: a model's prediction against runs with servers that sleep.

    python -m benchmarks.timeline [--shares 98 90 70 50] [--runs exact,1 segments,3 stream,4] [--steps 10] [--json FILE]

A run trains the tiny pair of `nemo-oprd toy` on one rank. Two servers sleep for each token (`sleeping_servers.py`), and
the teacher sleeps before it answers, so that sampling has the given share of a synchronous step, and neither is limited
by this machine's cores. Everything else is the real trainer. The phases besides sampling are taken from the synchronous
run's timeline.jsonl (medians); the model (`timeline_model.py`) adds the sampling, from the seconds per token and the
lengths of the responses, and the schedule. Its steps are compared with those of the timelines of all runs.

The second table is computed only (`timeline_gpus.py`): lag and segments against a synchronous run on as many GPUs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.sleeping_servers import interpreter
from benchmarks.timeline_gpus import GPU_HEAD, compare, gpu_line
from benchmarks.timeline_model import Schedule, Servers, Work, finish_times, predict, seconds_per_step
from nemo_oprd.rollout.engine import Request
from nemo_oprd.run.timeline import SAMPLING, Interval, hidden_share, read_timeline
from nemo_oprd.tools.toy.pair import make_tiny_pair
from nemo_oprd.vllm.rounds import LengthEstimate

# tokens of a response: a few are much longer than the others
LENGTHS = [4, 6, 6, 8, 8, 10, 12, 14, 20, 32]
SERVERS, SLOTS, RESPONSES = 2, 4, 16
# tokens of each prompt of the tiny pair
PROMPT = 10
# seconds of a synchronous step; long where little of it is left for the rest
STEP_S = {98: 16.0, 95: 10.0, 90: 8.0, 70: 6.0, 50: 6.0}
HEAD = (
    "| sampling | mode, lag | step | predicted | error | of synchronous | predicted | whole run "
    "| hidden | predicted |\n"
    "|---|---|---|---|---|---|---|---|---|---|"
)


@dataclass(frozen=True)
class Kind:
    """How far a run samples ahead: `rollout.mode` and `rollout.max_lag`."""

    mode: str = "exact"
    lag: int = 0

    @staticmethod
    def parse(text: str) -> Kind:
        """Of `MODE,LAG`."""
        mode, _, lag = text.partition(",")
        if mode not in ("exact", "segments", "stream") or not lag.isdigit():
            raise argparse.ArgumentTypeError(f"{text}: expected exact, segments or stream, a comma and a lag")
        return Kind(mode, int(lag))

    @property
    def name(self) -> str:
        """For tables; as `parse` takes it."""
        return f"{self.mode}, {self.lag}" if self.lag else "synchronous"

    @property
    def overrides(self) -> list[str]:
        """Of the configuration; in segments, the longest responses take all students that the lag allows."""
        segments = self.segment_tokens
        more = [] if segments is None else [f"rollout.segment_tokens={segments}"]
        return [f"rollout.max_lag={self.lag}", f"rollout.mode={self.mode}", *more]

    @property
    def segment_tokens(self) -> int | None:
        """`rollout.segment_tokens`."""
        return -(-max(LENGTHS) // (self.lag + 1)) if self.mode == "segments" else None

    def schedule(self, steps: int) -> Schedule:
        """As the model takes it."""
        return Schedule(steps, self.lag, self.segment_tokens, streams=self.mode == "stream")


SYNCHRONOUS = Kind()


class Bench:
    """A directory with the tiny pair and the runs of the benchmark."""

    def __init__(self, root: Path, steps: int) -> None:
        self.root, self.steps = root, steps
        make_tiny_pair(root / "toy", log=lambda line: None)

    def run(self, name: str, kind: Kind, token_s: float, teacher_s: float) -> Path:
        """Trains; returns the run directory."""
        from nemo_oprd.config.loading import load_config
        from nemo_oprd.distillation.distiller import Distiller
        from nemo_oprd.run import engine_kinds
        from nemo_oprd.train import train

        python, toy, output = (
            interpreter(self.root / f"{name}_servers", token_s, {"whole": [PROMPT + tokens for tokens in LENGTHS]}),
            self.root / "toy",
            self.root / name,
        )
        overrides = [
            *(f"{role}.hf_path={toy / role}" for role in ("student", "teacher")),
            *("student.checkpoint=null", "teacher.checkpoint=null", "student.parallel.tensor=1"),
            *(f"data.train={toy / 'prompts' / 'train.jsonl'}", "data.validation={}", "evaluation.every=0"),
            *("evaluation.teacher=false", "logging.tensorboard=false", "train.export_hf=false", "train.save_every=0"),
            *(f"train.steps={self.steps}", f"train.prompts_per_step={RESPONSES}", "rollout.save=true"),
            *("rollout.engine=vllm", f"rollout.vllm.python={python}", f"rollout.vllm.replicas={SERVERS}"),
            *(f"rollout.max_batch={SLOTS}", *kind.overrides, "rollout.vllm.check_tokens=0"),
            *(f"rollout.max_new_tokens={max(LENGTHS)}", f"output={output}"),
        ]
        targets = Distiller.targets

        def slowly(*arguments: Any) -> Any:
            time.sleep(teacher_s)
            return targets(*arguments)

        with ExitStack() as patched:
            patched.enter_context(mock.patch.object(Distiller, "targets", slowly))
            # real servers on a CPU do not know heads of the tiny pair's size
            patched.enter_context(mock.patch.object(engine_kinds, "check_head_size"))
            train(load_config("quickstart", overrides))
        return output


def lengths_of(run: Path, steps: int) -> list[list[int]]:
    """The tokens of the responses of each step, in the order in which the engine asks for them."""
    estimate, found = LengthEstimate(), []
    for step in range(1, steps + 1):
        lines = (run / "rollouts" / f"step_{step:07d}.jsonl").read_text().splitlines()
        rollouts = [json.loads(line) for line in lines]
        requests = [Request(rollout["prompt_ids"]) for rollout in rollouts]
        tokens = {i: len(rollout["response_ids"]) for i, rollout in enumerate(rollouts)}
        found.append([tokens[i] for i in estimate.longest_first(requests, range(len(requests)))])
        estimate.learn(requests, tokens)
    return found


def work_of(intervals: Sequence[Interval]) -> Work:
    """The phases besides sampling in a synchronous run: medians over its steps, without the first one.

    The gradient is what is between the last response and the optimizer, the planning of the batch included.
    """
    of = {(each.step, each.phase): each for each in intervals}
    steps = sorted({each.step for each in intervals})[2:]
    begins = {step: of[step, "generate"].began for step in steps}
    return Work(
        push=statistics.median(of[step, "sync"].ended - of[step, "sync"].began for step in steps),
        gradient=statistics.median(of[step, "optimizer"].began - of[step, "generate"].ended for step in steps),
        optimizer=statistics.median(of[step, "sync"].began - of[step, "optimizer"].began for step in steps),
        other=statistics.median(begins[step + 1] - of[step, "sync"].ended for step in steps[:-1]),
    )


def settle(share: int, overhead: float, mean_span: float) -> tuple[float, float]:
    """(Seconds per token, seconds of the teacher) with which sampling has `share` percent of a synchronous step.

    Args:
        overhead: seconds of a step in which nothing sleeps.
        mean_span: decoding steps until the last response of a batch, on average.
    """
    step = STEP_S[share]
    return share / 100 * step / mean_span, max(0.0, (1 - share / 100) * step - overhead)


def row_of(
    run: Path, share: int, kind: Kind, predicted: list[Interval], first: dict[str, Any] | None
) -> dict[str, Any]:
    """The numbers of one run. `first`: those of the synchronous run; None for itself.

    The first step and the last ones, ahead of which nothing is sampled, are left out; not the last ones of mode stream,
    in which steps trade what they wait for. In mode exact a step is compared with the synchronous one that samples the
    same batch, in the others with all but the first one.
    """
    found = read_timeline(run)
    measured, expected = seconds_per_step(found), seconds_per_step(predicted)
    middle = slice(1, len(measured) - (0 if kind.mode == "stream" else kind.lag))
    same = slice(1 + kind.lag if kind.mode == "exact" else 1, len(measured))
    base = measured if first is None else first["step_seconds"]
    base_expected = expected if first is None else first["predicted_step_seconds"]
    step, model = statistics.fmean(measured[middle]), statistics.fmean(expected[middle])
    sampling = [each.ended - each.began for each in found if each.phase == SAMPLING and each.batch > 1]
    return {
        "share": share,
        "mode": kind.mode,
        "lag": kind.lag,
        "step_s": step,
        "predicted_s": model,
        "error": model / step - 1,
        "of_synchronous": step / statistics.fmean(base[same]),
        "predicted_of_synchronous": model / statistics.fmean(base_expected[same]),
        "run_s": sum(measured),
        "predicted_run_s": sum(expected),
        "run_of_synchronous": sum(measured) / sum(base),
        "hidden": hidden_share(found),
        "predicted_hidden": hidden_share(predicted),
        "sampling_s": statistics.fmean(sampling),
        "step_seconds": measured,
        "predicted_step_seconds": expected,
    }


def line(row: dict[str, Any]) -> str:
    """A line of the table."""
    step = f"{row['step_s']:.2f} s | {row['predicted_s']:.2f} s | {100 * row['error']:+.1f} %"
    ratios = " | ".join(
        f"{row[key]:.2f}" for key in ("of_synchronous", "predicted_of_synchronous", "run_of_synchronous")
    )
    hidden = f"{100 * row['hidden']:.0f} % | {100 * row['predicted_hidden']:.0f} %"
    return f"| {row['share']} % | {Kind(row['mode'], row['lag']).name} | {step} | {ratios} | {hidden} |"


def measure(bench: Bench, shares: Sequence[int], kinds: Sequence[Kind]) -> list[dict[str, Any]]:
    """The rows of all runs; prints each."""
    pilot = bench.run("pilot", SYNCHRONOUS, 0.0, 0.0)
    lengths = lengths_of(pilot, bench.steps)
    counting = Servers(SERVERS, SLOTS, 1.0)
    span = statistics.fmean(max(finish_times([(tokens, 0) for tokens in batch], counting)) for batch in lengths)
    overhead = statistics.median(seconds_per_step(read_timeline(pilot))[1:])
    print(f"a step in which nothing sleeps: {overhead:.2f} s; a batch: {span:.1f} decoding steps\n\n{HEAD}", flush=True)
    rows = []
    for share in shares:
        token_s, teacher_s = settle(share, overhead, span)
        runs = {
            kind: bench.run(f"share_{share}_{kind.mode}_{kind.lag}", kind, token_s, teacher_s)
            for kind in (SYNCHRONOUS, *kinds)
        }
        rows += rows_of(runs, share, lengths, token_s)
        print(*map(line, rows[-len(runs) :]), sep="\n", flush=True)
    return rows


def rows_of(runs: dict[Kind, Path], share: int, lengths: list[list[int]], token_s: float) -> list[dict[str, Any]]:
    """The rows of the runs with one share of sampling, by their kind; the first one is synchronous."""
    servers, rows = Servers(SERVERS, SLOTS, token_s), list[dict[str, Any]]()
    work = work_of(read_timeline(runs[SYNCHRONOUS]))
    for kind, run in runs.items():
        found = lengths_of(run, len(lengths))
        if kind.mode == "stream":  # whose steps take other responses
            assert sorted(chain(*found)) == sorted(chain(*lengths))
        else:
            assert found == lengths, "the lengths do not depend on the weights"
        predicted = predict(lengths, work, servers, kind.schedule(len(lengths)))
        row = row_of(run, share, kind, predicted, rows[0] if rows else None)
        rows.append(row | {"token_s": token_s, "work": vars(work)})
    return rows


def rounded(value: Any) -> Any:
    """Numbers to four digits behind the point."""
    if isinstance(value, float):
        return round(value, 4)
    if isinstance(value, dict):
        return {name: rounded(item) for name, item in value.items()}
    return [rounded(item) for item in value] if isinstance(value, list) else value


def main() -> None:
    """Prints both tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--shares", nargs="*", type=int, choices=[*STEP_S], default=[98, 90, 70, 50], help="of sampling, in percent"
    )
    kinds = [Kind("exact", 1), Kind("segments", 3), Kind("stream", 4)]
    parser.add_argument("--runs", nargs="+", type=Kind.parse, default=kinds, metavar="MODE,LAG", help="beside lag 0")
    parser.add_argument("--steps", type=int, default=10, help="of each run")
    parser.add_argument("--directory", type=Path, help="keep the runs there")
    parser.add_argument("--json", metavar="FILE", help="also write the rows there")
    options = parser.parse_args()
    least = 4 + max(kind.lag for kind in options.runs)
    if options.steps < least:
        parser.error(f"--steps {options.steps}: expected at least {least} with this lag")
    found: dict[str, Any] = {"measured": []}
    with tempfile.TemporaryDirectory() as folder:
        if options.shares:
            bench = Bench(options.directory or Path(folder), options.steps)
            found["measured"] = measure(bench, options.shares, options.runs)
    found["equal_gpus"] = compare()
    print("\n" + GPU_HEAD, *map(gpu_line, found["equal_gpus"]), sep="\n")
    if options.json:
        Path(options.json).write_text(json.dumps(rounded(found), indent=1) + "\n")


if __name__ == "__main__":
    main()
