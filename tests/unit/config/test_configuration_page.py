"""docs/configuration.md is what the schema says."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from nemo_oprd.config import reference_page
from nemo_oprd.config.keys import keys
from nemo_oprd.config.schema import Config

PAGE = Path(__file__).parents[3] / "docs" / "configuration.md"


@dataclass
class Group:
    documented: int = 0
    """a number"""
    bare: int = 0


def test_the_page_is_up_to_date() -> None:
    made = reference_page.page()
    assert PAGE.read_text() == made, "run: python -m nemo_oprd.config.reference_page > docs/configuration.md"
    assert made.count("\n| `") == sum(not key.is_group for key in keys(Config)) > 130


def test_a_keys_meaning_is_the_first_paragraph_below_its_field() -> None:
    described = {key.name: key.meaning for key in keys(Config) if not key.is_group}
    assert all(described.values())
    assert described["train.save_every"] == "steps between checkpoints; 0: none"
    assert described["teacher.offload"] == "keep the weights in host memory while the teacher computes nothing"
    assert described["loss.output.temperature"] == "of both distributions"  # inherited
    assert described["loss.output.k"] == "size of the top sets"  # declared again, with the meaning of its base


def test_nobody_has_to_read_python_for_a_meaning() -> None:
    """All paragraphs below a field are there, with links to pages; none names a module or a class of the schema."""
    page, links = PAGE.read_text(), re.compile(r"\[(\w+\.md)\]\(\1\)")
    plain = links.sub(r"docs/\1", page)
    details = [key.details for key in keys(Config) if not key.is_group and key.details]
    assert len(details) > 40 and all(each.replace("|", "\\|") in plain for each in details)
    assert "unless long responses go on over updates (`mode`)" in page
    assert not re.search(r"docs/\w+\.md|schema\.py|losses/|distillation/|`[A-Z]\w+Config`", page)


def test_a_key_without_a_meaning_is_refused() -> None:
    first, second = keys(Group)
    assert first.meaning == "a number"
    with pytest.raises(KeyError, match="bare"):
        _ = second.meaning


def test_types_and_values_are_in_a_users_words() -> None:
    rows = {line.split("`")[1]: line for line in PAGE.read_text().splitlines() if line.startswith("| `")}
    assert "| `fp32` or `bf16` | `bf16` |" in rows["precision"]
    assert "| integer or null | `null` |" in rows["teacher.ranks"] and "`oprd_1p5b`" in rows["train.lr"]
    assert "| [number, number] | `[0.9, 0.999]` |" in rows["train.betas"]
    assert "| `off` or `truncate` or `mask` |" in rows["rollout.correction"]
