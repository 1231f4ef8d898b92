"""The report: complete, self-contained, safe to open, equal for equal input, and honest about broken files."""

from __future__ import annotations

import html
import json
import math
import re
from argparse import Namespace
from html.parser import HTMLParser
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from nemo_oprd.run.run_reader import read_run, short_names
from nemo_oprd.tools import report as command
from nemo_oprd.tools.report.page import TEMPLATE, write_report

pytest.importorskip("matplotlib")
yaml = pytest.importorskip("yaml")

PARALLEL = {"tensor": 2, "sequence": True, "pipeline": 4, "virtual_pipeline": 2, "context": 1}
CONFIG = {
    "student": {"hf_path": "models/student-1.5b", "parallel": PARALLEL},
    "teacher": {"hf_path": "models/teacher-1.5b", "parallel": PARALLEL | {"tensor": 8, "pipeline": 1}},
    "loss": {"representation": {"weight": 1.0, "kind": "mse", "layers": "all", "positions": "last_k", "k": 2000}},
    "rollout": {"per_prompt": 4},
    "train": {"prompts_per_step": 8, "lr": 1e-5},
}
VOID = {"meta", "input", "br", "path", "use", "image", "rect", "stop"}


def rows(steps: int = 6) -> list[dict[str, Any]]:
    """Lines of a run with every figure; `FEW` has two of them."""
    made = [{"step": 0, "time": 1000.0, "val/toy/avg@4": 0.25, "val/toy/teacher/avg@4": 0.75, "val/toy/avg_len": 40.0}]
    for step in range(1, steps + 1):
        made.append(
            {
                "step": step,
                "time": 1000.0 + 61.0 * step,
                "loss/total": 1.0 / step,
                "rep/loss": 1.0 / step,
                "rep/cosine_similarity": 1 - 0.5 / step,
                **{f"rep/cosine_similarity_layer/{layer}": 1 - 0.1 * layer / step for layer in range(1, 5)},
                **{f"rep/cosine_{end}_k/{2**j}": 0.9 + 0.01 * j for end in ("first", "last") for j in range(5)},
                "actor/grad_norm": 2.5,
                "response_length/mean": 1234.5,
                "lr": 1e-5,
                **{f"timing/{phase}_s": 1.5 for phase in ("generate", "teacher", "update", "sync")},
                "perf/tokens_per_s": 12345.6,
            }
        )
    made[-1] |= {"val/toy/avg@4": 0.5, "val/toy/avg_len": 30.0}
    return made


FEW = [{name: row[name] for name in row if name in ("step", "time", "rep/loss") or "toy" in name} for row in rows()]


def run(path: Path, lines: list[dict[str, Any]] | None = None, config: dict | None = None, tail: str = "") -> Path:
    path.mkdir(parents=True)
    text = "".join(json.dumps(row) + "\n" for row in (rows() if lines is None else lines))
    (path / "metrics.jsonl").write_text(text + tail, encoding="utf-8")
    (path / "config.yaml").write_text(yaml.safe_dump(CONFIG if config is None else config), encoding="utf-8")
    return path


def report(*runs: Path) -> str:
    return write_report(list(runs), runs[0].parent / "out" / "report.html").read_text(encoding="utf-8")


def titles(page: str) -> list[str]:
    return re.findall(r"<h3>(.*?)</h3>", page)


def words(page: str) -> str:
    """The page's text outside of figures."""
    body = re.sub(r"<(style|svg)\b.*?</\1>", " ", page, flags=re.DOTALL)
    return re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]*>", " ", body)))


def test_one_run(tmp_path):
    page = report(run(tmp_path / "alone"))
    assert titles(page) == [
        "Accuracy on toy",
        "Accuracy on toy over time",
        "Representation loss",
        "Cosine similarity",
        "Cosine similarity by layer",
        "Cosine similarity by position",
        "Response length",
        "Gradient norm",
        "Throughput",
        "Time per step",
    ]
    assert page.count("<svg") == 10
    text = words(page)
    assert "Student models/student-1.5b Student layout TP 2, PP 4, VPP 2, sequence parallel" in text
    assert "Teacher layout TP 8, VPP 2, sequence parallel" in text
    assert "representation mse (layers all, last_k 2000)" in text
    assert "8 prompts x 4 responses, learning rate 1e-05" in text
    assert "Steps 6 Total time 6 min 6 s" in text
    assert "toy alone step 0 → 6 25.0 % → 50.0 % 50 % of the gap closed 40 → 30" in text
    assert "teacher 75.0 %" in text
    assert "rep/loss 1 0.1667" in text
    assert "response_length/mean 1,234 1,234" in text
    assert "lr 1.00e\N{MINUS SIGN}05 1.00e\N{MINUS SIGN}05" in text
    assert "cut off" not in text


def test_a_timeline_of_some_steps(tmp_path):
    """Of the last steps, or of those that are asked for; the numbers in it are those of the sampled steps."""
    made = run(tmp_path / "a", FEW)
    lines = [
        {"step": step, "phase": phase, "began": 100.0 * step + begin, "ended": 100.0 * step + end, **more}
        for step in range(1, 9)
        for phase, begin, end, more in (
            ("sampling", 0, 60, {"batch": 40 + step, "submitted": 0, "collected": 60, "servers": {"0": [0, 60]}}),
            ("generate", 0, 15, {}), ("teacher", 15, 20, {}), ("gradient", 20, 90, {}), ("sync", 90, 99, {}),
        )
    ]  # fmt: skip
    (made / "timeline.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = report(made)
    assert "steps 4 to 8, 75 % of the sampling hidden" in words(page)
    figure = re.search(r"<h3>Timeline</h3>.*?</figure>", page, flags=re.DOTALL)[0]
    for text in ("sampling", "waiting for it", "teacher", "gradient", "weights to the engine", "44", "48"):
        assert f">{text}<" in figure, text
    assert ">43<" not in figure and "optimizer" not in figure
    chosen = write_report([made], tmp_path / "chosen.html", (2, 3)).read_text(encoding="utf-8")
    assert "steps 2 to 3, 75 % of the sampling hidden" in words(chosen)
    assert "Timeline" not in titles(write_report([made], tmp_path / "none.html", (20, 21)).read_text(encoding="utf-8"))


def test_steps_that_no_run_has(tmp_path, monkeypatch, capsys):
    """Steps between two lines of metrics.jsonl are in the timeline alone; a followed run may reach later ones."""
    made = run(tmp_path / "a", FEW)
    (made / "timeline.jsonl").write_text('{"step": 8, "phase": "gradient", "began": 1.0, "ended": 2.0}\n')

    def page(steps, follow=None):
        command.run(Namespace(runs=[str(made)], output=None, follow=follow, steps=steps))
        (made / "report.html").unlink()

    for steps in ("5", "8", "7-900"):
        page(steps)
    with pytest.raises(ValueError, match=r"^--steps 900-910: the last step is 8; expected steps up to it: choose e"):
        page("900-910")
    assert not (made / "report.html").exists()
    going_on = iter([True, False])
    monkeypatch.setattr("nemo_oprd.tools.report.page.unfinished", lambda runs: next(going_on))
    monkeypatch.setattr(command.time, "sleep", lambda seconds: None)
    page("900-910", follow=1.0)


def test_several_runs_overlay(tmp_path):
    other = [{name: value for name, value in row.items() if not name.startswith("rep/")} for row in rows(4)]
    page = report(run(tmp_path / "a"), run(tmp_path / "b"), run(tmp_path / "c", other))
    figures = dict(re.findall(r"<figure[^>]*><figcaption><h3>(.*?)</h3>(.*?)</figure>", page, flags=re.DOTALL))
    legends = {title: re.findall(r"</i><bdi>(.*?)</bdi></span>", body) for title, body in figures.items()}
    assert legends["Accuracy on toy"] == ["a", "b", "c", "teacher"]
    assert legends["Representation loss"] == ["a", "b"]
    assert figures["Representation loss"].count("<svg") == 1
    assert figures["Cosine similarity by layer"].count("<svg") == 2
    assert figures["Time per step"].count("<svg") == 3
    table = page.partition('<section id="evaluation">')[2]
    assert words(table).count("teacher 75.0 %") == 1  # the same for all: said once


def test_teachers_that_differ_get_a_line_each(tmp_path):
    stronger = [FEW[0] | {"val/toy/teacher/avg@4": 0.9}, *FEW[1:]]
    text = words(report(run(tmp_path / "a", FEW), run(tmp_path / "b", stronger)))
    assert "teacher of a 75.0 %" in text
    assert "teacher of b 90.0 %" in text


def test_no_data_no_figure(tmp_path):
    page = report(run(tmp_path / "a", [{"step": 1, "time": 5, "rep/loss": 0.5}], config={"seed": 1}))
    assert titles(page) == ["Representation loss"]
    assert "Validation" not in page
    assert "Steps 1 Total time 0 s" in words(page)


def test_a_long_run_is_smoothed_and_a_single_point_is_drawn(tmp_path):
    assert "moving average" in report(
        run(tmp_path / "long", [{"step": i, "time": i, "rep/loss": 1 / (i + 1)} for i in range(150)])
    )
    page = report(run(tmp_path / "short", rows(1)))
    assert "moving average" not in page
    assert "Time per step" in titles(page)


def test_diverged_runs_can_be_reported(tmp_path):
    lines = rows()
    for row in (lines[4], lines[6]):
        row |= {name: math.nan for name in row if "/" in name and not name.startswith("timing/")}
    lines[5]["rep/loss"] = math.inf
    page = report(run(tmp_path / "nan", lines))
    assert "25.0 % → nan" in words(page)
    assert len(titles(page)) == 10


def test_equal_input_gives_equal_bytes(tmp_path):
    first, second = run(tmp_path / "x" / "run"), run(tmp_path / "y" / "run")
    assert report(first) == report(second)


class _Checker(HTMLParser):
    """Collects ids, references and unbalanced tags."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.references: list[str] = []
        self.open: list[str] = []
        self.tags: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        for name, value in attrs:
            assert not name.startswith("on"), f"{name} on {tag}"
            if name == "id":
                self.ids.append(value or "")
            if name in ("src", "href", "xlink:href", "data", "action"):
                self.references.append(value or "")
            self.references += re.findall(r"url\((.*?)\)", value or "")
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag


def test_page_is_self_contained_and_well_formed(tmp_path):
    page = report(run(tmp_path / "a"), run(tmp_path / "b"))
    checker = _Checker()
    checker.feed(page)
    checker.close()
    assert checker.open == []
    assert len(checker.ids) == len(set(checker.ids))
    assert all(reference.startswith(("#", "data:image/png;base64,")) for reference in checker.references)
    assert {one[1:] for one in checker.references if one.startswith("#")} <= set(checker.ids)
    assert not checker.tags & {"script", "link", "iframe", "object", "embed", "base"}
    assert "http" not in re.sub(r"base64,[^\"]*", "", page)
    assert not re.search(r"@import|url\((?!#)", page)


def test_everything_from_files_is_escaped(tmp_path):
    evil = "<script>alert('$x^$')</script>&"
    config = {
        "student": {"hf_path": evil},
        "teacher": {"checkpoint": evil, "placement": evil, "parallel": {"tensor": evil}},
    }
    lines = [{"step": 1, "time": 1, f"val/{evil}/avg@4": 0.5, f"val/{evil}/teacher/avg@4": 0.6, "rep/loss": 0.1}]
    page = report(run(tmp_path / "<b>$a^$&", lines, config), run(tmp_path / "\"'><i>", lines, config))
    assert "<script" not in page
    assert "<b>$a" not in page
    assert "\"'><i>" not in page
    assert "Accuracy on &lt;script&gt;" in page
    assert words(page).count(evil) >= 6


def test_a_cut_off_last_line_is_left_out_and_mentioned(tmp_path):
    whole = run(tmp_path / "whole" / "run", FEW)
    cut = run(tmp_path / "cut" / "run", FEW, tail='{"step": 7, "time": 1427.0, "re')
    assert read_run(cut, "run").metrics == read_run(whole, "run").metrics
    page = report(cut)
    assert "Line 8 of metrics.jsonl was cut off" in words(page)
    assert re.sub(r'<p class="note">.*?</p>', "", page) == report(whole)


def test_steps_logged_again_after_a_restart_count_once(tmp_path):
    again = [{"step": 3, "time": 9000.0, "rep/loss": 7.0}, {"step": 4, "time": 9061.0, "rep/loss": 8.0}]
    series = read_run(run(tmp_path / "a", rows() + again), "a").metrics["rep/loss"]
    assert series == {1: 1.0, 2: 0.5, 3: 7.0, 4: 8.0, 5: 0.2, 6: 1 / 6}
    assert list(series) == sorted(series)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"step": 1, "ti\n', "not valid JSON"),
        ("\n", "not valid JSON"),
        ("[1, 2]\n", "integer `step` and a `time`"),
        ('{"step": 1.5, "time": 3}\n', "integer `step` and a `time`"),
        ('{"step": 1}\n', "integer `step` and a `time`"),
        ('{"step": 1, "time": null, "rep/loss": 1}\n', "integer `step` and a `time`"),
        ('{"step": 1, "time": 3, "rep/loss": "low"}\n', r"\{'rep/loss': 'low'\} among the values, expected numbers"),
        ('{"step": 1, "time": 3, "rep/loss": "low"}\n', "expected numbers"),
    ],
)
@pytest.mark.parametrize("where", ["middle", "end"])
def test_malformed_lines_are_errors(tmp_path, line, message, where):
    path = run(tmp_path / "a", rows(1), tail=line + (json.dumps({"step": 2, "time": 4}) + "\n") * (where == "middle"))
    with pytest.raises(ValueError, match=rf"a/metrics\.jsonl, line 3: .*{message}"):
        report(path)


def test_unusable_directories(tmp_path):
    with pytest.raises(ValueError, match="no run directories"):
        write_report([], tmp_path / "report.html")
    with pytest.raises(ValueError, match=r"missing/config\.yaml: there is no such file"):
        report(tmp_path / "missing")
    with pytest.raises(ValueError, match="holds no metrics"):
        report(run(tmp_path / "empty", []))
    with pytest.raises(ValueError, match="holds no metrics"):
        report(run(tmp_path / "cut", [], tail='{"step'))
    broken = run(tmp_path / "broken")
    (broken / "config.yaml").write_text("a: [1\n")
    with pytest.raises(ValueError, match=r"config\.yaml: not valid YAML"):
        report(broken)
    (broken / "config.yaml").write_text("")
    with pytest.raises(ValueError, match=r"config\.yaml: holds None, expected a mapping"):
        report(broken)
    good = run(tmp_path / "good")
    with pytest.raises(ValueError, match="is a directory, expected a file"):
        write_report([good], tmp_path)
    with pytest.raises(ValueError, match="expected different directories"):
        report(good, good)


def test_short_names(tmp_path):
    assert short_names([tmp_path / "x" / "run"]) == ["run"]
    assert short_names([tmp_path / "x" / "run", tmp_path / "y" / "run"]) == ["x/run", "y/run"]


def test_the_template_is_installed_with_the_package():
    """In a source tree and in a wheel, whose files hatch selects by the rules of pyproject.toml and .gitignore."""
    package = resources.files("nemo_oprd.tools.report")
    assert package.joinpath(TEMPLATE).is_file()
    wheel = pytest.importorskip("hatchling.builders.wheel")
    root = Path(__file__).parents[3]
    packed = {file.distribution_path for file in wheel.WheelBuilder(str(root)).recurse_included_files()}
    assert f"nemo_oprd/tools/report/{TEMPLATE}" in packed


def test_the_page_starts_with_its_doctype(tmp_path):
    """Otherwise browsers draw it in quirks mode."""
    assert report(run(tmp_path / "a", FEW)).startswith("<!doctype html>\n")


@pytest.mark.parametrize("output", [None, "elsewhere/page.html"])
def test_the_command_says_where_the_page_is(tmp_path, capsys, monkeypatch, output):
    monkeypatch.chdir(tmp_path)
    run(tmp_path / "a", FEW)
    command.run(Namespace(runs=["a"], output=output, follow=None, steps=None))
    written = output or "a/report.html"
    assert capsys.readouterr().out == f"{written}\n"
    assert (tmp_path / written).read_text(encoding="utf-8").startswith("<!doctype html>")
