"""Megatron's optimizer as this project makes it."""

from __future__ import annotations

import torch
from megatron.core import utils

from nemo_oprd.megatron import cpu_patches
from nemo_oprd.megatron.optimizer import norm_of_all


def test_the_norm_that_never_waits_is_megatrons_own() -> None:
    cpu_patches.install()
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(size, generator=generator) for size in (1, 7, 1000, 33333)]
    ours, _ = norm_of_all(0, None, [tensors], False)
    megatrons, _ = utils.local_multi_tensor_l2_norm(0, None, [tensors], False)
    assert ours.shape == megatrons.shape == (1,)
    assert torch.equal(ours, megatrons)
