"""The shipped recipes whose models Megatron-Bridge builds, in its environment: planned, counted, rehearsed.

test_rehearsal_recipes.py has the others.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from megatron_bridge_environment import PYTHON, ROOT, run

from nemo_oprd.tools.rehearse import TOLERANCE
from nemo_oprd.tools.rehearse.shim import COMPILERS
from tests.support.recipe_models import OF_MEGATRON_BRIDGE, shipped, write_models

CASES = "bridge_recipe_cases.py"
# one group of three layers with a delta net and one with attention, or of two windows and two layers without
LAYERS, PROMPT, RESPONSE = 4, 512, 3584
NEEDS_COMPILER = pytest.mark.skipif(
    not any(map(shutil.which, COMPILERS)), reason=f"no C++ compiler ({', '.join(COMPILERS)}) is on PATH"
)


@pytest.mark.nemo
@pytest.mark.parametrize("case", ["fits", "parameters"])
def test_plan(megatron_bridge: dict[str, str], tmp_path: Path, case: str) -> None:
    run(megatron_bridge, 0, CASES, case, directory=str(tmp_path / "models"))


@pytest.mark.nemo
def test_the_page_has_the_rows_of_today(megatron_bridge: dict[str, str]) -> None:
    run(megatron_bridge, 0, CASES, "page")


def check_rehearsal(environment: dict[str, str], place: Path, config: str, ranks: int, settings: list[str]) -> None:
    """The first and the last tensor rank, which hold both models: no mistake, they agree, and memory is the plan's."""
    fetched = subprocess.run(["bash", "scripts/setup_te_files.sh"], cwd=ROOT, capture_output=True, text=True)
    if fetched.returncode:
        pytest.skip(f"scripts/setup_te_files.sh failed: {fetched.stderr.strip().splitlines()[-1:]}")
    settings = [*settings, f"rollout.max_new_tokens={RESPONSE}", "train.prompts_per_step=8"]
    lengths = ["--prompt-tokens", str(PROMPT), "--response-tokens", str(RESPONSE)]
    command = [str(PYTHON), "-m", "nemo_oprd", "rehearse", "--config-name", config, "--ranks", str(ranks), *settings]
    ended = subprocess.run(
        [*command, *lengths, "--layers", "te", "--phases", "none", "--json", "found.json"],
        cwd=place,
        env={**environment, "PYTHONPATH": str(ROOT)},  # not the stand-in for Transformer Engine: its own files
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert ended.returncode == 0, f"{ended.stdout[-3000:]}\n{ended.stderr[-3000:]}"
    found = json.loads((place / "found.json").read_text())
    assert [one["rank"] for one in found["ranks"]] == [0, 1]
    for one in found["ranks"]:
        for phase in ("teacher", "update", "optimizer"):
            seen = one["phases"][phase]
            error = seen["planned_bytes"] / seen["measured_bytes"] - 1
            assert abs(error) < TOLERANCE, (one["rank"], phase, error)


@pytest.mark.slow
@pytest.mark.recipes
@NEEDS_COMPILER
@pytest.mark.parametrize("name", OF_MEGATRON_BRIDGE)
def test_a_recipe_is_rehearsed(megatron_bridge: dict[str, str], tmp_path: Path, name: str) -> None:
    write_models(tmp_path / "models", LAYERS)
    check_rehearsal(megatron_bridge, tmp_path, name, *shipped()[name])


# of the width and the experts of a published model of 16 billion parameters, of which a token uses 3
LATENT = {
    "model_type": "deepseek_v3", "hidden_size": 2048, "intermediate_size": 11264, "moe_intermediate_size": 1408,
    "num_hidden_layers": 5, "num_attention_heads": 16, "num_key_value_heads": 16, "n_routed_experts": 64,
    "n_shared_experts": 2, "num_experts_per_tok": 6, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    "norm_topk_prob": True, "routed_scaling_factor": 2.446, "kv_lora_rank": 512, "q_lora_rank": 768,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "vocab_size": 163840,
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 50000.0, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "hidden_act": "silu", "attention_bias": False,
}  # fmt: skip


@pytest.mark.slow
@NEEDS_COMPILER
def test_latent_attention_is_rehearsed(megatron_bridge: dict[str, str], tmp_path: Path) -> None:
    """A student and a teacher of DeepSeek-V3's kind, of other depths and ranks, with experts on two and four ranks."""
    for role, changes in (("student", {}), ("teacher", {"q_lora_rank": 1536, "num_hidden_layers": 6})):
        (tmp_path / role).mkdir()
        (tmp_path / role / "config.json").write_text(json.dumps({**LATENT, **changes}))
    models = [f"{role}.{key}" for role in ("student", "teacher") for key in (f"hf_path={role}", "provider=bridge")]
    layout = ["student.parallel.tensor=2", "student.parallel.sequence=true", "student.parallel.expert=2"]
    layers = ["loss.representation.layers=all", "loss.representation.layer_map={1:1,2:2,3:3,4:4,5:6}"]
    settings = [*models, *layout, "teacher.parallel.expert=4", *layers, "rollout.engine=vllm"]
    check_rehearsal(megatron_bridge, tmp_path, "oprd_1p5b", 4, settings)
