"""A norm of all heads over tensor ranks, for test_norm_of_all_heads.py."""

from __future__ import annotations

import torch
import torch.distributed as dist


def norm_of_all_heads(heads: int, channels: int) -> list[tuple[list[float], ...]]:
    """(Outputs of its heads, gradients of its states, of the whole weight) of each rank for `seeded`, flat.

    With fewer heads than ranks, neighbours have the same head; the gradients of the weight are summed over ranks.
    """
    from nemo_oprd.megatron.attention import NormOfAllHeads
    from nemo_oprd.megatron.parallel import everyones, init_distributed

    init_distributed()
    group, ranks = dist.group.WORLD, dist.get_world_size()
    norm = NormOfAllHeads(heads, torch.nn.LayerNorm(1), 1e-5, channels, group)
    states, weight, gradient = (tensor.float() for tensor in seeded(heads, channels))
    count = max(1, heads // ranks)
    first = dist.get_rank() // max(1, ranks // heads) * count
    norm.weight.data.copy_(weight)
    own = states[:, :, first : first + count].clone().requires_grad_()
    output = norm(own)
    # ranks that share a head have a part each of its gradient
    (output * gradient[:, :, first : first + count] / norm.copies).sum().backward()
    assert norm.weight.grad is not None and own.grad is not None
    dist.all_reduce(norm.weight.grad, group=group)
    return everyones((output.flatten().tolist(), own.grad.flatten().tolist(), norm.weight.grad.tolist()))


def seeded(heads: int, channels: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """float64: states [3, 2, heads, channels], a weight [heads * channels], the gradient of the output."""
    generator = torch.Generator().manual_seed(heads)
    shape = (3, 2, heads, channels)
    draws = [torch.randn(each, generator=generator, dtype=torch.float64) for each in (shape, shape[2:], shape)]
    return draws[0], draws[1].flatten() + 1, draws[2]
