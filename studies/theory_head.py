"""Directions that the LM head hides: each objective's response to hidden-state perturbations of equal norm.

A teacher's state h and a student's state h + d go through the same head W [V, D]. To second order

    KL(p || q) = 1/2 d^T W^T (diag(q) - q q^T) W d,

so a direction is invisible to every distribution-based loss exactly if W d is a constant vector; otherwise its effect
depends on the head's singular value *and* on the probabilities. Hidden-state MSE is |d|^2 / D for every direction.
Intermediate layers are not considered.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

TOP_K = 4
# of the state's own norm
RELATIVE_SIZE = 0.1
SMALL_SIZE = 0.001
RANK_TOLERANCE = 1e-10

Logits = Callable[[torch.Tensor], torch.Tensor]


def singular_directions(head_VD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Singular values [D] (zeros where V < D), right-singular vectors as rows [D, D], and |cos(u_i, 1)| [min(V, D)]."""
    left, values, right = torch.linalg.svd(head_VD, full_matrices=True)
    padded = torch.zeros(head_VD.shape[1], dtype=head_VD.dtype)
    padded[: len(values)] = values
    return padded, right, left[:, : len(values)].sum(0).abs() / len(head_VD) ** 0.5


def invisible_basis(head_VD: torch.Tensor) -> torch.Tensor:
    """Orthonormal rows [n, D] that span the directions whose logits change by a constant: the paper's N_W."""
    values, right, _ = singular_directions(head_VD - head_VD.mean(0))
    return right[values <= RANK_TOLERANCE * values[0]]


def constant_logit_direction(head_VD: torch.Tensor) -> tuple[torch.Tensor, float]:
    """The unit direction [D] whose logits are closest to a constant, and their relative distance from a constant."""
    ones = torch.ones(len(head_VD), dtype=head_VD.dtype)
    direction = torch.linalg.pinv(head_VD, rtol=RANK_TOLERANCE) @ ones
    missed = float((head_VD @ direction - ones).norm() / ones.norm())
    return direction / direction.norm(), missed


def with_common_row(head_VD: torch.Tensor, row_D: torch.Tensor) -> torch.Tensor:
    """The head with `row_D` as the mean of its rows: all logits of a state change equally, so no probability does."""
    return head_VD - head_VD.mean(0) + row_D


def seen(states_ND: torch.Tensor, moves_ND: torch.Tensor, logits: Logits) -> dict[str, float]:
    """The objectives' values if the teacher's states are `states_ND` and the student's are `states_ND` +- `moves_ND`.

    Returns:
        Means over states and both signs: `full_vocab` = KL(p || q), `top_k` = KL on the student's k most probable
        tokens, renormalised; `sampled_rms` and `sampled_negative` = root mean square of the sampled token's
        log p - log q and the probability that it is negative; `second_order` = KL by the formula at the top of this
        file. `bound` is the largest KL / (1/4 |centred change of logits|^2), which is at most 1.
    """
    z_q = logits(states_ND)
    log_q = z_q.log_softmax(-1)
    rows: dict[str, list[torch.Tensor]] = {
        name: [] for name in ("full_vocab", "top_k", "square", "negative", "bound", "second")
    }
    for sign in (1, -1):
        z_p = logits(states_ND + sign * moves_ND)
        log_p = z_p.log_softmax(-1)
        p, u = log_p.exp(), log_p - log_q
        kl = _kl(log_p, log_q)
        change = z_p - z_q
        change = change - change.mean(-1, keepdim=True)
        rows["full_vocab"].append(kl)
        rows["top_k"].append(_top_k(log_p, log_q))
        rows["square"].append((p * u.square()).sum(-1))
        rows["negative"].append((p * (u < 0)).sum(-1))
        rows["bound"].append(kl / (0.25 * change.square().sum(-1)).clamp_min(1e-300))
        q = log_q.exp()
        rows["second"].append(0.5 * ((q * change.square()).sum(-1) - (q * change).sum(-1).square()))
    means = {name: float(torch.cat(values).mean()) for name, values in rows.items()}
    return {
        "full_vocab": means["full_vocab"],
        "top_k": means["top_k"],
        "sampled_rms": means["square"] ** 0.5,
        "sampled_negative": means["negative"],
        "second_order": means["second"],
        "bound": float(torch.cat(rows["bound"]).max()),
    }


def _top_k(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """[N]: KL between the distributions renormalised on the student's `TOP_K` tokens."""
    support = log_p.topk(min(TOP_K, log_p.shape[-1])).indices
    a, b = (x.gather(-1, support).log_softmax(-1) for x in (log_p, log_q))
    return _kl(a, b)


def _kl(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """[N]: sum of p (u + e^-u - 1), u = log p - log q; all terms are positive, so rounding cannot hide a small KL."""
    u = log_p - log_q
    return (log_p.exp() * (u + torch.expm1(-u))).sum(-1)


def along(states_ND: torch.Tensor, direction_D: torch.Tensor, size: float = RELATIVE_SIZE) -> torch.Tensor:
    """Moves [N, D] along a unit direction, `size` times each state's norm."""
    return size * states_ND.norm(dim=-1, keepdim=True) * direction_D


def after_norm(head_VD: torch.Tensor, states_ND: torch.Tensor, seed: int = 0) -> dict[str, Any]:
    """Perturbs the states after the final norm along each singular direction and along special directions.

    Returns:
        `spectrum`: per singular direction `sigma`, `full_vocab` and `constant` (|cos| of its logits with the constant
        vector); `directions`: name -> results of `seen`, `sigma`, and the `mse` of hidden states;
        `invisible_dimensions`; `exponents`: d log loss / d log |d| of the sampled token (rms) and of the KL.
    """
    values, right, constant = singular_directions(head_VD)
    rank = int((values > RANK_TOLERANCE * values[0]).sum())

    def logits(h: torch.Tensor) -> torch.Tensor:
        return h @ head_VD.T

    special = {"largest": right[0], "smallest": right[rank - 1]}
    if rank < head_VD.shape[1]:
        special["null"] = right[-1]
    flat, missed = constant_logit_direction(head_VD)
    if missed < 1e-6:
        special["constant"] = flat
    generator = torch.Generator().manual_seed(seed)
    random = torch.randn(head_VD.shape[1], generator=generator, dtype=head_VD.dtype)
    special["random"] = random / random.norm()
    directions = {
        name: {"sigma": float((head_VD @ d).norm()), "mse": _mse(along(states_ND, d))}
        | seen(states_ND, along(states_ND, d), logits)
        for name, d in special.items()
    }
    small = seen(states_ND, along(states_ND, right[0], SMALL_SIZE), logits)
    middle = seen(states_ND, along(states_ND, right[0], 10 * SMALL_SIZE), logits)
    return {
        "shape": list(head_VD.shape),
        "rank": rank,
        "invisible_dimensions": len(invisible_basis(head_VD)),
        "directions": directions,
        "exponents": {
            name: float(torch.tensor(middle[name] / small[name]).log10()) for name in ("sampled_rms", "full_vocab")
        },
        "spectrum": [
            {
                "sigma": float(values[i]),
                "constant": float(constant[i]),
                "full_vocab": seen(states_ND, along(states_ND, right[i]), logits)["full_vocab"],
            }
            for i in range(rank)
        ],
    }


def constructed(head_VD: torch.Tensor, states_ND: torch.Tensor) -> dict[str, float]:
    """A head with the same probabilities whose *largest* singular value belongs to the least visible direction.

    The common row points along the last singular direction of the centred head, and is long enough to become the first.
    """
    before, _, _ = singular_directions(head_VD)
    _, right, _ = singular_directions(head_VD - head_VD.mean(0))
    head = with_common_row(head_VD, 10 * float(before[0]) / len(head_VD) ** 0.5 * right[-1])
    values, new_right, _ = singular_directions(head)
    rank = int((values > RANK_TOLERANCE * values[0]).sum())
    old, new = ((states_ND @ matrix.T).softmax(-1) for matrix in (head_VD, head))
    moves = along(states_ND, new_right[0])
    return {
        "largest_change_of_a_probability": float((old - new).abs().max()),
        "gap_claimed": float(values[0] / values[rank - 1]) ** 2,
        "sigma": float(values[0]),
        "mse": _mse(moves),
        **seen(states_ND, moves, lambda h: h @ head.T),
    }


def before_norm(model: Any, states_ND: torch.Tensor) -> dict[str, dict[str, float]]:
    """The same as `after_norm` for states before the final norm, which divides by the magnitude of the state.

    The directions are those of `after_norm` divided by the norm's gain, and the direction of the state itself
    (`radial`). `mse_before` and `mse_after` are the losses of OPRD with `final_norm` false and true.
    """
    head, norm = model.lm_head.weight.detach(), model.model.norm
    values, right, _ = singular_directions(head)
    rank = int((values > RANK_TOLERANCE * values[0]).sum())
    gain = norm.weight.detach()
    special = {"largest": right[0] / gain, "smallest": right[rank - 1] / gain}
    if rank < head.shape[1]:
        special["null"] = right[-1] / gain
    moves = {name: along(states_ND, d / d.norm()) for name, d in special.items()}
    moves["radial"] = RELATIVE_SIZE * states_ND
    with torch.no_grad():
        return {
            name: {"mse_before": _mse(move), "mse_after": _mse(norm(states_ND + move) - norm(states_ND))}
            | seen(states_ND, move, lambda x: norm(x) @ head.T)
            for name, move in moves.items()
        }


def pair_at(student: Any, teacher: Any, student_ND: torch.Tensor, teacher_ND: torch.Tensor) -> dict[str, float]:
    """The actual difference of the two models at the same positions, from their states after the final norm.

    Returns:
        `invisible_share`: the share of ||h_S - h_T||^2 in the teacher head's invisible directions; `kl`: KL(p || q);
        `kl_with_teacher_states`: KL that remains if the student's head reads the teacher's states.
    """
    basis = invisible_basis(teacher.lm_head.weight.detach())
    difference = student_ND - teacher_ND
    share = float((difference @ basis.T).square().sum() / difference.square().sum())
    with torch.no_grad():
        log_q = teacher.lm_head(teacher_ND).log_softmax(-1)
        log_p, log_p_replaced = (student.lm_head(h).log_softmax(-1) for h in (student_ND, teacher_ND))
    kls = [float((x.exp() * (x - log_q)).sum(-1).mean()) for x in (log_p, log_p_replaced)]
    return {"invisible_share": share, "kl": kls[0], "kl_with_teacher_states": kls[1]}


def _mse(moves_ND: torch.Tensor) -> float:
    return float(moves_ND.square().mean())
