"""Reads the architecture of a teacher that vLLM serves, of any family, as far as the trainer needs it."""

from __future__ import annotations

from pathlib import Path

from nemo_oprd.models import ModelSpec, read_hf_config
from nemo_oprd.models.architecture import Family, positive_integer, source_dtype
from nemo_oprd.models.complete_config import text_config
from nemo_oprd.models.rope import Rope
from nemo_oprd.models.weight_files import refuse_what_vllm_reads_differently

# what families call the same size; the first name that a config has counts
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
_WIDTH = ("hidden_size", "n_embd", "d_model")
_POSITIONS = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length")


def read_served_spec(path: str | Path) -> ModelSpec:
    """Returns depth, width, vocabulary, positions and logits' scale of the language model in `path/config.json`.

    Depth and width must be in the file; other missing keys have transformers' defaults. What only a model in this
    process needs (heads, feed-forward size, RoPE, norms) is not read, and is 0 or a default in the result.

    Raises:
        ValueError: config.json can't be read; `model_type` or one of these values is missing or wrong; RoPE's
            frequencies depend on the length of a sequence; or vLLM would load other weights than transformers.
    """
    hf_config, source = read_hf_config(path), str(Path(path) / "config.json")
    refuse_what_vllm_reads_differently(Path(path))
    model_type = hf_config.get("model_type")
    if not isinstance(model_type, str):
        raise ValueError(f"{source}: model_type={model_type!r}; expected a name: copy the file from its source again")
    text = text_config(hf_config, source)
    _check_rope(text, source)
    named = {**hf_config, **(hf_config.get("text_config") or {})}
    layers, width, positions = (
        positive_integer(given, next((name for name in names if name in given), names[0]), source)
        for names, given in ((_LAYERS, named), (_WIDTH, named), (_POSITIONS, text))
    )
    return ModelSpec(
        family=Family(model_type, _no_parse, (), own=False),
        model_type=model_type,
        num_layers=layers,
        hidden_size=width,
        ffn_size=0,
        num_heads=0,
        num_kv_heads=0,
        head_dim=0,
        vocab_size=positive_integer(text, "vocab_size", source),
        rope=Rope(theta=0.0),
        norm_eps=0.0,
        max_positions=positions,
        tied_embeddings=bool(text.get("tie_word_embeddings", False)),
        qkv_bias=False,
        proj_bias=False,
        qk_norm=False,
        dtype=source_dtype(named),
        hf_config=hf_config,
        output_cap=text.get("final_logit_softcapping") or None,
        output_scale=_output_scale(text, source),
    )


def _output_scale(text: dict, source: str) -> float:
    """Returns the factor of the family's logits: Cohere and Falcon-H1 name the factor, Granite its reciprocal."""
    for name in ("logit_scale", "lm_head_multiplier", "logits_scaling"):
        given = text.get(name)
        if given is None:
            continue
        if not isinstance(given, int | float) or isinstance(given, bool) or given == 0:
            raise ValueError(f"{source}: {name}={given!r}; expected a number other than 0: copy the file again")
        return 1.0 / given if name == "logits_scaling" else float(given)
    return 1.0


def _check_rope(text: dict, source: str) -> None:
    """Raises ValueError if the length of a sequence decides how its first tokens are rotated."""
    settings = text.get("rope_parameters") or text.get("rope_scaling") or {}
    kind = settings.get("rope_type", settings.get("type")) if isinstance(settings, dict) else None
    if kind in ("longrope", "su", "dynamic"):
        raise ValueError(
            f"{source}: teacher.engine=vllm with RoPE of type {kind}, whose frequencies depend on the length of a "
            "sequence, and vLLM's not on that of each; expected another type: set teacher.engine=megatron, or choose "
            "another teacher"
        )


def _no_parse(family: Family, hf_config: dict, source: str) -> ModelSpec:
    raise AssertionError(f"{source}: {family.model_type} is read by `read_served_spec`")
