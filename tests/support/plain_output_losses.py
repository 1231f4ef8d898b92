"""The output losses one row at a time, differentiated by autograd, and the losses and inputs that tests compare on."""

from __future__ import annotations

import math
from typing import Any

import torch

from nemo_oprd.losses.output_loss import OutputLoss
from nemo_oprd.losses.vocab_parallel import VocabShard

ROWS, REAL, PADDED = 9, 61, 64
SHARD = VocabShard(0, PADDED, REAL)
TOP_K = [
    OutputLoss("top_k", k, temperature, support, normalizer, weight)
    for k, temperature in ((2, 1.0), (4, 0.7), (60, 1.0), (61, 1.0), (500, 1.3))
    for support in ("student", "teacher", "union", "intersection")
    for normalizer in ("renormalized", "full")
    for weight in ("student", "teacher")
]
DENSE = [
    OutputLoss(kind, k, temperature, jsd_beta=beta)
    for kind, beta in (
        ("sampled_token", 0.5),
        ("full_vocab", 0.5),
        ("forward_kl", 0.5),
        ("jsd", 0.5),
        ("jsd", 0.1),
        ("jsd", 0.9),
    )
    for k, temperature in ((None, 1.0), (4, 0.6), (3, 2.0))
]
SINGLE = [OutputLoss("top_k", 1, normalizer="full"), OutputLoss("top_k", 1, support="union")]


def name(loss: OutputLoss) -> str:
    return "-".join(str(v) for v in vars(loss).values() if v is not None)


def logits(seed: int, rows: int = ROWS, size: int = REAL, spread: float = 2.0) -> torch.Tensor:
    return spread * torch.randn(rows, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


TOKENS = torch.randint(0, REAL, (ROWS,), generator=torch.Generator().manual_seed(3))


def padded(z: torch.Tensor) -> torch.Tensor:
    """With padding columns whose contents would be noticed."""
    junk = torch.tensor([math.inf, -math.inf, math.nan], dtype=z.dtype).expand(len(z), PADDED - REAL)
    return torch.cat([z, junk], dim=1)


def largest(z_V: torch.Tensor, k: int) -> list[int]:
    return sorted(range(len(z_V)), key=lambda v: (-float(z_V[v]), v))[:k]


def plain_support(loss: OutputLoss, z: torch.Tensor, w: torch.Tensor) -> list[int]:
    assert loss.k is not None
    ours, theirs = set(largest(z, loss.k)), set(largest(w, loss.k))
    return sorted(
        {"student": ours, "teacher": theirs, "union": ours | theirs, "intersection": ours & theirs}[loss.support]
    )


def plain_row(loss: OutputLoss, z: torch.Tensor, w: torch.Tensor, y: int, old: float | None) -> tuple[Any, Any]:
    """One row: (value, a scalar whose derivative is the gradient)."""
    p, q = torch.softmax(z / loss.temperature, 0), torch.softmax(w / loss.temperature, 0)
    if loss.kind == "sampled_token":
        advantage = (q[y].log() - p[y].log()).detach()
        if old is None:
            return -advantage, -advantage * p[y].log()
        ratio = p[y] / math.exp(old)
        low, high = loss.clip if isinstance(loss.clip, tuple) else (loss.clip, loss.clip)
        bounded = ratio if low is None or high is None else ratio.clamp(1 - low, 1 + high)
        value = -torch.minimum(ratio * advantage, bounded * advantage)
        return value, value
    if loss.kind == "full_vocab":
        value = (p * (p.log() - q.log())).sum()
    elif loss.kind == "forward_kl":
        value = (q * (q.log() - p.log())).sum()
    elif loss.kind == "jsd":
        m = loss.jsd_beta * q + (1 - loss.jsd_beta) * p
        value = loss.jsd_beta * (q * (q / m).log()).sum() + (1 - loss.jsd_beta) * (p * (p / m).log()).sum()
    else:
        s = plain_support(loss, z.detach(), w)
        p, q = p[s], q[s]
        if loss.normalizer == "renormalized":
            p, q = p / p.sum(), q / q.sum()
        value = (p * (p / q).log()).sum() if loss.support_weight == "student" else (q * (q / p).log()).sum()
    return value, value


def plain(
    loss: OutputLoss, z: torch.Tensor, w: torch.Tensor, old: torch.Tensor | None = None, tokens: torch.Tensor = TOKENS
) -> tuple[torch.Tensor, torch.Tensor]:
    """Values [c] and gradients [c, V]."""
    values, gradients = [], []
    for row in range(len(z)):
        leaf = z[row].clone().requires_grad_()
        value, surrogate = plain_row(loss, leaf, w[row], int(tokens[row]), None if old is None else float(old[row]))
        values.append(value.detach())
        gradients.append(torch.autograd.grad(surrogate + 0 * leaf.sum(), leaf)[0])
    return torch.stack(values), torch.stack(gradients)
