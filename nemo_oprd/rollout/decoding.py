"""In-process generation: sampling of a token from logits, generation without a cache, and decoding with a KV cache.

Cached decoding runs ragged batches on a Megatron model with one stage. Prompts are right-padded. Every sequence has its
own positions in the cache, and finished sequences leave the batch. Sampling inverts the cumulative distribution at one
uniform number per token, so the caller controls the randomness of every response.

The host tracks all lengths and positions. It waits for the device only every `ASK_EVERY` tokens, to learn which
sequences are finished.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from nemo_oprd.batch.packing import Pack
from nemo_oprd.batch.types import Rollout
from nemo_oprd.data.token_ids import TokenIds
from nemo_oprd.megatron.kv_cache import DecodeParams, KVCache
from nemo_oprd.megatron.model import DistillingModel
from nemo_oprd.megatron.parallel import Role, device, on_device
from nemo_oprd.megatron.pipeline_schedule import make_microbatch
from nemo_oprd.megatron.router_replay import Routes
from nemo_oprd.rollout.expert_routes import RouteRecord
from nemo_oprd.rollout.response import Response

# Sampling of one token per sequence from its logits: temperature, then top-p, then one uniform number.


class SampledColumns:
    """The columns of logits from which ids are sampled."""

    def __init__(self, sampled: TokenIds, device: torch.device) -> None:
        self._limit = sampled.limit
        self._gaps = torch.from_numpy(~sampled.mask).to(device) if sampled.gaps else None

    def of(self, logits_BV: torch.Tensor) -> torch.Tensor:
        """Sets logits [B, V or more] of the gaps in the sampled ids to -inf in place; returns the view [B, limit]."""
        kept = logits_BV[:, : self._limit]
        return kept if self._gaps is None else kept.masked_fill_(self._gaps, -torch.inf)


def pick_tokens(logits_BV: torch.Tensor, uniform_B: torch.Tensor, temperature: float, top_p: float) -> torch.Tensor:
    """Picks one id per row of [B, V] logits: the smallest id whose cumulative probability exceeds `uniform` in [0, 1).

    `temperature` 0 is greedy. `top_p` keeps the most likely ids until their total probability reaches `top_p`.
    """
    if temperature == 0:
        return logits_BV.argmax(-1)
    probability = torch.softmax(logits_BV.double() / temperature, dim=-1)
    if top_p < 1:
        # sorts float32 logits, which have the same order; keeps ids of equal logits from the lowest id on
        ids = logits_BV.sort(dim=-1, descending=True, stable=True).indices
        ordered = probability.gather(-1, ids)
        ordered = torch.where(ordered.cumsum(-1) - ordered < top_p, ordered, 0.0)
        probability = torch.zeros_like(probability).scatter(-1, ids, ordered)
    cumulative = probability.cumsum(-1)
    target = uniform_B.double()[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, target, right=True)[:, 0].clamp_max(logits_BV.shape[-1] - 1)


# Generation without a cache, for models that Megatron-Bridge builds: every token takes a pass over the whole sequence.
#
# A response of n tokens costs about n forward passes. Use it to try a family, in tests and for toys, and vLLM for
# anything else. Any model samples this way, whatever its layers keep between tokens: keys and values,
# narrow states, or the state of a gated delta net.


# tokens between two calls of `should_cancel`
CHECK_WHOLE_SEQUENCES_EVERY = 16


@torch.no_grad()
def generate_whole_sequences(
    model: Any,
    role: Role,
    sampled: TokenIds,
    prompts: list[list[int]],
    uniforms: np.ndarray,
    limits: list[int],
    *,
    temperature: float,
    top_p: float,
    eos_ids: tuple[int, ...],
    should_cancel: Callable[[], bool] | None = None,
) -> list[Response] | None:
    """Samples one response for each of B prompts; None if cancelled. See `generate_batch` for the other arguments.

    Args:
        model, role: the only chunk of a model without pipeline stages; its tensor ranks compute the same result.
        should_cancel: called every `CHECK_WHOLE_SEQUENCES_EVERY` tokens; returns the same value on all tensor ranks.
    """
    sequences = [list(prompt) for prompt in prompts]
    stopped = [False] * len(prompts)
    draws = torch.from_numpy(uniforms).to(device())
    columns = SampledColumns(sampled, device())
    alive = [i for i, limit in enumerate(limits) if limit > 0]
    for t in range(uniforms.shape[1]):
        if not alive:
            break
        if should_cancel is not None and t and t % CHECK_WHOLE_SEQUENCES_EVERY == 0 and should_cancel():
            return None
        logits = columns.of(_last_logits(model, role, [sequences[i] for i in alive]))
        for i, token in zip(alive, pick_tokens(logits, draws[alive, t], temperature, top_p).tolist(), strict=True):
            sequences[i].append(token)
            stopped[i] = token in eos_ids
        alive = [i for i in alive if not stopped[i] and t + 1 < limits[i]]
    responses = [np.array(ids[len(prompt) :], np.int32) for ids, prompt in zip(sequences, prompts, strict=True)]
    return [Response(ids, end) for ids, end in zip(responses, stopped, strict=True)]


def _last_logits(model: Any, role: Role, sequences: list[list[int]]) -> torch.Tensor:
    """Computes the logits [B, padded V] after each sequence."""
    rollouts = [Rollout(np.array([], np.int32), np.array(ids, np.int32)) for ids in sequences]
    pack = Pack.build(list(range(len(rollouts))), [len(ids) for ids in sequences], role.layout)
    microbatch = make_microbatch(pack, rollouts, role, None, None)
    microbatch.set_sequence_bounds(model)
    hidden = model(microbatch.input_ids, microbatch.sequences)  # [S, 1, D]
    last = on_device(pack.offsets + np.array(pack.lengths) - 1)
    return model.logits(hidden.index_select(0, last))[:, 0]


# Cached decoding. Finished sequences leave the batch once they are this share of it; removing them copies the cache.
COMPACT_AT = 0.25
# Tokens between two reads of the device's finished flags; a finished sequence wastes at most that many tokens.
ASK_EVERY = 32
# The cache is read in multiples of this many positions, because fused kernels want aligned masks.
MASK_GRAIN = 8
# Tokens between two calls of `should_cancel`; that many tokens take seconds.
CANCEL_CHECK_EVERY = 256


def _prefill_again(model: DistillingModel, ids_T: torch.Tensor, cache: KVCache, row: int) -> torch.Tensor:
    """Prefills one sequence again, into its row of the cache; returns the last token's hidden state [1, D].

    Needed for LongRoPE: when a sequence outgrows the short factors, all its keys change (Hugging Face drops its cache).
    """
    size = len(ids_T)
    alone = KVCache(size, used=size, lengths=torch.tensor([size], device=ids_T.device))
    alone.positions = torch.arange(size, device=ids_T.device)[None]
    hidden = model(ids_T[None], DecodeParams(cache=alone))  # [T, 1, D]
    for layer, kept in cache.layers.items():
        for old, new in zip(kept, alone.layers[layer], strict=True):
            old[row, :, :size] = new[0]
    return hidden[-1]


@torch.no_grad()
def generate_batch(
    model: DistillingModel,
    sampled: TokenIds,
    prompts: list[list[int]],
    uniforms: np.ndarray,
    limits: list[int],
    *,
    temperature: float,
    top_p: float,
    eos_ids: tuple[int, ...],
    should_cancel: Callable[[], bool] | None = None,
    record_routes: bool = False,
) -> list[Response] | None:
    """Samples one response for each of B prompts; None if generation was cancelled.

    All tensor ranks compute the same result, because they share the gathered logits and the uniforms.

    Args:
        sampled: the ids that may be sampled.
        uniforms: [B, T] numbers in [0, 1).
        limits: [B] maximum number of new tokens of each response, at most T.
        should_cancel: called every `CANCEL_CHECK_EVERY` tokens; must return the same value on all tensor ranks.
        record_routes: whether to record the experts that the tokens visit, if the model has experts.
    """
    batch = _Batch(model, sampled, prompts, uniforms, limits, eos_ids, record_routes=record_routes)
    last = batch.prefill()
    for t in range(uniforms.shape[1]):
        if should_cancel is not None and t and t % CANCEL_CHECK_EVERY == 0 and should_cancel():
            return None
        token = batch.sample(last, t, temperature, top_p)
        if t + 1 == uniforms.shape[1]:
            break
        if (t + 1) % ASK_EVERY == 0:
            token = batch.drop_finished(token)
            if not batch.alive_on_host:
                break
        last = batch.decode(token, t)
    return batch.responses()


class _Batch:
    """The sequences of one call of `generate_batch`, with the KV cache of those that are still being decoded.

    `alive` [b] holds the indices of these sequences among the B prompts, `alive_on_host` the same indices as a list.
    Finished sequences leave the batch once they are the share `COMPACT_AT` of it.
    """

    def __init__(
        self,
        model: DistillingModel,
        sampled: TokenIds,
        prompts: list[list[int]],
        uniforms: np.ndarray,
        limits: list[int],
        eos_ids: tuple[int, ...],
        *,
        record_routes: bool,
    ) -> None:
        place, count = device(), len(prompts)
        self.model, self.columns = model, SampledColumns(sampled, place)
        self.prompt_lengths = [len(prompt) for prompt in prompts]
        self.lengths = torch.tensor(self.prompt_lengths, device=place)
        ids = np.zeros((count, max(self.prompt_lengths)), dtype=np.int64)
        for row, prompt in zip(ids, prompts, strict=True):
            row[: len(prompt)] = prompt
        self.ids = torch.from_numpy(ids).to(place)
        self.draws = torch.from_numpy(uniforms).to(place)
        self.eos, self.limit = torch.tensor(eos_ids, dtype=torch.long, device=place), torch.tensor(limits, device=place)
        longest = max(length + limit for length, limit in zip(self.prompt_lengths, limits, strict=True))
        self.cache = KVCache(-(-longest // MASK_GRAIN) * MASK_GRAIN)
        self.slots = torch.arange(self.cache.max_length, device=place)
        self.sampled = torch.zeros(count, uniforms.shape[1], dtype=torch.long, device=place)
        self.count = torch.zeros(count, dtype=torch.long, device=place)
        self.finished = torch.zeros(count, dtype=torch.bool, device=place)  # needs no more tokens
        self.stopped = torch.zeros(count, dtype=torch.bool, device=place)  # an end-of-sequence id was sampled
        self.alive_on_host = list(range(count))
        self.alive = torch.arange(count, device=place)
        self.routes = RouteRecord.empty(model, count, self.cache.max_length) if record_routes else None

    def prefill(self) -> torch.Tensor:
        """Runs the model on the prompts; returns the hidden states of their last tokens, [1, B, D]."""
        count, longest = self.ids.shape
        self.cache.positions = torch.arange(longest, device=self.ids.device).expand(count, longest)
        self.cache.used, self.cache.lengths = longest, self.lengths
        hidden = self._run(self.ids)  # [longest, B, D]
        return hidden[self.lengths - 1, self.alive][None]

    def _run(self, ids: torch.Tensor) -> torch.Tensor:
        """Runs the model on the tokens [b, s] at `cache.positions`; returns their hidden states [s, b, D]."""
        routes = None if self.routes is None else Routes()
        hidden = self.model(ids, DecodeParams(cache=self.cache, routes=routes))
        if self.routes is not None and routes is not None:
            assert self.cache.positions is not None
            self.routes.add(routes, self.alive, self.cache.positions)
        return hidden

    def sample(self, last: torch.Tensor, t: int, temperature: float, top_p: float) -> torch.Tensor:
        """Samples token t of every sequence in the batch from the states [1, b, D] before it; returns the ids [b]."""
        logits, alive = self.columns.of(self.model.logits(last)[0]), self.alive
        token = pick_tokens(logits, self.draws[alive, t], temperature, top_p)
        fresh = ~self.finished[alive]
        self.sampled[alive, t] = torch.where(fresh, token, 0)
        self.count[alive] += fresh
        self.stopped[alive] |= fresh & torch.isin(token, self.eos)
        self.finished[alive] |= self.stopped[alive] | (t + 1 >= self.limit[alive])
        return token

    def drop_finished(self, token: torch.Tensor) -> torch.Tensor:
        """Removes finished sequences if they are at least `COMPACT_AT` of the batch; returns the remaining ids [b]."""
        done = self.finished[self.alive].tolist()
        if sum(done) < COMPACT_AT * len(done):
            return token
        rows = [row for row, is_done in enumerate(done) if not is_done]
        self.alive_on_host = [self.alive_on_host[row] for row in rows]
        keep = torch.tensor(rows, dtype=torch.long, device=token.device)
        self.cache.select(keep)
        self.alive = self.alive[keep]
        return token[keep]

    def decode(self, token: torch.Tensor, t: int) -> torch.Tensor:
        """Runs the model on token t [b] of every sequence in the batch; returns the hidden states [1, b, D]."""
        cache, alive = self.cache, self.alive
        # finished sequences that are still in the batch write to cache slots that nothing reads
        position = (self.lengths[alive] + t).clamp_max(cache.max_length - 1)
        longest = max(self.prompt_lengths[i] for i in self.alive_on_host) + t + 1
        cache.used = min(-(-longest // MASK_GRAIN) * MASK_GRAIN, cache.max_length)
        cache.positions = position[:, None]
        cache.lengths = position + 1
        cache.rows = torch.arange(len(alive), device=token.device)[:, None]
        allowed = self.slots[: cache.used] <= position[:, None]
        mask = torch.zeros(allowed.shape, dtype=self.model.config.params_dtype, device=token.device)
        cache.mask = mask.masked_fill_(~allowed, float("-inf"))[:, None, None]
        last = self._run(token[:, None])
        if self.model.frequencies.switch is not None:
            for row, i in enumerate(self.alive_on_host):
                if self.prompt_lengths[i] + t == self.model.frequencies.switch:
                    whole = torch.cat([self.ids[i, : self.prompt_lengths[i]], self.sampled[i, : t + 1]])
                    last[:, row] = _prefill_again(self.model, whole, cache, row)
        return last

    def responses(self) -> list[Response]:
        """Returns the B responses, in the order of the prompts."""
        ids, counts, stopped = self.sampled.int().cpu().numpy(), self.count.tolist(), self.stopped.tolist()
        lengths = [prompt + count - 1 for prompt, count in zip(self.prompt_lengths, counts, strict=True)]
        routes = [None] * len(counts) if self.routes is None else self.routes.of_sequences(lengths)
        return [Response(ids[i, : counts[i]].copy(), stopped[i], routes=routes[i]) for i in range(len(counts))]
