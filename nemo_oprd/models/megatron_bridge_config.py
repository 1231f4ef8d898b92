"""Megatron-Bridge's description of a model, section `model` of a checkpoint's run_config.yaml: written and compared.

Megatron-Bridge makes a model from the fields of its `GPTModelProvider`. `run_config` derives these fields from a
`ModelSpec`, so that Megatron-Bridge can load this project's checkpoints. `check_run_config` compares the fields in a
checkpoint of Megatron-Bridge with a model's config.json: shapes alone would not show another RoPE base or norm epsilon.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import yaml

from nemo_oprd.models.architecture import Experts, ModelSpec
from nemo_oprd.models.rope import Rope

RUN_CONFIG = "run_config.yaml"
PROVIDER = "megatron.bridge.models.gpt_provider.GPTModelProvider"
_LAYERS_OF_TWO_KINDS = {
    "_target_": "megatron.core.models.gpt.gpt_layer_specs.get_gpt_decoder_block_spec",
    "_partial_": True,
    "use_transformer_engine": True,
}
# how experts are computed and trained, and which modules a layer is made of: another choice is the same model
_CHOSEN = {
    "moe_grouped_gemm", "moe_token_dispatcher_type", "moe_permute_fusion", "moe_shared_expert_overlap",
    "moe_router_dtype", "moe_aux_loss_coeff", "moe_router_load_balancing_type", "moe_router_bias_update_rate",
    "transformer_layer_spec", "hetereogenous_dist_checkpoint",
}  # fmt: skip
# Megatron-core's own; its RoPE of Llama 3.1 has a setting for the factor only
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
# what Megatron-core's YaRN does where the HF config leaves a setting out; Megatron-Bridge then writes null
_YARN_DEFAULTS = {
    "yarn_beta_fast": 32.0,
    "yarn_beta_slow": 1.0,
    "yarn_mscale": 1.0,
    "yarn_mscale_all_dim": 0.0,
    "yarn_correction_range_round_to_int": True,
}


def not_described(spec: ModelSpec) -> str | None:
    """Returns, in words, a part of the model that `provider_fields` does not describe; None if there is none."""
    if spec.family.provider_fields(spec) is not None:
        return None
    if spec.delta is not None:
        return "gated delta nets, whose norms have another weight in checkpoints of Megatron-Bridge"
    if spec.latent is not None:
        return "queries without a narrow state (q_lora_rank=null), whose input Megatron-Bridge's model would norm again"
    if any(heads.tied for heads in spec.layer_heads):
        return "attention whose keys are its values, which Megatron-Bridge does not read from its own description"
    rope = spec.rope
    if rope.kind == "longrope":
        return "RoPE of type longrope"
    if rope.kind == "llama3" and any(rope.get(name) != value for name, value in _LLAMA3.items()):
        return f"RoPE of type llama3 with other settings than {_LLAMA3}"
    if rope.kind == "yarn" and rope.get("attention_factor") is not None:
        return "RoPE of type yarn with an attention_factor of its own"
    if spec.proj_bias:
        return "a bias in the attention's output projection only"
    return None


def provider_fields(spec: ModelSpec) -> dict[str, Any]:
    """Returns the fields of `GPTModelProvider` that say what a model computes, without those of layout and speed."""
    known = spec.family.provider_fields(spec)
    if known is not None:
        return known
    return {
        "_target_": PROVIDER,
        "num_layers": spec.num_layers,
        "hidden_size": spec.hidden_size,
        "ffn_hidden_size": spec.ffn_size,
        "num_attention_heads": spec.num_heads,
        "num_query_groups": spec.num_kv_heads,
        "kv_channels": spec.head_dim,
        "layernorm_epsilon": spec.norm_eps,
        **_rope_fields(spec.rope),
        "share_embeddings_and_output_weights": spec.tied_embeddings,
        "qk_layernorm": spec.qk_norm,
        "add_qkv_bias": spec.qkv_bias,
        "add_bias_linear": False,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        **_expert_fields(spec.experts),
        "activation_func": {"_target_": "torch.nn.functional.silu", "_call_": False},
    }


def _expert_fields(experts: Experts | None) -> dict[str, Any]:
    """Returns the fields of softmax routers without groups and biases, which the families of this project have."""
    if experts is None:
        return {"num_moe_experts": None}
    # the provider's own spec would give experts to all layers
    mixed = {} if all(experts.sparse) else {"transformer_layer_spec": _LAYERS_OF_TWO_KINDS}
    return {
        **mixed,
        "num_moe_experts": experts.count,
        "moe_ffn_hidden_size": experts.ffn_size,
        "moe_router_topk": experts.per_token,
        # False: softmax over the chosen experts alone, which is that over all, divided by the sum of the chosen
        "moe_router_pre_softmax": not experts.normalized,
        "moe_layer_freq": 1 if all(experts.sparse) else [int(sparse) for sparse in experts.sparse],
        "moe_grouped_gemm": True,
        "moe_token_dispatcher_type": "alltoall",
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
    }


def _rope_fields(rope: Rope) -> dict[str, Any]:
    fields = {
        "position_embedding_type": "yarn" if rope.kind == "yarn" else "rope",
        "rotary_base": rope.theta,
        "rotary_percent": rope.share,
        "rope_scaling": rope.kind == "llama3",
        "seq_len_interpolation_factor": rope.get("factor") if rope.kind == "linear" else None,
    }
    if rope.kind == "llama3":
        fields["rope_scaling_factor"] = rope.get("factor")
    if rope.kind == "yarn":
        given = {
            "yarn_rotary_scaling_factor": rope.get("factor"),
            "yarn_original_max_position_embeddings": rope.get("original_max_position_embeddings"),
            "yarn_beta_fast": rope.get("beta_fast"),
            "yarn_beta_slow": rope.get("beta_slow"),
            "yarn_correction_range_round_to_int": rope.get("truncate"),
        }
        # as in transformers, one of the two alone has no effect
        scales = {"yarn_mscale": rope.get("mscale"), "yarn_mscale_all_dim": rope.get("mscale_all_dim")}
        given |= scales if None not in scales.values() else {}
        fields |= _YARN_DEFAULTS | {name: value for name, value in given.items() if value is not None}
    return fields


def run_config(spec: ModelSpec, dtype: str) -> dict[str, Any] | None:
    """Returns the content of a run_config.yaml with which Megatron-Bridge builds the model and loads its weights.

    `dtype` is that of the stored weights, for example "bfloat16". None for a model that is `not_described`.
    """
    if not_described(spec) is not None:
        return None
    stored = {"_target_": f"torch.{dtype}", "_call_": False}
    model = {
        **provider_fields(spec),
        "vocab_size": spec.vocab_size,
        # as in Megatron-Bridge's checkpoints: else it exports rows of padding; Megatron's loader drops those of ours
        "should_pad_vocab": False,
        "seq_length": spec.max_positions,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "bf16": dtype == "bfloat16",
        "fp16": dtype == "float16",
        "params_dtype": stored,
        "pipeline_dtype": stored,
        # the checkpoint loads at any layout
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
    }
    # the checkpoint holds nothing from which Megatron-Bridge's own loop would resume
    return {"model": model, "checkpoint": {"save_optim": False, "save_rng": False, "fully_parallel_save": False}}


def write_run_config(directory: Path, spec: ModelSpec, dtype: str) -> None:
    """Writes run_config.yaml into a checkpoint; nothing for a model that the fields don't describe."""
    content = run_config(spec, dtype)
    if content is not None:
        (directory / RUN_CONFIG).write_text(yaml.safe_dump(content, sort_keys=False))


def read_run_config(directory: Path) -> dict[str, Any] | None:
    """Returns the content of a checkpoint's run_config.yaml; None without the file. Runs nothing that it names.

    Raises:
        ValueError: the file is damaged, or the checkpoint holds adapters only.
    """
    file = directory / RUN_CONFIG
    if not file.is_file():
        return None
    try:
        content = yaml.safe_load(file.read_text())
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{file} can't be read ({reason}); expected plain YAML: copy the checkpoint again") from error
    if not isinstance(content, dict) or not isinstance(content.get("model"), dict):
        raise ValueError(f"{file}: has no section 'model'; expected Megatron-Bridge's: copy the checkpoint again")
    if content.get("peft") is not None:
        raise ValueError(
            f"{file}: peft is set, so the checkpoint holds adapters and no model; expected a whole model: merge the "
            "adapters with Megatron-Bridge first"
        )
    return content


def named_hf_directory(content: dict[str, Any]) -> tuple[Path | None, list[str]]:
    """Returns (local directory with a config.json that a run_config.yaml names, or None; all names of models in it)."""
    model, tokenizer = content["model"], content.get("tokenizer")
    given = [model.get("hf_model_id"), tokenizer.get("tokenizer_model") if isinstance(tokenizer, dict) else None]
    names = [name for name in given if isinstance(name, str) and name]
    found = [Path(name) for name in names if (Path(name) / "config.json").is_file()]
    return (found[0] if found else None), names


def check_run_config(directory: Path, content: dict[str, Any], spec: ModelSpec, source: Path) -> None:
    """Raises ValueError unless a checkpoint's run_config.yaml describes the model of `source`/config.json."""
    if (reason := not_described(spec)) is not None:
        # weights with a further norm are of no model that transformers has
        export = "" if spec.latent is not None else ", or export the checkpoint with Megatron-Bridge"
        raise ValueError(
            f"{source / 'config.json'}: {reason}, which is not read from checkpoints of Megatron-Bridge; expected the "
            f"config.json of the model in {directory}: set hf_path= to that model's directory{export}"
        )
    model = content["model"]
    defaults = {"num_query_groups": model.get("num_attention_heads"), "kv_channels": _channels(model)} | _YARN_DEFAULTS
    for name, expected in provider_fields(spec).items():
        # one class or function may have several names
        if name == "_target_" or name in _CHOSEN or isinstance(expected, dict):
            continue
        found = model.get(name)
        found = defaults.get(name) if found is None else found
        if name in model and not (_same(found, expected) or _is_other_spelling(name, found, expected, model)):
            raise ValueError(
                f"{directory / RUN_CONFIG}: {name}={found!r}, but {source / 'config.json'} asks for {expected!r}; "
                "expected the same model: set hf_path= to the directory of the model that the checkpoint was made of"
            )


def _is_other_spelling(name: str, found: Any, expected: Any, model: dict[str, Any]) -> bool:
    """Returns whether Megatron-Bridge 0.6.2 writes a setting of the same model in another way than this project."""
    if name == "window_attn_skip_freq" and isinstance(expected, list):
        if found is None:  # a class with a pattern of its own, as Gemma 2's
            return True
        if isinstance(found, int) and not isinstance(found, bool):  # every such layer has no window
            return expected == [int((layer + 1) % found != 0) for layer in range(len(expected))]
    if name == "moe_layer_freq":
        return {str(found), str(expected)} <= {"1", str([1] * int(model.get("num_layers") or 0))}
    # YaRN by a factor of 1 with both scales of 1 is no YaRN
    ones = all(model.get(key) == 1.0 for key in ("rotary_scaling_factor", "mscale", "mscale_all_dim"))
    return name == "rope_type" and {found, expected} == {"rope", "yarn"} and ones


def _channels(model: dict[str, Any]) -> Any:
    width, heads = model.get("hidden_size"), model.get("num_attention_heads")
    return width // heads if isinstance(width, int) and isinstance(heads, int) and heads else None


def _same(found: Any, expected: Any) -> bool:
    if isinstance(expected, bool) or expected is None:
        return bool(found) == bool(expected)
    if isinstance(expected, float):
        return isinstance(found, int | float) and math.isclose(found, expected, rel_tol=1e-6)
    return found == expected
