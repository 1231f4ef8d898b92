"""Scaled RoPE and the families that have it: frequencies are transformers', what isn't supported is refused."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from family_configs import LLAMA, LLAMA3_ROPE, MIXTRAL, PHI3, QWEN2, QWEN3, QWEN3_MOE
from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd

from nemo_oprd.megatron.attention import decoding_rotation, packed_rotation, rotate
from nemo_oprd.models import parse_model_spec
from nemo_oprd.models.rope import Frequencies, Rope

NEW_LLAMA = {k: v for k, v in LLAMA.items() if k not in ("rope_theta", "rope_scaling")}
NEW_LLAMA["rope_parameters"] = {**LLAMA3_ROPE, "rope_theta": 10000.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.0, 2.0, 4.0, 8.0],
    "original_max_position_embeddings": 128,
}
SCALINGS: dict[str, dict | None] = {
    "default": None,
    "linear": {"type": "linear", "factor": 3},
    "yarn": YARN,
    "yarn, own attention factor": {**YARN, "attention_factor": 1.3, "beta_fast": 8, "beta_slow": 0.5},
    "yarn, as DeepSeek's": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.2, "truncate": False},
    "yarn, half of DeepSeek's": {**YARN, "mscale": 0.7},
    "longrope": LONGROPE,
    "longrope, own factor": {**LONGROPE, "factor": 9.0},
    "longrope, own attention factor": {**LONGROPE, "attention_factor": 1.5},
    "llama3": LLAMA3_ROPE,
    "yarn, as Kimi K2's": {**YARN, "factor": 32.0, "beta_fast": 1.0, "beta_slow": 1.0},
}


def _rotary(config: dict) -> Any:
    """The rotary embedding of transformers' model of a config."""
    from transformers import AutoConfig, AutoModelForCausalLM

    parsed = AutoConfig.for_model(**copy.deepcopy({k: v for k, v in config.items() if k != "auto_map"}))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(parsed)
    return type(model.model.rotary_emb)(parsed)


FAMILIES = {base["model_type"]: base for base in (QWEN2, QWEN3, LLAMA, QWEN3_MOE, MIXTRAL)}
# transformers' Phi-3 has two kinds
OF_PHI3 = [("phi3", scaling) for scaling in SCALINGS if scaling.startswith(("default", "longrope"))]


@pytest.mark.parametrize(("family", "scaling"), [*((f, s) for f in FAMILIES for s in SCALINGS), *OF_PHI3])
def test_cosines_and_sines_are_those_of_transformers_models(family: str, scaling: str) -> None:
    """Bit for bit, for sequences on either side of the original length."""
    whole = {**PHI3, "partial_rotary_factor": 1.0}
    config = {**FAMILIES.get(family, whole), "head_dim": 8, "rope_scaling": SCALINGS[scaling]}
    spec = parse_model_spec(copy.deepcopy(config))
    frequencies, rotary = spec.rope.frequencies(8), _rotary(config)
    for length in (100, 128, 129, 500):
        positions = torch.arange(length)
        is_long = None if frequencies.switch is None else torch.full((length,), length > frequencies.switch)
        found = packed_rotation(frequencies, positions, is_long, torch.float32)
        for ours, theirs in zip(found, rotary(torch.zeros(1), positions[None]), strict=True):
            assert torch.equal(ours[:, 0, 0], theirs[0])


@pytest.mark.parametrize("head_dim", [8, 64, 80, 96, 128, 256])
def test_frequencies_of_the_plain_kinds_are_those_of_transformers(head_dim: int) -> None:
    """Bit for bit, for the bases and shares of published models: the formula stands in this project, too."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    for theta, share, factor in itertools.product(
        (1e4, 5e5, 1e6, 5e6, 8e6, 1e7, 150000.0, 10000), (1.0, 0.25, 0.5, 0.75, 0.334), (1.0, 2.0, 3.0, 4.5, 16)
    ):
        scaling = {"rope_type": "linear", "factor": factor}
        sizes = {"head_dim": head_dim, "hidden_size": head_dim, "num_attention_heads": 1}
        config = LlamaConfig(**sizes, rope_theta=theta, rope_scaling=scaling, partial_rotary_factor=share)
        theirs, _ = ROPE_INIT_FUNCTIONS["linear"](config, torch.device("cpu"))
        settings = (("factor", factor),)
        kinds = [
            Rope(float(theta), "linear", share, settings),
            *([Rope(float(theta), "default", share)] * (factor == 1)),
        ]
        for rope in kinds:
            assert torch.equal(rope.frequencies(head_dim).inv_freq[0], theirs), (rope, head_dim)


def test_the_scalings_differ() -> None:
    """So that the comparison above can tell one from another."""
    specs = [parse_model_spec({**QWEN3, "head_dim": 8, "rope_scaling": s}) for s in SCALINGS.values() if s]
    found = [spec.rope.frequencies(8) for spec in specs]
    same = [
        (i, j)
        for j in range(len(found))
        for i in range(j)
        if torch.equal(found[i].inv_freq, found[j].inv_freq) and found[i].scale == found[j].scale
    ]
    assert same == [(1, 4)]  # without its partner, mscale has no effect


def test_low_frequencies_are_divided_and_high_ones_kept() -> None:
    plain = 10000.0 ** -(torch.arange(0, 64, 2) / 64)
    for scaling, factor in ((LLAMA3_ROPE, 8), (YARN, 4)):
        rope = parse_model_spec({**LLAMA, "head_dim": 64, "rope_scaling": scaling}).rope
        ratio = plain / rope.frequencies(64).inv_freq[0]
        assert ratio[0] == pytest.approx(1) and ratio[-1] == pytest.approx(factor)
        assert bool(((ratio > 1.01) & (ratio < factor - 0.1)).any())


@pytest.mark.parametrize("extra", [{}, {"attention_factor": 1.25}, {"factor": 9.0}])
def test_longrope_of_a_part_of_the_channels(extra: dict) -> None:
    config = {**PHI3, "rope_scaling": {**PHI3["rope_scaling"], **extra}}
    frequencies, rotary = parse_model_spec(config).rope.frequencies(8), _rotary(config)
    assert frequencies.switch == 128 and frequencies.scale > 1 and frequencies.scale == rotary.attention_scaling
    for regime, length in enumerate((128, 129)):
        rotary(torch.zeros(1), torch.arange(length)[None])
        assert torch.equal(frequencies.inv_freq[regime], rotary.inv_freq)


def test_without_dynamic_scaling_a_model_is_the_same_up_to_its_positions() -> None:
    """What the refusal of "dynamic" says: transformers' angles are plain ones, and other ones from there on."""
    plain, dynamic = (_rotary({**QWEN3, "rope_scaling": s}) for s in (None, {"type": "dynamic", "factor": 2.0}))
    for length in (100, 512):
        for ours, theirs in zip(
            *(r(torch.zeros(1), torch.arange(length)[None]) for r in (plain, dynamic)), strict=True
        ):
            assert torch.equal(ours, theirs)
    longer = [r(torch.zeros(1), torch.arange(513)[None])[0] for r in (plain, dynamic)]
    assert not torch.allclose(longer[0][0, :512], longer[1][0, :512], atol=1e-3)  # those before it, too


def test_both_spellings() -> None:
    assert parse_model_spec(NEW_LLAMA) == parse_model_spec(LLAMA)
    old = {k: v for k, v in PHI3.items() if k not in ("rope_scaling", "partial_rotary_factor", "rope_theta")}
    new = {**old, "rope_parameters": {**PHI3["rope_scaling"], "rope_theta": 10000.0, "partial_rotary_factor": 0.75}}
    assert parse_model_spec(new) == parse_model_spec(PHI3)
    # the first Phi-3 configs' name for LongRoPE
    assert parse_model_spec({**PHI3, **_rope(PHI3, type="su")}).rope == parse_model_spec(PHI3).rope


def test_llama_2_has_no_base_and_no_groups_in_its_config() -> None:
    spec = parse_model_spec({**LLAMA, "rope_theta": None, "rope_scaling": None, "num_key_value_heads": None})
    assert (spec.rope.theta, spec.rope.kind, spec.num_kv_heads) == (10000.0, "default", 6)


def _rope(base: dict, **changes: object) -> dict:
    return {"rope_scaling": {**base["rope_scaling"], **changes}}


@pytest.mark.parametrize(
    ("base", "change", "message"),
    [
        (LLAMA, {"mlp_bias": True}, "mlp_bias=True"),
        (QWEN3, {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "changes nothing up to max_position_embeddings"),
        (QWEN3, {"rope_parameters": {"rope_type": "proportional", "rope_theta": 1e4}}, "vLLM computes in another way"),
        (QWEN3, {"rope_scaling": {"type": "ntk", "factor": 2.0}}, "RoPE type 'ntk'; expected 'default' or 'linear'"),
        (LLAMA, _rope(LLAMA, rope_type="yarn"), "'high_freq_factor', 'low_freq_factor', which transformers would"),
        (QWEN3, {"rope_scaling": {**YARN, "attn_factor": 1.2}}, "have 'attn_factor', which transformers would ignore"),
        (QWEN3, {"rope_scaling": {**YARN, "factor": None}}, "no 'factor'"),
        (QWEN3, {"rope_scaling": {**YARN, "factor": "4"}}, "factor='4'; expected a positive number"),
        (QWEN3, {"rope_scaling": {"type": "yarn", "factor": 4.0}}, "no 'original_max_position_embeddings'"),
        (QWEN3, {"rope_scaling": {**YARN, "truncate": "no"}}, "truncate='no'; expected true or false"),
        (QWEN3, {"rope_scaling": {**YARN, "beta_fast": 0.5}}, "beta_fast=0.5 is below beta_slow=1.0"),
        (QWEN3, {"rope_scaling": YARN, "original_max_position_embeddings": 64}, "=64 at top level and 128 in"),
        (QWEN3, {"rope_scaling": {**YARN, "partial_rotary_factor": 0.5}}, "partial rotary"),
        (QWEN3, {"rope_parameters": {"full_attention": YARN}}, "'full_attention', which transformers would ignore"),
        (QWEN3, {"rope_scaling": {**LONGROPE, "long_factor": 2.0}}, "long_factor=2.0; expected a list"),
        (QWEN2, {"rope_scaling": {**YARN, "rope_type": ["yarn"]}}, "RoPE type ['yarn']; expected 'default' or"),
        (LLAMA, _rope(LLAMA, factor=None), "'factor'"),
        (LLAMA, _rope(LLAMA, low_freq_factor=4.0), "is not above"),
        (LLAMA, _rope(LLAMA, original_max_position_embeddings=None), "'original_max_position_embeddings'"),
        (LLAMA, {"rope_parameters": {**LLAMA3_ROPE, "factor": 2.0}}, "contradict"),
        (LLAMA, {"partial_rotary_factor": 0.5}, "partial rotary"),
        (PHI3, {"sliding_window": 511}, "sliding_window=511"),
        (PHI3, {"sliding_window": "all"}, "sliding_window='all'"),
        (PHI3, {"attention_bias": True}, "attention_bias=True"),
        (PHI3, {"original_max_position_embeddings": None}, "at top level"),
        (PHI3, {"partial_rotary_factor": 1.5}, "partial_rotary_factor=1.5"),
        (PHI3, {"partial_rotary_factor": 0.4}, "partial_rotary_factor=0.4"),
        (PHI3, _rope(PHI3, short_factor=[1.0]), "short_factor has 1 numbers, expected 3"),
        (PHI3, _rope(PHI3, long_factor=[1.0, 0.0, 1.0]), "long_factor=0.0"),
        (PHI3, _rope(PHI3, long_mscale=1.2), "long_mscale"),
        (PHI3, _rope(PHI3, type="yarn"), "RoPE type 'yarn'; expected 'default' or 'longrope', the types supported"),
    ],
)
def test_refusals_name_what_is_wrong(base: dict, change: dict, message: str) -> None:
    with pytest.raises(ValueError) as error:
        parse_model_spec({**base, **change}, "dir/config.json")
    assert message in str(error.value)
    assert "dir/config.json" in str(error.value)


def test_a_window_over_all_positions_is_full_attention() -> None:
    assert parse_model_spec({**PHI3, "sliding_window": 512})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("channels", "scale"), [(16, 1.0), (12, 1.19)], ids=["plain", "partial, scaled"])
def test_states_are_rotated_as_by_megatrons_attention(dtype: torch.dtype, channels: int, scale: float) -> None:
    """Bit for bit, as it computes cosines and sines itself; packed tokens as those of a decoding batch."""
    draw = torch.Generator().manual_seed(0)
    positions = torch.randint(0, 4000, (3, 5), generator=draw)  # [B, s]
    frequencies = Frequencies(Rope(1e4).frequencies(channels).inv_freq, scale)
    half = positions.t()[..., None] * frequencies.inv_freq[0]
    angles = torch.cat([half, half], dim=-1)[:, :, None]
    states = torch.randn(5, 3, 4, 16, generator=draw).to(dtype)
    expected = _apply_rotary_pos_emb_bshd(states, angles, mscale=scale)
    assert torch.equal(rotate(states, decoding_rotation(frequencies, positions, None, dtype)), expected)
    packed = packed_rotation(frequencies, positions.t().flatten(), None, dtype)
    flat = states.reshape(15, 1, 4, 16)
    assert torch.equal(rotate(flat, packed).view_as(expected), expected)
    assert not torch.equal(expected, states)
