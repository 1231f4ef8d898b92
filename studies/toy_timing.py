"""Seconds per update of the objectives on a toy pair, one run at a time, for an otherwise idle machine.

    python -m studies.toy_timing --pair runs/study/pairs/0 --output runs/timing

The objectives run in turn, twice; the figures are medians over updates. Only the objective is computed: runs with only
an output-space loss capture no hidden states, and no additional metrics are computed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

from studies.toy_arms import objectives

UPDATES, WARM_UP = 15, 3
PHASES = ("generate", "teacher", "update")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pair", type=Path, required=True, metavar="DIR", help="made by nemo-oprd toy or toy_study")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR")
    options = parser.parse_args()
    methods = {str(arm.method): arm.settings for arm in objectives()}
    seconds: dict[str, dict[str, list[float]]] = {name: {phase: [] for phase in PHASES} for name in methods}
    for _ in range(2):
        for name, settings in methods.items():
            for record in _records(options.pair, options.output / "run", settings)[WARM_UP:]:
                for phase in PHASES:
                    seconds[name][phase].append(record[f"timing/{phase}_s"])
    print("| objective | " + " | ".join(PHASES) + " | teacher + update |\n" + "|---" * (len(PHASES) + 2) + "|")
    for name, phases in seconds.items():
        medians = [statistics.median(phases[phase]) for phase in PHASES]
        print(f"| {name} | " + " | ".join(f"{value:.3f}" for value in [*medians, sum(medians[1:])]) + " |")


def _records(pair: Path, output: Path, settings: tuple[str, ...]) -> list[dict[str, float]]:
    shutil.rmtree(output, ignore_errors=True)
    alone = ["loss.representation.layers=none"] if "loss.representation.weight=0" in settings else []
    line = [
        sys.executable, "-m", "nemo_oprd", "train", "--config-name", "quickstart", f"output={output}",
        f"student.hf_path={pair}/student", f"teacher.hf_path={pair}/teacher", "student.parallel.tensor=1",
        f"data.train={pair}/prompts/train.jsonl", "evaluation.every=0", "evaluation.teacher=false",
        f"train.steps={UPDATES}", "train.save_every=0", "train.export_hf=false", *settings, *alone,
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    subprocess.run(line, check=True, env=environment, capture_output=True)
    return [json.loads(text) for text in (output / "metrics.jsonl").read_text().splitlines()]


if __name__ == "__main__":
    main()
