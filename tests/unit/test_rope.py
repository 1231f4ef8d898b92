"""Scaled RoPE and the families that have it: frequencies are transformers', what isn't supported is refused."""

from __future__ import annotations

import copy

import pytest
import torch
from family_configs import LLAMA, LLAMA3_ROPE, PHI3
from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd

from nemo_oprd.megatron.rotary import decoding_rotation, packed_rotation, rotate
from nemo_oprd.models import parse_model_spec
from nemo_oprd.models.rope import Rope

NEW_LLAMA = {k: v for k, v in LLAMA.items() if k not in ("rope_theta", "rope_scaling")}
NEW_LLAMA["rope_parameters"] = {**LLAMA3_ROPE, "rope_theta": 10000.0}


def _transformers(config: dict, length: int) -> tuple[torch.Tensor, float]:
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parsed = AutoConfig.for_model(**copy.deepcopy({k: v for k, v in config.items() if k != "auto_map"}))
    return ROPE_INIT_FUNCTIONS[parsed.rope_parameters["rope_type"]](parsed, torch.device("cpu"), seq_len=length)


def test_llama3_frequencies() -> None:
    rope = parse_model_spec({**LLAMA, "head_dim": 64}).rope
    expected, scale = _transformers({**LLAMA, "head_dim": 64}, 1)
    torch.testing.assert_close(rope.inv_freq(64), expected[None], rtol=1e-6, atol=0)
    plain = 10000.0 ** -(torch.arange(0, 64, 2) / 64)
    ratio = plain / rope.inv_freq(64)[0]
    # all three cases occur: kept, in between, divided
    assert ratio[0] == 1 and ratio[-1] == pytest.approx(8) and bool(((ratio > 1.01) & (ratio < 7.9)).any())
    assert (rope.scale, rope.switch, scale) == (1.0, None, 1.0)


@pytest.mark.parametrize("extra", [{}, {"attention_factor": 1.25}, {"factor": 9.0}])
def test_longrope_frequencies(extra: dict) -> None:
    config = {**PHI3, "rope_scaling": {**PHI3["rope_scaling"], **extra}}
    rope = parse_model_spec(config).rope
    assert rope.switch == 128
    for regime, length in enumerate((128, 129)):
        expected, scale = _transformers(config, length)
        torch.testing.assert_close(rope.inv_freq(8)[regime], expected, rtol=1e-6, atol=0)
        assert rope.scale == pytest.approx(scale)
    assert rope.scale > 1


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
        (LLAMA, _rope(LLAMA, rope_type="yarn"), "'yarn'"),
        (LLAMA, _rope(LLAMA, rope_type="longrope"), "'longrope'"),
        (LLAMA, _rope(LLAMA, factor=None), "'factor'"),
        (LLAMA, _rope(LLAMA, low_freq_factor=4.0), "is not above"),
        (LLAMA, _rope(LLAMA, original_max_position_embeddings=None), "'original_max_position_embeddings'"),
        (LLAMA, {"rope_parameters": {**LLAMA3_ROPE, "factor": 2.0}}, "contradict"),
        (LLAMA, {"partial_rotary_factor": 0.5}, "partial rotary"),
        (LLAMA, {"auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"}}, "auto_map"),
        (PHI3, {"auto_map": {"AutoModel": "modeling_mine.Model"}}, "auto_map"),
        (PHI3, {"sliding_window": 511}, "sliding_window=511"),
        (PHI3, {"sliding_window": "all"}, "sliding_window='all'"),
        (PHI3, {"attention_bias": True}, "attention_bias=True"),
        (PHI3, {"original_max_position_embeddings": None}, "at top level"),
        (PHI3, {"partial_rotary_factor": 1.5}, "partial_rotary_factor=1.5"),
        (PHI3, {"partial_rotary_factor": 0.4}, "partial_rotary_factor=0.4"),
        (PHI3, _rope(PHI3, short_factor=[1.0]), "short_factor has 1 numbers, expected 3"),
        (PHI3, _rope(PHI3, long_factor=[1.0, 0.0, 1.0]), "long_factor=0.0"),
        (PHI3, _rope(PHI3, long_mscale=1.2), "long_mscale"),
        (PHI3, _rope(PHI3, type="yarn"), "'yarn'"),
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
@pytest.mark.parametrize("rope", [Rope(1e4), Rope(1e4, share=0.75, scale=1.19)], ids=["plain", "partial, scaled"])
def test_states_are_rotated_as_by_megatrons_attention(dtype: torch.dtype, rope: Rope) -> None:
    """Bit for bit, as it computes cosines and sines itself; packed tokens as those of a decoding batch."""
    draw = torch.Generator().manual_seed(0)
    positions = torch.randint(0, 4000, (3, 5), generator=draw)  # [B, s]
    inv_freq = rope.inv_freq(16)
    half = positions.t()[..., None] * inv_freq[0]
    angles = torch.cat([half, half], dim=-1)[:, :, None]
    states = torch.randn(5, 3, 4, 16, generator=draw).to(dtype)
    expected = _apply_rotary_pos_emb_bshd(states, angles, mscale=rope.scale)
    assert torch.equal(rotate(states, decoding_rotation(rope, inv_freq, positions, None, dtype)), expected)
    packed = packed_rotation(rope, inv_freq, positions.t().flatten(), None, dtype)
    flat = states.reshape(15, 1, 4, 16)
    assert torch.equal(rotate(flat, packed).view_as(expected), expected)
    assert not torch.equal(expected, states)
