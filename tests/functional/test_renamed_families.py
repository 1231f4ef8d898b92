"""Models whose architecture transformers knows under another name: MiMo is Qwen2's, Kimi K2 is DeepSeek-V3's.

A MiMo with a layer that predicts a further token, and with code beside it, against the same weights as a Qwen2; a
Qwen3-VL of transformers, dense and with experts, whose language model is Qwen3's, against transformers' own text of it.
Losses, gradients, the plain computation, the export. Kimi K2's config, without weights.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from layout_cases import VOCABULARY, make_rollouts, read_result, save_model
from pool import Pools
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from nemo_oprd.canary.layer_by_layer import layered_states
from nemo_oprd.config.loading import load_config
from nemo_oprd.data.token_ids import TokenIds
from nemo_oprd.distillation.reference import agreement, reference
from nemo_oprd.evaluation.agreement import load_model
from nemo_oprd.models import read_hf_config, read_model_spec, transformers_config
from nemo_oprd.models.complete_config import names_in_language_model
from nemo_oprd.rollout.replay import write_rollouts
from nemo_oprd.vllm.launch import student_arguments

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


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
# kind -> (prefix of transformers' classes, more of the language model's config, the model that is exported)
TOWERS = {"dense": ("Qwen3VL", {}, "Qwen3ForCausalLM"), "experts": ("Qwen3VLMoe", EXPERTS, "Qwen3MoeForCausalLM")}


@pytest.fixture(scope="module", params=TOWERS)
def towers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """(kind, {student,teacher}): two Qwen3-VL as transformers makes and saves them, with a vision tower.

    Experts are stored with their inputs before their outputs, as published.
    """
    kind = request.param
    prefix, more, _ = TOWERS[kind]
    root = tmp_path_factory.mktemp("towers")
    text = {
        "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 5e4, "mrope_section": [4, 2, 2], "mrope_interleaved": True
        },
    } | more  # fmt: skip
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
    vision |= {"deepstack_visual_indexes": [0], "num_position_embeddings": 16}
    for seed, role in enumerate(("student", "teacher")):
        torch.manual_seed(seed)
        config = getattr(transformers, f"{prefix}Config")(text_config=text, vision_config=vision)
        model = whole_class(kind)(config).float()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.normal_(1.0 if "norm" in name else 0.0, 0.15)
        model.save_pretrained(root / role)
    write_rollouts(root / "rollouts.jsonl", make_rollouts())
    return kind, root


def whole_class(kind: str) -> Any:
    return getattr(transformers, f"{TOWERS[kind][0]}ForConditionalGeneration")


def test_the_language_model_of_qwen3_vl(pools: Pools, towers: tuple[str, Path], tmp_path: Path) -> None:
    """Gradients against the states of transformers' whole model, in float64; the export is a Qwen3 by itself."""
    kind, root = towers
    roles = [f"{role}.hf_path={root / role}" for role in ("student", "teacher")]
    shared = [*roles, f"rollout.replay={root / 'rollouts.jsonl'}", "loss.representation.positions=all"]
    layout = ["student.parallel.tensor=2", "student.parallel.sequence=true", "teacher.parallel.pipeline=2"]
    pools[2].run("layout_cases:run_verify", overrides=[*shared, *layout, f"output={tmp_path / 'verified'}"])
    found = read_result(tmp_path / "verified")[1]
    student, teacher = (
        whole_class(kind).from_pretrained(root / role, dtype=torch.float64, experts_implementation="eager")
        for role in ("student", "teacher")
    )
    total = torch.zeros((), dtype=torch.float64)
    rows = sum(sum(rollout.mask) for rollout in make_rollouts())
    answered = [rollout for rollout in make_rollouts() if sum(rollout.mask)]
    for rollout in answered:
        ids = torch.tensor([rollout.ids.tolist()])
        own, theirs = (states(model, ids) for model in (student, teacher))
        mask = torch.tensor(rollout.mask, dtype=torch.float64)
        squares = sum((a - b.detach()).square().mean(-1) for a, b in zip(own, theirs, strict=True)) / len(own)
        total = total + (squares[0, len(rollout.prompt_ids) :] * mask).sum() / mask.sum() / len(answered)
    assert rows > 0
    total.backward()
    gradients = {name: parameter.grad for name, parameter in student.named_parameters() if parameter.grad is not None}
    expected = {name: gradients[stored] for name, stored in names_in_language_model(gradients).items()}
    expected |= {name: of_expert(name, expected) for name in found if ".experts." in name}
    assert set(found) <= set(expected)
    deviations = agreement(found, {name: expected[name] for name in found})
    assert max(deviations.values()) < 1e-5, deviations
    pools[1].run("cases:run_train", overrides=[*shared, "train.steps=1", f"output={tmp_path / 'run'}"])
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "hf")
    assert type(exported).__name__ == TOWERS[kind][2]
    assert not any("visual" in name for name in load_file(tmp_path / "run" / "hf" / "model.safetensors"))
    plain: Any = load_model(root / "student", torch.float64)
    plain.set_experts_implementation("eager")  # the other one has no float64
    ids = torch.arange(20)[None]
    torch.testing.assert_close(plain(ids).logits, student(ids).logits, rtol=0, atol=1e-12)


def of_expert(name: str, whole: dict[str, torch.Tensor]) -> torch.Tensor:
    """One matrix of an expert, from transformers' tensors of all: [E, 2F, D], the gates first, and [E, D, F]."""
    layer, _, rest = name.partition(".experts.")
    expert, matrix, _ = rest.split(".")
    if matrix == "down_proj":
        return whole[f"{layer}.experts.down_proj"][int(expert)]
    return whole[f"{layer}.experts.gate_up_proj"][int(expert)].chunk(2)[("gate_proj", "up_proj").index(matrix)]


def states(model: torch.nn.Module, ids: torch.Tensor) -> list[torch.Tensor]:
    """The states after each layer, the last one after the final norm, as the losses compare them by default."""
    return list(model(input_ids=ids, output_hidden_states=True).hidden_states[1:])


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


def test_servers_of_such_a_student_are_refused(models: Path, tmp_path: Path) -> None:
    """vLLM would build it under its own name; the message says how to get the model under the known one."""
    config = load_config("verify", settings(models, "mimo", tmp_path))
    directory = models / "mimo-student"
    with pytest.raises(ValueError, match="expected rollout.engine=megatron, or the model under its known name: conv"):
        student_arguments(config, read_model_spec(directory), directory, TokenIds(8), cuda=False)


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
    stored = ["language_model.model.layers.3.mlp.gate.weight", "language_model.lm_head.weight", "model.norm.weight"]
    own = ["model.layers.3.mlp.gate.weight", "lm_head.weight", "model.norm.weight"]
    assert names_in_language_model(stored) == dict(zip(own, stored, strict=True))
