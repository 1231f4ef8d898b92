"""Rotary position embeddings: a config's settings and the frequencies that follow from them, for all layouts.

Kinds: "default"; "llama3" (low frequencies are divided by a factor, with a smooth transition); "longrope" (a factor per
frequency, one set for short sequences and one for long ones, and scaled cosines and sines). The set of LongRoPE factors
depends on the total length of a sequence compared with `original`, as in Hugging Face's code for a batch of one. Two
sequences in one pack may therefore have different frequencies.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Rope:
    """`share` is the part of a head's channels that is rotated; `scale` multiplies cosines and sines.

    `factor`, `low` and `high` are settings of llama3; `short` and `long` (one number per frequency) of longrope;
    `original` (the number of positions in pretraining) of both.
    """

    theta: float
    kind: str = "default"
    share: float = 1.0
    scale: float = 1.0
    factor: float = 1.0
    low: float = 1.0
    high: float = 1.0
    original: int = 0
    short: tuple[float, ...] = ()
    long: tuple[float, ...] = ()

    @property
    def switch(self) -> int | None:
        """Sequences of more tokens than this use the second row of `inv_freq`; None if there is one row."""
        return self.original if self.kind == "longrope" else None

    def inv_freq(self, head_dim: int) -> torch.Tensor:
        """Angles per position, float32 [regimes, rotated channels / 2]; the regimes of longrope are short and long."""
        import torch

        channels = rotated_channels(head_dim, self.share)
        exponents = torch.arange(0, channels, 2, dtype=torch.int64).float() / channels
        plain = 1.0 / self.theta**exponents
        if self.kind == "longrope":
            factors = torch.tensor([self.short, self.long], dtype=torch.float32)
            return 1.0 / (factors * self.theta**exponents)
        if self.kind == "llama3":
            turns = self.original * plain / (2 * math.pi)  # over the positions of pretraining
            blend = ((turns - self.low) / (self.high - self.low)).clamp(0, 1)
            plain = (1 - blend) * plain / self.factor + blend * plain
        return plain[None]


def rotated_channels(head_dim: int, share: float) -> int:
    """The number of rotated channels of a head."""
    return int(head_dim * share)


def number(key: str, value: Any, source: str) -> float:
    """`value` as a positive finite float, or a ValueError that names the key and the file."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"{source}: {key}={value!r}; expected a positive number as in the model's source")
    return float(value)


def parse_rope(
    hf_config: dict,
    source: str,
    *,
    head_dim: int,
    kinds: tuple[str, ...] = ("default",),
    default_theta: float | None = None,
    partial: bool = False,
) -> Rope:
    """Parses both spellings: `rope_theta` and `rope_scaling` (transformers 4), `rope_parameters` (transformers 5).

    Args:
        kinds: the kinds that the family supports.
        default_theta: the base if the config has none; None if a missing base is an error.
        partial: whether the family supports partial rotary embeddings.

    Raises:
        ValueError: an unsupported kind, unsupported partial rotary embeddings, missing or wrong values, or spellings
            that contradict each other.
    """
    settings: dict = {}
    for key in ("rope_parameters", "rope_scaling"):
        given = hf_config.get(key) or {}
        if not isinstance(given, dict):
            raise ValueError(f"{source}: {key}={given!r}; expected an object as in the model's source")
        kind = _kind(given)
        if kind not in kinds:
            only = "the supported type" if len(kinds) == 1 else "the types supported for this family"
            raise ValueError(
                f"{source}: {key} has RoPE type {kind!r}; expected {' or '.join(map(repr, kinds))}, {only}: "
                "choose a model without it"
            )
        if settings and given and any(settings[name] != given[name] for name in settings.keys() & given.keys()):
            raise ValueError(f"{source}: rope_parameters and rope_scaling contradict each other; keep one of them")
        settings.update(given)
    share = settings.get("partial_rotary_factor", hf_config.get("partial_rotary_factor"))
    share = 1.0 if share is None else number("partial_rotary_factor", share, source)
    if share != 1.0 and not partial:
        raise ValueError(
            f"{source}: partial_rotary_factor={share} asks for partial rotary embeddings, which this family does not "
            "have; expected 1.0: choose a model without them"
        )
    if share > 1 or rotated_channels(head_dim, share) % 2 or not rotated_channels(head_dim, share):
        raise ValueError(
            f"{source}: partial_rotary_factor={share} of head_dim {head_dim}; expected an even number of channels "
            f"between 2 and {head_dim}: correct it as in the model's source"
        )
    theta = settings.get("rope_theta", hf_config.get("rope_theta"))
    theta = default_theta if theta is None else theta
    if theta is None:
        raise ValueError(f"{source}: no rope_theta, neither at top level nor in rope_parameters; add the model's value")
    theta = number("rope_theta", theta, source)
    kind = _kind(settings)
    if kind == "llama3":
        return _llama3(hf_config, settings, theta, share, source)
    if kind == "longrope":
        return _longrope(hf_config, settings, theta, share, head_dim, source)
    return Rope(theta, share=share)


def _kind(settings: dict) -> str:
    kind = settings.get("rope_type", settings.get("type")) or "default"
    return "longrope" if kind == "su" else kind  # its name in the first Phi-3 configs


def _required(settings: dict, key: str, source: str) -> Any:
    if settings.get(key) is None:
        raise ValueError(f"{source}: the RoPE settings have no {key!r}; expected it as in the model's source")
    return settings[key]


def _original(hf_config: dict, settings: dict, source: str) -> int:
    """The top-level key wins, as in transformers."""
    places = [place.get("original_max_position_embeddings") for place in (hf_config, settings)]
    given = next((value for value in places if value is not None), None)
    if given is None:
        raise ValueError(
            f"{source}: the RoPE settings have no 'original_max_position_embeddings'; expected it as in the model's "
            "source"
        )
    return int(number("original_max_position_embeddings", given, source))


def _llama3(hf_config: dict, settings: dict, theta: float, share: float, source: str) -> Rope:
    factor, low, high = (
        number(key, _required(settings, key, source), source)
        for key in ("factor", "low_freq_factor", "high_freq_factor")
    )
    if high <= low:
        raise ValueError(
            f"{source}: high_freq_factor={high} is not above low_freq_factor={low}; correct them as in the model's "
            "source"
        )
    original = _original(hf_config, settings, source)
    return Rope(theta, "llama3", share, factor=factor, low=low, high=high, original=original)


def _longrope(hf_config: dict, settings: dict, theta: float, share: float, head_dim: int, source: str) -> Rope:
    unknown = settings.keys() & {"short_mscale", "long_mscale"}
    if unknown:
        raise ValueError(f"{source}: {sorted(unknown)} are not supported; expected attention_factor or none of them")
    frequencies = rotated_channels(head_dim, share) // 2
    sets = []
    for key in ("short_factor", "long_factor"):
        values = _required(settings, key, source)
        if not isinstance(values, list) or len(values) != frequencies:
            count = len(values) if isinstance(values, list) else repr(values)
            raise ValueError(
                f"{source}: {key} has {count} numbers, expected {frequencies} (half of the {2 * frequencies} rotated "
                "channels of a head); copy it from the model's source"
            )
        sets.append(tuple(number(key, value, source) for value in values))
    original = _original(hf_config, settings, source)
    if settings.get("attention_factor") is not None:
        scale = number("attention_factor", settings["attention_factor"], source)
    else:
        factor = settings.get("factor")
        if factor is None:
            factor = number("max_position_embeddings", hf_config.get("max_position_embeddings"), source) / original
        factor = number("factor", factor, source)
        scale = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return Rope(theta, "longrope", share, scale, original=original, short=sets[0], long=sets[1])
