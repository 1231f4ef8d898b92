"""Models whose files are quantised (MXFP4 of gpt-oss, block-wise fp8 of DeepSeek-V3), built by Megatron-Bridge on CPUs.

They are compared bit for bit with the same models in bfloat16, which transformers or plain arithmetic has dequantised:
losses and all gradients at a split layout, and the files of a conversion both ways. The gradients are compared with
plain Hugging Face models in float64, too, and the canary with transformers' states.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from golden_runs import GOLDEN
from megatron_bridge_environment import PYTHON, run
from megatron_bridge_family_cases import COMMON
from quantized_family_cases import QUANTIZATION
from safetensors.torch import load_file

from nemo_oprd.config.loading import load_config
from nemo_oprd.distillation.reference import agreement, reference
from nemo_oprd.rollout.replay import read_rollouts

# test_shrunk_models.py has a model of each format in the integration lane
pytestmark = [pytest.mark.nemo, pytest.mark.slow]
TOLERANCE, OF_TRANSFORMERS = 1e-5, 1.5
CASES = "quantized_family_cases.py"
LAYOUT = ("student.parallel.tensor=2", "student.parallel.sequence=true", "teacher.parallel.pipeline=2")
LOSS = ("loss.output.kind=full_vocab", "loss.output.weight=0.5")


def settings(root: Path, family: str, kind: str, output: Path) -> list[str]:
    roles = [f"{role}.hf_path={root / family / (kind + role)}" for role in ("student", "teacher")]
    providers = ["student.provider=bridge", "teacher.provider=bridge"]
    return [*roles, *providers, *LAYOUT, *LOSS, f"rollout.replay={GOLDEN}/rollouts.jsonl", f"output={output}"]


@pytest.fixture(scope="module")
def computed(megatron_bridge: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    if "version = 3.11" in (PYTHON.parent.parent / "pyvenv.cfg").read_text():
        pytest.skip("Megatron-Bridge 0.3 (Python 3.11): families with experts are refused")
    root = tmp_path_factory.mktemp("quantized")
    runs = {
        f"{kind}{family}": settings(root, family, kind, root / f"verified-{kind}{family}")
        for family in QUANTIZATION
        for kind in ("", "plain-")
    }
    run(megatron_bridge, 2, CASES, "compute", directory=str(root), runs=runs)
    return root


@pytest.mark.parametrize("family", QUANTIZATION)
def test_losses_and_gradients_are_those_of_the_bfloat16_model(computed: Path, family: str) -> None:
    ours, theirs = (load_file(computed / f"verified-{kind}{family}" / "grads.safetensors") for kind in ("", "plain-"))
    assert set(ours) == set(theirs)
    assert any(gradient.any() for name, gradient in ours.items() if "experts" in name)
    for name, gradient in theirs.items():
        assert torch.equal(ours[name], gradient), name
    losses = [
        json.loads((computed / f"verified-{kind}{family}" / "losses.json").read_text()) for kind in ("", "plain-")
    ]
    assert losses[0] == losses[1]


@pytest.mark.parametrize("family", QUANTIZATION)
def test_gradients_are_those_of_transformers(computed: Path, tmp_path: Path, family: str) -> None:
    config = load_config("verify", settings(computed, family, "", tmp_path))
    plain = load_config("verify", settings(computed, family, "plain-", tmp_path))
    rollouts = read_rollouts(GOLDEN / "rollouts.jsonl", COMMON["vocab_size"])
    expected = reference(plain, rollouts)
    theirs = max(agreement(reference(plain, rollouts, torch.float32)["gradients"], expected["gradients"]).values())
    found = agreement(load_file(computed / f"verified-{family}" / "grads.safetensors"), expected["gradients"])
    print(f"{family}: {max(found.values()):.1e}; transformers in float32: {theirs:.1e}")
    assert max(found.values()) < max(TOLERANCE, OF_TRANSFORMERS * theirs), found
    same = reference(config, rollouts)["gradients"]
    assert all(torch.equal(same[name], gradient) for name, gradient in expected["gradients"].items())


@pytest.mark.parametrize("family", QUANTIZATION)
def test_conversion_gives_the_bfloat16_model(computed: Path, family: str) -> None:
    from transformers import AutoModelForCausalLM

    expected = load_file(computed / family / "plain-student" / "model.safetensors")
    found = load_file(computed / family / "back" / "model.safetensors")
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name
    for place in ("back", "ours/hf"):
        config = json.loads((computed / family / place / "config.json").read_text())
        assert config == json.loads((computed / family / "plain-student" / "config.json").read_text())
    AutoModelForCausalLM.from_pretrained(computed / family / "back")


@pytest.mark.parametrize("family", QUANTIZATION)
def test_the_canary_compares_what_is_trained(computed: Path, family: str) -> None:
    assert "equal transformers' in" in json.loads((computed / "canary.json").read_text())[family]
