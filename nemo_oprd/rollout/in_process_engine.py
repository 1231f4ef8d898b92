"""The in-process rollout engine: a second Megatron copy of the student in its own layout (TP, DP and EP, no PP)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from nemo_oprd.batch import types
from nemo_oprd.batch.layout import Layout
from nemo_oprd.batch.types import Rollout
from nemo_oprd.config.memory_bounds import CACHE_SHARE, UNCACHED_TOKENS, cache_bytes_per_token
from nemo_oprd.config.rollout_schema import RolloutConfig
from nemo_oprd.data.token_ids import TokenIds
from nemo_oprd.megatron.model import DistillingModel, build_chunks
from nemo_oprd.megatron.parallel import Role, compute_dtype, device, first_ranks, free_bytes, make_role, wait_for_all
from nemo_oprd.megatron.weights.hf import TensorReader, load_hf, load_stream
from nemo_oprd.models import ModelSpec
from nemo_oprd.rollout.decoding import generate_batch, generate_whole_sequences
from nemo_oprd.rollout.engine import (
    Generates,
    GenerationCancelled,
    GenerationHandle,
    Keep,
    Request,
    SamplingParams,
    Weights,
    WeightStream,
    check_room,
)
from nemo_oprd.rollout.exchange import Exchange
from nemo_oprd.rollout.response import Response
from nemo_oprd.runtime.messages import ANY_RANK
from nemo_oprd.runtime.signals import agree
from nemo_oprd.vllm.worker.nemo_oprd_buckets import Bucket, Digest, padded_bytes

logger = logging.getLogger(__name__)

# cached tokens; fewer would not hold one useful batch, and an out-of-memory error is then the clearer message
SMALLEST_CACHE = 1024


class MegatronEngine(Generates):
    """A `RolloutEngine` on the student's ranks. Every rank of the world builds it and takes part in its calls."""

    def __init__(
        self,
        rollout: RolloutConfig,
        spec: ModelSpec,
        student_layout: Layout,
        eos_ids: tuple[int, ...],
        sampled: TokenIds | None = None,
        *,
        precision: str,
        router_dtype: str | None = None,
        provider: Any = None,
    ) -> None:
        """See `make_engine`. `precision`: dtype of weights and computation; `router_dtype`: `student.router_dtype`.

        `provider`: Megatron-Bridge's, for a model that only it can build; such a model samples without a cache.

        Raises:
            ValueError: `rollout.tensor` does not fit the ranks or the model.
        """
        tensor, ranks = rollout.tensor, student_layout.size
        if ranks % tensor:
            raise ValueError(f"rollout.tensor={tensor} does not divide the student's {ranks} rank(s)")
        expert, first = rollout.expert if spec.experts else 1, student_layout.first_rank
        layout = Layout(tensor=tensor, data=ranks // tensor, first_rank=first, expert=expert)
        self.spec, self.eos_ids, self.max_batch = spec, eos_ids, rollout.max_batch
        self.sampled = TokenIds(spec.vocab_size) if sampled is None else sampled
        self._cache_setting, self._said_budget = rollout.max_cache_tokens, False
        self.metrics: dict[str, float] = {}
        self.weights = Weights(0)
        self._with_digest = rollout.max_lag > 0  # for responses that outlive these weights
        self.role = make_role("rollout", layout)
        self._exchange = Exchange()
        self._dtype = compute_dtype(precision)
        self._cached = provider is None
        self.model: DistillingModel | None = None
        if self.role.is_member and provider is None:
            (self.model,) = build_chunks(spec, self.role, self._dtype, local_layers=True, moe_router_dtype=router_dtype)
        elif self.role.is_member:
            from nemo_oprd.megatron.megatron_bridge.build import build_from_provider

            (self.model,) = build_from_provider(provider, spec, self.role, self._dtype, moe_router_dtype=router_dtype)
        if self.model is not None:
            self.model.eval().requires_grad_(False)

    def update_weights(self, weights: WeightStream, step: int) -> None:
        """See `RolloutEngine`. Splits the parameters into this engine's shards, one at a time."""
        digest = Digest() if self._with_digest and dist.get_rank() == 0 else None
        if self.model is not None:
            load_stream([self.model], self.spec, self.role, _added(weights(), digest))
        value = None if digest is None else digest.value()
        self.weights = Weights(step, first_ranks(value) if self._with_digest else None)

    def load(self, read: TensorReader, source: str) -> None:
        """Reads this rank's shards of a model on disk; see `RolloutEngine`."""
        self.weights = Weights(0)
        if self.model is not None:
            load_hf([self.model], self.spec, self.role, read, source)

    def submit(
        self,
        requests: list[Request],
        sampling: SamplingParams,
        done: dict[int, Rollout] | None = None,
        keep: Keep | None = None,
    ) -> GenerationHandle:
        """See `RolloutEngine`. The first rank of each tensor group calls `keep` after every batch."""
        check_room(requests, self.spec.max_positions)
        return GenerationHandle(requests, sampling, done or {}, keep)

    def collect(
        self, handle: GenerationHandle, should_cancel: Callable[[], bool] | None = None, *, last: bool = False
    ) -> list[Rollout]:
        """Samples this rank's part of the requests and shares the responses among all ranks; see `RolloutEngine`."""
        own_part, completed, requests = dict[int, Response](), True, handle.requests
        if self.model is not None:
            own_part, completed = self._generate_own_part(handle, should_cancel)
        # Ranks can finish hours apart: the ranks of a dedicated teacher wait for a whole validation set. A collective
        # would time out, so the ranks wait without one; if a rank has died, the watchdog ends the others.
        wait_for_all()
        cancelled = should_cancel is not None and agree(device(), not completed)[0]
        shared = self._exchange.share({i: response.columns() for i, response in own_part.items()})
        sampled = {i: _rollout(requests[i], Response.of(columns), self.weights.steps) for i, columns in shared.items()}
        rollouts = {**handle.done, **sampled}
        if cancelled:
            raise GenerationCancelled(rollouts)
        return [rollouts[i] for i in range(len(requests))]

    def rest(self) -> None:
        """See `RolloutEngine`; there is no memory to give back, because the cache lives for one batch."""

    def close(self) -> None:
        """See `RolloutEngine`; drops the model."""
        self.model = None

    def _generate_own_part(
        self, handle: GenerationHandle, should_cancel: Callable[[], bool] | None
    ) -> tuple[dict[int, Response], bool]:
        """Samples this data-parallel rank's requests; returns (index of a request -> response, False if cancelled).

        All ranks of a tensor group sample the same responses, so only the first one returns them. The
        engine skips a batch whose requests are all in `done` and samples any other batch whole, so a response does not
        depend on an earlier cancellation. A cancelled call returns the responses of complete batches.
        """
        requests, sampling, keep = handle.requests, handle.sampling, handle.keep
        coords, data = self.role.member_coords, self.role.layout.data
        assert self.model is not None
        # sorted by length, so that batches hold similar lengths, and divided among the data-parallel ranks in turn
        order = sorted(range(len(requests)), key=lambda i: (len(requests[i].prompt_ids), i))[coords.data :: data]
        own: dict[int, Response] = {}
        group = self.role.member_groups.tp  # tensor ranks sample together, so they must stop together
        is_cancelled = None if should_cancel is None else lambda: agree(device(), should_cancel(), group=group)[0]
        for batch in self._batches(order, requests, sampling, self._cache_budget()):
            if handle.done.keys() >= set(batch):
                continue
            if is_cancelled is not None and is_cancelled():
                return own, False
            prompts = [requests[i].prompt_ids for i in batch]
            # the limit of a response does not depend on the other responses of its batch
            limits = [sampling.limit_of(requests[i], self.spec.max_positions) for i in batch]
            keys = [sampling.key_of(requests[i], i) for i in batch]
            uniforms = np.stack([np.random.default_rng(key).random(max(limits)) for key in keys])
            generated = self._sample(prompts, uniforms, limits, sampling, is_cancelled)
            if generated is None:
                return own, False
            if coords.tensor == 0:
                own.update(zip(batch, generated, strict=True))
                if keep is not None:
                    keep({i: _rollout(requests[i], own[i], self.weights.steps) for i in batch})
        return own, True

    def _sample(
        self,
        prompts: list[list[int]],
        uniforms: np.ndarray,
        limits: list[int],
        sampling: SamplingParams,
        should_cancel: Callable[[], bool] | None,
    ) -> list[Response] | None:
        """Samples a batch, without a cache if Megatron-Bridge built the model; see `generate_batch`."""
        assert self.model is not None
        given: dict[str, Any] = {"temperature": sampling.temperature, "top_p": sampling.top_p}
        given |= {"eos_ids": self.eos_ids, "should_cancel": should_cancel}
        if self._cached:
            routes = sampling.record_routes
            return generate_batch(self.model, self.sampled, prompts, uniforms, limits, record_routes=routes, **given)
        return generate_whole_sequences(self.model, self.role, self.sampled, prompts, uniforms, limits, **given)

    def _cache_budget(self) -> int:
        """Returns the most tokens of a batch; may log a line about it, once. Every rank of the role calls this."""
        if not self._cached and not self._said_budget and dist.get_rank() == self.role.layout.first_rank:
            logger.info(
                f"rollout.engine=megatron: {self.spec.model_type} samples without a cache, so that every token is a "
                "forward pass over all tokens before it: slow, for trying and testing; rollout.engine=vllm is faster",
                extra=ANY_RANK,
            )
        if not self._cached:
            self._said_budget = True
            return UNCACHED_TOKENS if self._cache_setting == "auto" else int(self._cache_setting)
        if self._cache_setting != "auto":
            return int(self._cache_setting)
        # computed anew for every call: optimizer states, for instance, take memory only from the first update on
        budget = cache_budget(self.spec, self.role, self._dtype)
        if not self._said_budget and dist.get_rank() == self.role.layout.first_rank:
            logger.info(f"rollout.max_cache_tokens=auto: {budget} tokens", extra=ANY_RANK)
        self._said_budget = True
        return budget

    def _batches(
        self, order: list[int], requests: list[Request], sampling: SamplingParams, budget: int
    ) -> list[list[int]]:
        """Divides `order` into batches of at most `max_batch` requests and `budget` tokens, padded to full length."""
        batches: list[list[int]] = []
        longest = 0
        for i in order:
            length = len(requests[i].prompt_ids) + sampling.limit_of(requests[i], self.spec.max_positions)
            longest = max(longest, length)
            full = not batches or len(batches[-1]) >= self.max_batch
            if full or (len(batches[-1]) + 1) * longest > budget:
                batches.append([])
                longest = length
            batches[-1].append(i)
        return batches


def _rollout(request: Request, response: Response, step: int) -> Rollout:
    recorded: dict[str, Any] = {"logprobs": response.logprobs, "expert_routes": response.routes}
    spans = types.span(step, len(response.ids))
    return request.answered(response.ids, finished=response.finished, weight_versions=spans, **recorded)


def _added(weights: Iterable[tuple[str, torch.Tensor]], digest: Digest | None) -> Iterable[tuple[str, torch.Tensor]]:
    """Yields the stream `weights` unchanged, and adds each tensor to `digest`, if there is one."""
    for name, tensor in weights:
        if digest is not None:
            alone = Bucket([], torch.empty(padded_bytes(tensor), dtype=torch.uint8, device=tensor.device))
            alone.add(name, tensor)
            digest.add(alone)
        yield name, tensor


def cache_budget(spec: ModelSpec, role: Role, dtype: torch.dtype) -> int:
    """Returns `rollout.max_cache_tokens=auto`: the most cached tokens for which all ranks have room, at least 1024.

    On CUDA (not yet run): a share of the free memory. On a CPU: a fixed amount. All ranks of the role call this.
    """
    own = free_bytes(device(), CACHE_SHARE) // cache_bytes_per_token(spec, role.layout.tensor, dtype.itemsize)
    smallest = torch.tensor([own], dtype=torch.int64, device=device())
    for group in (role.member_groups.tp, role.member_groups.dp):
        dist.all_reduce(smallest, op=dist.ReduceOp.MIN, group=group)
    return max(SMALLEST_CACHE, int(smallest.item()))
