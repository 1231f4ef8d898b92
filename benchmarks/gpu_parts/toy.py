"""The part `toy`: `nemo-oprd train` on the toy pair, with sampling, evaluation, a checkpoint and an export."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from benchmarks.gpu_parts.outcome import Outcome, Settings
from nemo_oprd.tools.toy.pair import make_tiny_pair

ROOT = Path(__file__).parents[2]
# the quickstart's pair, if it has run here
MADE = ROOT / "runs" / "toy"
STEPS = 10


def toy(settings: Settings, outcome: Outcome) -> None:
    """Some steps of the quickstart in fp32 and in bf16, each by the command."""
    pair = MADE
    if settings.quick or not (MADE / "prompts").is_dir():
        pair = settings.scratch / "toy"
        make_tiny_pair(pair)
    outcome.numbers["pair"] = "runs/toy" if pair == MADE else "tiny"
    outcome.lines.append("the pair of runs/toy" if pair == MADE else "a tiny pair, made here (runs/toy is not there)")
    for precision in ("fp32", "bf16"):
        output = settings.scratch / precision
        command = [sys.executable, "-m", "nemo_oprd", "train", "--config-name", "quickstart"]
        command += [
            f"{role}.{key}" for role in ("student", "teacher") for key in (f"hf_path={pair / role}", "checkpoint=null")
        ]
        command += [
            "student.parallel.tensor=1",
            f"data.train={pair}/prompts/train.jsonl",
            f"data.validation.heldout={pair}/prompts/heldout.jsonl",
            "evaluation.limit=16",
            "logging.tensorboard=false",  # which such a machine may lack
            f"evaluation.every={STEPS}",
            f"train.save_every={STEPS // 2}",
            f"train.steps={STEPS}",
            f"precision={precision}",
            f"output={output}",
        ]
        start = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
        seconds = time.perf_counter() - start
        print(done.stdout + done.stderr)
        said = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()] or ["no output"]
        outcome.row(f"train, {precision}", seconds=seconds)
        outcome.lines.append(f"{precision}: exit {done.returncode}; {said[-1][:150]}")
        outcome.require(
            done.returncode == 0, f"{precision}: `nemo-oprd train` ended with {done.returncode}: {said[-1][:200]}"
        )
        outcome.require(
            done.returncode != 0 or (output / "hf" / "model.safetensors").is_file(), f"{precision}: no exported model"
        )
