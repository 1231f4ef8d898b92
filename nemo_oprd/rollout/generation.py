"""In-process generation: prefill and token-by-token decoding of ragged batches on a Megatron model with one stage.

Prompts are right-padded. Every sequence has its own positions, its keys and values are at those positions in the cache,
and finished sequences leave the batch. Sampling inverts the cumulative distribution at one uniform number per token, so
the caller controls the randomness of every response.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from nemo_oprd.megatron.attention import DecodeParams, KVCache
from nemo_oprd.megatron.model import DistillingModel
from nemo_oprd.megatron.parallel import device

# Finished sequences are removed once they make up this share of the batch; removing them copies the cache.
COMPACT_AT = 0.25
# Tokens between two calls of `should_cancel`; that many tokens take seconds.
CANCEL_CHECK_EVERY = 256


@dataclass
class Generated:
    """Sampled ids of one response, including the end-of-sequence id if it was sampled (`finished`)."""

    ids: list[int]
    finished: bool


def pick_tokens(logits_BV: torch.Tensor, uniform_B: torch.Tensor, temperature: float, top_p: float) -> torch.Tensor:
    """One id per row of [B, V] logits: the smallest id whose cumulative probability exceeds `uniform` (in [0, 1)).

    `temperature` 0 is greedy. `top_p` keeps the most likely ids until their total probability reaches `top_p`.
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


def _prefill_again(model: DistillingModel, ids_T: torch.Tensor, cache: KVCache, row: int) -> torch.Tensor:
    """Prefills one sequence again, into its row of the cache; returns the last token's hidden state [1, D].

    Needed for LongRoPE: when a sequence outgrows the short factors, all its keys change (Hugging Face drops its cache).
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
    """Samples one response for each of B prompts.

    All tensor ranks compute the same result, because they share the gathered logits and the uniforms.

    Args:
        uniforms: [B, T] numbers in [0, 1).
        limits: [B] maximum number of new tokens of each response, at most T.
        should_cancel: called every `CANCEL_CHECK_EVERY` tokens; must return the same value on all tensor ranks.

    Returns:
        The responses; None if generation was cancelled.
    """
    target_device = device()
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=target_device)
    longest, steps = int(lengths.max()), uniforms.shape[1]
    ids = torch.zeros(len(prompts), longest, dtype=torch.long, device=target_device)
    for i, prompt in enumerate(prompts):
        ids[i, : len(prompt)] = torch.tensor(prompt)
    draws = torch.from_numpy(uniforms).to(target_device)
    eos = torch.tensor(eos_ids, dtype=torch.long, device=target_device)

    limit = torch.tensor(limits, device=target_device)
    cache = KVCache(int((lengths + limit).max()))
    cache.positions = torch.arange(longest, device=target_device).expand(len(prompts), longest)
    cache.used = longest
    cache.lengths = lengths
    hidden = model(ids, DecodeParams(cache=cache))  # [longest, B, H]
    rows = torch.arange(len(prompts), device=target_device)
    last = hidden[lengths - 1, rows][None]

    sampled = torch.zeros(len(prompts), steps, dtype=torch.long, device=target_device)
    count = torch.zeros(len(prompts), dtype=torch.long, device=target_device)
    finished = torch.zeros(len(prompts), dtype=torch.bool, device=target_device)  # needs no more tokens
    stopped = torch.zeros(len(prompts), dtype=torch.bool, device=target_device)  # the end-of-sequence id was sampled
    slots = torch.arange(cache.max_length, device=target_device)
    alive = rows  # indices into `prompts` of the sequences that are still in the batch
    for t in range(steps):
        if should_cancel is not None and t and t % CANCEL_CHECK_EVERY == 0 and should_cancel():
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
        # finished sequences that are still in the batch write to cache slots that nothing reads
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
                last[:, row] = _prefill_again(model, whole, cache, row)
    texts, counts, ends = sampled.cpu(), count.tolist(), stopped.tolist()
    return [Generated(texts[i, : counts[i]].tolist(), ends[i]) for i in range(len(prompts))]
