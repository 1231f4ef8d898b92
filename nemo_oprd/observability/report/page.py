"""Turns run directories into one HTML page: a summary per run, before/after tables and figures, nothing external.

Left out: anything interactive. Equal input gives an equal page, byte for byte, so pages can be compared; hence no date
either. All text that comes from files is escaped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from nemo_oprd.observability.report.figures import (
    COLORS,
    PHASES,
    Key,
    Panel,
    last,
    panels,
    run_key,
    svg,
    validation_names,
)
from nemo_oprd.observability.run_reader import Run, read_run, short_names

METRICS = (
    *("loss/total", "rep/loss", "rep/cosine_similarity", "output/loss", "actor/pg_loss", "actor/entropy"),
    *("teacher/entropy", "val-topk/overlap_ratio", "response_length/mean", "actor/grad_norm", "lr"),
    *(f"timing/{phase}_s" for phase in PHASES),
    *("perf/tokens_per_s", "perf/peak_memory_gb"),
)
PARALLEL = (("tensor", "TP"), ("pipeline", "PP"), ("virtual_pipeline", "VPP"), ("context", "CP"))


def write_report(runs: Sequence[Path], output: Path) -> Path:
    """Writes the page that shows `runs` (directories with metrics.jsonl and config.yaml) side by side to `output`.

    A run whose last line of metrics.jsonl was cut off is shown without that line, and the page says so.

    Returns: `output`; its parent directories are created.

    Raises:
        ValueError: there are no runs, a file is missing or malformed, or a run has no metrics yet.
    """
    if not runs:
        raise ValueError("no run directories, expected at least one; name the directories of the runs to report")
    paths, output = [Path(run) for run in runs], Path(output)
    if output.is_dir():
        raise ValueError(f"{output} is a directory, expected a file to write; add a name such as report.html")
    page = _page([read_run(path, name) for path, name in zip(paths, short_names(paths), strict=True)])
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(page, encoding="utf-8")
    return output


def _page(runs: list[Run]) -> str:
    names = escape(", ".join(run.name for run in runs))
    cards = "\n".join(_card(run, run_key(index, run)) for index, run in enumerate(runs))
    steps = min(run.steps[0] for run in runs), max(run.steps[1] for run in runs)
    figures = "\n".join(_figure(panel, steps, f"f{index}") for index, panel in enumerate(panels(runs)))
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{names} - distillation report</title>
<style>{_style()}</style>
</head>
<body>
<header><p>On-policy distillation report</p><h1>{names}</h1></header>
<main>
<section class="cards">
{cards}
</section>
{_validation_table(runs)}
<section><h2>Curves</h2><div class="figures">
{figures}
</div></section>
{_metrics_table(runs)}
</main>
</body>
</html>
"""


# --- parts of the page ---------------------------------------------------------------------------------------------


def _card(run: Run, key: Key) -> str:
    rows = [
        ("Student", _model(run, "student")),
        ("Student layout", _layout(run, "student")),
        ("Teacher", _model(run, "teacher")),
        ("Teacher layout", _layout(run, "teacher")),
        ("Loss", " + ".join(filter(None, (_representation_term(run), _output_term(run))))),
        ("Batch", _batch(run)),
        ("Steps", f"{run.steps[1]:,}"),
        ("Total time", _duration(run.seconds)),
    ]
    terms = "".join(f"<dt>{name}</dt><dd>{escape(value)}</dd>" for name, value in rows if value)
    cut = f"Line {run.cut_line} of metrics.jsonl was cut off when the run was killed, and is left out."
    note = f'<p class="note">{cut}</p>' if run.cut_line else ""
    return f"<article><h2>{_legend(key)}</h2><dl>{terms}</dl>{note}</article>"


def _model(run: Run, role: str) -> str:
    return str(run.setting(f"{role}.hf_path") or run.setting(f"{role}.checkpoint") or "")


def _layout(run: Run, role: str) -> str:
    """Only what is switched on. Example: "TP 2, PP 2, sequence parallel"."""
    layout = run.setting(f"{role}.parallel")
    if not isinstance(layout, dict):
        return ""
    parts = [f"{short} {layout[name]}" for name, short in PARALLEL if layout.get(name, 1) != 1]
    parts += ["sequence parallel"] if layout.get("sequence") else []
    if role == "teacher" and run.setting("teacher.placement"):
        parts.append(str(run.setting("teacher.placement")))
    return ", ".join(parts) or "data parallel only"


def _representation_term(run: Run) -> str:
    """Example: "representation mse (layers all, last_k 2000)"; "" if the term is off."""
    settings = run.setting("loss.representation")
    if not isinstance(settings, dict) or not settings.get("weight"):
        return ""
    positions = settings.get("positions", "")
    positions = "all positions" if positions == "all" else f"{positions} {settings.get('k', '')}"
    bridge = run.setting("bridge.path")
    through = f", bridge {bridge}" if bridge not in (None, "none") else ""
    details = f"layers {settings.get('layers', '')}, {positions}{through}"
    return f"{_weight(settings)}representation {settings.get('kind', '')} ({details})"


def _output_term(run: Run) -> str:
    """Example: "0.5 x output top_k (k 16)"; "" if the term is off."""
    settings = run.setting("loss.output")
    if not isinstance(settings, dict) or not settings.get("weight") or settings.get("kind") in (None, "none"):
        return ""
    support = f" (k {settings.get('k')})" if settings["kind"] == "top_k" else ""
    return f"{_weight(settings)}output {settings['kind']}{support}"


def _weight(settings: dict[str, Any]) -> str:
    return "" if settings["weight"] == 1 else f"{settings['weight']} x "


def _batch(run: Run) -> str:
    prompts, each, lr = (run.setting(k) for k in ("train.prompts_per_step", "rollout.per_prompt", "train.lr"))
    return "" if None in (prompts, each, lr) else f"{prompts} prompts x {each} responses, learning rate {lr}"


def _validation_table(runs: list[Run]) -> str:
    """Per set: each run at its first and last evaluated step, then the teachers."""
    pairs = validation_names(runs)
    metrics = list(dict.fromkeys(metric for _, metric in pairs))
    rows: list[list[str]] = []
    for name in dict.fromkeys(name for name, _ in pairs):
        teachers: dict[tuple[str, ...], str] = {}  # by their cells, so that equal ones make one row
        first_row = len(rows)
        for index, run in enumerate(runs):
            columns = [f"val/{name}/{metric}" for metric in metrics]
            references = [f"val/{name}/teacher/{metric}" for metric in metrics]
            cells = [_before_after(run, student, teacher) for student, teacher in zip(columns, references, strict=True)]
            if any(cells):
                evaluated = [step for column in columns for step in run.metrics.get(column, {})]
                span = f"<small>step {min(evaluated):,} \N{RIGHTWARDS ARROW} {max(evaluated):,}</small>"
                rows.append(["", _legend(run_key(index, run)) + span, *cells])
            values = tuple(_number(key, last(run, key)) if key in run.metrics else "" for key in references)
            if any(values):
                teachers.setdefault(values, run.name)
        for values, owner in teachers.items():
            rows.append(["", "teacher" if len(teachers) == 1 else f"teacher of {escape(owner)}", *values])
        rows[first_row][0] = f"<b>{escape(name)}</b>"
    if not rows:
        return ""
    return f"<section><h2>Validation</h2>{_table(['Set', 'Model', *metrics], rows, text_columns=2)}</section>"


def _before_after(run: Run, student: str, teacher: str) -> str:
    """Example: 34.0 % -> 51.1 %, and below it how much of the teacher's lead in accuracy that made up."""
    if student not in run.metrics:
        return ""
    values = list(run.metrics[student].values())
    cell = f"<b>{_number(student, values[-1])}</b>"
    if len(values) > 1:
        cell = f"{_number(student, values[0])} \N{RIGHTWARDS ARROW} {cell}"
        if "@" in student and teacher in run.metrics and (lead := last(run, teacher) - values[0]) > 0:
            cell += f"<small>{100 * (values[-1] - values[0]) / lead:.0f}\N{NO-BREAK SPACE}% of the gap closed</small>"
    return cell


def _metrics_table(runs: list[Run]) -> str:
    """First and last value of every metric of METRICS that a run has."""
    rows = []
    for metric in METRICS:
        if any(metric in run.metrics for run in runs):
            cells = [f"<code>{escape(metric)}</code>"]
            for run in runs:
                series = list(run.metrics.get(metric, {}).values())
                cells += [_number(metric, series[0]), f"<b>{_number(metric, series[-1])}</b>"] if series else ["", ""]
            rows.append(cells)
    if not rows:
        return ""
    header = ["Metric"]
    for index, run in enumerate(runs):
        chip = _legend(run_key(index, run)) + "<br>" if len(runs) > 1 else ""
        header += [f"{chip}first", f"{chip}last"]
    return f"<section><h2>First and last values</h2>{_table(header, rows, text_columns=1)}</section>"


def _table(header: Sequence[str], rows: list[list[str]], text_columns: int) -> str:
    def line(tag: str, cells: Sequence[str]) -> str:
        kinds = ["" if column < text_columns else ' class="number"' for column in range(len(cells))]
        return "<tr>" + "".join(f"<{tag}{k}>{c}</{tag}>" for k, c in zip(kinds, cells, strict=True)) + "</tr>"

    body = "\n".join(line("td", row) for row in rows)
    return f'<div class="scroll"><table><thead>{line("th", header)}</thead><tbody>\n{body}\n</tbody></table></div>'


def _figure(panel: Panel, steps: tuple[int, int], ident: str) -> str:
    legend = f'<p class="legend">{"".join(map(_legend, panel.keys))}</p>' if len(panel.keys) > 1 else ""
    plots = []
    for index, (caption, draw) in enumerate(panel.plots):
        heading = f"<h4>{escape(caption)}</h4>" if caption else ""
        plots.append(f"<div>{heading}{svg(draw, steps, f'{panel.title} {caption}'.strip(), f'{ident}-{index}')}</div>")
    title = f"<h3>{escape(panel.title)}</h3><p>{escape(panel.note)}</p>"
    wide = ' class="wide"' if len(plots) > 1 else ""
    return f'<figure{wide}><figcaption>{title}{legend}</figcaption>\n<div class="plots">{"".join(plots)}</div></figure>'


def _legend(key: Key) -> str:
    return f'<span class="key"><i style="border-top:3px {key.style} var(--{key.color})"></i>{escape(key.label)}</span>'


# --- numbers and style ---------------------------------------------------------------------------------------------


def _number(metric: str, value: float) -> str:
    """Accuracies in percent, diversity with three decimals, the rest with four significant digits."""
    if not math.isfinite(value):
        return str(value)
    if "/avg@" in f"/{metric}" or "/best@" in f"/{metric}":
        return f"{100 * value:.1f}\N{NO-BREAK SPACE}%"
    if metric.endswith("dist_4g"):
        return f"{value:.3f}"
    if value != 0 and not 1e-3 <= abs(value) < 1e7:
        text = f"{value:.2e}"
    else:
        text = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return text.replace("-", "\N{MINUS SIGN}")


def _duration(seconds: float) -> str:
    """Two units. Example: 7985.2 -> "2 h 13 min"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours:,} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def _style() -> str:
    def variables(theme: int) -> str:
        return "".join(f"--{name}:{pair[theme]};" for name, pair in COLORS.items())

    return f":root{{{variables(0)}}}\n@media (prefers-color-scheme:dark){{:root{{{variables(1)}}}}}\n{CSS}"


CSS = """
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);font:16px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif}
header,main{max-width:76rem;margin:auto;padding:0 1.25rem}
header{padding-top:2.5rem}
header p{margin:0;color:var(--muted);font-size:.85rem;letter-spacing:.02em}
h1{margin:.1rem 0 1.5rem;font-size:clamp(1.4rem,4vw,2.1rem);line-height:1.2;overflow-wrap:anywhere}
h2{margin:2.5rem 0 .75rem;font-size:1.2rem}
h3{margin:0;font-size:1rem}
h4{margin:.5rem 0 0;font-size:.85rem;font-weight:600}
article,figure,.scroll{background:var(--card);border:1px solid var(--line);border-radius:10px}
.cards,.figures,.plots{display:grid;gap:1rem;grid-template-columns:repeat(auto-fit,minmax(min(100%,26rem),1fr))}
article{padding:1rem 1.25rem}
article h2{margin:0 0 .6rem;font-size:1.05rem}
dl{display:grid;grid-template-columns:max-content 1fr;gap:.2rem 1rem;margin:0;font-size:.9rem}
dt{color:var(--muted)}
dd{margin:0;overflow-wrap:anywhere}
.note{margin:.8rem 0 0;padding-left:.7rem;border-left:3px solid var(--series-1);font-size:.9rem}
.scroll{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:.9rem}
th,td{padding:.45rem .9rem;text-align:left;vertical-align:top;white-space:nowrap;border-bottom:1px solid var(--line)}
tbody tr:last-child td{border-bottom:0}
th{color:var(--muted);font-weight:500}
.number{text-align:right;font-variant-numeric:tabular-nums}
small{display:block;color:var(--muted);font-size:.75rem}
code{font:.85em ui-monospace,Menlo,Consolas,monospace}
figure{margin:0;padding:1rem 1rem .5rem;min-width:0}
.wide{grid-column:1/-1}
figcaption p{margin:0;color:var(--muted);font-size:.85rem}
.key{display:inline-flex;align-items:center;gap:.45rem;vertical-align:top}
.key i{width:1.3rem;flex:none}
figcaption .legend{display:flex;flex-wrap:wrap;gap:.1rem 1rem;margin-top:.35rem;color:var(--ink)}
svg{display:block;width:100%;height:auto;margin-top:.4rem}
svg text{font-family:inherit!important}
@media (max-width:32rem){svg{overflow:visible} svg text{font-size:12px!important}}
main{padding-bottom:4rem}
"""
