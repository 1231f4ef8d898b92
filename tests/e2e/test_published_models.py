"""`nemo-oprd families` on 89 configurations as they were published, from the wheel aiconfigurator-core.

In Megatron-Bridge's environment, where scripts/setup_nemo_bridge.sh installs the wheel.
"""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest
from megatron_bridge_environment import PYTHON, ROOT, make_environment

from tests.support.published_models import on_page, table

pytestmark = pytest.mark.nemo
LIST = """
import json, sys
from pathlib import Path
from tests.support.published_models import make_directories, rows_of
root = Path(sys.argv[1])
print(json.dumps(rows_of(root) if make_directories(root) else []))
"""
# Parameters in billions, of the models' cards and reports; of a model with a tower, those of its language model, which
# is a Qwen3 of that size. The reader of configurations knows none of them.
PUBLISHED = {
    "meta-llama--Meta-Llama-3.1-8B": 8.03, "meta-llama--Meta-Llama-3.1-70B": 70.6,
    "meta-llama--Meta-Llama-3.1-405B": 405.9, "nvidia--Llama-3.1-70B-Instruct-FP8": 70.6,
    "Qwen--Qwen3-0.6B": 0.596, "Qwen--Qwen3-1.7B": 1.72, "Qwen--Qwen3-8B": 8.19, "Qwen--Qwen3-32B": 32.8,
    "Qwen--Qwen3-32B-FP8-Static-PerTensor": 32.8, "Qwen--Qwen3-30B-A3B": 30.5, "Qwen--Qwen3-235B-A22B": 235.1,
    "nvidia--Qwen3-235B-A22B-NVFP4": 235.1, "Qwen--Qwen3-Coder-480B-A35B-Instruct": 480.2,
    "Qwen--Qwen3-VL-2B-Instruct": 1.72, "Qwen--Qwen3-VL-8B-Instruct": 8.19, "Qwen--Qwen3-VL-32B-Instruct": 32.8,
    "Qwen--Qwen3-VL-30B-A3B-Instruct": 30.5, "Qwen--Qwen3-VL-235B-A22B-Instruct": 235.1,
    "MiniMaxAI--MiniMax-M2.5": 228.7, "nvidia--MiniMax-M2.7-NVFP4": 228.7, "XiaomiMiMo--MiMo-V2-Flash": 309.0,
    "google--gemma-4-26B-A4B": 25.2, "nvidia--Gemma-4-26B-A4B-NVFP4": 25.2,
    "moonshotai--Kimi-K2.5": 1026.0,
    "mistralai--Mixtral-8x7B-v0.1": 46.7, "mistralai--Mixtral-8x22B-v0.1": 140.6,
    "openai--gpt-oss-120b": 116.83, "openai--gpt-oss-20b": 20.91,
    "deepseek-ai--DeepSeek-V3": 671.0, "deepseek-ai--DeepSeek-R1": 671.0, "nvidia--DeepSeek-V3.1-NVFP4": 671.0,
    "moonshotai--Kimi-K2-Instruct": 1026.0, "Qwen--Qwen3.5-397B-A17B": 397.0,
    "MiniMaxAI--MiniMax-M2.7": 228.7, "nvidia--MiniMax-M2.5-NVFP4": 228.7, "nvidia--Kimi-K2.5-NVFP4": 1026.0,
    "nvidia--Kimi-K2.6-NVFP4": 1026.0, "nvidia--Kimi-K2.7-Code-NVFP4": 1026.0, "Qwen--Qwen3-32B-FP8": 32.8,
    "Qwen--Qwen3-30B-A3B-FP8": 30.5, "Qwen--Qwen3-235B-A22B-FP8": 235.1, "Qwen--Qwen3-VL-32B-Thinking": 32.8,
    "Qwen--Qwen3-VL-4B-Instruct": 4.02, "Qwen--Qwen3.5-27B": 27.0, "nvidia--Qwen3.6-27B-NVFP4": 27.0,
    "Qwen--Qwen3.5-35B-A3B": 35.0, "nvidia--Qwen3.6-35B-A3B-NVFP4": 35.0, "Qwen--Qwen3.5-122B-A10B": 122.0,
    "nvidia--Qwen3.5-122B-A10B-NVFP4": 122.0, "nvidia--Qwen3.5-397B-A17B-NVFP4": 397.0,
    # without the layer that predicts a further token, of 0.21
    "XiaomiMiMo--MiMo-7B-Base": 7.62,
}  # fmt: skip


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    environment = make_environment()
    if "version = 3.11" in (PYTHON.parent.parent / "pyvenv.cfg").read_text():
        pytest.skip("Megatron-Bridge 0.3 (Python 3.11) has fewer families")
    root = tmp_path_factory.mktemp("published") / "models"
    command = [str(PYTHON), "-W", "ignore", "-c", LIST, str(root)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    if not found:
        pytest.skip("the wheel aiconfigurator-core is not installed in .venv-nemo-bridge")
    return found


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
