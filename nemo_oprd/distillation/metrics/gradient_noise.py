"""The signal and the noise of a batch's gradient, estimated from the gradients of the two halves of the batch.

Let the halves have n1 and n2 responses and the gradients a and b, each a mean over the gradients of independent
responses with mean mu and covariance S. (All responses to one prompt are in the same half. With several responses per
prompt, S is the covariance of a response within its group.) Then

    E[a . b] = |mu|^2        E|a - b|^2 = tr(S) (1/n1 + 1/n2)

so a . b estimates the signal |mu|^2, and |a - b|^2 n1 n2 / (n1 + n2)^2 estimates tr(S) / (n1 + n2), the noise of the
whole batch's gradient. Both estimates are unbiased. Their ratio in a single step is rough and may be negative; divide
their means over steps instead.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared

from nemo_oprd.batch.types import Rollout
from nemo_oprd.config.schema import LoggingConfig
from nemo_oprd.distillation.distiller import Distiller
from nemo_oprd.distillation.step import StepResult
from nemo_oprd.distillation.student import Student
from nemo_oprd.megatron.parallel import device


def is_noise_due(logging: LoggingConfig, step: int) -> bool:
    """Returns whether the noise is measured before the update after `step` others."""
    every = logging.gradient_noise_every
    return every > 0 and (step == 0 or (step + 1) % every == 0)


def measure_gradient_noise(
    distiller: Distiller, rollouts: list[Rollout], step: int, accumulate: Callable[..., StepResult]
) -> dict[str, float]:
    """Measures signal and noise of the gradient of the update after `step` others, by a pass over each half.

    Args:
        accumulate: `train.accumulate_gradients`.

    Returns:
        Metrics by name; empty if fewer than two prompts have supervised tokens, and on ranks outside the student.
    """
    objective = distiller.objective_of(step, watch=False)
    rows = distiller.plan(rollouts, objective).hidden.table
    prompts: dict[bytes, list[Rollout]] = {}
    for i in np.unique(rows.response).tolist():
        prompts.setdefault(rollouts[i].prompt_ids.tobytes(), []).append(rollouts[i])
    # responses to one prompt are not independent
    groups = list(prompts.values())
    halves = [[rollout for group in groups[number::2] for rollout in group] for number in (0, 1)]
    if not halves[1]:
        return {}
    gradients, student = [], distiller.student
    for half in halves:
        accumulate(distiller, distiller.batch(half, objective), whole_gradients=True)
        gradients.append(whole_gradient(student))
    if not student.role.is_member:
        return {}
    sums = torch.zeros(2, dtype=torch.float64, device=device())
    for a, b in zip(*gradients, strict=True):
        sums[0] += torch.dot(a.flatten(), b.flatten()).double()
        sums[1] += (a - b).square().sum(dtype=torch.float64)
    dist.all_reduce(sums, group=student.role.member_groups.intra_dist_opt)
    signal, difference = sums.tolist()
    first, second = map(len, halves)
    noise = difference * first * second / (first + second) ** 2
    return {
        "actor/gradient_signal": signal,
        "actor/gradient_noise": noise,
        **({"actor/gradient_snr": signal / noise} if noise else {}),
    }


def whole_gradient(student: Student) -> list[torch.Tensor]:
    """This rank's part of the gradient, as float32 copies; every gradient value is on exactly one rank of the role.

    Needs gradients that were accumulated with `whole_gradients`.
    """
    coords = student.role.coords
    if coords is None:
        return []
    groups = student.role.member_groups

    def counts(parameter: torch.nn.Parameter) -> bool:
        """Returns whether this rank is the first one with this gradient."""
        if not getattr(parameter, "allreduce", True):  # an expert's, whose copies are on other ranks than those below
            return groups.expt_dp.rank() == 0
        copy = coords.data or coords.context
        return not copy and param_is_not_tensor_parallel_duplicate(parameter, groups.tp)

    return [
        p.main_grad.detach().clone()  # type: ignore[attr-defined]
        for chunk in student.chunks
        for p in chunk.parameters()
        if p.requires_grad and param_is_not_shared(p) and counts(p)
    ]
