"""Configs of real models, with their real shapes and without any data: our parameters are transformers' parameters.

The values are those of public copies of the models' config.json, with two exceptions. Phi-4-mini-reasoning's are those
of Phi-4-mini-instruct, of which it is a fine-tune. No copy of Qwen3-1.7B-Base's was at hand: its sizes are from other
programs' tables, its base, positions and tying are those known of the series; the number of parameters agrees.
"""

from __future__ import annotations

import copy
import re
from dataclasses import replace
from math import prod
from pathlib import Path

import pytest
import torch

from nemo_oprd.bridge.artifact import save_bridge
from nemo_oprd.bridge.covariance import LayerPair, PairStatistics
from nemo_oprd.bridge.maps import Bridge, LayerBridge
from nemo_oprd.config.loading import load_config
from nemo_oprd.config.schema import Config
from nemo_oprd.distillation.metrics.watched_metrics import ModelNeeds
from nemo_oprd.distillation.objective import Objective, model_identity
from nemo_oprd.megatron.weights.megatron_checkpoint import checkpoint_parameters
from nemo_oprd.models import ModelSpec, parse_model_spec
from nemo_oprd.run.checks import check_layers, make_layouts

COMMON = {"hidden_act": "silu", "torch_dtype": "bfloat16"}
QWEN = {**COMMON, "rms_norm_eps": 1e-06, "vocab_size": 151936, "use_sliding_window": False}
QWEN3 = {**QWEN, "model_type": "qwen3", "head_dim": 128, "num_key_value_heads": 8, "tie_word_embeddings": True} | {
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "attention_bias": False,
}
# fmt: off
LONG_FACTOR = [
    1, 1.118320672, 1.250641126, 1.398617824, 1.564103225, 1.74916897, 1.956131817, 2.187582649, 2.446418898,
    2.735880826, 3.059592084, 3.421605075, 3.826451687, 4.279200023, 4.785517845, 5.351743533, 5.984965424,
    6.693110555, 7.485043894, 8.370679318, 9.36110372, 10.4687158, 11.70738129, 13.09260651, 14.64173252, 16.37415215,
    18.31155283, 20.47818807, 22.90118105, 25.61086418, 28.64115884, 32.03, 32.1, 32.13, 32.23, 32.6, 32.61, 32.64,
    32.66, 32.7, 32.71, 32.93, 32.97, 33.28, 33.49, 33.5, 44.16, 47.77,
]
# fmt: on
MODELS: dict[str, dict] = {
    "Qwen3-4B": {
        **QWEN3,
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "max_position_embeddings": 40960,
        "max_window_layers": 36,
    },
    # with the settings that Qwen3's documentation gives for four times its context
    "Qwen3-1.7B with YaRN": {
        **QWEN3,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "max_position_embeddings": 131072,
    },
    "Qwen3-1.7B-Base": {
        **QWEN3,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "max_position_embeddings": 32768,
        "max_window_layers": 28,
    },
    "DeepSeek-R1-Distill-Qwen-1.5B": {
        **QWEN,
        "model_type": "qwen2",
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "max_position_embeddings": 131072,
        "max_window_layers": 21,
        "sliding_window": 4096,
        "rope_theta": 10000,
        "tie_word_embeddings": False,
        "use_mrope": False,
    },
    "Phi-4-mini-reasoning": {
        **COMMON,
        "model_type": "phi3",
        "auto_map": {
            "AutoConfig": "configuration_phi3.Phi3Config",
            "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM",
        },
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 32,
        "num_attention_heads": 24,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "original_max_position_embeddings": 4096,
        "partial_rotary_factor": 0.75,
        "pad_token_id": 199999,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {"long_factor": LONG_FACTOR, "short_factor": [1.0] * 48, "type": "longrope"},
        "rope_theta": 10000.0,
        "sliding_window": 262144,
        "tie_word_embeddings": True,
        "vocab_size": 200064,
    },
    "Llama-3.2-1B": {
        **COMMON,
        "model_type": "llama",
        "attention_bias": False,
        "head_dim": 64,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "num_attention_heads": 32,
        "num_hidden_layers": 16,
        "num_key_value_heads": 8,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "factor": 32.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
        "vocab_size": 128256,
    },
}
PARAMETERS = {
    "Qwen3-4B": 4_022_468_096,
    "Qwen3-1.7B with YaRN": 1_720_574_976,
    "Qwen3-1.7B-Base": 1_720_574_976,
    "DeepSeek-R1-Distill-Qwen-1.5B": 1_777_088_000,
    "Phi-4-mini-reasoning": 3_836_021_760,
    "Llama-3.2-1B": 1_235_814_400,
}


def objective_of(config: Config, student: ModelSpec, teacher: ModelSpec, *, fitting: bool = False) -> Objective:
    """What `resolve` finds of these models, and the objective that follows."""
    pairs = check_layers(config, student, teacher, config.teacher_sources[0], fitting=fitting)
    return Objective.build(config, student, [(teacher, pairs)], dict.fromkeys(pairs, 1.0), fitting=fitting)


@pytest.mark.parametrize("name", MODELS)
def test_shapes_and_frequencies(name: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    spec = parse_model_spec(copy.deepcopy(MODELS[name]))
    config = AutoConfig.for_model(**copy.deepcopy({k: v for k, v in MODELS[name].items() if k != "auto_map"}))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    theirs = {key: tuple(parameter.shape) for key, parameter in model.named_parameters()}
    ours = {}
    for parameter in checkpoint_parameters(spec):
        form, whole = parameter.mapping.form, torch.empty(parameter.shape, device="meta")
        parts = form.split_to_hf(whole, spec)
        ours |= {key: tuple(part.shape) for key, part in zip(parameter.mapping.hf, parts, strict=True)}
        shards = [form.shard(whole, rank, 2, spec) for rank in range(2)]
        assert form.unshard(shards, spec).shape == form.join(parts, spec).shape == whole.shape
    assert ours == theirs
    assert sum(map(prod, ours.values())) == PARAMETERS[name]
    assert len(spec.family.param_mappings(spec)) == len(checkpoint_parameters(spec))

    rotary = type(model.model.rotary_emb)(config)  # with data
    frequencies = spec.rope.frequencies(spec.head_dim)
    assert torch.equal(frequencies.inv_freq[0], rotary.inv_freq)
    assert frequencies.scale == rotary.attention_scaling


def test_a_vocabulary_of_200k_is_split_evenly() -> None:
    spec = parse_model_spec(MODELS["Phi-4-mini-reasoning"])
    assert [spec.padded_vocab(size) for size in (1, 4, 8)] == [200064, 200192, 200704]


def test_the_bridge_recipe(tmp_path: Path) -> None:
    """Layer map, tensors and layouts of `conf/bridge_qwen3_4b_to_1p7b.yaml` with the sizes of its Slurm script."""
    script = (Path(__file__).parents[3] / "scripts" / "bridge_qwen3_4b_to_1p7b.sh").read_text()
    sizes = re.findall(r"PAIR_SIZES:-(.*)\}", script)[0].split()
    config = load_config("bridge_qwen3_4b_to_1p7b", [*sizes, f"bridge.path={tmp_path}"])
    names = [Path(str(model.hf_path)).name for model in (config.student, config.teacher)]
    assert names == ["Qwen3-1.7B-Base", "Qwen3-4B"]
    student, teacher = (parse_model_spec(copy.deepcopy(MODELS[name])) for name in ("Qwen3-1.7B-Base", "Qwen3-4B"))

    fitting = objective_of(config, student, teacher, fitting=True)
    # eq. (layer mapping), written out: round((l - 1) / 27 * 35) + 1
    assert fitting.teachers[0].layers == {layer: round((layer - 1) / 27 * 35) + 1 for layer in range(1, 29)}
    rank = config.bridge.rank
    assert rank == 8
    pairs = {
        LayerPair(s, t): LayerBridge(torch.zeros(2560), torch.zeros(8, 2560), torch.zeros(8, 2048))
        for s, t in fitting.teachers[0].layers.items()
    }
    save_bridge(Bridge(8, pairs, model_identity(student), model_identity(teacher)), tmp_path)
    objective = objective_of(config, student, teacher)
    (match,), needs = objective.teachers, ModelNeeds.build(objective, None)
    assert (match.layers, match.width) == (fitting.teachers[0].layers, 8)
    assert needs.teacher_depth(objective, 0) == objective.for_step(0).teacher_depth(0) == 36
    assert not objective.trains_bridge
    whole = ["bridge.train=true", "bridge.path=full_width"]
    objective = objective_of(load_config("bridge_qwen3_4b_to_1p7b", whole), student, teacher)
    (match,) = objective.teachers
    assert match.layers == fitting.teachers[0].layers and match.width == 2560 and objective.trains_bridge

    for spec, layout in zip((student, teacher), make_layouts(config, 8), strict=True):
        assert (layout.tensor, layout.data) == (2, 4)
        spec.check_tensor_parallel(layout.tensor, "tensor")
        assert layout.layers_per_stage(spec.num_layers) == [spec.num_layers]
    student.check_tensor_parallel(config.rollout.tensor, "rollout.tensor")
    # docs/bridge.md counts these
    statistics = PairStatistics(LayerPair(1, 1), 2560, 2048, device="meta")
    held = [value for moments in statistics.moments for value in vars(moments).values()]
    tensors = [value for value in held if isinstance(value, torch.Tensor) and value.dim() == 2]
    assert sum(value.nbytes for value in tensors) == 8 * 3 * (2560**2 + 2048**2 + 2560 * 2048)


def test_the_recipe_across_tokenizers(tmp_path: Path) -> None:
    """Layer map, tensors and layouts of `conf/bridge_phi4mini_to_qwen3_1p7b.yaml` with the sizes of its script."""
    scripts = Path(__file__).parents[3] / "scripts"
    assert "exec bash scripts/bridge_qwen3_4b_to_1p7b.sh" in (scripts / "bridge_phi4mini_to_qwen3_1p7b.sh").read_text()
    script = (scripts / "bridge_qwen3_4b_to_1p7b.sh").read_text()
    sizes = re.findall(r"PAIR_SIZES:-(.*)\}", script)[0].split()
    config = load_config("bridge_phi4mini_to_qwen3_1p7b", [*sizes, f"bridge.path={tmp_path}"])
    names = [Path(str(model.hf_path)).name for model in (config.student, config.teacher)]
    assert names == ["Qwen3-1.7B-Base", "Phi-4-mini-reasoning"]
    student, teacher = (parse_model_spec(copy.deepcopy(MODELS[name])) for name in names)
    assert (student.vocab_size, teacher.vocab_size) == (151936, 200064)
    layers = {layer: round((layer - 1) / 27 * 31) + 1 for layer in range(1, 29)}
    assert objective_of(config, student, teacher, fitting=True).teachers[0].layers == layers
    pairs = {
        LayerPair(s, t): LayerBridge(torch.zeros(3072), torch.zeros(4, 3072), torch.zeros(4, 2048))
        for s, t in layers.items()
    }
    save_bridge(Bridge(4, pairs, model_identity(student), model_identity(teacher)), tmp_path)
    objective = objective_of(config, student, teacher)
    (match,) = objective.teachers
    assert (match.layers, match.width) == (layers, config.bridge.rank)
    assert ModelNeeds.build(objective, None).teacher_depth(objective, 0) == 32
    for spec, layout in zip((student, teacher), make_layouts(config, 8), strict=True):
        spec.check_tensor_parallel(layout.tensor, "tensor")
        assert layout.layers_per_stage(spec.num_layers) == [spec.num_layers]
    config = replace(config, teacher=replace(config.teacher, reads="ids"))
    with pytest.raises(ValueError, match="vocabularies of 151936 and 200064 ids"):
        objective_of(config, student, teacher)
