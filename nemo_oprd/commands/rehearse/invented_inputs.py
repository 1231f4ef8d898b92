"""What a rehearsal has in place of the files that it does not read: rollouts and bridges."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from nemo_oprd.batch.types import Rollout
from nemo_oprd.config.schema import Config
from nemo_oprd.setup.idle_ranks import shares


def longest_responses(config: Config, prompt: int, response: int) -> list[Rollout]:
    """The rollouts of a step, all as long as they may be, divided evenly among the teachers.

    A teacher that reads other ids than the student has as many of them, and a target for every response token.
    """
    ids, logprobs = np.ones(prompt + response, np.int32), np.full(response, -1.0, np.float32)
    one = Rollout(ids[:prompt], ids[prompt:], finish_reason="length", logprobs=logprobs)
    if config.teacher.reads == "text" or config.own_prompts:
        index = np.arange(response, dtype=np.int32)
        one = replace(one, teacher_prompt_ids=ids[:prompt], teacher_response_ids=ids[prompt:], teacher_index=index)
    count = config.train.prompts_per_step * config.rollout.per_prompt
    if not config.teachers:
        return [one] * count
    each = zip(config.teachers, shares(count, len(config.teachers)), strict=True)
    sources = [
        teacher.data_sources[0] if teacher.data_sources else None for teacher, share in each for _ in range(share)
    ]
    return [replace(one, data_source=source) for source in sources]


def unread_bridges(config: Config) -> None:
    """Bridges of the run's rank between the configured layers, in place of those in `bridge.path`."""
    import torch

    from nemo_oprd.bridge.covariance import LayerPair
    from nemo_oprd.bridge.full_width import FULL_WIDTH
    from nemo_oprd.bridge.maps import Bridge, CapturePoint, LayerBridge
    from nemo_oprd.commands.plan.workload import bridge_rank
    from nemo_oprd.distillation import objective

    read = objective._bridge

    def unread(loss: Any, source: Any, student: Any, teacher: Any, pairs: dict[int, int]) -> Bridge | None:
        if source.bridge in (None, FULL_WIDTH):
            return read(loss, source, student, teacher, pairs)
        rank = bridge_rank(config, source.bridge, student.hidden_size, teacher.hidden_size)
        maps = LayerBridge(
            torch.zeros(teacher.hidden_size),
            torch.zeros(rank, teacher.hidden_size),
            torch.zeros(rank, student.hidden_size),
            torch.zeros(rank),
        )
        layers = {LayerPair(*pair): maps for pair in pairs.items()}
        identity = objective.model_identity(teacher, source.path)
        return Bridge(rank, layers, student, identity, CapturePoint(loss.position, loss.final_norm))

    objective._bridge = unread
