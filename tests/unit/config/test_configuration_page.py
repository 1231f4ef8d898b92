"""docs/configuration.md is what the schema says."""

from __future__ import annotations

from pathlib import Path

from nemo_oprd.config import reference_page
from nemo_oprd.config.key_meanings import MEANINGS

PAGE = Path(__file__).parents[3] / "docs" / "configuration.md"


def test_the_page_is_up_to_date() -> None:
    made = reference_page.page()
    assert PAGE.read_text() == made, "run: python -m nemo_oprd.config.reference_page > docs/configuration.md"
    assert made.count("\n| `") == len(list(reference_page.keys_of_schema())) > 130


def test_every_meaning_belongs_to_a_key() -> None:
    known = {key for key, _, _ in reference_page.keys_of_schema()}
    for key in MEANINGS:
        assert any(key.replace("{role}", role) in known for role in ("student", "teacher")), key


def test_types_and_values_are_in_a_users_words() -> None:
    rows = {line.split("`")[1]: line for line in PAGE.read_text().splitlines() if line.startswith("| `")}
    assert "| `fp32` or `bf16` | `bf16` |" in rows["precision"]
    assert "| integer or null | `null` |" in rows["teacher.ranks"] and "`oprd_1p5b`" in rows["train.lr"]
    assert "| [number, number] | `[0.9, 0.999]` |" in rows["train.betas"]
    assert "| `off` or `truncate` or `mask` |" in rows["rollout.correction"]
