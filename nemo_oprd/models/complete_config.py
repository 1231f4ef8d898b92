"""Finds the language model's config in a config.json, under transformers' name and with transformers' defaults."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

# The language model inside a checkpoint of a model for text and pictures: its config, and its tensors' names.
#
# Qwen3.5 is such a model. Students and teachers of text are made of the language model alone: the vision tower and the
# layers for multi-token prediction are left out, as transformers does when it loads such a checkpoint as a causal
# language model. An export is a language model by itself.

# model_type of the whole -> architecture of the language model
_ARCHITECTURES = {
    "qwen3_5": "Qwen3_5ForCausalLM",
    "qwen3_5_moe": "Qwen3_5MoeForCausalLM",
    "kimi_k25": "DeepseekV3ForCausalLM",
    "gemma4": "Gemma4ForCausalLM",
    "qwen3_vl": "Qwen3ForCausalLM",
    "qwen3_vl_moe": "Qwen3MoeForCausalLM",
}
# model_type -> (that under which transformers has a causal language model of the same architecture; its class). Kimi K2
# is DeepSeek-V3's architecture, MiMo is Qwen2's with a layer that predicts a further token, which is left out, and the
# language models of Qwen3-VL are Qwen3's: the axes of their positions are alike in text.
_ALIASES = {
    "kimi_k2": ("deepseek_v3", "DeepseekV3ForCausalLM"),
    "mimo": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3_vl_text": ("qwen3", "Qwen3ForCausalLM"),
    "qwen3_vl_moe_text": ("qwen3_moe", "Qwen3MoeForCausalLM"),
}
_AXES = {"mrope_section", "mrope_interleaved"}
# keys that the whole has for its language model
_SHARED = ("dtype", "torch_dtype", "quantization_config")
# a key whose value for the whole counts, even if the language model's own differs: transformers makes the whole
_OF_WHOLE = "tie_word_embeddings"
# keys of the whole that count for its language model, unless that has its own
_DIFFERING = ("bos_token_id", "eos_token_id", "pad_token_id", "auto_map")
_PREFIX, _INNER, _OUTER = "model.", "model.language_model.", "language_model."
# prefixes of the names of tensors that are left out
LEFT_OUT = (
    "model.visual.", "model.vision_tower.", "model.embed_vision.", "mtp.", "vision_tower.", "mm_projector.",
    "model.mtp_layers.",
)  # fmt: skip


def language_model_config(hf_config: dict, source: str) -> dict:
    """Returns the config of the language model in a config.json, under a name that transformers knows.

    The config of a model outside `_ARCHITECTURES` changes only if transformers knows it under another name.

    Raises:
        ValueError: there is no language model in it, or the two configs contradict each other.
    """
    architecture = language_model_architecture(hf_config)
    if architecture is None:
        return _under_known_name(hf_config)
    text = _inner_config(hf_config, source, required=True)
    for key in _SHARED:
        if key in text and key in hf_config and text[key] != hf_config[key]:
            raise ValueError(
                f"{source}: {key}={hf_config[key]!r}, but {text[key]!r} in text_config; expected one value: correct it "
                "as in the model's source"
            )
    shared = {key: hf_config[key] for key in (*_SHARED, *_DIFFERING) if key in hf_config}
    made = {_OF_WHOLE: hf_config[_OF_WHOLE]} if _OF_WHOLE in hf_config else {}
    return _under_known_name({**shared, **text, **made, "architectures": [architecture]})


def _under_known_name(hf_config: dict) -> dict:
    known = _ALIASES.get(str(hf_config.get("model_type")))
    if known is None:
        return hf_config
    plain = {
        key: {name: value for name, value in hf_config[key].items() if name not in _AXES}
        for key in ("rope_scaling", "rope_parameters")
        if isinstance(hf_config.get(key), dict)
    }
    return {**hf_config, **plain, "model_type": known[0], "architectures": [known[1]]}


def is_renamed(hf_config: dict) -> bool:
    """Returns whether `language_model_config` renames the model of a config.json."""
    text = hf_config.get("text_config")
    types = {str(each.get("model_type")) for each in (hf_config, text) if isinstance(each, dict)}
    return bool(types & _ALIASES.keys())


def language_model_architecture(hf_config: dict) -> str | None:
    """Returns the architecture of the language model in a model for text and pictures; None for other models."""
    return _ARCHITECTURES.get(str(hf_config.get("model_type")))


def names_in_language_model(names: Iterable[str]) -> dict[str, str]:
    """Maps each tensor's name in the language model to its name in the checkpoint, one of `names`.

    >>> names_in_language_model(["model.language_model.layers.0.mlp.up_proj.weight"])
    {'model.layers.0.mlp.up_proj.weight': 'model.language_model.layers.0.mlp.up_proj.weight'}
    """
    return {_name_in_language_model(name): name for name in names}


def _name_in_language_model(name: str) -> str:
    if name.startswith(_OUTER):
        return name.removeprefix(_OUTER)
    return _PREFIX + name.removeprefix(_INNER) if name.startswith(_INNER) else name


def text_config(hf_config: dict[str, Any], source: str = "config.json") -> dict[str, Any]:
    """Returns a model's config, or that of its language model if it has parts, with transformers' defaults filled in.

    A family that transformers does not know has no defaults.

    Raises:
        ValueError: `text_config` is no object.
    """
    from transformers import CONFIG_MAPPING, AutoConfig  # takes seconds

    text = _inner_config(hf_config, source)
    if hf_config.get("model_type") in CONFIG_MAPPING:
        return AutoConfig.for_model(**_decoded(hf_config)).get_text_config().to_dict()
    return {**hf_config, **text}


def _inner_config(hf_config: dict[str, Any], source: str, *, required: bool = False) -> dict[str, Any]:
    """Returns the config of the language model in a config.json; {} without one, unless it is `required`."""
    text = hf_config.get("text_config")
    if text is None and not required:
        return {}
    if not isinstance(text, dict):
        raise ValueError(f"{source}: text_config={text!r}; expected the language model's config: copy the file again")
    return text


def renamed_config(hf_config: dict) -> Any:
    """Returns transformers' config object for the result of `read_hf_config`, whose name transformers knows."""
    from transformers import AutoConfig  # takes seconds

    return AutoConfig.for_model(**_decoded(hf_config))


def _decoded(value: Any) -> Any:
    """Returns a value of a config.json with floats in place of transformers' {"__float__": "Infinity"}."""
    if isinstance(value, dict):
        if set(value) == {"__float__"}:
            return float(value["__float__"])
        return {key: _decoded(inner) for key, inner in value.items()}
    return [_decoded(inner) for inner in value] if isinstance(value, list) else value
