"""Turns run directories into one self-contained HTML page: the progress, the results and the costs of the runs.

The page consists of the jinja2 templates in this directory, which escape all text; the other modules compute their
content. Left out: scripts (filters and colours are CSS), anything from the network, and the date. Equal input gives an
equal page, byte for byte, so pages can be compared. The page of an unfinished run asks the browser to load it again.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

from nemo_oprd.evaluation.comparison import COLUMNS, DIRECTORY, read_comparison
from nemo_oprd.run.run_reader import Run, read_run, short_names
from nemo_oprd.runtime.files import write_atomically
from nemo_oprd.tools.report.cards import cards
from nemo_oprd.tools.report.evaluations import groups, meanings, paired, read_evaluations
from nemo_oprd.tools.report.figures import COLORS, Panel, run_key, svg
from nemo_oprd.tools.report.panels import panels
from nemo_oprd.tools.report.responses import prompt_decoder, responses
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
from nemo_oprd.tools.report.tokens import HEAD, LEVELS, MEASURES, token_panel

TEMPLATE = "page.html.jinja"
REFRESH_S = 30


def write_report(runs: Sequence[Path], output: Path, steps: tuple[int, int] | None = None) -> Path:
    """Writes the page that shows `runs` (directories with metrics.jsonl and config.yaml) side by side to `output`.

    A run whose last line of metrics.jsonl was cut off is shown without that line, and the page mentions it.

    Args:
        steps: the first and the last step of the timeline; None: the last ones of each run.

    Returns: `output`; its parent directories are created.

    Raises:
        ValueError: there are no runs, a file is missing or malformed, or a run has no metrics yet.
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
    """True if any of the runs is unfinished (`Run.unfinished`). Raises ValueError as `write_report`."""
    return any(run.unfinished for run in _read(runs))


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
    """(Caption, SVG element) of each plot; `ident` keeps their ids apart from the ids of other panels."""
    return [
        (caption, Markup(svg(draw, steps, in_attribute(f"{panel.title} {caption}".strip()), f"{ident}-{index}")))
        for index, (caption, draw) in enumerate(panel.plots)
    ]
