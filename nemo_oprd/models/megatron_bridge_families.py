"""The families that only Megatron-Bridge has and that were compared with transformers, with their special parts.

A family that is not here is accepted if it is a dense decoder with full attention: everything else is refused
(`provider_fields.REFUSED`), because a part that was not compared may be computed differently. `nemo-oprd families`
prints the tables. Imports neither torch nor Megatron-Bridge.
"""

from __future__ import annotations

from dataclasses import dataclass

# the first version with which families with special parts were compared
NEEDED_VERSION = (0, 6)

_EXPERTS, _MTP = "experts", "layers for multi-token prediction"
_LATENT = frozenset((_EXPERTS, _MTP, "multi-latent attention"))
# the softmax and the gated activation of gpt-oss; the last three are fields of a provider
_GPT_OSS = (
    _EXPERTS, "sliding-window attention", "another softmax", "softmax_type", "glu_linear_offset",
    "activation_func_clamp_value",
)  # fmt: skip


# the gated delta net in three of four layers, and an output gate in the attention of the fourth
_HYBRID = (_MTP, "an output gate in attention", "attention of another kind")


@dataclass(frozen=True)
class Kind:
    """The accepted parts of a family beside a dense decoder with full attention.

    Attributes:
        layouts: those in which losses and all gradients were compared with transformers', in float64.
        parts: accepted keys of `provider_fields.REFUSED`, and accepted fields of a provider.
        ropes: kinds of RoPE.
        refused: the part of the family that is refused.
    """

    layouts: str
    parts: frozenset[str] = frozenset()
    ropes: tuple[str, ...] = ("default",)
    refused: str = ""


_DENSE = "TP2+SP, PP2, CP2, DP2, full recompute"
_SPARSE = "TP2+SP, PP2, EP2, CP2, VPP, full recompute"
_ROUTERS = "routers' losses and replay"
_OF_HYBRID = "multi-token prediction and vision towers are left out"
_OF_LATENT = f"{_ROUTERS}; multi-token prediction is left out"
KINDS: dict[str, Kind] = {
    "gemma": Kind(_DENSE),
    "nemotron": Kind(_DENSE),
    "mistral": Kind(_DENSE, refused="sliding windows"),
    "gemma3_text": Kind(
        "TP2+SP, PP2, DP2, VPP, full recompute",
        frozenset(("sliding-window attention",)),
        ("default", "linear"),
        "context parallelism; vision towers",
    ),
    "gemma2": Kind(
        "TP2+SP, PP2, CP2, DP2, VPP, full recompute",
        frozenset(("sliding-window attention", "capped attention logits", "capped output logits")),
        refused="attention to later tokens",
    ),
    "gemma4_text": Kind(
        "TP2+SP, PP2, EP2, full recompute",
        frozenset((_EXPERTS, "sliding-window attention", "capped output logits")),
        ("default", "proportional"),
        f"models without experts; context parallelism; {_ROUTERS}; vision towers",
    ),
    "olmoe": Kind(_SPARSE, frozenset((_EXPERTS,)), refused=_ROUTERS),
    "minimax_m2": Kind(_SPARSE, frozenset((_EXPERTS,)), refused=f"{_ROUTERS}; multi-token prediction is left out"),
    "gpt_oss": Kind(
        "TP2+SP, PP2, EP2, VPP, full recompute",
        frozenset(_GPT_OSS),
        ("default", "yarn"),
        f"context parallelism, expert_tensor; {_ROUTERS}",
    ),
    "glm4_moe": Kind(_SPARSE, frozenset((_EXPERTS, _MTP)), refused=f"{_ROUTERS}; multi-token prediction is left out"),
    "mimo_v2_flash": Kind(
        "TP2+SP, PP2, EP2, VPP, full recompute",
        frozenset((_EXPERTS, "sliding-window attention")),
        refused=f"context parallelism; {_ROUTERS}; multi-token prediction is left out",
    ),
    "deepseek_v3": Kind(
        "TP2+SP, PP2, EP2, CP2 without YaRN, VPP, full recompute", _LATENT, ("default", "yarn"), _OF_LATENT
    ),
    "glm4_moe_lite": Kind(_SPARSE, _LATENT, ("default", "yarn"), _OF_LATENT),
    "qwen3_5_text": Kind(f"{_DENSE}, VPP", frozenset(_HYBRID), refused=_OF_HYBRID),
    "qwen3_5_moe_text": Kind(_SPARSE, frozenset((*_HYBRID, _EXPERTS)), refused=f"{_ROUTERS}; {_OF_HYBRID}"),
    "qwen3_next": Kind(_SPARSE, frozenset((*_HYBRID, _EXPERTS)), refused=f"{_ROUTERS}; {_OF_HYBRID}"),
}
# families that people ask for -> why Megatron-Bridge's model of them is refused
REFUSED_FAMILIES = {
    "nemotron_h": "layers of different kinds",
}
