"""What the training loop asks of a rollout engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from nemo_oprd.batch.types import Rollout
from nemo_oprd.distillation.student import Student


class GenerationCancelled(Exception):  # noqa: N818 - it is no error
    """The caller wanted the responses no more before they were whole."""


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
    """One response to sample, what its rollout shall carry along, and the conversation that the prompt is made of.

    `teacher_messages` is the conversation that the teacher reads instead: the same, unless `teacher.prompt` tells it
    more.
    """

    prompt_ids: list[int]
    prompt: str | None = None
    data_source: str | None = None
    answer: str | None = None
    messages: tuple[dict[str, str], ...] = ()
    teacher_messages: tuple[dict[str, str], ...] = ()


class RolloutEngine(Protocol):
    """Samples from the student. Every rank of the world calls both methods, with the same arguments."""

    def generate(
        self, requests: list[Request], sampling: SamplingParams, give_up: Callable[[], bool] | None = None
    ) -> list[Rollout]:
        """One rollout per request, in order, the same on every rank.

        Args:
            give_up: asked now and then, on every rank, whether the responses are still wanted; answers can differ.

        Raises:
            GenerationCancelled: on all ranks, where one gave up before its part was done.
        """
        ...

    def update_weights(self, student: Student) -> None:
        """Refits the engine with the student's current weights."""
        ...
