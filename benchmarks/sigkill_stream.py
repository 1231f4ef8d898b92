"""Kills a run with `rollout.mode=stream` beside servers that sleep for each token; counts what its steps have taken.

    python -m benchmarks.sigkill_stream [--lag 4] [--kills 20] [--seed 0] [--steps 16]

What a step takes depends on the clock, so there is no other run to compare with. At the end every sample of every
prompt must have been taken by exactly one step, each with all of its tokens (a tenth of the responses is ten times as
long as the others, whatever happens), none more than the lag's steps old; and no process may be left.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections import Counter
from pathlib import Path
from unittest import mock

from benchmarks.sigkill import PHASES, Bench, Phase, choose, table
from benchmarks.sleeping_servers import interpreter
from tests.functional.vllm_stand_in import whole_length

# tokens of prompt and response
WHOLE = [24] * 9 + [100]
TOKEN_S = 0.02
PROMPTS, PER_PROMPT = 4, 2
ENGINE = "nemo_oprd.vllm.engine:VllmEngine"
_IN_PROCESS = ("rollout", "rollouts kept", "weight sync", "evaluation")
STREAM_PHASES = (
    *(phase for phase in PHASES if phase.name not in _IN_PROCESS),
    # every step comes here, but waits for its engine only if the responses were not complete while it trained
    Phase("gather", "nemo_oprd.rollout.stream_rollouts:StreamSampler._of_step"),
    Phase("gathered", "nemo_oprd.rollout.stream_rollouts:StreamSampler._of_step", "after"),
    Phase("cut", f"{ENGINE}.cut"),
    Phase("cut: responses here", f"{ENGINE}.cut", "after"),
    Phase("push", f"{ENGINE}.update_weights"),
    Phase("save: places written", "nemo_oprd.rollout.resume_cache:ResumeCache.write", "before"),
)


def settings(root: Path, lag: int) -> tuple[str, ...]:
    """Overrides of a run beside such servers."""
    python = interpreter(root, TOKEN_S, {"whole": WHOLE})
    return (
        *("rollout.engine=vllm", f"rollout.vllm.python={python}", "rollout.vllm.check_tokens=0"),
        *("rollout.vllm.replicas=2", "rollout.mode=stream", f"rollout.max_lag={lag}", "rollout.save=true"),
        *(f"train.prompts_per_step={PROMPTS}", f"rollout.per_prompt={PER_PROMPT}", "rollout.max_new_tokens=96"),
        *("data.validation={}", "evaluation.every=0", "train.keep_best=null", "rollout.vllm.max_restarts=20"),
    )


def problems(run: Path, steps: int, lag: int) -> list[str]:
    """What is wrong with the rollouts that the steps of a run have taken."""
    found, taken = list[str](), Counter[tuple[int, ...]]()
    for step in range(steps):
        lines = (run / "rollouts" / f"step_{step + 1:07d}.jsonl").read_text().splitlines()
        if len(lines) != PROMPTS * PER_PROMPT:
            found.append(f"step {step + 1} has {len(lines)} responses")
        for rollout in map(json.loads, lines):
            prompt, tokens = rollout["prompt_ids"], len(rollout["response_ids"])
            taken[tuple(prompt)] += 1
            if len(prompt) + tokens != whole_length(prompt, WHOLE):
                found.append(f"step {step + 1}: {tokens} tokens after a prompt of {len(prompt)}")
            oldest = min(span["version"] for span in rollout["weight_versions"])
            if oldest < step - lag:
                found.append(f"step {step + 1}: tokens of the weights after {oldest} steps")
    wrong = {number for number in taken.values() if number != PER_PROMPT}
    if wrong or len(taken) != steps * PROMPTS:
        found.append(f"{len(taken)} prompts with {sorted(wrong | {PER_PROMPT})} samples; {steps * PROMPTS} were due")
    return found


def kill_streams(kills: int, seed: int, steps: int, lag: int) -> None:
    """Ends the process with a message if a sample was lost or taken twice."""
    draw = random.Random(seed)
    # the heads of the tiny pair are smaller than those that real servers know on CPU
    unchecked = mock.patch("nemo_oprd.run.engine_kinds.check_head_size")
    with tempfile.TemporaryDirectory() as directory, unchecked:
        root = Path(directory)
        bench = Bench(root, steps, settings(root / "servers", lag), phases=STREAM_PHASES)
        durations = bench.whole()
        result = bench.kill_and_finish(choose(kills, draw, STREAM_PHASES), durations, draw)
        print(table(result))
        wrong = {name: problems(root / name, steps, lag) for name in ("whole", "killed")}
        parts = [
            len(json.loads(line)["weight_versions"])
            for file in (root / "killed" / "rollouts").glob("step_*.jsonl")
            for line in file.read_text().splitlines()
        ]
        print(f"{len(result.kills)} kills, {result.starts} starts, {result.seconds:.0f} s")
        print(f"{len(parts)} responses, {sum(part > 1 for part in parts)} of them of several students")
        if any(wrong.values()):
            sys.exit(f"responses were lost or taken twice: {wrong}")
        print("every sample of every prompt was taken by one step, with all of its tokens and in time")


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description="Kill a run with rollout.mode=stream and count what its steps took")
    for name, value in (("lag", 4), ("kills", 20), ("seed", 0), ("steps", 16)):
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args()
    kill_streams(options.kills, options.seed, options.steps, options.lag)


if __name__ == "__main__":
    main()
