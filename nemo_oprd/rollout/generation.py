"""In-process generation: prefill and one-token decoding of ragged batches on a Megatron model without pipeline stages.

Prompts are right-padded; every sequence keeps its own positions, its keys and values sit at those positions in the
cache, and finished sequences leave the batch. Sampling inverts the cumulative distribution at one uniform number per
token, so the caller decides the randomness of every response.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from nemo_oprd.megatron.attention import DecodeParams, KVCache
from nemo_oprd.megatron.model import DistillingModel
from nemo_oprd.megatron.parallel import device

# Finished sequences are dropped from the batch once they are this share of it; dropping copies the cache.
COMPACT_AT = 0.25
# A caller is asked whether it gives up once in so many tokens: seconds.
ASK_EVERY = 256


@dataclass
class Generated:
    """Sampled ids of one response, the end-of-sequence id included if it was reached."""

    ids: list[int]
    finished: bool


def pick_tokens(logits_BV: torch.Tensor, uniform_B: torch.Tensor, temperature: float, top_p: float) -> torch.Tensor:
    """One id per row of [B, V] logits: the smallest id whose cumulative probability exceeds `uniform` (in [0, 1)).

    `temperature` 0 is greedy. `top_p` keeps the most likely ids until their mass reaches it.
    """
    if temperature == 0:
        return logits_BV.argmax(-1)
    probability = torch.softmax(logits_BV.double() / temperature, dim=-1)
    if top_p < 1:
        ordered, ids = probability.sort(dim=-1, descending=True)
        ordered[ordered.cumsum(-1) - ordered >= top_p] = 0
        probability = torch.zeros_like(probability).scatter(-1, ids, ordered)
    cumulative = probability.cumsum(-1)
    target = uniform_B.double()[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, target, right=True)[:, 0].clamp_max(logits_BV.shape[-1] - 1)


def _start_over(model: DistillingModel, ids_T: torch.Tensor, cache: KVCache, row: int) -> torch.Tensor:
    """Prefills one sequence anew, into its row of the cache; the last token's hidden state [1, H].

    For LongRoPE: where a sequence grows beyond the short factors, all its keys change (Hugging Face drops its cache).
    """
    size = len(ids_T)
    alone = KVCache(size, used=size, lengths=torch.tensor([size], device=ids_T.device))
    alone.positions = torch.arange(size, device=ids_T.device)[None]
    hidden = model(ids_T[None], DecodeParams(cache=alone))  # [T, 1, H]
    for layer, kept in cache.layers.items():
        for old, new in zip(kept, alone.layers[layer], strict=True):
            old[row, :, :size] = new[0]
    return hidden[-1]


@torch.no_grad()
def generate_batch(
    model: DistillingModel,
    vocab_size: int,
    prompts: list[list[int]],
    uniforms: np.ndarray,
    limits: list[int],
    *,
    temperature: float,
    top_p: float,
    eos_ids: tuple[int, ...],
    should_cancel: Callable[[], bool] | None = None,
) -> list[Generated] | None:
    """Responses to a ragged batch of prompts.

    Args:
        uniforms: [B, T] numbers in [0, 1).
        limits: [B] how many new tokens each response may have, at most T.
        should_cancel: asked every `ASK_EVERY` tokens; the same answer on all tensor ranks.

    Returns:
        None if it was cancelled.

    All tensor ranks compute the same result: they share the gathered logits and the uniforms.
    """
    here = device()
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=here)
    longest, steps = int(lengths.max()), uniforms.shape[1]
    ids = torch.zeros(len(prompts), longest, dtype=torch.long, device=here)
    for i, prompt in enumerate(prompts):
        ids[i, : len(prompt)] = torch.tensor(prompt)
    draws = torch.from_numpy(uniforms).to(here)
    eos = torch.tensor(eos_ids, dtype=torch.long, device=here)

    limit = torch.tensor(limits, device=here)
    cache = KVCache(int((lengths + limit).max()))
    cache.positions = torch.arange(longest, device=here).expand(len(prompts), longest)
    cache.used = longest
    cache.lengths = lengths
    hidden = model(ids, DecodeParams(cache=cache))  # [longest, B, H]
    rows = torch.arange(len(prompts), device=here)
    last = hidden[lengths - 1, rows][None]

    sampled = torch.zeros(len(prompts), steps, dtype=torch.long, device=here)
    count = torch.zeros(len(prompts), dtype=torch.long, device=here)
    finished = torch.zeros(len(prompts), dtype=torch.bool, device=here)  # no more tokens wanted
    stopped = torch.zeros(len(prompts), dtype=torch.bool, device=here)  # the end-of-sequence id was sampled
    slots = torch.arange(cache.max_length, device=here)
    alive = rows  # sequences in the batch, by their place in `prompts`
    for t in range(steps):
        if should_cancel is not None and t and t % ASK_EVERY == 0 and should_cancel():
            return None
        logits = model.logits(last)[0, :, :vocab_size]
        token = pick_tokens(logits, draws[alive, t], temperature, top_p)
        fresh = ~finished[alive]
        sampled[alive[fresh], t] = token[fresh]
        count[alive] += fresh
        stopped[alive] |= fresh & torch.isin(token, eos)
        finished[alive] |= stopped[alive] | (t + 1 >= limit[alive])
        if t == steps - 1 or bool(finished.all()):
            break
        done = finished[alive]
        if bool(done.float().mean() >= COMPACT_AT):
            keep = (~done).nonzero()[:, 0]
            cache.select(keep)
            alive, token = alive[keep], token[keep]
        # finished sequences that are still in the batch write nowhere that matters
        position = (lengths[alive] + t).clamp_max(cache.max_length - 1)
        cache.positions = position[:, None]
        cache.used = int(position.max()) + 1
        cache.lengths = position + 1
        cache.mask = (slots <= position[:, None])[:, None, None]
        last = model(token[:, None], DecodeParams(cache=cache))
        if model.rope.switch is not None:
            for row in ((position == model.rope.switch) & ~finished[alive]).nonzero()[:, 0].tolist():
                i = alive[row]
                whole = torch.cat([ids[i, : lengths[i]], sampled[i, : t + 1]])
                last[:, row] = _start_over(model, whole, cache, row)
    texts, counts, ends = sampled.cpu(), count.tolist(), stopped.tolist()
    return [Generated(texts[i, : counts[i]].tolist(), ends[i]) for i in range(len(prompts))]
