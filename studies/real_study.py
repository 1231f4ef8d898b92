"""Compares losses on a real language model: runs what is missing, then writes tables from all finished runs.

    bash scripts/fetch_smollm2.sh
    python -m studies.real_study run --output runs/real_study --jobs 2
    python -m studies.real_study table

The teacher is SmolLM2-135M-Instruct; students are 20 of its 30 layers, or its weights rounded to 2 bits. A run is
`nemo-oprd train` on 30 x 8 responses of at most 48 tokens, in one process with one thread, and then `nemo-oprd compare`
on held-out prompts. The small JSON of each finished run is written to studies/results/real_study/ and is not run
again, so another machine goes on where one stopped. `docs/results_smollm2.md` says what follows from the tables.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from nemo_oprd.evaluation.agreement import SampledIds, describe_text
from nemo_oprd.evaluation.responses import read_lines
from nemo_oprd.losses.layer_mapping import layer_map as paper_map
from nemo_oprd.models import read_model_spec
from nemo_oprd.run.resolve import resolve_models
from studies.real_arms import RATES, SEARCHED, SEEDS, Arm, changes, is_hidden, on_student, seeds, sweep
from studies.real_models import HELDOUT, ROOT, STUDENTS, TRAIN, kept_layers, layer_map, make_models
from studies.real_tables import RESULTS, TEACHER_RESPONSES, best_runs, details, distance, line, read_results, tables

RESPONSES, NEW_TOKENS = 8, 48
PROMPT_TOKENS = 48  # of an average prompt of examples/real_model in the chat template
HELDOUT_PROMPTS = 48
SEVERAL = 3  # losses that run with several seeds, and on the second student
# Hydra composes one configuration at a time, and two runs may end in the same second
_COMPOSING = threading.Lock()
# of a training record; `rep/loss_layer/*` show where the loss is
CURVES = ("loss/total", "rep/loss", "rep/cosine_similarity", "actor/grad_norm", "actor/entropy", "teacher/entropy",
          "response_length/mean", "output/loss")  # fmt: skip


@dataclass
class Study:
    """The study in the directory `root`, which holds models, bridges and runs."""

    root: Path

    def make_models(self, teacher: Path) -> None:
        """Makes the models that are missing."""
        models = self.root / "models"
        make_models(models, teacher)
        self.kept = kept_layers(models)
        self.depth = json.loads((models / "teacher" / "config.json").read_text())["num_hidden_layers"]

    def prepare(self, teacher: Path) -> None:
        """Makes the models and bridges that are missing, and measures the students before training."""
        models = self.root / "models"
        self.make_models(teacher)
        self._moments()  # before runs begin side by side: sampling has one random state per process
        for student in STUDENTS:
            if not _result(f"{student}-start").is_file():
                write_result(f"{student}-start", {"measured": self._compare(f"{student}-start", models / student)})

    def run(self, arm: Arm) -> None:
        """Trains and measures one arm, unless its result is there."""
        if _result(arm.name).is_file():
            check_result(arm, json.loads(_result(arm.name).read_text()))
            return
        began = time.time()
        directory = self.root / "runs" / arm.name
        shutil.rmtree(directory, ignore_errors=True)
        self.command("train", ["--config-name", "real_model", *self.settings(arm, directory)], f"{arm.name}.train")
        records = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
        self._write(arm, directory, records, began)
        for large in ("hf", "checkpoints"):
            shutil.rmtree(directory / large, ignore_errors=True)

    def _write(self, arm: Arm, directory: Path, records: list[dict[str, Any]], began: float) -> None:
        """Measures a trained student and writes the result."""
        measured = self._compare(arm.name, directory / "hf")
        write_result(arm.name, {"arm": asdict(arm), "settings": arm.all_settings, "measured": measured,
                                "operations": operations(self.settings(arm, directory)),
                                "training": curves(records), "machine": machine(),
                                "seconds": round(time.time() - began)})  # fmt: skip
        print(f"{time.strftime('%H:%M')} {arm.name}: {line(measured)}", flush=True)

    def settings(self, arm: Arm, directory: Path) -> list[str]:
        """Of the training run in `directory`; those of the arm come last."""
        models = self.root / "models"
        settings = [
            f"student.hf_path={models / arm.student}", f"teacher.hf_path={models / 'teacher'}", f"data.train={TRAIN}",
            f"output={directory}", f"train.lr={arm.rate}", f"seed={arm.seed}", f"train.steps={arm.steps}",
            f"train.prompts_per_step={RESPONSES}", f"rollout.max_new_tokens={NEW_TOKENS}", "train.schedule=constant",
            "train.warmup_fraction=0.1", "logging.output_metrics_every=10", "logging.output_metrics_rows=256",
            "train.save_every=0",
        ]  # fmt: skip
        pairs = self._layer_map(arm)
        for setting in arm.all_settings:
            if setting.startswith("bridge="):
                settings.append(f"bridge.path={self._bridge(arm, setting.removeprefix('bridge='))}")
            else:
                settings.append(setting)
        if pairs is not None and "loss.representation.layers=none" not in arm.all_settings:
            chosen = _supervised(arm, pairs)
            settings.append("loss.representation.layer_map={" + ",".join(f"{s}:{t}" for s, t in chosen.items()) + "}")
        return settings

    def _layer_map(self, arm: Arm) -> dict[int, int] | None:
        return layer_map(arm.layer_map, self.kept, self.depth) if arm.student != "quantised" else None

    def _bridge(self, arm: Arm, kind: str) -> Path:
        """The bridge of a kind between the arm's student and the teacher, made if it is missing."""
        from studies.real_bridges import write_bridge

        place = self.root / "bridges" / f"{arm.student}-{arm.layer_map}-{kind}"
        if not (place / "bridge.json").is_file():
            models = self.root / "models"
            pairs = self._layer_map(arm)
            if pairs is None:
                depth = read_model_spec(models / arm.student).num_layers
                pairs = paper_map(list(range(1, depth + 1)), depth, self.depth)
            write_bridge(kind, self._moments(), pairs, (models / arm.student, models / "teacher"), place)
        return place

    def _moments(self) -> Any:
        """Moments of the teacher's states on its own responses to training prompts, computed once."""
        import torch

        from nemo_oprd.evaluation.agreement import SamplingSettings, load_model, sample_responses
        from nemo_oprd.runtime.files import replacing
        from studies.real_bridges import teacher_moments

        file = self.root / "moments.pt"
        if not file.is_file():
            from nemo_oprd.data.prompts import load_prompts
            from nemo_oprd.data.tokenizer import Tokenizer

            directory = self.root / "models" / "teacher"
            tokenizer, model = Tokenizer.load(directory), load_model(directory, torch.float32)
            prompts = [tokenizer.encode_prompt(prompt.messages, prompt.tools) for prompt in load_prompts(TRAIN)[:64]]
            known = tokenizer.ids(model.config.vocab_size)
            found = sample_responses(model, prompts, tokenizer.eos_ids, known, SamplingSettings(NEW_TOKENS, 1.0, 0, 64))
            moments = teacher_moments(model, [(r.prompt + r.tokens, len(r.prompt)) for r in found])
            with replacing(file) as partial:
                torch.save(moments, partial)
        return torch.load(file, weights_only=True)

    def _compare(self, name: str, model: Path) -> dict[str, Any]:
        """The measurements of `nemo-oprd compare` on the held-out prompts."""
        place = self.root / "compare"
        arguments = [
            f"{name}={model}", "--teacher", str(self.root / "models" / "teacher"), "--prompts", str(HELDOUT),
            "--output", str(place), "--teacher-responses", str(TEACHER_RESPONSES),
            "--count", str(HELDOUT_PROMPTS), "--max-new-tokens", str(NEW_TOKENS),
        ]  # fmt: skip
        self.command("compare", arguments, f"{name}.compare")
        return read_measurements(place, name)

    def command(self, command: str, arguments: list[str], log_name: str, module: str = "nemo_oprd") -> None:
        """Runs a command of the package, or of a module around it; raises RuntimeError if it fails."""
        log = self.root / "logs" / f"{log_name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        words = [sys.executable, "-m", module, command, *arguments]
        with log.open("w") as out:
            ended = subprocess.run(words, env=environment, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT, check=False)
        if ended.returncode:
            raise RuntimeError(f"{command} ended with {ended.returncode}; see {log}:\n{log.read_text()[-800:]}")


def _supervised(arm: Arm, pairs: dict[int, int]) -> dict[int, int]:
    """The pairs of the layers that the arm supervises."""
    from nemo_oprd.losses.layer_mapping import supervised_layers

    named = [s.split("=", 1)[1] for s in arm.all_settings if s.startswith("loss.representation.layers=")]
    return {layer: pairs[layer] for layer in supervised_layers(named[-1] if named else "all", len(pairs))}


def read_measurements(place: Path, name: str) -> dict[str, dict[str, list[float]]]:
    """What `nemo-oprd compare` wrote, per held-out prompt: {"on_teacher" or "on_student": {measure: [values]}}.

    Values of models are sums over the tokens of a response, so that means over any set of prompts can be formed.
    """
    result = json.loads((place / f"{name}.json").read_text())
    found = {
        source: {key: [part[key] for part in parts] for key in parts[0]}
        for source, parts in result["per_prompt"].items()
    }
    rows = [row for _, row in read_lines(place / f"{name}.jsonl", "responses", "measure again")]
    responses = [SampledIds(row["prompt_ids"], row["response_ids"], row["ended"]) for row in rows]
    found["on_student"]["truncated"] = [float(not response.ended) for response in responses]
    found["on_student"]["distinct_4"] = [  # None: too short to have any 4-gram
        describe_text([response])["distinct_4"] if len(response.tokens) >= 4 else None for response in responses
    ]
    return found


def check_result(arm: Arm, result: dict[str, Any]) -> None:
    """Raises ValueError if a finished run of this name had other settings than the arm has now."""
    found = {**result["arm"], "settings": tuple(result["arm"]["settings"])}, tuple(result["settings"])
    if found != (asdict(arm), arm.all_settings):
        raise ValueError(
            f"{_result(arm.name)} was measured with {found}, the arm is {asdict(arm)} with {arm.all_settings}; "
            "expected the same: remove the file to run it again, or rename the arm"
        )


def operations(settings: list[str], response: int = NEW_TOKENS) -> dict[str, float]:
    """Counted floating-point operations of an update in 10^9, by `nemo-oprd plan`'s formulas; metrics are left out."""
    from nemo_oprd.config.loading import load_config
    from nemo_oprd.tools.plan.operations import step_flops
    from nemo_oprd.tools.plan.workload import make_workload

    unwatched = [*settings, "logging.output_metrics_every=0"]
    with _COMPOSING:
        config = load_config("real_model", unwatched)
    work = make_workload(config, resolve_models(config), prompt=PROMPT_TOKENS, response=response)
    return {kind: value / 1e9 for kind, value in asdict(step_flops(work)).items()}


def curves(records: list[dict[str, Any]]) -> dict[str, Any]:
    """The training's curves, its first and last losses per layer, and its seconds per phase."""
    layers = [key for key in records[0] if key.startswith("rep/loss_layer/")]
    timing = sorted({key for record in records for key in record if key.startswith("timing/")})
    return {
        **{key: [_short(record[key]) for record in records if key in record] for key in CURVES},
        "loss_layer_first": {key.rsplit("/", 1)[1]: _short(records[0][key]) for key in layers},
        "loss_layer_last": {key.rsplit("/", 1)[1]: _short(records[-1][key]) for key in layers},
        "seconds": {key: round(sum(record.get(key, 0.0) for record in records), 2) for key in timing},
    }


def machine() -> dict[str, Any]:
    """Where a run was measured: seconds of one machine are not those of another."""
    import torch

    return {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count(), "threads": 1,
            "torch": torch.__version__}  # fmt: skip


def _short(value: Any) -> Any:
    return float(f"{value:.5g}") if isinstance(value, float) else value


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    return _short(value)


def _result(name: str) -> Path:
    return RESULTS / f"{name}.json"


def write_result(name: str, content: dict[str, Any]) -> None:
    """Writes the small JSON of a finished run, which is committed."""
    write_json(_result(name), content)


def write_json(file: Path, content: dict[str, Any]) -> None:
    """Writes a result with five digits of every number, and each list on one line."""
    from nemo_oprd.runtime.files import write_atomically

    file.parent.mkdir(parents=True, exist_ok=True)
    lists = re.compile(r"\[[^\[\]{}]*\]")  # one line each
    text = lists.sub(lambda found: " ".join(found[0].split()), json.dumps(_rounded(content), indent=1))
    write_atomically(file, text + "\n")


def arm_of(result: dict[str, Any]) -> Arm:
    """The arm that a result was measured with."""
    known = {each.name for each in fields(Arm)}
    values = {key: value for key, value in result["arm"].items() if key in known}
    return Arm(**{**values, "settings": tuple(values["settings"])})


def best_arms(results: dict[str, dict[str, Any]], student: str) -> list[Arm]:
    """Every loss at its best rate, the best loss first."""
    names = sorted(best_runs(results, student).values(), key=lambda name: distance(results[name]["measured"]))
    return [arm_of(results[name]) for name in names]


def equal_operations(cheaper: Arm, dearer: Arm) -> list[Arm]:
    """The cheaper loss with as many counted operations as the other one's run, and so with more updates."""
    results = read_results()
    ours, theirs = (sum(results[arm.name]["operations"].values()) for arm in (cheaper, dearer))
    return [replace(cheaper, change="equal_operations", steps=round(dearer.steps * theirs / ours))]


def stages() -> Iterator[list[Arm]]:
    """The arms of the study in their order; a stage is chosen by the results of the stages before it."""
    yield list(sweep())
    best = [arm for arm in best_arms(read_results(), "pruned") if arm.loss in SEARCHED]
    hidden = [arm for arm in best if is_hidden(arm)]
    several = hidden[:1] + [arm for arm in best if not is_hidden(arm)][: SEVERAL - 1]
    yield list(on_student("quantised", several))
    # whether a student that repeats itself after that does so because of the loss or because of the rate
    yield [replace(arm, rate=min(RATES)) for arm in on_student("quantised", several)]
    yield list(seeds(best[:SEVERAL]))
    yield list(changes(hidden[0]))
    longer = equal_operations(hidden[0], next(arm for arm in best if not is_hidden(arm)))
    yield [*longer, replace(best_arms(read_results(), "quantised")[0], seed=SEEDS[1])]
    # cosine's gradient is the only one that is never clipped: with this weight all are
    cosine = next(arm for arm in best if arm.loss == "cosine")
    yield [replace(cosine, change="weight1000", settings=("loss.representation.weight=1000",))]


def run_all(study: Study, arms: Iterable[Arm], jobs: int) -> None:
    """Runs arms in their order, `jobs` at a time; a failed one is reported and the others go on."""

    def one(arm: Arm) -> None:
        try:
            study.run(arm)
        except Exception as error:  # whatever stopped this run need not stop the others
            print(f"{arm.name} failed: {type(error).__name__}: {error}", file=sys.stderr, flush=True)

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(one, arms))


def main() -> None:
    """Command line."""

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=["run", "table"])
    parser.add_argument("--output", default="runs/real_study", metavar="DIR")
    parser.add_argument("--teacher", default="models/SmolLM2-135M-Instruct", metavar="DIR", help="default: %(default)s")
    parser.add_argument("--jobs", type=int, default=1, help="number of simultaneous runs; each has one thread")
    parser.add_argument("--only", nargs="+", metavar="TEXT", help="run only arms whose names contain one of these")
    options = parser.parse_args()
    if options.command == "run":
        study = Study(Path(options.output).absolute())
        study.prepare(Path(options.teacher))
        for arms in stages():
            wanted = [arm for arm in arms if not options.only or any(text in arm.name for text in options.only)]
            run_all(study, wanted, options.jobs)
    print(f"{tables(read_results())}\n\n{details(read_results())}")


if __name__ == "__main__":
    main()
