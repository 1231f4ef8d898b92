"""The report in headless Chromium: no console errors, no network, every figure drawn, filters and colours at work."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import chromium
import numpy as np
import pytest
from PIL import Image
from report_runs import make_run

from nemo_oprd.cli import main
from nemo_oprd.tools.report.page import write_report

pytestmark = pytest.mark.chromium
# elements that draw: not those in <defs>, and not the invisible ones (patches without colour)
DRAWN = """[...document.querySelectorAll("figure svg")].map(svg => ({
  label: svg.getAttribute("aria-label"),
  width: svg.getBoundingClientRect().width,
  lines: [...svg.querySelectorAll("path, use, image, polygon")].filter(e => {
    if (e.closest("defs") || e.closest("clipPath")) return false;
    const style = getComputedStyle(e), box = e.getBoundingClientRect();
    const visible = style.stroke !== "none" || style.fill !== "none" || e.tagName === "image";
    return visible && box.width + box.height > 1;
  }).length,
  texts: [...svg.querySelectorAll("text")].filter(e => e.textContent.trim()).length,
  box: (({x, y, width, height}) => ({x: x + scrollX, y: y + scrollY, width, height}))(svg.getBoundingClientRect()),
}))"""
FIGURES = [
    *("Accuracy on sums", "Accuracy on sums over time", "Representation loss", "Cosine similarity"),
    *("Cosine similarity by layer", "Cosine similarity by position", "Cosine similarity by rank", "Entropies"),
    *("Output-space loss", "Policy-gradient loss", "KL of student from teacher", "Top-k overlap", "Response length"),
    *("Gradient norm", "Throughput", "Peak memory", "Time per step"),
]
VISIBLE = """(list => [...list.children].filter(e => getComputedStyle(e).display !== "none").length)"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[chromium.Browser]:
    reason = chromium.missing()
    if reason:
        pytest.skip(reason)
    browser = chromium.Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("runs")
    made = [make_run(root / "a"), make_run(root / "b <i>$x^", seed=1, learned=0.5, lr=3e-4)]
    for run in made:
        main(["grade", str(run), "--judge", "text"])
        (run / "bridge").mkdir()
        curves = {name: {"cosine": {"2": at, "8": at / 2}} for name, at in (("bridge", 0.8), ("before", 0.1))}
        (run / "bridge" / "bridge.json").write_text(json.dumps({"report": {"layers": {"1:2": {"curves": curves}}}}))
    return made


@pytest.fixture(scope="module")
def page(runs: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(runs, tmp_path_factory.mktemp("out") / "report.html")


def undrawn(browser: chromium.Browser) -> list[str]:
    """What is wrong with the figures of the open page: their labels, with what they lack."""
    found = []
    for figure in browser.evaluate(DRAWN):
        if figure["width"] < 200 or figure["lines"] < 8 or figure["texts"] < 4:
            found.append(f"{figure['label']}: {figure['lines']} lines, {figure['texts']} texts, {figure['width']} wide")
        elif _colours(browser, figure["box"]) < 20:
            found.append(f"{figure['label']}: drawn in fewer than 20 colours")
    return found


def _colours(browser: chromium.Browser, box: dict[str, float]) -> int:
    """The number of colours in a part of the page as it is painted; antialiased lines and text have dozens."""
    return len(np.unique(_pixels(browser, box).reshape(-1, 3), axis=0))


def _pixels(browser: chromium.Browser, box: dict[str, float]) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(browser.image(box))).convert("RGB"))


def test_a_broken_page_is_noticed(browser: chromium.Browser, tmp_path: Path) -> None:
    """What the tests below rely on: errors, requests and empty figures are seen."""
    broken = tmp_path / "broken.html"
    broken.write_text(
        "<!doctype html><script>console.error('no'); missing()</script><img src='http://192.0.2.1/x.png'>"
        "<figure><svg aria-label='empty' width=300 height=200><path d='M0 0'/></svg></figure>"
    )
    before = len(browser.messages)
    browser.open(broken, wait_for_load=False)
    browser.evaluate("new Promise(done => setTimeout(done, 100))")
    found = " ".join(browser.messages[before:])
    assert "console" in found and "exception" in found
    assert any(address.startswith("http:") for address in browser.requests)
    assert undrawn(browser) == ["empty: 0 lines, 0 texts, 300 wide"]
    browser.forget()


@pytest.mark.parametrize("width", [1280, 390])
def test_figures(browser: chromium.Browser, page: Path, width: int) -> None:
    browser.open(page, width)
    assert browser.messages == []
    assert {address.partition(":")[0] for address in browser.requests} <= {"file", "data"}
    titles = browser.evaluate("[...document.querySelectorAll('figure h3')].map(e => e.textContent)")
    assert sorted(titles) == sorted(FIGURES)
    assert len(browser.evaluate(DRAWN)) == len(FIGURES) + 3  # one per run for layers, positions and times
    assert undrawn(browser) == []
    assert browser.evaluate("document.documentElement.scrollWidth") <= width  # only tables scroll sideways


def test_filters(browser: chromium.Browser, page: Path) -> None:
    browser.open(page)
    lists = browser.evaluate(f"[...document.querySelectorAll('.list')].map(list => {VISIBLE}(list))")
    assert len(lists) == 4 and lists[2] == lists[3] == 8
    for ident, kinds in (("s1", ("wrong", "truncated", "changed")), ("t1", ("wrong", "truncated", "largest"))):
        for kind in (*kinds, "all"):
            button = f"document.getElementById('{ident}-{kind}')"
            visible = browser.evaluate(f"({button}.click(), {VISIBLE}({button}.parentElement.querySelector('.list')))")
            label = browser.evaluate(f"{button}.nextElementSibling.querySelector('small').textContent")
            assert visible == int(label) > 0, (ident, kind)
    assert browser.evaluate(f"{VISIBLE}(document.querySelectorAll('.list')[3])") == 8  # the other run's stay


def test_token_colours(browser: chromium.Browser, page: Path) -> None:
    """The chosen measure alone colours tokens, far-apart ones more strongly, and its scale is shown."""
    browser.open(page)
    alpha = """(name => { const list = document.getElementById("t1-all").parentElement.querySelector(".list");
      const context = document.createElement("canvas").getContext("2d");
      context.fillStyle = getComputedStyle(list.querySelector("." + name)).backgroundColor;
      context.fillRect(0, 0, 1, 1); return context.getImageData(0, 0, 1, 1).data[3]; })"""
    scales = "[...document.getElementById('t1-all').parentElement.querySelectorAll('.scale')]"
    for letter in "ckrg":
        browser.evaluate(f"document.getElementById('t1-by-{letter}').click()")
        weak, medium, strong = (browser.evaluate(f"{alpha}('{letter}{level}')") for level in (1, 4, 8))
        assert 0 < weak < medium < strong, letter
        shown = browser.evaluate(f"{scales}.filter(e => e.offsetParent).map(e => e.className)")
        assert shown == [f"scale scale-{letter}"]
    only = "(span => [...span.classList].every(name => name[0] === 'c'))"
    spans = "document.getElementById('t1-all').parentElement.querySelectorAll('.tokens span[class]')"
    browser.evaluate("document.getElementById('t1-by-k').click()")
    coloured = f"[...{spans}].filter({only}).map(e => getComputedStyle(e).backgroundColor)"
    assert set(browser.evaluate(coloured)) <= {"rgba(0, 0, 0, 0)"}  # tokens that only the cosine colours


def test_dark_and_unfinished(browser: chromium.Browser, tmp_path: Path) -> None:
    run = make_run(tmp_path / "going", steps=3)
    file = write_report([run], tmp_path / "report.html")
    browser.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])
    try:
        browser.open(file)
        assert browser.messages == [] and undrawn(browser) == []
        corner = _pixels(browser, {"x": 0, "y": 0, "width": 5, "height": 5})
        assert corner.max() < 60
        assert browser.evaluate("document.querySelector('meta[http-equiv=refresh]').content") == "30"
    finally:
        browser.call("Emulation.setEmulatedMedia", features=[])


def test_the_browser_reloads_an_unfinished_page(browser: chromium.Browser, tmp_path: Path) -> None:
    """With the waiting time cut to a second; the page that replaces it stays."""
    run = make_run(tmp_path / "going", steps=3)
    file = write_report([run], tmp_path / "report.html")
    file.write_text(file.read_text().replace('http-equiv="refresh" content="30"', 'http-equiv="refresh" content="1"'))
    browser.open(file)
    lines = [{"step": 6, "time": 2000.0, "rep/loss": 0.1}, {"step": 6, "time": 2100.0, "val/sums/avg@2": 0.5}]
    with (run / "metrics.jsonl").open("a") as metrics:
        metrics.write("".join(json.dumps(line) + "\n" for line in lines))
    write_report([run], file)
    browser.wait_for("document.querySelector('meta[http-equiv=refresh]') === null")
    facts: Any = browser.evaluate("document.querySelector('article dl').textContent")
    assert "Steps6" in facts and "unfinished" not in facts
