"""`nemo-oprd families` on 89 configurations as they were published, from the wheel aiconfigurator-core.

In Megatron-Bridge's environment, where scripts/setup_nemo_bridge.sh installs the wheel.
"""

from __future__ import annotations

from typing import Any

import pytest
from megatron_bridge_environment import published_rows

from tests.support.published_models import PUBLISHED, on_page, table

pytestmark = pytest.mark.nemo


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return published_rows(tmp_path_factory.mktemp("published") / "models")


def test_most_are_taken(rows: list[dict[str, Any]]) -> None:
    """None by mistake: a model is taken only with the number of parameters that it is known to have."""
    taken = {row["directory"]: row for row in rows if row["route"] in ("own", "bridge")}
    assert len(rows) == 89 and len(taken) >= 50 and taken.keys() == PUBLISHED.keys()
    for name, billions in PUBLISHED.items():
        assert taken[name]["parameters"] == pytest.approx(billions * 1e9, rel=0.01), name
    assert all(row["why"] == "" and row["layers"] and row["kv_heads"] for row in taken.values())


def test_the_others_are_refused_in_one_line(rows: list[dict[str, Any]]) -> None:
    others = [row for row in rows if row["route"] in ("served", "refused")]
    assert all(row["why"] and "\n" not in row["why"] and "expected" in row["why"] for row in others)
    assert all(row["parameters"] is None for row in others)


def test_the_page_has_what_the_command_says(rows: list[dict[str, Any]]) -> None:
    assert on_page() == table(rows), "write it anew: tests/support/published_models.py"


def test_what_a_quantised_release_says(rows: list[dict[str, Any]]) -> None:
    """Also where only hf_quant_config.json says so: such a model was once taken for a bfloat16 one."""
    weights = {row["directory"]: row["weights"] for row in rows}
    for name, row in {row["directory"]: row for row in rows if row["route"] in ("own", "bridge")}.items():
        assert (weights[name] != "bfloat16") == (
            "FP" in name or "gpt-oss" in name or _is_quantised_by_its_makers(name)
        ), row


def _is_quantised_by_its_makers(name: str) -> bool:
    of_deepseek = "deepseek-ai--DeepSeek-V3", "deepseek-ai--DeepSeek-R1", "moonshotai--Kimi-K2"
    makers = (*of_deepseek, "MiniMaxAI--MiniMax-M2", "XiaomiMiMo--MiMo-V2-Flash")
    return name.startswith(makers)
