"""Reading HF configs: both spellings, and refusal of what isn't supported; weight forms are inverses."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from family_configs import LLAMA, MIXTRAL, PHI3, QWEN2, QWEN3, QWEN3_MOE

from nemo_oprd.config.schema import ModelSource
from nemo_oprd.models import FAMILIES, parse_model_spec, read_model_spec
from nemo_oprd.models.architecture import Family, ModelSpec
from nemo_oprd.models.families import PARAM_MAPPINGS, fused_name, parse_dense
from nemo_oprd.models.rope import Rope
from nemo_oprd.run.resolve import ResolvedModel, resolve_model


def test_qwen2() -> None:
    spec = parse_model_spec(QWEN2)
    assert (spec.head_dim, spec.qkv_bias, spec.qk_norm, spec.dtype) == (8, True, False, "bfloat16")
    assert spec.torch_dtype is torch.bfloat16


def test_qwen3_head_dim_is_its_own() -> None:
    spec = parse_model_spec(QWEN3)
    assert (spec.head_dim, spec.qkv_bias, spec.qk_norm, spec.proj_bias) == (16, False, True, False)
    assert parse_model_spec({**QWEN3, "attention_bias": True}).proj_bias


def test_both_spellings_of_rope() -> None:
    new = {k: v for k, v in QWEN3.items() if k != "rope_theta"}
    new["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0}
    assert parse_model_spec(new) == parse_model_spec(QWEN3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "'original_max_position_embeddings'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "'dynamic'"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1.0}}, "'factor'"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial rotary"),
        ({"rope_theta": None}, "rope_theta"),
        ({"use_sliding_window": True, "max_window_layers": 1}, "sliding-window"),
        ({"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, "sliding-window"),
        ({"use_sliding_window": True, "max_window_layers": None}, "max_window_layers=None; expected an integer"),
        ({"use_sliding_window": True, "max_window_layers": "3"}, "max_window_layers='3'; expected an integer"),
        ({"use_sliding_window": True, "num_hidden_layers": None}, "'num_hidden_layers' is missing"),
        ({"use_sliding_window": True, "num_hidden_layers": "3"}, "num_hidden_layers='3'; expected a positive integer"),
        ({"layer_types": 3}, "layer_types=3; expected a list of names"),
        ({"layer_types": ["full_attention", 3]}, "expected a list of names"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"num_key_value_heads": 4}, "not a multiple"),
        ({"vocab_size": None}, "vocab_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"model_type": "gpt2"}, "'gpt2'"),
    ],
)
def test_refusals_name_what_is_wrong(change: dict, message: str) -> None:
    with pytest.raises(ValueError) as error:
        parse_model_spec({**QWEN2, **change}, "dir/config.json")
    assert message in str(error.value)
    assert "dir/config.json" in str(error.value) and "\n" not in str(error.value)


def test_unused_sliding_window_is_fine() -> None:
    assert parse_model_spec({**QWEN2, "use_sliding_window": True, "max_window_layers": 3})
    full = ["full_attention"] * QWEN2["num_hidden_layers"]  # layer types decide alone
    assert parse_model_spec({**QWEN2, "use_sliding_window": True, "max_window_layers": None, "layer_types": full})


@pytest.mark.parametrize("family", [QWEN2, QWEN3])
@pytest.mark.parametrize("layers", [28, 29])
def test_without_max_window_layers_transformers_default_counts(family: dict, layers: int) -> None:
    from transformers import AutoConfig

    config = {**family, "num_hidden_layers": layers, "use_sliding_window": True}
    del config["max_window_layers"]
    windowed = "sliding_attention" in AutoConfig.for_model(**copy.deepcopy(config)).layer_types
    assert windowed == (layers == 29)
    if windowed:
        with pytest.raises(ValueError, match="sliding-window"):
            parse_model_spec(config)
    else:
        assert parse_model_spec(config).num_layers == 28


def _hf_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**copy.deepcopy(spec.hf_config)))
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    if spec.experts is None:
        return shapes
    # transformers fuses experts in memory; their tensors on disk are those of `save_pretrained`
    apart = {}
    for mapping in spec.family.param_mappings(spec):
        for name in mapping.hf:
            held, expert, half = fused_name(name)
            shape = shapes[held] if expert is None else shapes[held][1:]
            apart[name] = shape if half is None else (shape[0] // 2, *shape[1:])
    assert {fused_name(name)[0] for name in apart} == set(shapes)
    return apart


@pytest.mark.parametrize(
    "config",
    [
        QWEN2,
        {**QWEN2, "tie_word_embeddings": True},
        QWEN3,
        {**QWEN3, "attention_bias": True, "tie_word_embeddings": True},
        LLAMA,
        {**LLAMA, "attention_bias": True, "tie_word_embeddings": True, "head_dim": 16},
        PHI3,
        {**PHI3, "tie_word_embeddings": True, "num_key_value_heads": None},
        QWEN3_MOE,
        MIXTRAL,
    ],
)
@pytest.mark.parametrize("size", [1, 2])
def test_rules_cover_the_hf_model_and_forms_are_inverse(config: dict, size: int) -> None:
    """Every parameter of transformers' model is made by exactly one rule; shard/unshard and join/split_to_hf invert."""
    spec = parse_model_spec(config)
    shapes = _hf_shapes(spec)
    rules = spec.family.param_mappings(spec)
    names = [name for rule in rules for name in rule.hf]
    assert sorted(names) == sorted(shapes)
    generator = torch.Generator().manual_seed(0)
    for rule in rules:
        tensors = [torch.randn(shapes[name], generator=generator) for name in rule.hf]
        joined = rule.form.join(tensors, spec)
        shards = [rule.form.shard(joined, rank, size, spec) for rank in range(size)]
        again = rule.form.split_to_hf(rule.form.unshard(shards, spec), spec)
        assert all(torch.equal(a, b) for a, b in zip(tensors, again, strict=True))
        if rule.form.axis is not None:
            assert len({tuple(shard.shape) for shard in shards}) == 1


def test_a_lookup_changes_nothing(tmp_path: Path) -> None:
    """A family that the caller gives is in the model's spec, and unknown to the next look-up."""
    before = dict(FAMILIES)
    with pytest.raises(TypeError):
        FAMILIES["gemma"] = FAMILIES["qwen2"]  # type: ignore[index]
    given = Family("gemma", parse_dense, PARAM_MAPPINGS, own=False)
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "model_type": "gemma", "rope_theta": 10000.0}))
    spec = read_model_spec(tmp_path, given)
    assert spec.family is given and spec.model_type == "gemma"
    assert parse_model_spec(QWEN3, family=given).family is FAMILIES["qwen3"]
    with pytest.raises(
        ValueError, match="model_type 'gemma' is not one of this project's own families; expected provider=bridge"
    ):
        read_model_spec(tmp_path)
    assert dict(FAMILIES) == before


def test_one_builder_for_both_models_of_a_family(tmp_path: Path) -> None:
    """A teacher with provider=own beside a student of the same family that Megatron-Bridge builds is told so."""
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "model_type": "gemma", "rope_theta": 10000.0}))
    spec = read_model_spec(tmp_path, Family("gemma", parse_dense, PARAM_MAPPINGS, own=False))
    source = ModelSource(hf_path=str(tmp_path))
    student = ResolvedModel("student", ModelSource(hf_path=str(tmp_path), provider="bridge"), tmp_path, spec)
    with pytest.raises(ValueError, match="provider=own for a gemma model; expected one of .*set provider=bridge"):
        resolve_model(source, "teacher", beside=student)
    with pytest.raises(
        ValueError, match="model_type 'gemma' is not one of this project's own families; expected provider=bridge"
    ):
        resolve_model(source, "student")


def test_families_of_megatron_bridge_are_resolved_without_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of two models of such a family has it in its spec, with the mappings of its own config."""
    from nemo_oprd.megatron.megatron_bridge import family
    from nemo_oprd.run import provider

    def described(hf_config: dict, source: str = "config.json") -> family.BridgeModel:
        made = SimpleNamespace(
            num_layers=hf_config["num_hidden_layers"], hidden_size=hf_config["hidden_size"], ffn_hidden_size=64,
            num_attention_heads=4, num_query_groups=2, kv_channels=8, layernorm_epsilon=1e-6, add_qkv_bias=False,
            share_embeddings_and_output_weights=True, add_bias_linear=False, qk_layernorm=False,
            gated_linear_unit=True, normalization="RMSNorm", num_moe_experts=None, activation_func=print,
        )  # fmt: skip
        shown = [
            m for m in PARAM_MAPPINGS if m.megatron != "output_layer.weight" or not hf_config["tie_word_embeddings"]
        ]
        mappings = tuple(replace(m, present=lambda spec: True) for m in shown)
        return family.BridgeModel(made, hf_config, Rope(1e4), {}, None, mappings)

    monkeypatch.setattr(family, "bridge_model", described)
    monkeypatch.setattr(provider, "find_spec", lambda name: SimpleNamespace(name=name))
    gemma = {**QWEN3, "model_type": "gemma", "hidden_size": 32}
    for name, tied in (("student", True), ("teacher", False)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({**gemma, "tie_word_embeddings": tied}))
    before = dict(FAMILIES)
    sources = {name: ModelSource(hf_path=str(tmp_path / name), provider="bridge") for name in ("student", "teacher")}
    models = {name: resolve_model(source, name).spec for name, source in sources.items()}
    assert dict(FAMILIES) == before and not any(spec.family.own for spec in models.values())
    names = {name: {m.megatron for m in spec.family.param_mappings(spec)} for name, spec in models.items()}
    assert names["teacher"] - names["student"] == {"output_layer.weight"}
    with pytest.raises(
        ValueError, match="model_type 'gemma' is not one of this project's own families; expected provider=bridge"
    ):
        resolve_model(ModelSource(hf_path=str(tmp_path / "student")), "student")
