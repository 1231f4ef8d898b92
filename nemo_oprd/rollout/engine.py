"""The interface of a rollout engine, which the training loop, evaluation and fit-bridge use."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch

from nemo_oprd.batch.types import Rollout
from nemo_oprd.data.conversation import Message, Tool
from nemo_oprd.megatron.weights.hf import TensorReader

# a function that makes the stream of (HF name, whole tensor) of a model, each tensor once
WeightStream: TypeAlias = Callable[[], Iterable[tuple[str, torch.Tensor]]]
# a function that receives complete responses by the index of their request; see `RolloutEngine.submit`
Keep: TypeAlias = Callable[[dict[int, Rollout]], None]
# decides whether the complete responses, by the indices of their requests, suffice; see `RolloutEngine.gather`
Enough: TypeAlias = Callable[[AbstractSet[int]], bool]

# the first number of a sampling key, so that training and evaluation never share random numbers
TRAINING_STREAM, EVALUATION_STREAM = 1, 2


class GenerationCancelled(Exception):  # noqa: N818 - not an error
    """Raised if the caller cancelled the generation before all responses were complete.

    `completed` maps the index of a request to its rollout, the same on every rank; a later `generate` accepts it as
    `done`.
    """

    def __init__(self, completed: dict[int, Rollout] | None = None) -> None:
        super().__init__("the generation was cancelled")
        self.completed = completed or {}


@dataclass(frozen=True)
class SamplingParams:
    """Parameters of sampling.

    `key` seeds the randomness. Response i of a call draws from (*key, i) alone, so the responses depend neither on the
    engine's layout nor on what was sampled before. `max_new_tokens` limits each response. `record_routes` asks an
    engine to record `Rollout.expert_routes` if it can.
    """

    temperature: float
    top_p: float
    max_new_tokens: int
    key: tuple[int, ...]
    record_routes: bool = False

    def key_of(self, request: Request, index: int) -> tuple[int, ...]:
        """Returns the seed of the response to a request; `index` is the number of the request in its call."""
        return (*self.key, index) if request.key is None else request.key

    def limit_of(self, request: Request, max_positions: int) -> int:
        """Returns the most tokens that the response to a request may have."""
        most = self.max_new_tokens if request.most is None else min(request.most, self.max_new_tokens)
        return min(most, max_positions - len(request.prompt_ids))


@dataclass(frozen=True)
class Request:
    """A request for one response; `prompt`, `data_source` and `answer` are copied to the rollout.

    `messages` is the conversation that the prompt was made from, `teacher_messages` the one that the teacher reads: the
    same one, unless `teacher.prompt` is set. `tools` are those that the model may call in both.

    A request that continues a response has the `begun` tokens of that response at the end of `prompt_ids`. `key`
    replaces the call's seed, and `most` lowers the call's limit of tokens. `sampled` replaces the call's sampling
    parameters and the number of the response. Servers begin requests with a lower `turn` first. The in-process engine
    ignores `sampled` and `turn`.
    """

    prompt_ids: list[int]
    prompt: str | None = None
    data_source: str | None = None
    answer: str | None = None
    messages: tuple[Message, ...] = ()
    teacher_messages: tuple[Message, ...] = ()
    tools: tuple[Tool, ...] = ()
    key: tuple[int, ...] | None = None
    most: int | None = None
    begun: int = 0
    turn: int = 0
    sampled: tuple[SamplingParams, int] | None = None

    def answered(
        self, ids: np.ndarray | Sequence[int], *, finished: bool, cut: bool = False, **recorded: Any
    ) -> Rollout:
        """Makes the rollout of a response with the tokens `ids`; `recorded`: more fields of `Rollout`.

        `finished`: the last id ended the response; `cut`: the response may go on, so `finish_reason` is None.
        """
        return Rollout(
            prompt_ids=np.array(self.prompt_ids, np.int64),
            response_ids=np.asarray(ids),
            prompt=self.prompt,
            data_source=self.data_source,
            answer=self.answer,
            finish_reason="stop" if finished else None if cut else "length",
            **recorded,
        )


@dataclass(frozen=True)
class Weights:
    """Identity of an engine's weights: the number of optimizer steps behind them, and their digest, if it has one.

    Equal tensors have equal digests, whatever the engine and the layout (`nemo_oprd_buckets.Digest`).
    """

    steps: int
    digest: str | None = None


@dataclass
class GenerationHandle:
    """Handle of a call to an engine, from `submit` to `collect`; engines add fields of their own.

    Attributes:
        served: after `collect` or `cut`, per server when it began and when its last response arrived, in seconds since
            the epoch.
        given: indices of the requests whose whole responses `gather` or `cut` have returned.
    """

    requests: list[Request]
    sampling: SamplingParams
    done: dict[int, Rollout]
    keep: Keep | None
    submitted: float = field(init=False, default_factory=time.time)
    served: dict[int, tuple[float, float]] = field(init=False, default_factory=dict)
    given: set[int] = field(init=False, default_factory=set)


class RolloutEngine(Protocol):
    """Samples from one model. Every rank of the world builds one and calls its methods with the same arguments.

    Tensors have their Hugging Face names, so that an engine can be a separate program. `metrics` are those of the last
    `collect` or `generate`, by their names in metrics.jsonl. `weights` are those to sample from.
    """

    metrics: dict[str, float]
    weights: Weights

    def submit(
        self,
        requests: list[Request],
        sampling: SamplingParams,
        done: dict[int, Rollout] | None = None,
        keep: Keep | None = None,
    ) -> GenerationHandle:
        """Requests one rollout per request, from the current weights; returns a handle. Only one handle may be open.

        An engine with servers of its own begins to sample; one in the trainer's processes samples in `collect`. In
        between the trainer may compute, but must not change the weights of the stream, because the engine sends them
        again to a server that it restarts.

        Args:
            done: rollouts that an interrupted call with the same arguments completed, by the index of their request.
            keep: receives responses as soon as they are complete, by the index of their request, so that they outlive
                this process. The engine calls it on the one rank that has them, perhaps from another thread, and not
                for `done` unless it samples these again. An exception of `keep` ends `collect`.

        Raises:
            ValueError: a prompt leaves no room for a response.
        """

    def collect(
        self, handle: GenerationHandle, should_cancel: Callable[[], bool] | None = None, *, last: bool = False
    ) -> list[Rollout]:
        """Waits for the rollouts of a handle; returns them in the order of its requests, the same on every rank.

        Args:
            should_cancel: called repeatedly on every rank; True asks to stop. The ranks' answers may differ.
            last: whether the caller replaces the weights before it samples again, so that the engine may drop them.

        Raises:
            GenerationCancelled: on all ranks, if `should_cancel` stopped one of them before its part was complete.
        """

    def gather(
        self, handle: GenerationHandle, enough: Enough, should_cancel: Callable[[], bool] | None = None
    ) -> dict[int, Rollout]:
        """Waits until enough responses of a handle are complete, while the others continue; replaces `collect`.

        Args:
            enough: receives the indices of complete responses. It must return True when all are complete.

        Returns:
            All complete responses that no earlier call has returned, by the index of their request; the same on every
            rank.

        Raises:
            GenerationCancelled: as `collect`, with all responses that are complete. The handle is closed.
        """

    def cut(self, handle: GenerationHandle, should_cancel: Callable[[], bool] | None = None) -> dict[int, Rollout]:
        """Stops a handle now, before the weights change; returns its complete responses and partial ones.

        Returns:
            The result of `gather`, and the tokens so far of unfinished responses (`finish_reason` None), without
            requests that have no sampled token.

        Raises:
            GenerationCancelled: as `gather`, if the engine must wait for responses.
        """

    def generate(
        self,
        requests: list[Request],
        sampling: SamplingParams,
        should_cancel: Callable[[], bool] | None = None,
        done: dict[int, Rollout] | None = None,
        keep: Keep | None = None,
        *,
        last: bool = False,
    ) -> list[Rollout]:
        """Calls `submit` and `collect`."""

    def update_weights(self, weights: WeightStream, step: int) -> None:
        """Replaces the weights to sample from.

        Args:
            weights: makes the stream of (HF name, whole tensor), the same on every rank that trains the model, empty on
                the other ranks. Producing it is a collective operation, so an engine consumes all of it on
                every rank, or none of it on any rank. A tensor is valid until the next one is requested. An engine may
                call `weights` again until the next `update_weights`, if a server has lost them; the trainer must not
                change them while the engine samples.
            step: number of optimizer steps behind these weights.
        """

    def load(self, read: TensorReader, source: str) -> None:
        """Replaces the weights by those of a model on disk: `read` returns a tensor by its HF name.

        Args:
            source: where the tensors come from, for messages.

        Raises:
            ValueError: the weights are not of this engine's architecture.
        """

    def rest(self) -> None:
        """Announces that no call samples before the next `update_weights`; an engine that shares memory gives it back.

        Every rank calls this. `generate` with `last` does the same at its end.
        """

    def close(self) -> None:
        """Ends the processes and threads of the engine; the engine can't be used afterwards."""


class Generates:
    """Default `generate`, `gather` and `cut` of an engine that has `submit` and `collect`."""

    def generate(
        self: RolloutEngine,
        requests: list[Request],
        sampling: SamplingParams,
        should_cancel: Callable[[], bool] | None = None,
        done: dict[int, Rollout] | None = None,
        keep: Keep | None = None,
        *,
        last: bool = False,
    ) -> list[Rollout]:
        """Calls `submit` and `collect`."""
        return self.collect(self.submit(requests, sampling, done, keep), should_cancel, last=last)

    def gather(
        self: RolloutEngine, handle: GenerationHandle, enough: Enough, should_cancel: Callable[[], bool] | None = None
    ) -> dict[int, Rollout]:
        """See `RolloutEngine`; an engine that samples in `collect` has all responses at once."""
        if len(handle.given) == len(handle.requests):
            return {}
        handle.given.update(range(len(handle.requests)))
        return dict(enumerate(self.collect(handle, should_cancel)))

    def cut(
        self: RolloutEngine, handle: GenerationHandle, should_cancel: Callable[[], bool] | None = None
    ) -> dict[int, Rollout]:
        """Returns the responses that no call has returned; an engine that samples in `collect` has no partial ones."""
        return self.gather(handle, lambda complete: True, should_cancel)


def check_room(requests: list[Request], max_positions: int) -> None:
    """Raises ValueError if a prompt leaves no room for a response in the model's positions."""
    for request in requests:
        if len(request.prompt_ids) >= max_positions:
            raise ValueError(
                f"a prompt of {len(request.prompt_ids)} tokens leaves no room in the model's {max_positions} "
                f"positions; drop or shorten it: {str(request.prompt)[:80]!r}"
            )
