"""One token per sequence from its logits: temperature, then the nucleus of top-p, then one uniform number."""

from __future__ import annotations

import torch

from nemo_oprd.data.tokenization.token_ids import TokenIds


class SampledColumns:
    """The columns of logits from which ids are sampled."""

    def __init__(self, sampled: TokenIds, device: torch.device) -> None:
        self._limit = sampled.limit
        self._gaps = torch.from_numpy(~sampled.mask).to(device) if sampled.gaps else None

    def of(self, logits_BV: torch.Tensor) -> torch.Tensor:
        """[B, V or more] logits -> [B, limit], with minus infinity for ids that are not sampled; a view of the same."""
        kept = logits_BV[:, : self._limit]
        return kept if self._gaps is None else kept.masked_fill_(self._gaps, -torch.inf)


def pick_tokens(logits_BV: torch.Tensor, uniform_B: torch.Tensor, temperature: float, top_p: float) -> torch.Tensor:
    """One id per row of [B, V] logits: the smallest id whose cumulative probability exceeds `uniform` (in [0, 1)).

    `temperature` 0 is greedy. `top_p` keeps the most likely ids until their total probability reaches `top_p`.
    """
    if temperature == 0:
        return logits_BV.argmax(-1)
    probability = torch.softmax(logits_BV.double() / temperature, dim=-1)
    if top_p < 1:
        # sorted as float32 logits, which have the same order; ids of equal logits are kept from the lowest id on
        ids = logits_BV.sort(dim=-1, descending=True, stable=True).indices
        ordered = probability.gather(-1, ids)
        ordered = torch.where(ordered.cumsum(-1) - ordered < top_p, ordered, 0.0)
        probability = torch.zeros_like(probability).scatter(-1, ids, ordered)
    cumulative = probability.cumsum(-1)
    target = uniform_B.double()[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, target, right=True)[:, 0].clamp_max(logits_BV.shape[-1] - 1)
