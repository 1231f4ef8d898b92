"""What becomes of the fields of Megatron-Bridge's provider; test_megatron_bridge_families.py has all of them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from nemo_oprd.megatron.megatron_bridge.provider_fields import (
    KERNELS,
    LAYERS,
    MODEL,
    OFF,
    PLAIN,
    REFUSED,
    ROPE,
    UNUSED,
    changed,
    is_ours,
    kind_of,
)


@dataclass
class Provider:
    """A provider of few fields, one of which is in no table."""

    num_layers: int = 2
    glu_linear_offset: float = 0.0
    rotary_interleaved: bool = False
    softmax_type: str = "vanilla"
    fp8: str | None = None
    moe_aux_loss_coeff: float = 0.0
    activation_func_clamp_value: float | None = None
    of_a_later_version: list[int] = field(default_factory=list)


def test_each_field_is_in_one_table() -> None:
    refused = [name for names in REFUSED.values() for name in names]
    counts = Counter([*MODEL, *ROPE, *LAYERS, *refused, *PLAIN, *OFF, *KERNELS, *UNUSED])
    # the number of experts is read, to be refused
    assert {name for name, count in counts.items() if count > 1} == {"num_moe_experts"}


def test_what_must_be_the_models_own() -> None:
    """Prefixes such as mtp_ do not take over a field that makes another model."""
    assert not any(is_ours(name) for name in (*MODEL, *ROPE, *LAYERS, *PLAIN, "mtp_num_layers", "num_moe_experts"))
    assert is_ours("fp8") and is_ours("mtp_loss_scaling_factor") and is_ours("seq_length")
    assert (kind_of("mtp_num_layers"), kind_of("mtp_use_repeated_layer")) == ("refused", "unused")
    assert kind_of("of_a_later_version") is None


def test_arithmetic_that_no_family_has() -> None:
    """Fields in no table must have their defaults, too; None and False both switch off."""
    assert changed(Provider(), Provider) == {}
    assert changed(Provider(num_layers=3, fp8="e4m3", moe_aux_loss_coeff=0.1), Provider) == {}
    assert changed(Provider(activation_func_clamp_value=False), Provider) == {}  # type: ignore[arg-type]
    given = Provider(glu_linear_offset=1.0, softmax_type="learnable", of_a_later_version=[1])
    assert changed(given, Provider) == {
        "glu_linear_offset": 1.0,
        "softmax_type": "learnable",
        "of_a_later_version": [1],
    }
