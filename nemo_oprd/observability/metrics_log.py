"""A run's record: metrics.jsonl (the source of everything plotted), TensorBoard, W&B if asked for, a progress line.

Only the world's first rank writes. `step` counts the updates done: a line of step 5 tells of the fifth
update, or of an evaluation after it. A resumed run drops the lines it is about to write again.
"""

from __future__ import annotations

import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

from nemo_oprd.config.loading import to_yaml
from nemo_oprd.config.schema import Config
from nemo_oprd.fault_tolerance.disk import naming

# what the progress line shows, in order: (metric, label, format)
_SHOWN = (
    ("rep/loss", "rep", "{:.4g}"),
    ("rep/cosine_similarity", "cos", "{:.4f}"),
    ("output/loss", "output", "{:.4g}"),
    ("actor/grad_norm", "|g|", "{:.3g}"),
    ("response_length/mean", "len", "{:.0f}"),
    ("lr", "lr", "{:.1e}"),
    ("perf/tokens_per_s", "tok/s", "{:.0f}"),
)


class MetricsLog:
    """Writes the metrics of one run directory."""

    def __init__(self, config: Config, first_step: int) -> None:
        self.writes = dist.get_rank() == 0
        self.directory = Path(config.output)
        self.steps, self.first_step, self.every = config.train.steps, first_step, config.logging.every
        self.started = time.monotonic()
        self._tensorboard: Any = None
        self._wandb: Any = None
        if not self.writes:
            return
        self.directory.mkdir(parents=True, exist_ok=True)
        (self.directory / "config.yaml").write_text(to_yaml(config))
        self.path = self.directory / "metrics.jsonl"
        if not first_step and self.path.exists():
            self.say(f"no checkpoint in {self.directory}: starting over, {self.path.name} is written anew")
        self._drop_from(first_step)
        if config.logging.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._tensorboard = SummaryWriter(
                str(self.directory / "tensorboard"), purge_step=first_step + 1 if first_step else 0
            )
        if config.logging.wandb:
            import wandb

            # a fixed id, so that a resumed run goes on in the same W&B run
            known = self.directory / "wandb_id"
            if not known.exists():
                known.write_text(wandb.util.generate_id())
            self._wandb = wandb.init(
                project=config.logging.wandb, dir=str(self.directory), id=known.read_text(), resume="allow"
            )
            # W&B's own steps only rise: a resumed run could not add an evaluation that it owes to an earlier update
            self._wandb.define_metric("*", step_metric="step")

    def write(self, step: int, metrics: dict[str, float]) -> None:
        """Appends one line."""
        if not self.writes:
            return
        with naming(self.path), self.path.open("a") as file:
            # JSON has no NaN and no infinity: they are null
            plain = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
            file.write(json.dumps({"step": step, "time": time.time(), **plain}, allow_nan=False) + "\n")
        if self._tensorboard is not None:
            for name, value in metrics.items():
                self._tensorboard.add_scalar(name, value, step)
            self._tensorboard.flush()
        if self._wandb is not None:
            self._wandb.log({"step": step, **metrics})

    def history(self, metric: str) -> dict[int, float]:
        """Step -> finite value of a metric so far, before a resume included; only on the world's first rank."""
        if not self.writes or not self.path.exists():
            return {}
        records = [json.loads(line) for line in self.path.read_text().splitlines()]
        return {record["step"]: record[metric] for record in records if record.get(metric) is not None}

    def evaluated(self, step: int) -> bool:
        """Whether validation metrics of `step` were written, before a resume included; on the first rank only."""
        if not self.writes or not self.path.exists():
            return False
        records = [json.loads(line) for line in self.path.read_text().splitlines()]
        return any(name.startswith("val/") for record in records if record["step"] == step for name in record)

    def progress(self, done: int, metrics: dict[str, float]) -> None:
        """One line after update `done`, with the time left."""
        if not self.writes or (done % self.every and done != self.steps):
            return
        shown = [f"{label} {form.format(metrics[name])}" for name, label, form in _SHOWN if name in metrics]
        elapsed = time.monotonic() - self.started
        left = elapsed / max(1, done - self.first_step) * (self.steps - done)
        self.say(f"step {done}/{self.steps}  " + "  ".join(shown) + f"  left {_clock(left)}")

    def say(self, text: str) -> None:
        """A line for the person who watches."""
        if self.writes:
            print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Ends the writers."""
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish()

    def _drop_from(self, step: int) -> None:
        if not self.path.exists():
            return
        kept = []
        for line in self.path.read_text().splitlines():
            try:
                record = json.loads(line)
            except json.JSONDecodeError:
                break  # the line that a killed run was writing; everything after the checkpoint is made again
            if step > 0 and record["step"] <= step:
                kept.append(line)
        partial = self.path.with_suffix(".partial")
        partial.write_text("".join(line + "\n" for line in kept))
        partial.rename(self.path)


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
