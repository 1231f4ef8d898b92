"""Reads a training run's configuration and its metrics by name and step; finds its files of values per token.

Not here: the readers of checkpoints (`run/checkpoint_directory.py`) and rollouts (`rollout/replay.py`), and the writer
of metrics.jsonl (`run/metrics_log.py`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_oprd.run.config_history import current_config, read_config, spans
from nemo_oprd.runtime.files import parse_json

# The files with the values per token of a run's responses: `rollouts/token_metrics_*.jsonl`, one file per step.
#
# `step_recorder.py` writes their lines. This module imports no torch, because the report uses it.


_NAME = re.compile(r"token_metrics_(\d{7,})\.jsonl")


def token_file(directory: Path, done: int) -> Path:
    """Returns the file of step `done`, from 1, in the directory `rollouts`."""
    return directory / f"token_metrics_{done:07d}.jsonl"


def token_files(directory: Path) -> dict[int, Path]:
    """Returns step -> its file of values per token, steps ascending."""
    files = {int(match[1]): file for file in directory.glob("*") if (match := _NAME.fullmatch(file.name))}
    return dict(sorted(files.items()))


def remove_token_files(directory: Path, last: int) -> None:
    """Removes the files of the steps after `last`; a run that starts over, or repeats steps, writes them again."""
    for step, file in token_files(directory).items():
        if step > last:
            file.unlink()


@dataclass(frozen=True)
class Run:
    """A run directory's configurations and metrics.jsonl.

    Attributes:
        name: tells the run apart from the other runs of a report.
        config: the configuration of the last start as nested mappings.
        metrics: name -> {step: value}, steps ascending, never empty.
        seconds: wall-clock time between the first and the last logged line, including the pauses before restarts.
        cut_line: number, from 1, of an incomplete last line that was left out; None if the file is complete.
        history: (number of steps before, file, content) of each configuration with which steps ran, ascending.
    """

    name: str
    path: Path
    config: dict[str, Any]
    metrics: dict[str, dict[int, float]]
    seconds: float
    cut_line: int | None
    history: tuple[tuple[int, str, dict[str, Any]], ...] = ()

    @property
    def steps(self) -> tuple[int, int]:
        """Returns the first and the last step with a metric."""
        steps = [step for series in self.metrics.values() for step in series]
        return min(steps), max(steps)

    @property
    def unfinished(self) -> bool:
        """Returns whether steps of `train.steps` are missing, or the evaluation after the last step.

        An interrupted run is unfinished, too, although no process works on it.
        """
        total = self.setting("train.steps")
        if not isinstance(total, int) or self.steps[1] < total:
            return isinstance(total, int)
        sets = self.setting("data.validation") or self.setting("data.held_out")
        evaluates = self.setting("evaluation.every") and sets
        if not evaluates or self.setting("rollout.replay"):
            return False
        return not any(total in series for name, series in self.metrics.items() if name.startswith("val/"))

    def setting(self, key: str) -> Any:
        """Returns the value at a dotted key of the configuration, None if it is missing. Example: "student.hf_path"."""
        value: Any = self.config
        for part in key.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        return value


def read_run(path: Path, name: str) -> Run:
    """Reads a run directory.

    If a step was logged again after a restart, its last values count. An incomplete last line, which a killed run
    leaves, is left out, and `cut_line` holds its number.

    Raises:
        ValueError: a file is missing or malformed (the message names file and line), or no metrics are logged yet.
    """
    config = current_config(path)
    for file in (config, path / "metrics.jsonl"):
        if not file.is_file():
            raise ValueError(f"{file}: there is no such file; give the `output` directory of a training run")
    metrics: dict[str, dict[int, float]] = {}
    times: list[float] = []
    cut_line = None
    lines = (path / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    for number, line in enumerate(lines, 1):
        try:
            row = _parse_line(line, f"{path / 'metrics.jsonl'}, line {number}")
        except ValueError:
            if number < len(lines) or line.endswith(b"\n"):
                raise
            cut_line = number
            break
        times.append(row.pop("time"))
        step = int(row.pop("step"))
        for metric, value in row.items():
            metrics.setdefault(metric, {})[step] = value
    if not metrics:
        raise ValueError(f"{path / 'metrics.jsonl'}: holds no metrics, expected a step; wait for the run's first step")
    metrics = {metric: dict(sorted(series.items())) for metric, series in metrics.items()}
    kept = [(span, path / span.file) for span in spans(path)]  # the user may have removed a file
    history = tuple((span.after, span.file, read_config(file) if file.is_file() else {}) for span, file in kept)
    return Run(
        name,
        path,
        config=read_config(config),
        metrics=metrics,
        seconds=max(times) - min(times),
        cut_line=cut_line,
        history=history,
    )


def short_names(paths: list[Path]) -> list[str]:
    """Returns the shortest unambiguous path endings of equal length. Example: r/a/x, r/b/x -> a/x, b/x."""
    parts = [path.resolve().parts for path in paths]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-length:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    raise ValueError(f"runs are {', '.join(map(str, paths))}, expected different directories; name each run once")


def _parse_line(line: bytes, where: str) -> dict[str, Any]:
    """Returns the step, the time and the finite metrics of one line."""
    row = parse_json(line, where, "an object with step and time", "remove the line, or restore the file")
    if not isinstance(row, dict) or not isinstance(row.get("step"), int) or row.get("time") is None:
        raise ValueError(f"{where}: expected an object with an integer `step` and a `time`; remove or correct the line")
    wrong = {k: v for k, v in row.items() if isinstance(v, bool) or not isinstance(v, int | float | None)}
    if wrong:
        raise ValueError(f"{where}: {wrong!r:.80} among the values, expected numbers; remove or correct the line")
    # null stands for a non-finite value, which a skipped update can have
    return {name: value for name, value in row.items() if value is not None}
