"""What the pool's workers run: the doctor on a configuration, perhaps with something planted."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import replace
from io import StringIO
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import torch


def diagnose(config: str, overrides: list[str], plant: str | None = None, **settings: int) -> tuple[bool, list]:
    """(Whether something is wrong, the findings) of one doctor's visit.

    Args:
        plant: the name of a function below.
        settings: fields of `SampleSizes`.
    """
    from nemo_oprd.canary.layer_by_layer import layered_states
    from nemo_oprd.config.loading import load_config
    from nemo_oprd.run import canary
    from nemo_oprd.run.models import world_size
    from nemo_oprd.run.preflight import preflight
    from nemo_oprd.tools.doctor import examination as command
    from nemo_oprd.tools.doctor.findings import SampleSizes, for_diagnosis

    made: list[Any] = []

    def report(**arguments: bool) -> Any:
        made.append(command_report(**arguments))
        return made[-1]

    command_report = command.Report
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(command, "Report", report))
        # in this process, which has imported transformers, and kept by nobody
        stack.enter_context(mock.patch.object(canary, "reference_states", layered_states))
        cache = stack.enter_context(TemporaryDirectory())
        stack.enter_context(mock.patch.dict(os.environ, XDG_CACHE_HOME=cache))
        if plant is not None:
            stack.enter_context(globals()[plant]())
        stack.enter_context(redirect_stdout(StringIO()))
        torch.manual_seed(0)
        run, sizes = load_config(config, overrides), SampleSizes(**settings)
        wrong = command.doctor(run, preflight(for_diagnosis(run, sizes), world_size(), "doctor"), sizes)
    return wrong, made[0].findings


@contextmanager
def _changed_greedy(change: Callable[..., list[int]]) -> Iterator[None]:
    """The engine's greedy responses, changed: (the engine, the prompt, the response) -> the response."""
    from nemo_oprd.rollout.in_process_engine import MegatronEngine

    generate = MegatronEngine.generate

    def planted(self: Any, requests: list, sampling: Any, *rest: Any) -> list:
        rollouts = generate(self, requests, sampling, *rest)
        if sampling.temperature:
            return rollouts
        return [replace(r, response_ids=change(self, r.prompt_ids.tolist(), r.response_ids.tolist())) for r in rollouts]

    with mock.patch.object(MegatronEngine, "generate", planted):
        yield


@contextmanager
def rotated_otherwise() -> Iterator[None]:
    """Models whose frequencies are all a little lower, in training and in sampling."""
    from nemo_oprd.models.rope import Frequencies, Rope

    right = Rope.frequencies

    def lower(rope: Rope, head_dim: int) -> Frequencies:
        found = right(rope, head_dim)
        return replace(found, inv_freq=0.97 * found.inv_freq)

    with mock.patch.object(Rope, "frequencies", lower):
        yield


def vllm_of_any_head_size() -> Any:
    """vLLM without CUDA takes the heads of the tiny models, as its stand-in does."""
    from nemo_oprd.vllm import launch

    return mock.patch.object(launch, "CPU_HEAD_SIZES", range(1, 1000))


def first_token_lost() -> Any:
    """An engine whose responses begin one token late."""
    return _changed_greedy(lambda engine, prompt, response: response[1:])


def one_position_early() -> Any:
    """An engine that samples every token from the state before the right one."""

    def early(engine: Any, prompt: list[int], response: list[int]) -> list[int]:
        from nemo_oprd.rollout.decoding import generate_batch

        ids = list(prompt)
        for _ in response:
            (made,) = generate_batch(
                engine.model, engine.sampled, [ids[:-1]], _zeros(), [1], temperature=0.0, top_p=1.0, eos_ids=()
            ) or [None]
            assert made is not None
            ids += made.ids.tolist()
        return ids[len(prompt) :]

    return _changed_greedy(early)


def _zeros() -> Any:
    import numpy as np

    return np.zeros((1, 1))


def _noisy_teacher(size: float) -> Any:
    """A teacher whose targets differ by `size`, relative, from call to call."""
    from nemo_oprd.distillation.teacher import Teacher

    targets = Teacher.targets

    def planted(self: Any, *arguments: Any) -> Any:
        found = targets(self, *arguments)
        found.hidden = {
            layer: states * (1 + size * torch.randn(states.shape)) for layer, states in found.hidden.items()
        }
        return found

    return mock.patch.object(Teacher, "targets", planted)


def noise_in_the_targets() -> Any:
    """As of dropout."""
    return _noisy_teacher(0.01)


def rounding_in_the_targets() -> Any:
    """As of sums in another order."""
    return _noisy_teacher(1e-6)


def teacher_one_token_late() -> Any:
    """The teacher's states are taken one token too late."""
    from nemo_oprd.rollout.teacher_inputs import PromptInputs

    with_prompt = PromptInputs._with_prompt

    def planted(self: Any, rollout: Any, prompt: Any) -> Any:
        made, count = with_prompt(self, rollout, prompt), len(rollout.response_ids)
        return replace(made, teacher_response_ids=rollout.response_ids, teacher_index=[*range(1, count), -1])

    return mock.patch.object(PromptInputs, "_with_prompt", planted)
