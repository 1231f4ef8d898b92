"""The losses by name. This table is known without importing torch; the functions are imported when a run needs them.

A name of a built-in loss stands for a function of this package. `MODULE:FUNCTION` names a function of the user's, which
is imported from Python's path or from the working directory. docs/losses.md describes such a function, and
how to add a built-in one.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from nemo_oprd.losses.import_path import import_function, is_import_path

if TYPE_CHECKING:
    import torch

    from nemo_oprd.losses.representation import RowLoss

# Sizes of the parts of a loss that are computed at a time, for the losses and for `plan`, which imports no torch.


# Rows converted to float32 at a time. This bounds the transient memory of a value and of its gradient, for width 4096
# to 8192 x 4096 x 4 B = 128 MiB each.
ROW_CHUNK = 8192
# Columns per step of an operation that would otherwise need one more [c, V] tensor; wide enough for an efficient GEMM.
SLAB = 16384


@dataclass(frozen=True)
class RowLossEntry:
    """A built-in distance between hidden states: its function's path, and the keys that `kind_args` may hold.

    `normalizes`: it compares the directions of states, each scaled to unit length.
    """

    path: str
    arguments: tuple[str, ...] = ()
    normalizes: bool = False


@dataclass(frozen=True)
class DivergenceEntry:
    """A built-in divergence between next-token distributions: its function's path, and the function's needs.

    `from_samples`: it estimates an expectation from the sampled tokens, so that the teacher's log-probabilities of
    these suffice, the tokens must be the student's, and their weights can be corrected and clipped; otherwise it needs
    the teacher's logits. `needs_support`: it needs the top sets of `OutputLoss.k` ids. `live_tensors`, for `plan`: the
    tensors [c, V] of a chunk that are alive at a time, the slabs of `SLAB` columns beside them, and an upper bound of
    the slabs' size in tensors [c, V], for a narrow vocabulary (`python -m benchmarks.live_bytes` counts the bytes).
    """

    path: str
    from_samples: bool = False
    needs_support: bool = False
    live_tensors: tuple[int, int, int] = (3, 1, 1)


ROW_LOSSES: dict[str, RowLossEntry] = {
    "mse": RowLossEntry("nemo_oprd.losses.representation:mse"),
    "normalized_mse": RowLossEntry("nemo_oprd.losses.representation:normalized_mse", normalizes=True),
    "cosine": RowLossEntry("nemo_oprd.losses.representation:cosine", normalizes=True),
}
DIVERGENCES: dict[str, DivergenceEntry] = {
    "sampled_token": DivergenceEntry(
        "nemo_oprd.losses.divergences:sampled_token", from_samples=True, live_tensors=(1, 2, 1)
    ),
    "top_k": DivergenceEntry("nemo_oprd.losses.divergences:top_k", needs_support=True),
    "full_vocab": DivergenceEntry("nemo_oprd.losses.divergences:full_vocab"),
    "forward_kl": DivergenceEntry("nemo_oprd.losses.divergences:forward_kl"),
    "jsd": DivergenceEntry("nemo_oprd.losses.divergences:jsd", live_tensors=(3, 3, 2)),
}


def normalizes_rows(kind: str) -> bool:
    """Returns whether a row loss scales both states to unit length; False for a user's own, whose form is unknown."""
    return kind in ROW_LOSSES and ROW_LOSSES[kind].normalizes


# rows of the trial: one would hide a result that has lost its row dimension
_TRIAL_ROWS = 3
# float32 products of one and of three rows may be rounded differently; a mean over the rows differs by far more
_TRIAL_TOLERANCE = 1e-4


def check_row_loss(kind: str, kind_args: Mapping[str, Any]) -> None:
    """Checks the names in `loss.representation` without importing the function.

    Raises:
        ValueError: `kind` is neither a built-in loss nor MODULE:FUNCTION, or a built-in one has no such argument.
    """
    if is_import_path(kind):
        return
    own = ", or MODULE:FUNCTION for a function of your own (docs/losses.md)"
    _check_name("loss.representation.kind", kind, ROW_LOSSES, own)
    arguments = ROW_LOSSES[kind].arguments
    unknown = sorted(set(kind_args) - set(arguments))
    if unknown:
        raise ValueError(
            f"loss.representation.kind_args.{unknown[0]}={kind_args[unknown[0]]!r} with loss.representation.kind="
            f"{kind}: expected {'one of ' + ', '.join(arguments) if arguments else 'no arguments'}; remove it"
        )


def check_divergence(kind: str) -> None:
    """Raises ValueError unless `loss.output.kind` is "none" or a built-in divergence."""
    _check_name("loss.output.kind", kind, ["none", *DIVERGENCES])


def resolve_row_loss(
    kind: str, kind_args: Mapping[str, Any], dim_reduction: str = "mean", width: int | None = None
) -> RowLoss:
    """Returns the function of `loss.representation.kind`, with `kind_args` filled in.

    Args:
        width: the D of the rows that the run compares. The function is tried once on random rows [3, D], so that a
            mistake ends the run before models are loaded; None leaves the trial out.

    Raises:
        ValueError: there is no such function, it cannot be called with `kind_args`, it changes the teacher's rows, or
            its result is not one differentiable value per row, which depends on that row alone.
    """
    check_row_loss(kind, kind_args)
    function = _import(ROW_LOSSES[kind].path if kind in ROW_LOSSES else kind)
    _check_signature(kind, function, kind_args)
    row_loss = partial(function, **kind_args)
    if width is not None:
        _try_row_loss(kind, row_loss, dim_reduction, width)
    return row_loss


@cache
def resolve_divergence(kind: str) -> Callable[..., torch.Tensor]:
    """Returns the function of a built-in divergence, a `divergences.Divergence`."""
    return _import(DIVERGENCES[kind].path)


def _check_name(key: str, kind: str, names: Iterable[str], own: str = "") -> None:
    if kind in names:
        return
    near = difflib.get_close_matches(kind, names, n=1, cutoff=0.5)
    fix = f"did you mean {near[0]!r}?" if near else "choose one"
    raise ValueError(f"{key}={kind!r}: expected one of {', '.join(names)}{own}; {fix}")


def _import(path: str) -> Callable[..., Any]:
    return import_function("loss.representation.kind", path, "docs/losses.md")


def _check_signature(kind: str, function: Callable[..., Any], kind_args: Mapping[str, Any]) -> None:
    try:
        inspect.signature(function).bind("student_ND", "teacher_ND", "mean", **kind_args)
    except (TypeError, ValueError) as error:  # ValueError: some functions written in C have no signature
        raise ValueError(
            f"loss.representation.kind={kind} can't be called with loss.representation.kind_args={dict(kind_args)} "
            f"({error}); expected a function(student_ND, teacher_ND, dim_reduction, **kind_args): correct the function "
            "or the arguments"
        ) from error


def _try_row_loss(kind: str, row_loss: RowLoss, dim_reduction: str, width: int) -> None:
    """Tries a row loss on random rows; raises ValueError if its result is wrong, as `resolve_row_loss` says."""
    import torch

    draw = torch.Generator().manual_seed(0)
    rows_2ND = torch.randn(2, _TRIAL_ROWS, width, generator=draw, dtype=torch.float32)
    student_ND, teacher_ND = rows_2ND[0].clone().requires_grad_(), rows_2ND[1].clone()
    key = f"loss.representation.kind={kind}"
    with torch.enable_grad():
        value_N = row_loss(student_ND, teacher_ND, dim_reduction)
        found = _describe(value_N)
        if found != f"float32 [{_TRIAL_ROWS}]":
            raise ValueError(
                f"{key} returned {found} for rows [{_TRIAL_ROWS}, {width}]; expected float32 [{_TRIAL_ROWS}], one "
                "value per row in the rows' dtype: reduce the last dimension only"
            )
        gradient_ND = None
        if value_N.requires_grad:
            (gradient_ND,) = torch.autograd.grad(value_N.sum(), student_ND, allow_unused=True)
        if gradient_ND is None:
            raise ValueError(
                f"{key} returned values without a gradient; expected ones that autograd can differentiate with respect "
                "to student_ND: use torch operations, without detach(), item(), numpy or no_grad()"
            )
        alone_N = row_loss(rows_2ND[0, :1].clone(), rows_2ND[1, :1].clone(), dim_reduction)
    if not torch.equal(teacher_ND, rows_2ND[1]):
        raise ValueError(f"{key} changes teacher_ND; expected unchanged rows: use operations that are not in place")
    if not torch.allclose(alone_N, value_N[:1], rtol=_TRIAL_TOLERANCE, atol=_TRIAL_TOLERANCE):
        raise ValueError(
            f"{key} returned {float(value_N[0].detach()):.6g} for a row among others and {float(alone_N[0]):.6g} for "
            "the same row alone; expected one value, because the rows are split over microbatches and ranks: use no "
            "statistics over rows, and nothing random"
        )


def _describe(value: Any) -> str:
    """Returns the dtype and shape of a tensor, such as "float32 [3]", or the type of another value."""
    import torch

    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
