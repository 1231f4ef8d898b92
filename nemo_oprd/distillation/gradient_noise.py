"""How much of a batch's gradient is signal: from the gradients of its two halves.

For halves of n1 and n2 responses with gradients a and b, means over independent responses of mean mu and covariance S
(responses to one prompt are in one half; with several to each, S is that of a response within its group):

    E[a . b] = |mu|^2        E|a - b|^2 = tr(S) (1/n1 + 1/n2)

so a . b estimates the signal, |a - b|^2 n1 n2 / (n1 + n2)^2 the noise tr(S) / (n1 + n2) of the whole batch's gradient.
Either is unbiased; their ratio in one step is rough and may be negative. Divide means over steps instead.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared

from nemo_oprd.distillation.student import Student
from nemo_oprd.megatron.parallel import device


def whole_gradient(student: Student) -> list[torch.Tensor]:
    """This rank's part of the gradient, float32 copies; every number is on one rank of the role only.

    Needs `whole_gradients`: complete ones on every rank.
    """
    at, group = student.role.coords, student.role.groups.tp if student.role.is_member else None  # type: ignore[attr-defined]
    if at is None or at.data or at.context:  # those have copies
        return []
    return [
        p.main_grad.detach().clone()  # type: ignore[attr-defined]
        for chunk in student.chunks
        for p in chunk.parameters()
        if p.requires_grad and param_is_not_shared(p) and param_is_not_tensor_parallel_duplicate(p, group)
    ]


def gradient_noise(
    student: Student, first: list[torch.Tensor], second: list[torch.Tensor], sizes: tuple[int, int]
) -> dict[str, float]:
    """Signal, noise and their ratio; every rank of the role calls this, and gets the same.

    Args:
        first, second: `whole_gradient` of either half.
        sizes: responses in them.
    """
    sums = torch.zeros(2, dtype=torch.float64, device=device())
    for a, b in zip(first, second, strict=True):
        sums[0] += torch.dot(a.flatten(), b.flatten()).double()
        sums[1] += (a - b).square().sum(dtype=torch.float64)
    dist.all_reduce(sums, group=student.role.groups.intra_dist_opt)  # type: ignore[attr-defined]
    signal, difference = sums.tolist()
    noise = difference * sizes[0] * sizes[1] / sum(sizes) ** 2
    return {
        "actor/gradient_signal": signal,
        "actor/gradient_noise": noise,
        **({"actor/gradient_snr": signal / noise} if noise else {}),
    }
