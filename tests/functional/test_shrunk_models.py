"""Tiny random models of configurations as they were published, whose files are as published, too: names and formats.

Losses and all gradients on two ranks against what transformers alone makes of the same configuration, in float64, and
HF -> Megatron -> HF against the numbers that the files stand for, bit for bit. In Megatron-Bridge's environment.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from golden_runs import GOLDEN
from megatron_bridge_environment import published_rows, run
from safetensors.torch import load_file

from nemo_oprd.config.loading import load_config
from nemo_oprd.distillation.reference import agreement, reference
from nemo_oprd.rollout.replay import read_rollouts
from tests.support.published_models import PUBLISHED
from tests.support.shrunk_models import SIZES

pytestmark = pytest.mark.nemo
# float32 sums in other orders, as for other models; routers choose, so that float32 itself deviates more in some
TOLERANCE, OF_TRANSFORMERS = 1e-5, 1.5
CASES = "shrunk_model_cases.py"
LAYOUT = tuple(f"{role}.parallel.{key}" for role in ("student", "teacher") for key in ("tensor=2", "sequence=true"))
LOSS = ("loss.output.kind=full_vocab", "loss.output.weight=0.5")
# one of each family and format
QUICK = (
    "meta-llama--Meta-Llama-3.1-8B", "nvidia--Llama-3.1-70B-Instruct-FP8", "Qwen--Qwen3-32B-FP8-Static-PerTensor",
    "nvidia--Qwen3-235B-A22B-NVFP4", "Qwen--Qwen3-30B-A3B-FP8", "Qwen--Qwen3-VL-4B-Instruct",
    "Qwen--Qwen3-VL-30B-A3B-Instruct", "MiniMaxAI--MiniMax-M2.5", "XiaomiMiMo--MiMo-V2-Flash",
    "nvidia--Gemma-4-26B-A4B-NVFP4", "moonshotai--Kimi-K2.5", "nvidia--Kimi-K2.6-NVFP4", "openai--gpt-oss-20b",
    "deepseek-ai--DeepSeek-V3", "nvidia--Qwen3.6-27B-NVFP4", "nvidia--Qwen3.6-35B-A3B-NVFP4",
    "XiaomiMiMo--MiMo-7B-Base",
)  # fmt: skip
MODELS = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in PUBLISHED]


def settings(root: Path, model: str, route: str, *, kind: str = "") -> list[str]:
    roles = [f"{role}.hf_path={root / model / (kind + role)}" for role in ("student", "teacher")]
    providers = [f"{role}.provider={route}" for role in ("student", "teacher")]
    replay = f"rollout.replay={GOLDEN}/rollouts.jsonl"
    return [*roles, *providers, *LAYOUT, *LOSS, replay, f"output={root / model / 'verified'}"]


@pytest.fixture(scope="module")
def computed(
    request: pytest.FixtureRequest, megatron_bridge: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, str]]:
    """(Directory, the provider of each model) after all models of this session's tests were verified and converted."""
    root = tmp_path_factory.mktemp("published")
    routes = {row["directory"]: row["route"] for row in published_rows(root / "models")}
    chosen = {item.callspec.params["model"] for item in request.session.items if item.path == request.path}
    published = {model: str(root / "models" / model) for model in sorted(chosen)}
    runs = {model: settings(root, model, routes[model]) for model in published}
    run(megatron_bridge, 2, CASES, "compute", published=published, routes=routes, directory=str(root), runs=runs)
    return root, routes


@pytest.mark.parametrize("model", MODELS)
def test_gradients_are_those_of_transformers(computed: tuple[Path, dict[str, str]], model: str) -> None:
    root, routes = computed
    config = load_config("verify", settings(root, model, routes[model], kind="plain-"))
    rollouts = read_rollouts(GOLDEN / "rollouts.jsonl", SIZES["vocab_size"])
    expected = reference(config, rollouts)
    losses = json.loads((root / model / "verified" / "losses.json").read_text())
    for key in ("rep/loss", "output/loss"):
        assert losses[key] == pytest.approx(expected[key], rel=TOLERANCE), key
    found = agreement(load_file(root / model / "verified" / "grads.safetensors"), expected["gradients"])
    theirs = max(agreement(reference(config, rollouts, torch.float32)["gradients"], expected["gradients"]).values())
    print(f"{model}: {max(found.values()):.1e}; transformers in float32: {theirs:.1e}")
    assert max(found.values()) < max(TOLERANCE, OF_TRANSFORMERS * theirs), found


@pytest.mark.parametrize("model", MODELS)
def test_conversion_gives_the_numbers_of_the_files(computed: tuple[Path, dict[str, str]], model: str) -> None:
    place = computed[0] / model
    expected, found = (load_file(place / kind / "model.safetensors") for kind in ("plain-student", "back"))
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name
