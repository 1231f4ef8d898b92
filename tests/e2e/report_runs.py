"""Run directories for tests of the report: metrics, evaluations with grades, values per token, environments."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import yaml

PROBLEMS, SAMPLES, TOKENS = 40, 2, 24
CONFIG: dict[str, Any] = {
    "output": "runs/x",
    "student": {"hf_path": "models/student", "parallel": {"tensor": 2}},
    "teacher": {"hf_path": "models/teacher", "parallel": {"tensor": 1}},
    "loss": {"representation": {"weight": 1.0, "kind": "mse", "layers": "all", "positions": "all", "k": 2000}},
    "rollout": {"per_prompt": 1, "max_new_tokens": 40},
    "train": {"prompts_per_step": 8, "lr": 1e-4, "steps": 6},
    "evaluation": {"every": 3},
    "data": {"validation": {"sums": "sums.jsonl"}},
}


def make_run(path: Path, *, seed: int = 0, learned: float = 0.8, steps: int = 6, **train: Any) -> Path:
    """A run of 6 steps, of which `steps` are done, with everything that the page shows.

    Args:
        learned: share of the problems that the last evaluation has right; the first one has 30 %, the teacher 90 %.
        train: changes of the group `train`.
    """
    path.mkdir(parents=True)
    config = {**CONFIG, "output": str(path), "train": {**CONFIG["train"], **train}}
    (path / "config.yaml").write_text(yaml.safe_dump(config))
    environment = {"started": f"2026-01-0{1 + seed}T00:00:00Z", "ranks": 2, "packages": {"torch": f"2.{9 + seed}"}}
    (path / "environment.json").write_text(json.dumps([environment]))
    draw = random.Random(seed)
    for place, share in (("step_0000000", 0.3), ("teacher", 0.9), (f"step_{steps:07d}", learned)):
        if place != f"step_{steps:07d}" or steps == 6:
            write_generations(path / "evaluations" / place, share, draw)
    lines = [_line(step, draw) for step in range(1, steps + 1)]
    first = {"step": 0, "time": 1000.0, "val/sums/avg@2": 0.3, "val/sums/teacher/avg@2": 0.9, "val/sums/avg_len": 9.0}
    last = [{"step": 6, "time": 1400.0, "val/sums/avg@2": learned, "val/sums/avg_len": 8.0}] if steps == 6 else []
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in (first, *lines, *last)))
    (path / "rollouts").mkdir()
    for step in (1, steps):
        write_tokens(path / "rollouts" / f"token_metrics_{step:07d}.jsonl", step, draw)
    return path


def _line(step: int, draw: random.Random) -> dict[str, Any]:
    return {
        "step": step,
        "time": 1000.0 + 50.0 * step,
        "rep/loss": 1.0 / step,
        "rep/cosine_similarity": 1 - 0.3 / step,
        **{f"rep/cosine_similarity_layer/{layer}": 1 - 0.1 * layer / step for layer in range(1, 5)},
        **{f"rep/cosine_{end}_k/{2**j}": 0.9 + 0.01 * j for end in ("first", "last") for j in range(5)},
        "output/loss": 0.5 / step,
        "actor/pg_loss": 0.4 / step - 0.05,
        "actor/entropy": 1.5 - 0.1 * step,
        "teacher/entropy": 0.8 + draw.random() / 50,
        "output/reverse_kl": 0.6 / step,
        "val-topk/overlap_ratio": 0.5 + 0.05 * step,
        "response_length/mean": 12.0,
        "actor/grad_norm": 2.5,
        **{f"timing/{phase}_s": 1.5 * (n + 1) for n, phase in enumerate(("generate", "teacher", "update", "sync"))},
        "perf/tokens_per_s": 123.0 + step,
        "perf/peak_memory_gb": 3.0 + 0.1 * step,
        "perf/targets_gb": 0.25,
    }


def write_generations(directory: Path, share: float, draw: random.Random) -> None:
    """Responses of which `share` are right, as `evaluate` writes them, and the metrics of `nemo-oprd grade`."""
    lines = []
    for problem in range(PROBLEMS):
        for sample in range(SAMPLES):
            right = (problem + 0.5) / PROBLEMS < share
            answer = problem + 3 if right else draw.randrange(1000, 9999)
            line = {
                "problem": problem,
                "sample": sample,
                "prompt_ids": [5, 6, problem + 7],
                "response_ids": list(range(4 + problem % 5)),
                "response": rf"it is 3 + {problem}, so \boxed{{{answer}}}",
                "finish_reason": "length" if problem % 10 == 9 else "stop",
                "seed": [0, 2, 0, problem],
                "model": "m@0",
                "answer": str(problem + 3),
                "data_source": "sums",
                "subject": "odd" if problem % 2 else "even",
            }
            lines.append(line)
    file = directory / "generations" / "sums.jsonl"
    file.parent.mkdir(parents=True)
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


def write_tokens(file: Path, step: int, draw: random.Random) -> None:
    """Values per token of four responses: two wrong, one of them truncated, and one with the largest loss."""
    lines = []
    for response in range(4):
        scale = 10.0 if response == 3 else 1.0
        lines.append(
            {
                "step": step,
                "number": 2 * response,
                "prompt_id": f"{response:012x}",
                "answer": "7",
                "finish_reason": "length" if response == 1 else "stop",
                "prompt": f"prompt {response}\nsecond line",
                "response": rf"so \boxed{{{7 if response > 1 else 8}}}",
                "tokens": [f" t{t}" if t % 7 else "\n" for t in range(TOKENS)],
                "token_ids": list(range(TOKENS)),
                "rep_loss": [None] * 4 + [scale * (0.1 + draw.random()) / step for _ in range(TOKENS - 4)],
                "cosine": [None] * 4 + [1 - 0.3 * draw.random() / step for _ in range(TOKENS - 4)],
                "kl": [draw.random() ** 3 / step for _ in range(TOKENS)],
                "log_ratio": [draw.random() - 0.5 for _ in range(TOKENS)],
            }
        )
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
