"""Tiny random HF models for the conversion tests, and ways to spoil them."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from nemo_oprd.megatron.weights.hf import HFCheckpoint

# 300 rows are padded to 384 at TP1 and to 512 at TP2
SIZES: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
}
MODELS: dict[str, dict[str, Any]] = {
    "qwen2_tied": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen2_untied": {"model_type": "qwen2", "tie_word_embeddings": False},
    "qwen3_untied": {"model_type": "qwen3", "tie_word_embeddings": False, "head_dim": 16},
    "qwen3_tied_bias": {"model_type": "qwen3", "tie_word_embeddings": True, "head_dim": 16, "attention_bias": True},
}
# frequencies of all three kinds (kept, in between, divided) and most angles different from unscaled ones within 64
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
MODELS |= {
    "llama_tied": {"model_type": "llama", "tie_word_embeddings": True, "head_dim": 16, "rope_parameters": LLAMA3},
    "llama_untied_bias": {
        "model_type": "llama",
        "tie_word_embeddings": False,
        "attention_bias": True,
        "rope_parameters": LLAMA3,
    },
    "llama2": {"model_type": "llama", "tie_word_embeddings": False},
}
# 12 of 16 channels rotated; sequences of more than 12 tokens take the long factors
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 5000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
    "long_factor": [1.0, 1.5, 2.0, 3.0, 5.0, 9.0],
}
PHI3 = {"model_type": "phi3", "hidden_size": 64, "pad_token_id": None}
MODELS |= {
    "phi4_tied": {**PHI3, "tie_word_embeddings": True, "original_max_position_embeddings": 12}
    | {"rope_parameters": LONGROPE},
    "phi4_untied_old": {**PHI3, "tie_word_embeddings": False, "original_max_position_embeddings": 12}
    | {"rope_parameters": LONGROPE},
    "phi3": {**PHI3, "tie_word_embeddings": False, "sliding_window": 64},
}
# a layer without experts among those with experts; all layers with experts
MODELS |= {
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "tie_word_embeddings": False,
        "head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
    },
    "mixtral": {
        "model_type": "mixtral",
        "tie_word_embeddings": False,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
}
# of 8 frequencies the first is kept, the next two are in between, the others are divided by 4
YARN = {
    "rope_type": "yarn",
    "rope_theta": 100.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_slow": 0.5,
}
MODELS |= {
    "qwen3_yarn": {**MODELS["qwen3_untied"], "rope_parameters": YARN},
    "qwen3_moe_yarn": {
        **MODELS["qwen3_moe"],
        "rope_parameters": {**YARN, "truncate": False, "mscale": 0.7, "mscale_all_dim": 1.3},
    },
    # sequences of more than 16 tokens take the long factors
    "qwen2_longrope": {
        **MODELS["qwen2_untied"],
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 5000.0,
            "short_factor": [1.0, 1.1, 1.2, 1.3],
            "long_factor": [1.0, 2.0, 3.0, 9.0],
            "original_max_position_embeddings": 16,
            "factor": 6.0,
        },
    },
    "mixtral_linear": {
        **MODELS["mixtral"],
        "rope_parameters": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0},
    },
}
# the spelling of transformers 4 in config.json
OLD_SPELLING = {"qwen2_untied", "qwen3_tied_bias", "llama_untied_bias", "phi4_untied_old", "qwen3_moe_yarn"}


class Models:
    """`models(name, dtype)` is the directory of a model, made when first asked for."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def __call__(self, name: str, dtype: str = "float32") -> Path:
        path = self.root / f"{name}_{dtype}"
        if not path.exists():
            save_random_model(path, name, getattr(torch, dtype))
        return path


def save_random_model(path: Path, name: str, dtype: torch.dtype) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(len(name))
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**copy.deepcopy(SIZES | MODELS[name])), dtype=torch.float32
    )
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            # biases of 0 and norms of 1, as initialised, would hide a mix-up
            parameter.normal_(1.0 if "norm" in key else 0.0, 0.1)
    model.to(dtype).save_pretrained(path)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (path / file).write_text(json.dumps({"stands for": file}))
    if name in OLD_SPELLING:
        config = json.loads((path / "config.json").read_text())
        rope = config.pop("rope_parameters")
        config["rope_theta"] = rope.pop("rope_theta")
        config["rope_scaling"] = rope if rope["rope_type"] != "default" else None
        config["torch_dtype"] = config.pop("dtype")
        (path / "config.json").write_text(json.dumps(config))


def save_random(path: Path, config: dict[str, Any], seed: int) -> None:
    """A model of `config`, all weights random."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**copy.deepcopy(config)), dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.1)
    model.save_pretrained(path)


def save_random_bridge(
    path: Path, student: dict[str, Any], teacher: dict[str, Any], layers: dict[int, int], rank: int, position: str
) -> None:
    """A bridge between models of these configs: orthonormal bases, random projectors."""
    from nemo_oprd.bridge.artifact import save_bridge
    from nemo_oprd.bridge.covariance import LayerPair
    from nemo_oprd.bridge.maps import Bridge, CapturePoint, LayerBridge, ModelIdentity

    torch.manual_seed(rank)
    d_s, d_t = student["hidden_size"], teacher["hidden_size"]
    pairs = {
        LayerPair(s, t): LayerBridge(
            torch.randn(d_t) * 0.1, torch.linalg.qr(torch.randn(d_t, rank)).Q.T.contiguous(), torch.randn(rank, d_s)
        )
        for s, t in layers.items()
    }
    identities = [ModelIdentity(c["model_type"], c["num_hidden_layers"], c["hidden_size"]) for c in (student, teacher)]
    save_bridge(Bridge(rank, pairs, *identities, CapturePoint(position)), path)


def edit_config(path: Path, **changes: Any) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **changes}))


def edit_tensors(path: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def assert_same_tensors(one: Path, other: Path) -> None:
    before, after = HFCheckpoint(one), HFCheckpoint(other)
    assert before.keys() == after.keys()
    for name in before.keys():  # noqa: SIM118 - not a dictionary
        assert before[name].dtype == after[name].dtype
        assert torch.equal(before[name], after[name]), name
