"""Rotary position embeddings: a config's settings, and the frequencies that transformers computes from them.

Kinds: "default"; "linear" (all frequencies are divided by a factor); "yarn" and "llama3" (low frequencies are divided
by a factor, with a smooth transition; yarn also scales cosines and sines); "longrope" (a factor per frequency, one set
for short sequences and one for long ones, and scaled cosines and sines); "proportional" (Gemma 4's). The set of
LongRoPE factors depends on the total length of a sequence compared with `original_max_position_embeddings`, as in
Hugging Face's code for a batch of one. Two sequences in one pack may therefore have different frequencies.

The settings have transformers' names and meaning, and its `ROPE_INIT_FUNCTIONS` compute the frequencies of all kinds
but the first two, whose formula is one line. This module checks the settings that transformers would ignore or misread
without an error.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_ORIGINAL = "original_max_position_embeddings"
# kind -> (settings that it needs, settings that it may have)
_SETTINGS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "yarn": (
        ("factor", _ORIGINAL),
        ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    ),
    "longrope": (("short_factor", "long_factor", _ORIGINAL), ("factor", "attention_factor")),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", _ORIGINAL), ()),
}
KINDS = tuple(_SETTINGS)  # of this project's own families
# all channels are rotated, those beyond the share by no angle
_SETTINGS["proportional"] = ((), ())
# of every kind; those of several position axes (of pictures) have no effect on text, whose axes all count the tokens
_COMMON = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
_AXES = {"mrope_section", "mrope_interleaved"}
# transformers' defaults
_BETA_FAST, _BETA_SLOW = 32.0, 1.0
# kinds that transformers has -> why they are refused in families that do not list them
_REFUSED = {
    "dynamic": (
        "whose frequencies change while a sequence grows beyond max_position_embeddings, so that keys in a cache are "
        "rotated unlike those of the whole sequence; expected {expected}: remove it, which changes nothing up to "
        "max_position_embeddings tokens"
    ),
    "proportional": "which vLLM computes in another way than transformers; expected {expected}: choose a model "
    "without it",
}


@dataclass(frozen=True)
class Frequencies:
    """The rotation of a head's channels; the regimes of longrope are short and long, other kinds have one."""

    inv_freq: torch.Tensor  # angles per position, float32 [regimes, rotated channels / 2]
    scale: float = 1.0  # multiplies cosines and sines (transformers' attention factor)
    switch: int | None = None  # sequences of more tokens than this use the second regime; None if there is one


@dataclass(frozen=True)
class Rope:
    """A RoPE: `share` is the rotated part of a head's channels; `settings` are (name, value) pairs of the kind."""

    theta: float
    kind: str = "default"
    share: float = 1.0
    settings: tuple[tuple[str, Any], ...] = ()

    def get(self, name: str) -> Any:
        """Returns the setting `name` of the kind; None if the config leaves it out."""
        return dict(self.settings).get(name)

    @property
    def switch(self) -> int | None:
        """Returns the length above which sequences use the second row of `inv_freq`; None if there is one row."""
        return self.get(_ORIGINAL) if self.kind == "longrope" else None

    @property
    def reach(self) -> float | None:
        """The number of positions that the scaling covers; None if the settings don't give it."""
        factor, original = self.get("factor"), self.get(_ORIGINAL)
        return None if factor is None or original is None else factor * original

    def frequencies(self, head_dim: int) -> Frequencies:
        """Returns the frequencies that transformers computes for heads of `head_dim` channels, on the CPU."""
        import torch

        if self.kind in ("default", "linear"):  # the same to the last bit, without an import that takes a second
            channels = rotated_channels(head_dim, self.share)
            places = torch.arange(0, channels, 2, dtype=torch.int64, device="cpu").to(torch.float32)
            inv_freq = 1.0 / self.theta ** (places / channels) / (self.get("factor") or 1.0)
            return Frequencies(inv_freq[None])
        return self._scaled_frequencies(head_dim)

    def _scaled_frequencies(self, head_dim: int) -> Frequencies:
        """Computes `frequencies` for kinds other than default and linear, with transformers' functions."""
        import torch
        from transformers import LlamaConfig
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        settings = {name: list(value) if isinstance(value, tuple) else value for name, value in self.settings}
        config = LlamaConfig(
            head_dim=head_dim,
            hidden_size=head_dim,
            num_attention_heads=1,
            # transformers warns of other numbers; some of its versions take the factor of longrope from here
            max_position_embeddings=round(self.reach or 1),
            rope_theta=self.theta,
            rope_scaling={"rope_type": self.kind, "factor": 1.0, **settings},
            **({} if self.share == 1.0 else {"partial_rotary_factor": self.share}),
            **({} if self.switch is None else {_ORIGINAL: self.switch}),
        )
        lengths = [None] if self.switch is None else [self.switch, self.switch + 1]
        cpu = torch.device("cpu")
        with cpu:  # not all tensors that it makes are put on the device that it is given
            regimes = [ROPE_INIT_FUNCTIONS[self.kind](config, cpu, seq_len=length) for length in lengths]
        return Frequencies(torch.stack([inv_freq for inv_freq, _ in regimes]), float(regimes[0][1]), self.switch)


def rotated_channels(head_dim: int, share: float) -> int:
    """Returns the number of rotated channels of a head."""
    return int(head_dim * share)


def number(key: str, value: Any, source: str) -> float:
    """Returns `value` as a positive finite float; raises a ValueError that names the key and the file."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"{source}: {key}={value!r}; expected a positive number as in the model's source")
    return float(value)


def parse_rope(
    hf_config: dict,
    source: str,
    *,
    head_dim: int,
    kinds: tuple[str, ...] = KINDS,
    default_theta: float | None = None,
    partial: bool = False,
    axes: bool = False,
) -> Rope:
    """Parses both spellings: `rope_theta` and `rope_scaling` (transformers 4), `rope_parameters` (transformers 5).

    Args:
        kinds: the kinds that the family supports.
        default_theta: the base if the config has none; None if a missing base is an error.
        partial: whether the family supports partial rotary embeddings.
        axes: whether the family's settings divide the channels among position axes, which are alike in text.

    Raises:
        ValueError: an unsupported kind, unsupported partial rotary embeddings, missing, unknown or wrong values, or
            spellings that contradict each other.
    """
    settings: dict = {}
    for key in ("rope_parameters", "rope_scaling"):
        given = hf_config.get(key) or {}
        if not isinstance(given, dict):
            raise ValueError(f"{source}: {key}={given!r}; expected an object as in the model's source")
        _check_kind(_kind(given), kinds, key, source)
        if settings and given and any(settings[name] != given[name] for name in settings.keys() & given.keys()):
            raise ValueError(f"{source}: rope_parameters and rope_scaling contradict each other; keep one of them")
        settings.update(given)
    kind = _kind(settings)
    _refuse_unknown(kind, {name: settings[name] for name in settings.keys() - (_AXES if axes else set())}, source)
    share = settings.get("partial_rotary_factor", hf_config.get("partial_rotary_factor"))
    share = 1.0 if share is None else number("partial_rotary_factor", share, source)
    if share != 1.0 and not partial:
        raise ValueError(
            f"{source}: partial_rotary_factor={share} asks for partial rotary embeddings, which this family does not "
            "have; expected 1.0: choose a model without them"
        )
    channels = rotated_channels(head_dim, share)
    if share > 1 or channels % 2 or not channels:
        raise ValueError(
            f"{source}: partial_rotary_factor={share} of head_dim {head_dim}; expected an even number of channels "
            f"between 2 and {head_dim}: correct it as in the model's source"
        )
    theta = settings.get("rope_theta", hf_config.get("rope_theta"))
    theta = default_theta if theta is None else theta
    if theta is None:
        raise ValueError(f"{source}: no rope_theta, neither at top level nor in rope_parameters; add the model's value")
    theta = number("rope_theta", theta, source)
    values = _values(kind, hf_config, settings, source)
    _check_together(kind, values, channels // 2, source)
    return Rope(theta, kind, share, tuple(sorted(values.items())))


def parse_ropes(hf_config: dict, source: str, **options: Any) -> tuple[Rope, Rope | None]:
    """Returns (RoPE of layers with full attention, RoPE of layers with windows; None: the config has one for all).

    Args:
        options: those of `parse_rope`; of `kinds`, only "default" is allowed for layers with windows.
    """
    given = hf_config.get("rope_parameters") or {}
    if not isinstance(given, dict) or "full_attention" not in given:
        return parse_rope(hf_config, source, **options), None
    unknown = sorted(given.keys() - {"full_attention", "sliding_attention"})
    if unknown:
        raise ValueError(f"{source}: rope_parameters has {unknown}; expected full_attention and sliding_attention only")
    # the settings of one kind of layer, in the place of all of them
    full, local = ({**hf_config, "rope_parameters": given.get(f"{name}_attention")} for name in ("full", "sliding"))
    return parse_rope(full, source, **options), parse_rope(local, source, **{**options, "kinds": ("default",)})


def _kind(settings: dict) -> str:
    kind = settings.get("rope_type", settings.get("type")) or "default"
    return "longrope" if kind == "su" else kind  # its name in the first Phi-3 configs


def _check_kind(kind: Any, kinds: tuple[str, ...], key: str, source: str) -> None:
    if kind in kinds:
        return
    expected = " or ".join(map(repr, kinds))
    if isinstance(kind, str) and kind in _REFUSED:
        raise ValueError(f"{source}: {key} has RoPE type {kind!r}, {_REFUSED[kind].format(expected=expected)}")
    raise ValueError(
        f"{source}: {key} has RoPE type {kind!r}; expected {expected}, the types supported for this family: choose a "
        "model without it"
    )


def _refuse_unknown(kind: str, settings: dict, source: str) -> None:
    needed, optional = _SETTINGS[kind]
    unknown = sorted(name for name in settings.keys() - {*_COMMON, *needed, *optional} if settings[name] is not None)
    if unknown:
        known = f"{', '.join([*needed, *optional])}, which are" if needed else "rope_theta, which is"
        raise ValueError(
            f"{source}: the RoPE settings of type {kind!r} have {', '.join(map(repr, unknown))}, which transformers "
            f"would ignore; expected {known} all that it reads: remove the others"
        )


def _values(kind: str, hf_config: dict, settings: dict, source: str) -> dict[str, Any]:
    """Returns the settings of `kind` that the config has, checked one by one."""
    needed, optional = _SETTINGS[kind]
    values: dict[str, Any] = {}
    for name in (*needed, *optional):
        value = _original(hf_config, settings, source) if name == _ORIGINAL else settings.get(name)
        if value is None and name in needed:
            raise ValueError(f"{source}: the RoPE settings have no {name!r}; expected it as in the model's source")
        if value is None:
            continue
        if name in ("short_factor", "long_factor"):
            if not isinstance(value, list):
                raise ValueError(f"{source}: {name}={value!r}; expected a list of numbers as in the model's source")
            values[name] = tuple(number(name, entry, source) for entry in value)
        elif name == "truncate":
            if not isinstance(value, bool):
                raise ValueError(f"{source}: truncate={value!r}; expected true or false as in the model's source")
            values[name] = value
        else:
            values[name] = number(name, value, source)
    if _ORIGINAL in values:
        values[_ORIGINAL] = int(values[_ORIGINAL])
    if kind == "longrope" and "factor" not in values:
        most = number("max_position_embeddings", hf_config.get("max_position_embeddings"), source)
        values["factor"] = most / values[_ORIGINAL]
    return values


def _original(hf_config: dict, settings: dict, source: str) -> Any:
    """Returns `original_max_position_embeddings`, which Phi-3's configs have at top level; None without it."""
    places = [place.get(_ORIGINAL) for place in (hf_config, settings)]
    given = [value for value in places if value is not None]
    if len(given) == 2 and given[0] != given[1]:
        raise ValueError(
            f"{source}: {_ORIGINAL}={given[0]!r} at top level and {given[1]!r} in the RoPE settings; expected one "
            "value: correct it as in the model's source"
        )
    return given[0] if given else None


def _check_together(kind: str, values: dict[str, Any], frequencies: int, source: str) -> None:
    """Raises ValueError for settings that don't fit each other or the `frequencies` of a head."""
    for name in ("short_factor", "long_factor"):
        if name in values and len(values[name]) != frequencies:
            raise ValueError(
                f"{source}: {name} has {len(values[name])} numbers, expected {frequencies} (half of the "
                f"{2 * frequencies} rotated channels of a head); copy it from the model's source"
            )
    low, high = values.get("low_freq_factor", 0.0), values.get("high_freq_factor", 1.0)
    if high <= low:
        raise ValueError(
            f"{source}: high_freq_factor={high} is not above low_freq_factor={low}; correct them as in the model's "
            "source"
        )
    fast, slow = values.get("beta_fast", _BETA_FAST), values.get("beta_slow", _BETA_SLOW)
    if kind == "yarn" and fast < slow:  # Kimi K2 has equal ones
        raise ValueError(f"{source}: beta_fast={fast} is below beta_slow={slow}; correct them as in the model's source")
