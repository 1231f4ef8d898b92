"""Turns run directories into one self-contained HTML page: the progress, the results and the costs of the runs.

The page consists of the jinja2 templates in this directory, which escape all text; the other modules compute their
content. Left out: scripts (filters and colours are CSS), anything from the network, and the date. Equal input gives an
equal page, byte for byte, so pages can be compared. The page of an unfinished run asks the browser to load it again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

from nemo_oprd.evaluation.comparison import COLUMNS, DIRECTORY, read_comparison
from nemo_oprd.run.config_history import starts
from nemo_oprd.run.run_reader import Run, read_run, short_names
from nemo_oprd.run.timeline import read_timeline
from nemo_oprd.runtime.files import write_atomically
from nemo_oprd.tools.report.evaluations import groups, meanings, paired, read_evaluations
from nemo_oprd.tools.report.figures import COLORS, Key, Panel, closed_gap, count, duration, last, number, run_key, svg
from nemo_oprd.tools.report.panels import panels, validation_names
from nemo_oprd.tools.report.responses import HEAD, LEVELS, MEASURES, prompt_decoder, responses, token_panel
from nemo_oprd.tools.report.tables import (
    all_settings,
    changed_settings,
    chosen_settings,
    costs,
    differing_settings,
    first_and_last,
    in_attribute,
    in_text,
    validation_metrics,
    validation_rows,
)

# The top of the report: a sentence for each run, and its summary: models, teachers, loss, batch, time, versions.


PARALLEL = (("tensor", "TP"), ("pipeline", "PP"), ("virtual_pipeline", "VPP"), ("context", "CP"))
# weights of a teacher that is no model of its own -> what the card calls them
_WEIGHTS = {
    "student": "the student itself, as it is",
    "ema": "the moving average of the student, decay {decay}",
    "initial": "the student as it was before training",
}
# what a teacher reads that the student does not: key of its settings -> what the card calls it
_CONVERSATION = {
    "prompt": "prompt",
    "system_prompt": "system prompt",
    "chat_template": "chat template",
    "chat_template_args": "chat template's arguments",
}
_PRIVILEGES = {"{answer}": "the answer", "{hint}": "a hint"}
_LOSSES = ("rep/loss", "output/loss", "loss/total")


@dataclass(frozen=True)
class Card:
    """The summary of one run: its sentence, (setting, value) pairs, and the number of a line that was cut off."""

    key: Key
    sentence: str
    settings: list[tuple[str, str]]
    cut_line: int | None


def cards(runs: list[Run]) -> list[Card]:
    """Returns one card per run."""
    made = [_Summary(run) for run in runs]
    return [
        Card(run_key(index, each.run), each.sentence, [(name, value) for name, value in each.settings() if value],
             each.run.cut_line)
        for index, each in enumerate(made)
    ]  # fmt: skip


class _Summary:
    """One run's settings and results in words, as far as the run's files have them."""

    def __init__(self, run: Run) -> None:
        self.run = run

    @cached_property
    def _start(self) -> dict[str, Any]:
        """The last start's entry of environment.json."""
        return (starts(self.run.path) or [{}])[-1]

    @property
    def _ranks(self) -> str:
        """The number of ranks. Example: "2 ranks"; "" if it is not known."""
        ranks = _text(self._start.get("ranks"))
        return f"{ranks} rank{'' if ranks == '1' else 's'}" if ranks else ""

    @property
    def sentence(self) -> str:
        """The run in words: "96 % of the gap closed: 64.3 → 98.6 %, teacher 100.0 %, 6 min 48 s on 2 ranks"."""
        done, total = self.run.steps[1], self.run.setting("train.steps")
        averages = [(name, metric) for name, metric in validation_names([self.run]) if metric.startswith("avg@")]
        found = [self._of_set(f"val/{name}/", metric) for name, metric in averages]
        if len(found) > 1:
            found = [f"{name}: {text}" for (name, _), text in zip(averages, found, strict=True)]
        on = f" on {self._ranks}" if self._ranks else ""
        found = ["; ".join(found) or self._loss(), duration(self.run.seconds) + on]
        unfinished = f"After {done:,} of {total:,} steps, unfinished: " if self.run.unfinished else ""
        return unfinished + ", ".join(filter(None, found))

    def _of_set(self, prefix: str, metric: str) -> str:
        """Returns a text on a validation set's average: its change, and the closed part of the teacher's lead."""
        series = self.run.metrics[prefix + metric]
        (first, before), (step, after) = next(iter(series.items())), list(series.items())[-1]
        shares = [f"{100 * value:.1f}" for value in (before, after)]
        if first == step:
            text = f"{shares[0]} % {f'after step {step:,}' if step else 'before training'}"
        else:
            text = f"{shares[0]} → {shares[1]} %"
        reference = f"{prefix}teacher/{metric}"
        if reference not in self.run.metrics:
            return text
        teacher = last(self.run, reference)
        text += f", teacher {100 * teacher:.1f} %"
        if first == step or not math.isfinite(after):
            return text
        if teacher > before:
            return f"{closed_gap(before, after, teacher)} % of the gap closed: {text}"
        return f"{text}, which was not ahead"

    def _loss(self) -> str:
        """Returns the loss of a run without evaluations."""
        name = next((name for name in _LOSSES if name in self.run.metrics), None)
        if name is None:
            return ""
        values = list(self.run.metrics[name].values())
        steps = f"in {len(values):,} step{'' if len(values) == 1 else 's'}"
        return f"{name} {number(name, values[0])} → {number(name, values[-1])} {steps}"

    def settings(self) -> Iterator[tuple[str, str]]:
        """Yields (name, value or "") of each setting on the card."""
        run, start = self.run, self._start
        steps = f"{run.steps[1]:,}" + (f" of {run.setting('train.steps'):,}, unfinished" if run.unfinished else "")
        prompts, each, lr = (run.setting(k) for k in ("train.prompts_per_step", "rollout.per_prompt", "train.lr"))
        yield "Student", self._model("student", run.config.get("student"))
        yield "Student layout", self._layout("student")
        yield from self._teachers()
        yield "Teacher layout", self._layout("teacher")
        yield "Loss", " + ".join(filter(None, (_representation_term(run), _output_term(run))))
        batch = f"{prompts} prompts x {each} responses, learning rate {lr}"
        yield "Batch", "" if None in (prompts, each, lr) else batch
        yield "Steps", steps
        yield "Total time", duration(run.seconds)
        yield "Seed", _text(run.setting("seed"))
        yield "Precision", _text(run.setting("precision"))
        yield "Started", self._date()
        yield "Machine", ", ".join(filter(None, (self._ranks, _text(start.get("device")))))
        yield "Versions", ", ".join(self._versions())

    def _teachers(self) -> Iterator[tuple[str, str]]:
        """Yields the teachers: models or weights, data sources, other input than the student's, and engine."""
        run, common = self.run, self.run.config.get("teacher")
        common = common if isinstance(common, dict) else {}
        several = run.setting("teachers")
        several = [each for each in several if isinstance(each, dict)] if isinstance(several, list) else []
        weights = run.setting("teacher.weights")
        for number_, own in enumerate(several):
            name = own.get("name") or "+".join(map(str, own.get("data_sources") or ["others"]))
            yield f"Teacher {name}", ", ".join(filter(None, (self._model(f"teachers[{number_}]", own), *_share(own))))
            yield from _conversation(f"Teacher {name}'s", own)
        if not several and weights in _WEIGHTS:
            yield "Teacher", _WEIGHTS[weights].format(decay=run.setting("teacher.ema_decay"))
        elif not several:
            yield "Teacher", self._model("teacher", common)
        yield from _conversation("Teachers'" if several else "Teacher's", common)
        yield "Teacher reads", "the text, in its own tokens" if common.get("reads") == "text" else ""
        yield "Teacher computed by", "vLLM servers" if common.get("engine") == "vllm" else ""

    def _model(self, key: str, source: Any) -> str:
        """Describes a model by path and size, e.g. "models/a (qwen2, 28 layers, width 1,536, 1.54 B parameters)"."""
        if not isinstance(source, dict):
            return ""
        path = _text(source.get("checkpoint") or source.get("hf_path"))
        sizes = self._start.get("model_sizes")
        size = sizes.get(key) if isinstance(sizes, dict) else None
        if not path or not isinstance(size, dict):
            return path
        parts = [_text(size.get("model_type")), f"{size['layers']} layers" if size.get("layers") else ""]
        parts += [f"width {size['hidden_size']:,}"] if isinstance(size.get("hidden_size"), int) else []
        parts += [f"{count(size['parameters'])} parameters"] if size.get("parameters") else []
        return f"{path} ({', '.join(filter(None, parts))})"

    def _layout(self, role: str) -> str:
        """Describes a role's layout, as recorded ("TP2 PP2 DP1 +SP") or by the settings; a teacher's with placement."""
        recorded, layout = self._start.get("layouts"), self.run.setting(f"{role}.parallel")
        placement = _text(self.run.setting("teacher.placement")) if role == "teacher" else ""
        if isinstance(recorded, dict) and role in recorded:
            return ", ".join(filter(None, (_text(recorded[role]), placement)))
        if not isinstance(layout, dict):
            return ""
        parts = [f"{short} {layout[name]}" for name, short in PARALLEL if layout.get(name, 1) != 1]
        parts += ["sequence parallel"] if layout.get("sequence") else []
        return ", ".join(filter(None, (*parts, placement))) or "data parallel only"

    def _date(self) -> str:
        """Returns the date of the run. Example: "2026-01-31 12:00 UTC, 3 starts"."""
        every = starts(self.run.path)
        first = _text(every[0].get("started")) if every else ""
        date = f"{first[:10]} {first[11:16]} UTC" if len(first) == len("2026-01-31T12:00:00Z") else first
        return date + (f", {len(every)} starts" if len(every) > 1 else "")

    def _versions(self) -> Iterator[str]:
        packages = self._start.get("packages")
        named = {name: self._start.get(name) for name in ("nemo_oprd", "python")}
        for name, version in {**named, **(packages if isinstance(packages, dict) else {})}.items():
            if version:
                yield f"{name} {version}"


def _share(source: dict[str, Any]) -> Iterator[str]:
    """Yields the data sources of one of several teachers, its weight and bridge, and whether it runs on servers."""
    data_sources = source.get("data_sources")
    yield (
        f"data sources {', '.join(map(str, data_sources))}"
        if isinstance(data_sources, list)
        else "all other data sources"
    )
    yield f"weight {source['weight']}" if source.get("weight", 1) != 1 else ""
    yield f"bridge {source['bridge']}" if source.get("bridge") else ""
    yield "computed by vLLM servers" if source.get("engine") == "vllm" else ""


def _conversation(whose: str, settings: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields what a teacher reads in addition to, or instead of, the student's input."""
    for key, name in _CONVERSATION.items():
        value = settings.get(key)
        if value in (None, {}):
            continue
        knows = [known for field, known in _PRIVILEGES.items() if key == "prompt" and field in str(value)]
        yield f"{whose} {name}", f"{value}" + (f" (it knows {' and '.join(knows)})" if knows else "")


def _text(value: Any) -> str:
    return "" if value is None else str(value)


def _representation_term(run: Run) -> str:
    """Describes the representation term, such as "representation mse (layers all, last_k 2000)"; "" if it is off."""
    settings = run.setting("loss.representation")
    if not isinstance(settings, dict) or not settings.get("weight"):
        return ""
    positions = settings.get("positions", "")
    positions = "all positions" if positions == "all" else f"{positions} {settings.get('k', '')}"
    bridge = run.setting("bridge.path")
    through = f", bridge {bridge}" if bridge not in (None, "none") else ""
    if run.setting("rollout.stop_after") is not None:
        positions += ", where sampling stops"
    details = f"layers {settings.get('layers', '')}, {positions}{through}"
    return f"{_weight(settings)}representation {settings.get('kind', '')} ({details})"


def _output_term(run: Run) -> str:
    """Describes the output term, such as "0.5 x output top_k (k 16)"; "" if it is off."""
    settings = run.setting("loss.output")
    if not isinstance(settings, dict) or not settings.get("weight") or settings.get("kind") in (None, "none"):
        return ""
    support = f" (k {settings.get('k')})" if settings["kind"] == "top_k" else ""
    return f"{_weight(settings)}output {settings['kind']}{support}"


def _weight(settings: dict[str, Any]) -> str:
    if isinstance(settings["weight"], list):
        return "scheduled "
    return "" if settings["weight"] == 1 else f"{settings['weight']} x "


TEMPLATE = "page.html.jinja"
REFRESH_S = 30


def write_report(runs: Sequence[Path], output: Path, steps: tuple[int, int] | None = None) -> Path:
    """Writes the page that shows `runs` (directories with metrics.jsonl and config.yaml) side by side to `output`.

    A run whose last line of metrics.jsonl was cut off is shown without that line, and the page mentions it.

    Args:
        steps: the first and the last step of the timeline; None: the last ones of each run.

    Returns: `output`; its parent directories are created.

    Raises:
        ValueError: `output` is a directory, there are no runs, a file is missing or malformed, or a run has no metrics.
    """
    output = Path(output)
    if output.is_dir():
        raise ValueError(f"{output} is a directory, expected a file to write; add a name such as report.html")
    read = _read(runs)
    page = _render(read, steps)
    output.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(output, page)
    return output


def unfinished(runs: Sequence[Path]) -> bool:
    """Returns whether any of the runs is unfinished (`Run.unfinished`). Raises ValueError as `write_report`."""
    return any(run.unfinished for run in _read(runs))


def check_steps(runs: Sequence[Path], steps: tuple[int, int]) -> None:
    """Raises ValueError if the first of `steps` is after the last step of every run, or as `write_report`."""
    read = _read(runs)
    # steps between two lines of metrics.jsonl are in the timeline
    last = max(max([run.steps[1], *(each.step for each in read_timeline(run.path))]) for run in read)
    if steps[0] > last:
        given = f"{steps[0]}-{steps[1]}"
        raise ValueError(f"--steps {given}: the last step is {last}; expected steps up to it: choose e.g. {last}")


def _read(runs: Sequence[Path]) -> list[Run]:
    if not runs:
        raise ValueError("no run directories, expected at least one; name the directories of the runs to report")
    paths = [Path(run) for run in runs]
    return [read_run(path, name) for path, name in zip(paths, short_names(paths), strict=True)]


def _render(runs: list[Run], timeline_steps: tuple[int, int] | None) -> str:
    # autoescape: names of runs, sets and models come from files
    environment = Environment(
        loader=FunctionLoader(lambda name: resources.files(__package__).joinpath(name).read_text(encoding="utf-8")),
        autoescape=True,
        finalize=in_text,
        trim_blocks=True,
        keep_trailing_newline=True,
        undefined=StrictUndefined,
    )
    environment.filters["in_attribute"] = in_attribute
    steps = min(run.steps[0] for run in runs), max(run.steps[1] for run in runs)
    kept = [read_evaluations(index, run) for index, run in enumerate(runs)]
    compared = [(run_key(index, run), read_comparison(run.path / DIRECTORY)) for index, run in enumerate(runs)]
    metrics, (differing, differences) = validation_metrics(runs), paired(kept)
    return environment.get_template(TEMPLATE).render(
        title=", ".join(run.name for run in runs),
        refresh=REFRESH_S if any(run.unfinished for run in runs) else None,
        colors=COLORS,
        cards=cards(runs),
        validation={"metrics": metrics, "rows": validation_rows(runs, kept)},
        differences={"metrics": differing, "rows": differences},
        meanings=meanings([*metrics, *differing]),
        groups=groups(kept),
        columns=COLUMNS,
        comparisons=[(key, comparison) for key, comparison in compared if comparison is not None],
        figures=[
            (panel, _plots(panel, steps, f"f{index}")) for index, panel in enumerate(panels(runs, timeline_steps))
        ],
        costs=costs(runs),
        settings=differing_settings(runs),
        chosen=chosen_settings(runs[0]) if len(runs) == 1 else [],
        everything=all_settings(runs),
        changed=changed_settings(runs),
        samples=[each for run, own in zip(runs, kept, strict=True) for each in responses(own, prompt_decoder(run))],
        measures=MEASURES,
        levels=LEVELS,
        head=HEAD,
        tokens=[panel for index, run in enumerate(runs) if (panel := token_panel(index, run)) is not None],
        metrics=first_and_last(runs),
    )


def _plots(panel: Panel, steps: tuple[int, int], ident: str) -> list[tuple[str, Markup]]:
    """Returns (caption, SVG element) of each plot; `ident` keeps their ids apart from the ids of other panels."""
    return [
        (caption, Markup(svg(draw, steps, in_attribute(f"{panel.title} {caption}".strip()), f"{ident}-{index}")))
        for index, (caption, draw) in enumerate(panel.plots)
    ]
