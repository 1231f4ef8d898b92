"""The timeline figure: the intervals of sampling, waiting, teaching and updating in some steps; from timeline.jsonl."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from nemo_oprd.run.run_reader import Run
from nemo_oprd.run.timeline import SAMPLING, Interval, hidden_share, read_timeline
from nemo_oprd.tools.report.figures import COLORS, Draw, Panel

# phase -> (label, colour), from the top of the figure
LANES = {
    SAMPLING: ("sampling", "phase-0"),
    "generate": ("waiting for it", "phase-rest"),
    "check": ("check", "phase-1"),
    "gradient_noise": ("gradient noise", "phase-5"),
    "teacher": ("teacher", "phase-2"),
    "gradient": ("gradient", "phase-3"),
    "optimizer": ("optimizer", "phase-3"),
    "sync": ("weights to the engine", "phase-4"),
    "evaluation": ("evaluation", "phase-5"),
    "save": ("saving", "phase-rest"),
}
DEFAULT_STEPS = 5
_NUMBERS_UP_TO = 40  # samplings whose numbers have room


def parse_steps(text: str) -> tuple[int, int]:
    """The first and the last step of "8-12" or "8". Raises ValueError for anything else."""
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 0 < first <= last:
        raise ValueError(f"--steps {text}: expected a step or a range of steps, from 1; choose e.g. 8-12")
    return first, last


def timeline_panel(runs: Sequence[Run], steps: tuple[int, int] | None) -> Panel:
    """A plot per run with the intervals of `steps` (None: the last ones); no plots if no run has any of them."""
    plots: list[tuple[str, Draw]] = []
    for run in runs:
        chosen = shown(read_timeline(run.path), steps)
        numbers = [each.step for each in chosen if each.phase != SAMPLING]
        if not numbers:
            continue
        name = f"{run.name}, " if len(runs) > 1 else ""
        share = hidden_share(chosen)
        hidden = "" if share is None else f", {100 * share:.0f} % of the sampling hidden"
        caption = f"{name}steps {min(numbers)} to {max(numbers)}{hidden}"
        plots.append((caption, partial(_draw, chosen)))
    note = "seconds; hidden: the ranks did something else than wait. Numbers: the step whose responses are sampled"
    return Panel("Timeline", note, [], plots)


def shown(intervals: Sequence[Interval], steps: tuple[int, int] | None) -> list[Interval]:
    """The intervals from the beginning of the first to the end of the last of `steps`, clipped there, from second 0.

    Evaluations and checkpoints between the steps belong to the step before. None: the last `DEFAULT_STEPS` steps.
    """
    last = max((each.step for each in intervals), default=0)
    first, last = steps or (max(1, last - DEFAULT_STEPS + 1), last)
    own = [each for each in intervals if first <= each.step <= last and each.phase != SAMPLING]
    if not own:
        return []
    begin, end = min(each.began for each in own), max(each.ended for each in own)
    cut = [
        replace(each, began=max(each.began, begin) - begin, ended=min(each.ended, end) - begin)
        for each in intervals
        if first <= each.step <= last or each.phase == SAMPLING
    ]
    return [each for each in cut if each.began < each.ended]


def _draw(intervals: list[Interval], axes: Any) -> None:
    """Draws the intervals, one lane per phase."""
    lanes = [phase for phase in LANES if any(each.phase == phase for each in intervals)]
    samplings = sum(each.phase == SAMPLING for each in intervals)
    for row, phase in enumerate(lanes):
        own = [each for each in intervals if each.phase == phase]
        bars = [(each.began, each.ended - each.began) for each in own]
        axes.broken_barh(bars, (row - 0.38, 0.76), color=COLORS[LANES[phase][1]][0], linewidth=0)
        if phase == SAMPLING and samplings <= _NUMBERS_UP_TO:
            for each in own:
                middle = (each.began + each.ended) / 2
                axes.text(middle, row, str(each.batch), ha="center", va="center", fontsize=7, color=COLORS["card"][0])
    own = [each for each in intervals if each.phase != SAMPLING]
    for step in {each.step for each in own}:
        begins = min(each.began for each in own if each.step == step)
        axes.axvline(begins, color=COLORS["muted"][0], linewidth=0.6, linestyle="dotted")
    axes.set_yticks(range(len(lanes)), [LANES[phase][0] for phase in lanes])
    axes.set_ylim(len(lanes) - 0.5, -0.5)
    axes.set_xlim(0, max(each.ended for each in intervals))
    axes.set_xlabel("seconds")
    axes.grid(visible=False, axis="y")
