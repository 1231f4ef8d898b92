"""The models of the shipped recipes by the shapes in their published config.json; nothing is downloaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_ALL = {"rms_norm_eps": 1e-6, "hidden_act": "silu", "torch_dtype": "bfloat16", "vocab_size": 151936}
_QWEN3 = {**_ALL, "model_type": "qwen3", "head_dim": 128, "num_key_value_heads": 8, "tie_word_embeddings": True}
_R1 = {
    **_ALL,
    "model_type": "qwen2",
    "num_hidden_layers": 28,
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
}
_QWEN3_30B_A3B = {
    **_ALL,
    "model_type": "qwen3_moe",
    "num_hidden_layers": 48,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
}
# what scripts/quickstart.sh and scripts/real_model.sh make, or fetch
_TOY = {
    **_R1,
    "num_hidden_layers": 4,
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 25,
    "max_position_embeddings": 128,
}
_SMOLLM2 = {
    **_ALL,
    "model_type": "llama",
    "num_hidden_layers": 30,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
# Sizes of the one with experts: an inventory of the published snapshot, with which the defaults of transformers' config
# and the settings of another trainer agree. Of the dense one: a copy of its config.json, and a list of its sizes.
_QWEN3_5 = {
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "vocab_size": 248320,
    "max_position_embeddings": 262144,
    "num_attention_heads": 16,
    "head_dim": 256,
    "attention_bias": False,
    "attn_output_gate": True,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "mtp_num_hidden_layers": 1,
    "dtype": "bfloat16",
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000000,
        "partial_rotary_factor": 0.25,
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
    },
}
# as in its config.json, but for `quantization_config`: the weights in bfloat16
_GPT_OSS_20B = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "num_hidden_layers": 24,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "attention_bias": True,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "vocab_size": 201088,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
    "rope_theta": 150000,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
}
SHAPES: dict[str, dict[str, Any]] = {
    "DeepSeek-R1-Distill-Qwen-1.5B": _R1,
    "JustRL-DeepSeek-1.5B": _R1,
    "DeepCoder-1.5B-Preview": _R1,
    "Qwen3-1.7B-Base": {
        **_QWEN3,
        "num_hidden_layers": 28,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_attention_heads": 16,
        "max_position_embeddings": 32768,
    },
    "Qwen3-4B": {
        **_QWEN3,
        "num_hidden_layers": 36,
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_attention_heads": 32,
        "max_position_embeddings": 40960,
    },
    "Phi-4-mini-reasoning": {
        **_ALL,
        "model_type": "phi3",
        "num_hidden_layers": 32,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_attention_heads": 24,
        "num_key_value_heads": 8,
        "vocab_size": 200064,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
    },
    "Qwen3-30B-A3B": _QWEN3_30B_A3B,
    "Qwen3-30B-A3B-specialist": _QWEN3_30B_A3B,
    "Qwen3-4B-Base": {
        **_QWEN3,
        "num_hidden_layers": 36,
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_attention_heads": 32,
        "max_position_embeddings": 32768,
    },
    # a model for text and pictures, whose language model is in text_config
    "Qwen3.5-4B": {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "tie_word_embeddings": True,
        "text_config": {
            **_QWEN3_5,
            "model_type": "qwen3_5_text",
            "num_hidden_layers": 32,
            "hidden_size": 2560,
            "intermediate_size": 9216,
            "num_key_value_heads": 4,
            "tie_word_embeddings": True,
        },
    },
    "Qwen3.5-35B-A3B": {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "model_type": "qwen3_5_moe",
        "tie_word_embeddings": False,
        "text_config": {
            **_QWEN3_5,
            "model_type": "qwen3_5_moe_text",
            "num_hidden_layers": 40,
            "hidden_size": 2048,
            "num_key_value_heads": 2,
            "num_experts": 256,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "tie_word_embeddings": False,
        },
    },
    "gpt-oss-20b": _GPT_OSS_20B,
    "toy": _TOY,
    "SmolLM2-135M-Instruct": _SMOLLM2,
}
# recipe -> (student, teacher, the sizes that its sbatch script sets)
RECIPES = {
    "oprd_1p5b": (
        "DeepSeek-R1-Distill-Qwen-1.5B",
        "JustRL-DeepSeek-1.5B",
        ["student.parallel.tensor=2", "teacher.parallel.tensor=1", "rollout.tensor=1"],
    ),
    "oprd_prefix_1p5b": (
        "DeepSeek-R1-Distill-Qwen-1.5B",
        "JustRL-DeepSeek-1.5B",
        ["student.parallel.tensor=2", "teacher.parallel.tensor=1", "rollout.tensor=1"],
    ),
    "bridge_qwen3_4b_to_1p7b": (
        "Qwen3-1.7B-Base",
        "Qwen3-4B",
        ["student.parallel.tensor=2", "teacher.parallel.tensor=2", "rollout.tensor=1"],
    ),
    "bridge_phi4mini_to_qwen3_1p7b": (
        "Qwen3-1.7B-Base",
        "Phi-4-mini-reasoning",
        ["student.parallel.tensor=2", "teacher.parallel.tensor=2", "rollout.tensor=1"],
    ),
    "oprd_qwen3_30b_a3b": (
        "Qwen3-30B-A3B",
        "Qwen3-30B-A3B-specialist",
        ["student.parallel.pipeline=2", "student.parallel.expert=8", "teacher.parallel.tensor=2",
         "teacher.parallel.sequence=true", "teacher.parallel.expert=8"],
    ),
    "bridge_qwen3p5_35b_a3b_to_4b": (
        "Qwen3.5-4B",
        "Qwen3.5-35B-A3B",
        ["student.parallel.tensor=2", "student.parallel.sequence=true", "teacher.parallel.expert=8"],
    ),
    "bridge_gpt_oss_20b_to_qwen3_4b": (
        "Qwen3-4B-Base",
        "gpt-oss-20b",
        ["student.parallel.tensor=2", "student.parallel.sequence=true", "teacher.parallel.expert=8"],
    ),
}  # fmt: skip
# those with models of Megatron-Bridge, whose configs are read in its environment only (scripts/setup_nemo_bridge.sh)
OF_MEGATRON_BRIDGE = ("bridge_qwen3p5_35b_a3b_to_4b", "bridge_gpt_oss_20b_to_qwen3_4b")
# recipe -> ranks, where it is not one node
RANKS = {"oprd_qwen3_30b_a3b": 32, "bridge_qwen3p5_35b_a3b_to_4b": 16, "bridge_gpt_oss_20b_to_qwen3_4b": 16}


# configurations that are started by the script of another one
_SCRIPTS = {"opd_": "oprd_1p5b", "oprd_opd_": "oprd_1p5b", "merge_": "oprd_1p5b", "self_": "oprd_1p5b",
            "bridge_then_": "bridge_qwen3_4b_to_1p7b"}  # fmt: skip


def shipped() -> dict[str, tuple[int, list[str]]]:
    """Configuration in conf/ -> (ranks, the sizes that its sbatch script sets), of those for a cluster."""
    found = {}
    for file in sorted((Path(__file__).parents[2] / "conf").glob("*.yaml")):
        script = next((recipe for start, recipe in _SCRIPTS.items() if file.stem.startswith(start)), file.stem)
        if script in RECIPES:
            found[file.stem] = RANKS.get(script, 8), RECIPES[script][2]
    return found


def write_models(place: Path, layers: int | None = None) -> None:
    """Writes the directories of all models, with config.json alone.

    Args:
        layers: at most so many are left of each model.
    """
    for name, shape in SHAPES.items():
        (place / name).mkdir(parents=True)
        if "text_config" in shape:
            written = {**shape, "text_config": _shallower(shape["text_config"], layers)}
        else:
            written = _shallower({"rope_theta": 10000, **shape}, layers)
        (place / name / "config.json").write_text(json.dumps(written))


def _shallower(shape: dict[str, Any], layers: int | None) -> dict[str, Any]:
    depth = min(shape["num_hidden_layers"], layers or shape["num_hidden_layers"])
    kinds = {"layer_types": shape["layer_types"][:depth]} if "layer_types" in shape else {}
    return {**shape, **kinds, "num_hidden_layers": depth}
