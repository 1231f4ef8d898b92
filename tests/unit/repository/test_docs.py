"""What the documents name exists: links, anchors, files, and the tests that hold an invariant."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
DOCUMENTS = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")] + sorted(ROOT.glob("docs/*.md"))
# a table of messages, in which paths are examples; entries of earlier versions
EXAMPLES = {"errors.md"}
SOURCES = [file for folder in ("nemo_oprd", "tests", "benchmarks", "studies", "checkpoint_tools", "scripts", "conf", "examples")
           for file in (ROOT / folder).rglob("*.*")]  # fmt: skip


def anchors(text: str) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda file: file.name)
def test_links_lead_somewhere(document: Path) -> None:
    text = document.read_text()
    for target, _, anchor in (link.partition("#") for link in re.findall(r"\]\(([^)\s]+)\)", text)):
        if target.startswith("http"):
            continue
        other = document.parent / target if target else document
        assert other.exists(), f"{document.name} links to {target}"
        assert not anchor or anchor in anchors(other.read_text()), f"{document.name} links to {target}#{anchor}"


@pytest.mark.parametrize("document", [d for d in DOCUMENTS if d.name not in EXAMPLES], ids=lambda file: file.name)
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
