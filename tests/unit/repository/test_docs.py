"""The documents become a site without a dead link, and what they name exists: files, and the tests of an invariant."""

from __future__ import annotations

import html
import json
import re
import shutil
from pathlib import Path

import pytest
from mkdocs.commands.build import build
from mkdocs.config import load_config
from mkdocs.exceptions import Abort
from pymdownx.slugs import slugify

ROOT = Path(__file__).parents[3]
DOCUMENTS = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")] + sorted(ROOT.glob("docs/*.md"))
NUMBER = r"[-+]?\d+(?:[.,]\d+)*"
FOLDERS = ("nemo_oprd", "tests", "benchmarks", "studies", "checkpoint_tools", "scripts", "conf", "examples")
SOURCES = [file for folder in FOLDERS for file in (ROOT / folder).rglob("*.*")]


def build_site(project: Path, site: Path, **settings: str) -> None:
    config = load_config(str(project / "mkdocs.yml"), strict=True, site_dir=str(site), **settings)
    config.plugins.on_startup(command="build", dirty=False)
    build(config)


def test_the_site(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """No dead link, anchor or page without a place; nothing of other hosts; all formulas are shown."""
    try:
        build_site(ROOT, tmp_path)
    except Abort:
        pytest.fail("\n".join(record.getMessage() for record in caplog.records if record.levelname == "WARNING"))
    pages = {page.relative_to(tmp_path).as_posix(): page.read_text() for page in tmp_path.rglob("*.html")}
    assert len(pages) >= len(DOCUMENTS) and (tmp_path / "search" / "search_index.json").exists()
    for name, text in pages.items():
        assert not re.findall(r'<(?:script|link|img)[^>]* (?:src|href)="https?:[^"]*"', text), name
        assert "arithmatex" not in text, name
    assert "On-policy representation distillation on Megatron-core" in pages["index.html"]
    assert "in nemo_oprd/train.py." in pages["index.html"]
    assert 'href="../contributing/#versions"' in pages["cluster/index.html"]
    assert pages["design/index.html"].count("<math") > 30
    assert '<div class="no-copy highlight">' in pages["index.html"]
    assert "no-copy" not in pages["my_models/index.html"]
    keys = pages["configuration/index.html"]
    assert "<code>student.hf_path</code>" in keys and "student.<wbr>parallel.<wbr>first_<wbr>stage_<wbr>layers" in keys
    assert "<code>--layers local|te</code>" in pages["rehearsal/index.html"]


def test_the_search_finds_every_message(tmp_path: Path) -> None:
    """Under a heading of its own on the page that docs/hooks.py makes of docs/errors.json, which no page replaces."""
    build_site(ROOT, tmp_path)
    index = json.loads((tmp_path / "search" / "search_index.json").read_text())["docs"]
    found = [entry for entry in index if entry["location"].startswith("errors/#")]
    groups = json.loads((ROOT / "docs" / "errors.json").read_text())
    plain = {"".join(re.findall(r"\w+", html.unescape(re.sub("<[^>]*>", "", entry["text"])))) for entry in found}
    for message in (message for group in groups.values() for message in group.values()):
        assert "".join(re.findall(r"\w+", message)) in plain, message
    assert not (ROOT / "docs" / "errors.md").exists()
    page = (tmp_path / "errors" / "index.html").read_text()
    assert "expected constant | cosine;" in page
    assert 'href="#layout"' in page and 'class="md-nav__link" href="#a-fraction' not in page
    assert 'href="../errors/"' in (tmp_path / "configuration" / "index.html").read_text()


def test_pictures_fit() -> None:
    """Drawn with characters, on a page that is 1300 pixels wide."""
    found = 0
    for document in DOCUMENTS:
        for block in re.findall(r"^```\n(.*?)^```$", document.read_text(), flags=re.DOTALL | re.MULTILINE):
            if re.search("[│┌└┬]", block):
                found += 1
                assert max(map(len, block.splitlines())) <= 90, f"{document.name}: {block}"
    assert found >= 2


def test_mistakes_fail_the_site(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One of each kind, all in one build."""
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    for name in ("mkdocs.yml", "README.md", "CONTRIBUTING.md", "CHANGELOG.md"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "docs" / "unplaced.md").write_text("# A page\n")
    with (tmp_path / "docs" / "rope.md").open("a") as page:
        page.write("\n[a](nothing.md) [b](runs.md#nothing) [c](#nowhere) [d](../scripts/nothing.sh)\n")
    with (tmp_path / "README.md").open("a") as page:
        page.write("\n[e](docs/nobody.md)\n")
    with pytest.raises(Abort):
        build_site(tmp_path, tmp_path / "site")
    messages = "\n".join(record.getMessage() for record in caplog.records if record.levelname == "WARNING")
    for expected in (
        "unplaced.md",
        "docs/rope.md links to nothing.md, which does not exist",
        "docs/rope.md links to ../scripts/nothing.sh, which does not exist",
        "README.md links to docs/nobody.md, which does not exist",
        "'runs.md#nothing'",
        "'#nowhere'",
    ):
        assert expected in messages, expected


def test_links_into_a_repository(tmp_path: Path) -> None:
    """Where one is named; mkdocs.yml names none, and the links are text."""
    build_site(ROOT, tmp_path, repo_url="https://host.invalid/project/")
    link = 'href="https://host.invalid/project/blob/HEAD/nemo_oprd/train.py"'
    assert link in (tmp_path / "index.html").read_text()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda file: file.name)
def test_files_exist(document: Path) -> None:
    """Paths in backticks are relative to the project, to `nemo_oprd/`, or the end of one."""
    for path in re.findall(r"`([\w./-]+/[\w-]+\.(?:py|sh|yaml|jinja))`", document.read_text()):
        if "NAME" not in path:
            assert any(file.as_posix().endswith(f"/{path}") for file in SOURCES), f"{document.name} names {path}"


def test_invariants_name_tests_that_exist() -> None:
    found = re.findall(r"`(tests/[\w/]+\.py)`: ((?:`test_\w+`(?:, )?)+)", (ROOT / "docs" / "design.md").read_text())
    assert len(found) > 10
    for file, names in found:
        content = (ROOT / file).read_text()
        for name in re.findall(r"`(test_\w+)`", names):
            assert f"def {name}(" in content, f"docs/design.md: {file} has no {name}"


def test_figures_of_verdicts_are_those_of_their_evidence() -> None:
    """Each number of a verdict in docs/results.md stands in the section that its line links to."""
    evidence = {}
    for page in ROOT.glob("docs/results_*.md"):
        _, *sections = re.split(r"^###? ", page.read_text(), flags=re.MULTILINE)
        evidence |= {f"{page.name}#{slugify(case='lower')(each.partition(chr(10))[0], '-')}": each for each in sections}
    results = (ROOT / "docs" / "results.md").read_text()
    rows = re.findall(r"^\|.*\| (.*) \| \[[^]]*\]\((.*#.*)\) \|$", results, flags=re.MULTILINE)
    assert len(rows) > 35
    for figures, section in rows:
        known = re.findall(NUMBER, evidence[section])
        assert not set(re.findall(NUMBER, figures)) - set(known), f"{figures} is not in {section}"
