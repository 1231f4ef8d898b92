"""What a config.json leaves out, because transformers has defaults for it: a size of the model, or a sliding window."""

from __future__ import annotations

from typing import Any


def text_config(hf_config: dict[str, Any]) -> dict[str, Any]:
    """The config of a model, of its language model if it has parts, with transformers' defaults filled in.

    A family that transformers does not know has no defaults.
    """
    from transformers import CONFIG_MAPPING, AutoConfig  # takes seconds

    if hf_config.get("model_type") in CONFIG_MAPPING:
        return AutoConfig.for_model(**_decoded(hf_config)).get_text_config().to_dict()
    text = hf_config.get("text_config")
    return {**hf_config, **text} if isinstance(text, dict) else hf_config


def _decoded(value: Any) -> Any:
    """A value of a config.json with numbers in place of {"__float__": "Infinity"}, as transformers writes them."""
    if isinstance(value, dict):
        if set(value) == {"__float__"}:
            return float(value["__float__"])
        return {key: _decoded(inner) for key, inner in value.items()}
    return [_decoded(inner) for inner in value] if isinstance(value, list) else value
