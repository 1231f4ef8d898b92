"""More tensor ranks than key/value heads: each rank gathers the projection, and ranks share a head.

The layouts of two heads on four ranks are in layout_grid.py, sampling in test_generate.py, conversion in
test_convert.py; here are a resume at other sizes, four heads on eight ranks, and what `plan` counts.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from layout_cases import VOCABULARY, Workbench, make_rollouts, read_result
from pool import Pools
from safetensors.torch import load_file

from nemo_oprd.batch.layout import Layout
from nemo_oprd.config.loading import load_config
from nemo_oprd.config.memory_bounds import cache_bytes_per_token
from nemo_oprd.distillation.reference import agreement, reference
from nemo_oprd.models import read_model_spec
from nemo_oprd.rollout.replay import read_rollouts, write_rollouts
from nemo_oprd.tools.plan.memory import layer_bytes

STUDENT, TEACHER = "student.parallel.", "teacher.parallel."
FOUR, TWO = [f"{STUDENT}tensor=4", f"{STUDENT}sequence=true"], [f"{STUDENT}tensor=2", f"{STUDENT}pipeline=2"]


def test_a_checkpoint_resumes_at_another_size(pools: Pools, workbench: Workbench, tmp_path: Path) -> None:
    """With its optimizer, from four ranks per two heads to two and back; weights as of a run at one layout."""
    training = ["train.steps=2", "train.save_every=1", "train.keep_checkpoints=0", "train.lr=1e-3"]
    # Adam's first step is lr times the gradient's sign, also of a gradient of rounding errors, unless eps is larger
    training.append("train.adam_eps=1e-4")
    shared = [*workbench.settings("qwen3"), *training]
    trained = {}
    for name, parts in {"whole": (TWO,), "up": (TWO, FOUR), "down": (FOUR, TWO)}.items():
        output = tmp_path / name
        for layout in parts:
            pools[4].run("cases:run_train", overrides=[*shared, *layout, f"output={output}"])
            trained[name] = load_file(output / "hf" / "model.safetensors")
            shutil.rmtree(output / "hf")
            (output / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("1\n")
    for name in ("up", "down"):
        for key, value in trained["whole"].items():
            # another layout sums in another order
            torch.testing.assert_close(trained[name][key], value, rtol=1e-5, atol=2e-6, msg=f"{name}: {key}")


@pytest.mark.slow
def test_four_heads_on_eight_ranks(pools: Pools, tmp_path: Path) -> None:
    """Gradients against the plain computation in float64, of a student at TP8 and a teacher at TP4 and PP2."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    for seed, role in enumerate(("student", "teacher")):
        torch.manual_seed(seed)
        config = Qwen3Config(
            vocab_size=VOCABULARY, hidden_size=64, intermediate_size=64, num_hidden_layers=3, num_attention_heads=8,
            num_key_value_heads=4, head_dim=16, max_position_embeddings=512,
        )  # fmt: skip
        Qwen3ForCausalLM(config).save_pretrained(tmp_path / role)
    write_rollouts(tmp_path / "rollouts.jsonl", make_rollouts())
    models = [f"{role}.hf_path={tmp_path / role}" for role in ("student", "teacher")]
    overrides = [*models, f"rollout.replay={tmp_path / 'rollouts.jsonl'}", f"output={tmp_path / 'out'}"]
    layout = [f"{STUDENT}tensor=8", f"{STUDENT}sequence=true", f"{TEACHER}tensor=4", f"{TEACHER}pipeline=2"]
    pools[8].run("layout_cases:run_verify", overrides=[*overrides, *layout])
    expected = reference(load_config("verify", overrides), read_rollouts(tmp_path / "rollouts.jsonl", VOCABULARY))
    deviations = agreement(read_result(tmp_path / "out")[1], expected["gradients"])
    assert max(deviations.values()) < 1e-5, deviations


def test_plan_counts_a_head_per_rank(workbench: Workbench) -> None:
    """A rank holds one head, however many ranks share it: its cache and saved keys stop shrinking at two ranks."""
    spec = read_model_spec(workbench.root / "qwen3" / "student")
    assert [spec.kv_heads_per_rank(size) for size in (1, 2, 4)] == [2, 1, 1]
    of = [cache_bytes_per_token(spec, size, 4) for size in (1, 2, 4)]
    assert of[0] == 2 * of[1] == 2 * of[2] > 0
    two, four = (layer_bytes(spec, Layout(tensor=size), 4, "local").kept for size in (2, 4))
    assert four > two / 2
