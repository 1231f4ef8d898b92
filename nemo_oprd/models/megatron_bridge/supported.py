"""The families that only Megatron-Bridge has and that were compared with transformers, and what is special in them.

A family that is not here is accepted if it is a dense decoder with full attention: everything else is refused
(`provider_fields.REFUSED`), because a part that nobody has compared may be computed otherwise. Imports neither torch nor
Megatron-Bridge.
"""

from __future__ import annotations

from dataclasses import dataclass

_EXPERTS, _MTP = "experts", "layers for multi-token prediction"
_LATENT = frozenset((_EXPERTS, _MTP, "multi-latent attention"))
# the softmax and the gated activation of gpt-oss; the last three are fields of a provider
_GPT_OSS = (
    _EXPERTS, "sliding-window attention", "another softmax", "softmax_type", "glu_linear_offset",
    "activation_func_clamp_value",
)  # fmt: skip


@dataclass(frozen=True)
class Kind:
    """What is accepted of a family beside a dense decoder with full attention.

    Attributes:
        parts: keys of `provider_fields.REFUSED`, and fields of a provider.
        ropes: kinds of RoPE.
    """

    parts: frozenset[str] = frozenset()
    ropes: tuple[str, ...] = ("default",)


KINDS: dict[str, Kind] = {
    "olmoe": Kind(frozenset((_EXPERTS,))),
    "gpt_oss": Kind(frozenset(_GPT_OSS), ("default", "yarn")),
    "glm4_moe": Kind(frozenset((_EXPERTS, _MTP))),
    "deepseek_v3": Kind(_LATENT, ("default", "yarn")),
    "glm4_moe_lite": Kind(_LATENT, ("default", "yarn")),
}
