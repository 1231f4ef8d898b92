"""The codes of findings: every one is said somewhere, and docs/doctor.md lists them all."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from nemo_oprd.tools.doctor.findings import CODES, Finding

ROOT = Path(__file__).parents[3]


def test_the_page_lists_them() -> None:
    page = (ROOT / "docs" / "doctor.md").read_text()
    listed = re.findall(r"^\| `([a-z-]+)` \| (.*) \|$", page, flags=re.MULTILINE)
    assert listed == list(CODES.items()), "rewrite the table of docs/doctor.md from nemo_oprd/tools/doctor/findings.py"


def test_every_code_is_said() -> None:
    files = (ROOT / "nemo_oprd" / "tools" / "doctor").glob("*.py")
    said = "\n".join(file.read_text() for file in files if file.name != "findings.py")
    assert [code for code in CODES if f'"{code}"' not in said] == []
    assert all(re.fullmatch(r"[a-z]+(-[a-z]+)*", code) for code in CODES)


@pytest.mark.parametrize(
    ("verdict", "code"),
    [("warning", None), ("wrong", "no-such-code"), ("ok", "same-weights"), ("skipped", "few-prompts")],
)
def test_what_is_to_be_done_has_a_code(verdict: str, code: str | None) -> None:
    with pytest.raises(AssertionError):
        Finding("check", verdict, "text", code=code)  # type: ignore[arg-type]
