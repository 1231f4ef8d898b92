"""A run's metrics: metrics.jsonl (the source of every plot), TensorBoard, optionally W&B, and a progress line.

Only the world's first rank writes. `step` counts completed steps: a line with step 5 describes the fifth step, or an
evaluation after it. A resumed run drops the lines of the steps that it is about to repeat.
"""

from __future__ import annotations

import json
import logging
import math
import secrets
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

from nemo_oprd.config.loading import as_plain
from nemo_oprd.config.schema import Config
from nemo_oprd.run.config_history import record_config
from nemo_oprd.runtime.disk import naming
from nemo_oprd.runtime.files import write_atomically
from nemo_oprd.runtime.messages import hours_minutes_seconds
from nemo_oprd.runtime.output_directories import mark

logger = logging.getLogger(__name__)

# the progress line, in order: (metric, label, format)
_PROGRESS_METRICS = (
    ("rep/loss", "rep", "{:.4g}"),
    ("rep/cosine_similarity", "cos", "{:.4f}"),
    ("output/loss", "output", "{:.4g}"),
    ("actor/grad_norm", "|g|", "{:.3g}"),
    ("response_length/mean", "len", "{:.0f}"),
    ("lr", "lr", "{:.1e}"),
    ("perf/tokens_per_s", "tok/s", "{:.0f}"),
)


class MetricsLog:
    """Writes the metrics of one run directory.

    Args:
        first_step: completed steps of the checkpoint from which the run resumes; 0 for a new run.

    Attributes:
        config_file: name of the file that holds the settings of this start; "" on all but the first rank.
    """

    config_file = ""

    def __init__(self, config: Config, first_step: int) -> None:
        self.writes = dist.get_rank() == 0
        self.directory = Path(config.output)
        self.steps, self.first_step, self.every = config.train.steps, first_step, config.logging.every
        self.started = time.monotonic()
        self._tensorboard: Any = None
        self._wandb: Any = None
        if not self.writes:
            return
        mark(self.directory, "train")
        self.config_file = record_config(self.directory, config)
        self.path = self.directory / "metrics.jsonl"
        if not first_step and self.path.exists():
            logger.info(f"no checkpoint in {self.directory}: starting over, {self.path.name} is overwritten")
        drop_lines_after(self.path, first_step)
        if config.logging.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._tensorboard = SummaryWriter(
                str(self.directory / "tensorboard"), purge_step=first_step + 1 if first_step else 0
            )
        if config.logging.wandb:
            import wandb

            # a stored id, so that a resumed run continues the same W&B run
            id_file = self.directory / "wandb_id"
            if not id_file.exists():
                write_atomically(id_file, secrets.token_hex(4))
            self._wandb = wandb.init(
                project=config.logging.wandb,
                name=self.directory.name,
                config=as_plain(config),
                dir=str(self.directory),
                id=id_file.read_text(),
                resume="allow",
            )
            # W&B's own steps only increase: a resumed run could not add the deferred evaluation of an earlier update
            self._wandb.define_metric("*", step_metric="step")

    def write(self, step: int, metrics: dict[str, float]) -> None:
        """Appends one line: `metrics` after `step` steps."""
        if not self.writes:
            return
        with naming(self.path), self.path.open("a") as file:
            # JSON has no NaN and no infinity: both become null
            plain = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
            file.write(json.dumps({"step": step, "time": time.time(), **plain}, allow_nan=False) + "\n")
        if self._tensorboard is not None:
            for name, value in metrics.items():
                self._tensorboard.add_scalar(name, value, step)
            self._tensorboard.flush()
        if self._wandb is not None:
            self._wandb.log({"step": step, **metrics})

    def history(self, metric: str) -> dict[int, float]:
        """Returns step -> finite value of a metric, from all starts of the run; {} on all but the first rank."""
        return {record["step"]: record[metric] for record in self._records() if record.get(metric) is not None}

    def evaluated(self, step: int) -> bool:
        """Returns whether the run has written validation metrics of `step`; False on all but the first rank."""
        return any(name.startswith("val/") for record in self._records() if record["step"] == step for name in record)

    def progress(self, done: int, metrics: dict[str, float]) -> None:
        """Logs the progress line after step `done`, if one is due, with an estimate of the remaining time."""
        if not self.writes or (done % self.every and done != self.steps):
            return
        shown = [f"{label} {form.format(metrics[name])}" for name, label, form in _PROGRESS_METRICS if name in metrics]
        elapsed = time.monotonic() - self.started
        remaining = elapsed / max(1, done - self.first_step) * (self.steps - done)
        logger.info(f"step {done}/{self.steps}  " + "  ".join(shown) + f"  left {hours_minutes_seconds(remaining)}")

    def close(self) -> None:
        """Closes TensorBoard and W&B."""
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish()

    def _records(self) -> list[dict[str, Any]]:
        if not self.writes or not self.path.exists():
            return []
        return [json.loads(line) for line in self.path.read_text().splitlines()]


def drop_lines_after(path: Path, step: int) -> None:
    """Removes an incomplete line with all after it, and lines whose `step` is above `step`; in a new run (0), all."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text().splitlines():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            break  # a killed run was writing this line; every step after the checkpoint is repeated
        if step > 0 and record["step"] <= step:
            kept.append(line)
    write_atomically(path, "".join(line + "\n" for line in kept))
