"""The gated delta net's kernels in plain torch, for machines without FLA (flash-linear-attention, which is Triton).

Megatron-core 0.19 builds the layer and splits it over tensor and context ranks, but takes three functions from FLA and
refuses to be built without it. Its own torch rule reads no packed sequences and rounds to float32. `use_torch_kernels`
puts the functions of this module in FLA's place; they compute sequences of similar length together, in float32 or, for
float64 inputs, in float64.

Shapes: B sequences that are computed together, S tokens of all, H heads, K channels of a key, V of a value, C channels.
"""

from __future__ import annotations

import importlib
import itertools
from typing import Any

import torch
from torch.nn.functional import pad, silu

from nemo_oprd.megatron import versions

# transformers' and FLA's epsilon, inside the square root
_EPS = 1e-6
# tokens whose changes of the state are solved for together, as in transformers and FLA
CHUNK = 64
# a sequence that is shorter than a chunk is padded to a multiple of this
GRAIN = 16
TORCH, FLA = "torch (slower than FLA)", "FLA"
# methods of Megatron's layer that torch.compile decorates; its compiler takes seconds for nothing on a CPU
_COMPILED = ("_apply_gated_norm", "_prepare_input_for_gated_delta_rule", "_compute_g_and_beta")


def l2norm(states: torch.Tensor) -> torch.Tensor:
    """Scales vectors [..., K] to length 1, in the same dtype."""
    wide = _wide(states)
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + _EPS)).to(states.dtype)


def causal_convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: str = "silu",
    initial_state: None = None,
    output_final_state: bool = False,
    cu_seqlens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, None]:
    """Convolves each channel separately over time, then applies SiLU; zeros precede every sequence.

    Args:
        x: [1, S, C].
        weight: [C, W]; the last column is for the token itself.
        cu_seqlens: int [sequences + 1], the bounds of the sequences of a pack; None: there is one.

    Returns:
        ([1, S, C], None).
    """
    assert activation in ("silu", "swish") and initial_state is None and not output_final_state
    width = weight.shape[1]
    bounds = _bounds(x.shape[1], cu_seqlens)
    positions = torch.tensor([t for start, end in itertools.pairwise(bounds) for t in range(end - start)])
    positions = positions.to(x.device)[:, None]  # [S, 1], in the token's own sequence
    total = x * weight[:, -1]
    for back in range(1, min(width, x.shape[1])):
        earlier = pad(x[:, :-back], (0, 0, back, 0))
        total = total + torch.where(positions >= back, earlier, 0.0) * weight[:, -1 - back]
    return silu(total if bias is None else total + bias), None


def gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, None]:
    """Returns the state's answers to the queries; each token first lets the state decay and then corrects it.

    With a state M [K, V] that is zero before a sequence: M <- exp(g) M; M <- M + beta k (v - k M); o = scale q M.

    Args:
        q, k: [1, S, H, K]. v: [1, S, H, V]. g, beta: [1, S, H], g at most 0.
        scale: of the queries; None: K ** -0.5.
        cu_seqlens: as for `causal_convolution`.

    Returns:
        (o [1, S, H, V] in the dtype of q, None).
    """
    assert initial_state is None and not output_final_state and not use_qk_l2norm_in_kernel
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    tokens, bounds = q.shape[1], _bounds(q.shape[1], cu_seqlens)
    groups: dict[int, list[tuple[int, int]]] = {}  # padded length -> (first token, end) of the sequences
    for start, end in itertools.pairwise(bounds):
        unit = GRAIN if end - start < CHUNK else CHUNK
        if end > start:
            groups.setdefault(-(-(end - start) // unit) * unit, []).append((start, end))
    # a row of zeros behind the tokens stands for padding, which changes no state
    given = [pad(_wide(part[0]), (0, 0) * (part.dim() - 2) + (0, 1)) for part in (q, k, v, g, beta)]
    given[0] = given[0] * scale
    outputs, order = [], []
    for padded, sequences in groups.items():
        places = torch.full((len(sequences), padded), tokens)
        for row, (start, end) in enumerate(sequences):
            places[row, : end - start] = torch.arange(start, end)
        here = places.to(q.device)
        found = _rule_of_sequences(*(part[here].transpose(1, 2) for part in given)).transpose(1, 2)
        real = places < tokens
        outputs.append(found[real.to(q.device)])
        order.append(places[real])
    rows = torch.cat(outputs)[torch.cat(order).argsort().to(q.device)]
    return rows[None].to(q.dtype), None


def _rule_of_sequences(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor
) -> torch.Tensor:
    """Applies the rule to B sequences: q, k [B, H, T, K], v [B, H, T, V], g, beta [B, H, T] -> [B, H, T, V].

    T is a multiple of `CHUNK`, or less: then it is the size of the only chunk.

    Within a chunk, the corrections of all tokens are the solution of a triangular system: each depends on those before
    it, weighed by the products of the keys. The state is handed from chunk to chunk.
    """
    size = min(CHUNK, q.shape[2])
    q, k, v, g, beta = (tensor.unflatten(2, (-1, size)) for tensor in (q, k, v, g, beta))
    total = g.cumsum(-1)  # [B, H, chunks, size], the decay from the chunk's start, as a logarithm
    later = torch.ones(size, size, dtype=torch.bool, device=q.device).triu(1)
    decay = (total[..., :, None] - total[..., None, :]).masked_fill(later, -torch.inf).exp()
    weighed = k * beta[..., None]
    system = weighed @ k.mT * decay  # the solver reads only what is below the diagonal
    both = torch.cat([v * beta[..., None], weighed * total.exp()[..., None]], dim=-1)
    solved = torch.linalg.solve_triangular(system, both, upper=False, unitriangular=True)
    new, read = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    within = q @ k.mT * decay
    from_start = q * total.exp()[..., None]
    to_end = k * (total[..., -1:] - total).exp()[..., None]
    kept = total[..., -1].exp()[..., None, None]
    state = q.new_zeros(*q.shape[:2], k.shape[-1], v.shape[-1])
    outputs = []
    for i in range(q.shape[2]):
        corrections = new[:, :, i] - read[:, :, i] @ state
        outputs.append(from_start[:, :, i] @ state + within[:, :, i] @ corrections)
        state = state * kept[:, :, i] + to_end[:, :, i].mT @ corrections
    return torch.cat(outputs, dim=2)


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _bounds(tokens: int, cu_seqlens: torch.Tensor | None) -> list[int]:
    """Returns the bounds of the sequences; without a pack, all tokens are one sequence."""
    return [0, tokens] if cu_seqlens is None else cu_seqlens.tolist()


def delta_net_kernels() -> str:
    """Returns the kernels that a delta net uses here: `FLA`, if it is installed and CUDA is available, else `TORCH`."""
    common = _module("common")
    return FLA if common.HAVE_FLA and common.l2norm is not l2norm and torch.cuda.is_available() else TORCH


def use_torch_kernels() -> None:
    """Replaces FLA's functions in Megatron's gated delta net by this module's, unless FLA can be used."""
    if delta_net_kernels() == FLA:
        return
    common, layer = _module("common"), _module("gdn")
    common.HAVE_FLA, common.l2norm = True, l2norm
    layer.causal_conv1d, layer.chunk_gated_delta_rule = causal_convolution, gated_delta_rule
    if not torch.cuda.is_available():
        for name in _COMPILED:
            method = getattr(common._GDNBase, name)
            setattr(common._GDNBase, name, getattr(method, "_torchdynamo_orig_callable", method))


def _module(name: str) -> Any:
    """Returns a module of Megatron-core's gated delta net.

    Raises:
        ValueError: Megatron-core is too old.
    """
    if versions.CORE < (0, 19):
        raise ValueError(
            f"Megatron-core {versions.CORE_VERSION} has no gated delta net for packed sequences; expected 0.19 or "
            "later: use the environment of scripts/setup_nemo_bridge.sh with Python 3.12, or a newer container of NeMo"
        )
    return importlib.import_module(f"megatron.core.ssm.gated_delta_net.{name}")
