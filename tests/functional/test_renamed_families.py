"""Models whose architecture transformers knows under another name: MiMo is Qwen2's, Kimi K2 is DeepSeek-V3's.

A MiMo with a layer that predicts a further token, and with code beside it, against the same weights as a Qwen2: losses,
gradients, the plain computation, the export. Kimi K2's config, without weights.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from layout_cases import make_rollouts, read_result, save_model
from pool import Pools
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from nemo_oprd.canary.layer_by_layer import layered_states
from nemo_oprd.config.loading import load_config
from nemo_oprd.distillation.reference import reference
from nemo_oprd.evaluation.agreement import load_model
from nemo_oprd.models import read_hf_config, transformers_config
from nemo_oprd.models.complete_config import name_in_language_model
from nemo_oprd.rollout.replay import write_rollouts

CODE = {"AutoConfig": "configuration_mimo.MiMoConfig", "AutoModelForCausalLM": "modeling_mimo.MiMoForCausalLM"}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """{qwen2,mimo}-{student,teacher}: the same weights under both names."""
    root = tmp_path_factory.mktemp("renamed")
    for seed, role in enumerate(("student", "teacher")):
        source, target = root / f"qwen2-{role}", root / f"mimo-{role}"
        save_model(source, "qwen2", seed, layers=3)
        shutil.copytree(source, target)
        config = json.loads((source / "config.json").read_text())
        named = {"model_type": "mimo", "architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
        (target / "config.json").write_text(json.dumps({**config, **named, "auto_map": CODE}))
        tensors = load_file(source / "model.safetensors")
        more = {"model.mtp_layers.0.input_proj.weight": torch.ones(4, 8)}
        save_file({**tensors, **more}, target / "model.safetensors", metadata={"format": "pt"})
    write_rollouts(root / "rollouts.jsonl", make_rollouts())
    return root


def settings(models: Path, name: str, output: Path) -> list[str]:
    roles = [f"{role}.hf_path={models / f'{name}-{role}'}" for role in ("student", "teacher")]
    return [*roles, f"rollout.replay={models / 'rollouts.jsonl'}", f"output={output}"]


def test_mimo_is_qwen2(pools: Pools, models: Path, tmp_path: Path) -> None:
    results = {}
    for name in ("qwen2", "mimo"):
        layout = ["student.parallel.tensor=2", "teacher.parallel.pipeline=2"]
        overrides = [*settings(models, name, tmp_path / name), *layout]
        pools[2].run("layout_cases:run_verify", overrides=overrides)
        results[name] = read_result(tmp_path / name)
    assert results["mimo"][0] == results["qwen2"][0]
    gradients = [results[name][1] for name in ("mimo", "qwen2")]
    assert set(gradients[0]) == set(gradients[1])
    assert all(torch.equal(gradients[0][name], gradient) for name, gradient in gradients[1].items())


def test_what_transformers_computes_is_the_same(models: Path, tmp_path: Path) -> None:
    """The plain computation of `verify`, the models of `compare`, and the states of the canary."""
    rollouts = make_rollouts()[:2]
    ours, theirs = (
        reference(load_config("verify", settings(models, name, tmp_path)), rollouts) for name in ("mimo", "qwen2")
    )
    assert ours["rep/loss"] == theirs["rep/loss"]
    assert all(torch.equal(ours["gradients"][name], gradient) for name, gradient in theirs["gradients"].items())
    ids = torch.arange(12)[None]
    loaded, plain = (load_model(models / f"{name}-student", torch.float32) for name in ("mimo", "qwen2"))
    assert torch.equal(loaded(ids).logits, plain(ids).logits)
    prompts = [list(range(5, 15))]
    states = [layered_states(models / f"{name}-student", prompts, "float32", head=True) for name in ("mimo", "qwen2")]
    found, expected = (each.tensors() for each in states)
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def test_an_export_has_the_known_name(pools: Pools, models: Path, tmp_path: Path) -> None:
    pools[1].run("cases:run_train", overrides=[*settings(models, "mimo", tmp_path), "train.steps=1", "train.lr=1e-3"])
    exported = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert (exported["model_type"], exported["architectures"]) == ("qwen2", ["Qwen2ForCausalLM"])
    assert "auto_map" not in exported
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert type(model).__name__ == "Qwen2ForCausalLM"
    assert not any("mtp" in name for name in load_file(tmp_path / "hf" / "model.safetensors"))


@pytest.mark.parametrize("whole", [False, True])
def test_kimi_is_deepseek_v3(tmp_path: Path, whole: bool) -> None:
    """Also inside Kimi K2.5, whose tensors have names of their own, and whose pictures are left out."""
    config = {"model_type": "kimi_k2", "hidden_size": 64, "num_hidden_layers": 2, "auto_map": CODE}
    outer = {"model_type": "kimi_k25", "text_config": config, "vision_config": {}, "auto_map": CODE}
    (tmp_path / "config.json").write_text(json.dumps(outer if whole else config))
    found = read_hf_config(tmp_path)
    assert (found["model_type"], found["architectures"]) == ("deepseek_v3", ["DeepseekV3ForCausalLM"])
    assert found["hidden_size"] == 64
    assert type(transformers_config(tmp_path)).__name__ == "DeepseekV3Config"
    assert name_in_language_model("language_model.model.layers.3.mlp.gate.weight") == "model.layers.3.mlp.gate.weight"
    assert name_in_language_model("language_model.lm_head.weight") == "lm_head.weight"
