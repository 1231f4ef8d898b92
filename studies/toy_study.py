"""Compares objectives on toy pairs over several seeds: runs missing arms, then writes a table and a figure.

    python -m studies.toy_study objectives --output runs/study --seeds 0 1 2 --jobs 2
    python -m studies.toy_study ablation --output runs/study --seeds 0 1 2 --jobs 2
    python -m studies.toy_study bridge --output runs/study --seeds 0 1 2 --jobs 2
    python -m studies.toy_study tokenizers --output runs/study --seeds 0 1 2 --jobs 2
    python -m studies.toy_study merge --output runs/study --seeds 0 1 2 --jobs 2
    python -m studies.toy_study self --output runs/study --seeds 0 1 2 --jobs 2

Every arm of a study is a plain `nemo-oprd train` in a single-threaded process; `nemo-oprd report` reads its directory
`STUDY/ARM-SEED`. A restarted study keeps finished arms and starts the others over. Students are made
like those of `nemo-oprd toy`, but are narrower: width 96, 4 layers, some 40 % of the problems solved. The teachers of
`bridge` have width 128 and 6 layers and were trained from another seed on the same task; those of `tokenizers` have
another vocabulary (`tests/support/bpe_teacher.py`). The models of `merge` and `self` are those of `toy_models.py`.

Accuracy is measured on 200 held-out problems, with 2 samples each at T = 0.7, after the last update. `objectives` and
`ablation` try several learning rates per method on the first seed; the other seeds use the rate that solves most tune
problems.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from studies.toy_arms import RANKS, STEPS, STUDIES, TEACHERS, Arm
from studies.toy_models import PAIR_WIDTH, SOLUTION_PROMPT, make_self_teaching_student, make_specialists

EVALUATED = 200
ROOT = Path(__file__).parent.parent


@dataclass
class Study:
    """A study in the directory `root`; the studies in a directory share models and bridges."""

    name: str
    root: Path
    log: Callable[[str], None] = print
    began: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.arms = STUDIES[self.name]()

    def run(self, seeds: list[int], jobs: int) -> None:
        """Runs missing arms; an arm that continues from another one runs after it."""
        for seed in seeds:
            self._models(seed)
        for waiting in (False, True):
            arms = [arm for arm in self.arms if (arm.after is not None) == waiting]
            for part in (seeds[:1], seeds[1:]):
                chosen = arms if part == seeds[:1] else [arm for arm in arms if arm in self.best(seeds[0])]
                todo = [(arm, seed) for seed in part for arm in chosen if not self.done(arm, seed)]
                with ThreadPoolExecutor(jobs) as pool:
                    list(pool.map(lambda item: self._train(*item), todo))

    def best(self, seed: int) -> list[Arm]:
        """The arm of each method that solves most tune problems, and all arms without a method."""
        kept = [arm for arm in self.arms if arm.method is None]
        for method in dict.fromkeys(arm.method for arm in self.arms if arm.method is not None):
            arms = [arm for arm in self.arms if arm.method == method and self.done(arm, seed)]
            kept += [max(arms, key=lambda arm: self._accuracy(arm, seed, "tune"))] if arms else []
        return kept

    def directory(self, arm: Arm, seed: int) -> Path:
        """The directory of one run."""
        return self.root / self.name / f"{''.join(c if c.isalnum() else '_' for c in arm.name)}-{seed}"

    def records(self, arm: Arm, seed: int) -> list[dict[str, Any]]:
        """The metrics of one run."""
        file = self.directory(arm, seed) / "metrics.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []

    def done(self, arm: Arm, seed: int) -> bool:
        """Whether a run is finished."""
        return (self.directory(arm, seed) / "done").is_file()

    def _models(self, seed: int) -> None:
        from nemo_oprd.tools.toy.pair import Recipe, build_pair, make_pair

        if self.name in ("merge", "self"):
            make = {"merge": make_specialists, "self": make_self_teaching_student}[self.name]
            make(self.root / f"{self.name}_models" / str(seed), seed=seed, log=self.log)
            return
        make_pair(self.root / "pairs" / str(seed), seed=seed, hidden=PAIR_WIDTH, log=self.log)
        if self.name == "bridge":
            recipe = Recipe(seed=100 + seed, steps=400, student_step=200, layers=6, hidden=128)
            build_pair(recipe, self.root / "wide" / str(seed), self.log)
            self._bridges(seed)
        if self.name == "tokenizers":
            from tests.support.bpe_teacher import make_bpe_teacher

            make_bpe_teacher(self.root / "bpe" / str(seed), seed=seed, log=self.log)
            for arm in self.arms:
                bridge = self.root / "bridges" / str(seed) / str(arm.bridge)
                if not (bridge / "bridge.json").is_file():
                    kept = [setting for setting in arm.settings if setting.startswith(("teacher.", "alignment."))]
                    settings = [*kept, f"output={bridge}", "bridge.rank=8", "bridge.prompts=512"]
                    self._command("fit-bridge", [*self._common(seed), *settings], bridge, arm.reading)

    def _application(self, seed: int) -> list[str]:
        """The settings that all arms of `merge` or `self` share."""
        models = self.root / f"{self.name}_models" / str(seed)
        tasks = {"merge": ("addition", "subtraction"), "self": ("addition",)}[self.name]
        teachers = ", ".join(
            f"{{hf_path: {models}/teacher_{task}, data_sources: [toy_{task}]}}" for task in tasks if len(tasks) > 1
        )
        return [
            f"student.hf_path={models}/student", "student.parallel.tensor=1", "teacher.checkpoint=null",
            f"data.train=[{','.join(f'{models}/prompts/train_{task}.jsonl' for task in tasks)}]",
            *(
                f"data.validation.{name}={models}/prompts/heldout_{task}.jsonl"
                for name, task in zip(("heldout", "subtraction"), tasks, strict=False)
            ),
            f"seed={seed}", "evaluation.teacher=false",
            f"teachers=[{teachers}]" if teachers else f"teacher.prompt='{SOLUTION_PROMPT}'",
        ]  # fmt: skip

    def _common(self, seed: int) -> list[str]:
        pair = self.root / "pairs" / str(seed)
        teacher = TEACHERS.get(self.name, "pairs/{seed}/teacher").format(seed=seed)
        return [
            f"student.hf_path={pair}/student", f"teacher.hf_path={self.root}/{teacher}",
            "student.parallel.tensor=1", f"data.train={pair}/prompts/train.jsonl", f"seed={seed}",
            "evaluation.teacher=false",
        ]  # fmt: skip

    def _train(self, arm: Arm, seed: int) -> None:
        pair, directory = self.root / "pairs" / str(seed), self.directory(arm, seed)
        pair_settings = [
            *self._common(seed),
            f"data.validation.heldout={pair}/prompts/heldout.jsonl", f"data.validation.tune={pair}/prompts/tune.jsonl",
        ]  # fmt: skip
        settings = [
            *(self._application(seed) if self.name in ("merge", "self") else pair_settings),
            f"output={directory}", f"evaluation.limit={EVALUATED}",
            f"evaluation.every={STEPS}", "train.save_every=0",
            f"train.export_hf={str(any(other.after == arm.name for other in self.arms)).lower()}",
            f"train.steps={STEPS}", "logging.every=20",
            *([] if self.name == "tokenizers" else ["logging.output_metrics_every=20"]),
            *(setting.replace("ROOT", str(self.root)).replace("SEED", str(seed)) for setting in arm.settings),
        ]  # fmt: skip
        if arm.bridge is not None:
            settings.append(f"bridge.path={self.root}/bridges/{seed}/{arm.bridge.replace(' ', '_')}")
        if arm.after is not None:
            before = next(other for other in self.arms if other.name == arm.after)
            settings.append(f"student.hf_path={self.directory(before, seed)}/hf")
        for leftover in directory.glob("*.jsonl"):
            leftover.unlink()
        self._command("train", settings, directory, arm.reading)
        (directory / "done").touch()
        last = [value(self.records(arm, seed)) for name, value in SHOWN.items() if name in SCORES]
        scores = ", ".join(f"{value:.1%}" for value in last if value is not None)
        self.log(f"{time.monotonic() - self.began:6.0f} s  {arm.name}, seed {seed}: {scores}")

    def _command(self, command: str, settings: list[str], directory: Path, reading: str = "right") -> None:
        module = ["nemo_oprd"] if reading == "right" else ["studies.wrong_reading", reading]
        run_command(command, settings, directory, *module)

    def _bridges(self, seed: int) -> None:
        """Fits the highest rank; lower ranks are its first rows, because basis and regulariser are the same."""
        from nemo_oprd.bridge.artifact import load_bridge, save_bridge

        place = self.root / "bridges" / str(seed)
        widest = place / f"rank_{max(RANKS)}"
        if not (widest / "bridge.json").is_file():
            settings = [
                *self._common(seed), f"output={widest}", f"bridge.rank={max(RANKS)}", "bridge.prompts=512",
                "bridge.baselines=true",
            ]  # fmt: skip
            self._command("fit-bridge", settings, widest)
        whole = load_bridge(widest)
        for rank in RANKS[:-1]:
            save_bridge(first_rows(whole, rank), place / f"rank_{rank}")
        eight = first_rows(whole, 8)
        save_bridge(shift_projectors(eight), place / "other_layers")
        save_bridge(random_projectors(eight, seed), place / "random")

    def _accuracy(self, arm: Arm, seed: int, problems: str = "heldout") -> float:
        return float(self.records(arm, seed)[-1][f"val/{problems}/avg@2"])

    def results(self, seeds: list[int]) -> list[dict[str, Any]]:
        """For each shown arm that is finished for all seeds: mean and standard deviation of the table's columns."""
        rows = []
        for arm in filter(lambda arm: arm.shown, self.arms):
            if arm not in self.best(seeds[0]) or not all(self.done(arm, seed) for seed in seeds):
                continue
            row: dict[str, Any] = {"arm": arm.name}
            for name, value in SHOWN.items():
                found = [value(self.records(arm, seed)) for seed in seeds]
                known = [number for number in found if number is not None]
                row[name] = [statistics.fmean(known), statistics.pstdev(known), known] if known else None
            rows.append(row)
        return rows

    def sweep(self, seed: int) -> str:
        """A table of all arms with a method, on one seed: for each method, the learning rates in ascending order."""
        lines = ["| method | learning rate: tune, held-out |", "|---|---|"]
        for method in dict.fromkeys(arm.method for arm in self.arms if arm.method is not None):
            arms = [arm for arm in self.arms if arm.method == method and self.done(arm, seed)]
            tried = [
                f"{arm.name.removeprefix(method + ' lr=')}: {self._accuracy(arm, seed, 'tune'):.1%}, "
                f"{self._accuracy(arm, seed):.1%}"
                for arm in arms
            ]
            lines.append(f"| {method} | {'; '.join(tried)} |")
        return "\n".join(lines)


def run_command(command: str, settings: list[str], directory: Path, *module: str) -> None:
    """Runs a command of the package, or of a module around it, with one thread; raises RuntimeError if it fails."""
    directory.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    log = directory.with_suffix(f".{command}.log")
    line = [sys.executable, "-m", *module, command, "--config-name", "quickstart", *settings]
    with log.open("w") as out:
        ended = subprocess.run(line, env=environment, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT, check=False)
    if ended.returncode:
        raise RuntimeError(f"{command} ended with {ended.returncode}; see {log}:\n{log.read_text()[-800:]}")


def first_rows(whole: Any, rank: int) -> Any:
    """The bridge of a lower rank that a bridge of a higher rank contains."""
    pairs = {
        key: dataclasses.replace(
            pair,
            teacher_basis=pair.teacher_basis[:rank].clone(),
            student_projector=pair.student_projector[:rank].clone(),
            student_bias=None if pair.student_bias is None else pair.student_bias[:rank].clone(),
        )
        for key, pair in whole.pairs.items()
    }
    return dataclasses.replace(whole, rank=rank, pairs=pairs, report={})


def shift_projectors(right: Any) -> Any:
    """Each layer pair with the student's projector of the next pair."""
    keys = sorted(right.pairs)
    shifted = dict(zip(keys, [*keys[1:], keys[0]], strict=True))
    pairs = {
        key: dataclasses.replace(pair, student_projector=right.pairs[shifted[key]].student_projector.clone())
        for key, pair in right.pairs.items()
    }
    return dataclasses.replace(right, pairs=pairs, report={})


def random_projectors(right: Any, seed: int) -> Any:
    """Gaussian projectors with the norms of the given ones."""
    import torch

    draw = torch.Generator().manual_seed(seed)
    pairs = {}
    for key, pair in right.pairs.items():
        noise = torch.randn(pair.student_projector.shape, generator=draw)
        pairs[key] = dataclasses.replace(pair, student_projector=noise * (pair.student_projector.norm() / noise.norm()))
    return dataclasses.replace(right, pairs=pairs, report={})


def _last(name: str) -> Callable[[list[dict[str, Any]]], float | None]:
    return lambda records: next((float(r[name]) for r in reversed(records) if name in r), None)


def _seconds(records: list[dict[str, Any]]) -> float:
    return sum(value for record in records for key, value in record.items() if key.startswith("timing/"))


def _entropy_gap(records: list[dict[str, Any]]) -> float | None:
    student, teacher = _last("actor/entropy")(records), _last("teacher/entropy")(records)
    return None if student is None or teacher is None else student - teacher


SHOWN: dict[str, Callable[[list[dict[str, Any]]], float | None]] = {
    "accuracy": _last("val/heldout/avg@2"),
    "tune": _last("val/tune/avg@2"),
    "subtraction": _last("val/subtraction/avg@2"),
    "start": lambda records: float(records[0]["val/heldout/avg@2"]),
    "length": _last("response_length/mean"),
    "cosine": _last("rep/cosine_similarity"),
    "entropy gap": _entropy_gap,
    "seconds": _seconds,
}
SCORES = ("accuracy", "tune", "subtraction", "start")


def markdown(rows: list[dict[str, Any]]) -> str:
    """The results as a Markdown table."""

    def cell(name: str, value: Any) -> str:
        if value is None:
            return "-"
        mean, deviation, _ = value
        if name in SCORES:
            return f"{mean:.1%} ± {deviation:.1%}"
        return f"{mean:.3g} ± {deviation:.2g}"

    shown = [name for name in SHOWN if any(row[name] is not None for row in rows)]
    lines = ["| method | " + " | ".join(shown) + " |", "|---" * (1 + len(shown)) + "|"]
    lines += [f"| {row['arm']} | " + " | ".join(cell(name, row[name]) for name in shown) + " |" for row in rows]
    return "\n".join(lines)


def draw(rows: list[dict[str, Any]], file: Path) -> None:
    """Draws the accuracy of each arm, with a dot for each seed."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    matplotlib.rcParams["svg.hashsalt"] = "toy_study"
    figure, axes = pyplot.subplots(figsize=(7, 0.4 + 0.3 * len(rows)))
    for number, row in enumerate(rows):
        for score, color in (("accuracy", "#2166ac"), ("subtraction", "#b2182b")):
            if row[score] is not None:
                mean, _, values = row[score]
                axes.plot([100 * mean], [number], "|", color=color, markersize=12)
                axes.plot([100 * a for a in values], [number] * len(values), "o", color=color, markersize=4)
    axes.axvline(100 * statistics.fmean(row["start"][0] for row in rows), color="#66707c", linestyle="dotted")
    axes.set_yticks(range(len(rows)), [row["arm"] for row in rows])
    axes.invert_yaxis()
    tasks = "; blue additions, red subtractions" if rows[0]["subtraction"] is not None else ""
    axes.set_xlabel(f"held-out problems solved, % (dotted: the student's start{tasks})")
    figure.savefig(file, bbox_inches="tight", metadata={"Date": None})


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("study", choices=sorted(STUDIES))
    parser.add_argument("--output", required=True, metavar="DIR")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=1, help="number of simultaneous runs; each has one thread")
    parser.add_argument(
        "--arms", nargs="+", metavar="TEXT", help="run only arms whose name contains one of these texts"
    )
    options = parser.parse_args()
    study = Study(options.study, Path(options.output).absolute(), lambda line: print(line, flush=True))
    if options.arms:
        study.arms = [arm for arm in study.arms if any(text in arm.name for text in options.arms)]
    study.run(options.seeds, options.jobs)
    rows = study.results(options.seeds)
    print(markdown(rows))
    if any(arm.method for arm in study.arms):
        print(study.sweep(options.seeds[0]))
    (study.root / f"{study.name}.json").write_text(json.dumps(rows, indent=1) + "\n")
    if rows:
        draw(rows, study.root / f"{study.name}.svg")


if __name__ == "__main__":
    main()
