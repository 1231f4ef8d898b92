"""What a reader of the report sees: invisible characters of foreign text, wide tables, and colours with contrast."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

import pytest
from report_runs import make_run

from nemo_oprd.cli import main
from nemo_oprd.tools.report import page as pages
from nemo_oprd.tools.report.figures import COLORS
from nemo_oprd.tools.report.page import write_report
from nemo_oprd.tools.report.responses import LEVELS
from nemo_oprd.tools.report.tables import in_attribute, in_text

pytest.importorskip("matplotlib")
TURNED, NUL, NARROW, HALF = "\u202e", "\0", "\u200b", "\ud800"
TEXT_COLORS = ("ink", "muted", "right", "wrong", *(name for name in COLORS if name.startswith("series-")))
AREA_COLORS = tuple(name for name in COLORS if name.startswith("phase-"))


@pytest.mark.parametrize(
    ("character", "name"),
    [
        (TURNED, "right-to-left override"),
        ("\u2067", "right-to-left isolate"),
        ("\u200f", "right-to-left mark"),
        ("\u061c", "arabic letter mark"),
        (NARROW, "zero width space"),
        ("\ufeff", "zero width no-break space"),
        ("\u00ad", "soft hyphen"),
        ("\u2028", "line separator"),
        (NUL, "control character"),
        ("\x1b", "control character"),
        ("\r", "control character"),
        ("\x85", "control character"),
        (HALF, "control character"),
        ("\U000e0041", "tag latin capital letter a"),
    ],
)
def test_invisible_characters_are_framed(character: str, name: str) -> None:
    shown = f"U+{ord(character):04X}"
    assert in_text(f"<a{character}b") == f'&lt;a<span class="control" title="{name}">{shown}</span>b'
    assert in_attribute(f"a{character}b") == f"a[{shown}]b"


@pytest.mark.parametrize("text", ["", "2 + 2 = 4\n\tso", "é ± …", "数学", "שלום", "👍🏽", "a\u00a0b"])
def test_all_other_text_stays(text: str) -> None:
    assert in_text(text) == text == in_attribute(text)
    assert in_text(3) == 3


def test_no_control_reaches_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In responses, tokens, run names and settings."""
    monkeypatch.setattr(pages, "svg", lambda draw, steps, label, ident: f"<svg aria-label='{label}'></svg>")
    runs = [make_run(tmp_path / f"a{TURNED}b"), make_run(tmp_path / "c", seed=1)]
    bad = f"x{TURNED}{NUL}{NARROW}{HALF}y"
    for file in runs[0].rglob("*.jsonl"):
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        for line in lines:
            line |= {"response": bad + str(line["response"])} if "response" in line else {}
            line |= {"tokens": [bad, *line["tokens"][1:]]} if isinstance(line.get("tokens"), list) else {}
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = runs[0] / "config.yaml"
    config.write_text(config.read_text() + f'\nextra: "{TURNED.encode("unicode_escape").decode()}|"\n')
    for run in runs:
        main(["grade", str(run), "--judge", "text"])
    page = write_report(runs, tmp_path / "report.html").read_text(encoding="utf-8")
    assert not {TURNED, NUL, NARROW, HALF} & set(page)
    assert page.count(">U+202E</span>") > 10
    assert ">U+0000</span>" in page and ">U+200B</span>" in page and ">U+D800</span>" in page
    assert "<title>a[U+202E]b, c - " in page
    tokens = page[page.index('class="tokens"') :]
    assert 'U+202E</span><span class="control"' in tokens
    differing = page[page.index('id="settings"') : page.index('id="responses"')]
    assert "U+202E" in differing


def test_wide_tables_scroll_by_themselves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "svg", lambda *arguments: "<svg></svg>")
    page = write_report([make_run(tmp_path / name) for name in "abc"], tmp_path / "report.html").read_text()
    assert page.count("<table") == len(re.findall(r'<div class="scroll" tabindex="0" role="region" aria-label="', page))


def luminance(color: str) -> float:
    """Relative luminance by WCAG 2.2."""
    parts = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (each / 12.92 if each <= 0.04045 else ((each + 0.055) / 1.055) ** 2.4 for each in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(color: str, background: str) -> float:
    """Contrast ratio by WCAG 2.2, from 1 to 21."""
    dark, light = sorted((luminance(color), luminance(background)))
    return (light + 0.05) / (dark + 0.05)


def mixed(color: str, share: float, background: str) -> str:
    """CSS's color-mix(in srgb, color share, transparent) on a background."""
    pairs = ((int(color[at : at + 2], 16), int(background[at : at + 2], 16)) for at in (1, 3, 5))
    return "#" + "".join(f"{round(share * front + (1 - share) * back):02x}" for front, back in pairs)


def test_contrast_of_known_colours() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)


@pytest.mark.parametrize("mode", [0, 1], ids=["light", "dark"])
def test_contrast(mode: int) -> None:
    """Text and legend lines 4.5:1 (WCAG AA), the areas of bars 3:1; on the page and on cards."""
    ratios = {
        (name, ground): contrast(COLORS[name][mode], COLORS[ground][mode])
        for name, ground in itertools.product((*TEXT_COLORS, *AREA_COLORS), ("page", "card"))
    }
    low = {pair: f"{ratio:.2f}" for pair, ratio in ratios.items() if ratio < (4.5 if pair[0] in TEXT_COLORS else 3)}
    assert low == {}
    strongest = mixed(COLORS["heat"][mode], 0.08 * LEVELS, COLORS["card"][mode])
    assert contrast(COLORS["ink"][mode], strongest) >= 4.5
