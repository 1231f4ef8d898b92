"""What the training loop, evaluation and fit-bridge ask of a rollout engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import torch

from nemo_oprd.batch.types import Rollout
from nemo_oprd.weights.hf import TensorReader

# first entry of a sampling key: training and evaluation never share random numbers
TRAINING_STREAM, EVALUATION_STREAM = 1, 2


class GenerationCancelled(Exception):  # noqa: N818 - it is no error
    """The caller cancelled the generation before all responses were complete."""


@dataclass(frozen=True)
class SamplingParams:
    """How to sample. `key` seeds the randomness: response i of a call draws from (*key, i) and nothing else, so the
    result depends neither on the engine's layout nor on what was sampled before."""

    temperature: float
    top_p: float
    max_new_tokens: int
    key: tuple[int, ...]


@dataclass(frozen=True)
class Request:
    """One response to sample, the fields that its rollout carries along, and the conversation of its prompt.

    `teacher_messages` is the conversation that the teacher reads instead: the same one, unless `teacher.prompt` gives
    the teacher another.
    """

    prompt_ids: list[int]
    prompt: str | None = None
    data_source: str | None = None
    answer: str | None = None
    messages: tuple[dict[str, str], ...] = ()
    teacher_messages: tuple[dict[str, str], ...] = ()


class RolloutEngine(Protocol):
    """Samples from one model. Every rank of the world makes one and calls its methods with the same arguments.

    The engine knows a model by its Hugging Face tensor names only, so that it can be another program.
    """

    def generate(
        self, requests: list[Request], sampling: SamplingParams, should_cancel: Callable[[], bool] | None = None
    ) -> list[Rollout]:
        """One rollout per request, in order, the same on every rank.

        Args:
            should_cancel: asked now and then, on every rank, whether to stop; the ranks' answers can differ.

        Raises:
            GenerationCancelled: on all ranks, if one of them was told to stop before its part was complete.
            ValueError: a prompt leaves no room for a response.
        """
        ...

    def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Takes the weights to sample from.

        Args:
            weights: (HF name, whole tensor), each tensor of the model once; the same stream on every rank that trains
                the model, empty on the others. Making the stream is a collective operation, so an engine consumes it to
                the end on all ranks or begins it on none. A tensor is valid until the next one is asked for.
        """
        ...

    def load(self, read: TensorReader, source: str) -> None:
        """Takes the weights from files instead, e.g. those of a finished run.

        Args:
            read: gives a tensor by its HF name.
            source: where the tensors come from, for messages.

        Raises:
            ValueError: the weights are not of this engine's architecture.
        """
        ...
