"""The rollouts of the current step on disk, so that an interrupted step does not have to sample them again.

Sampling is the longest part of a step. The rollouts are therefore written before they are used. A run that resumes from
its last checkpoint uses them, if they were sampled from that checkpoint's weights for the same prompts.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch.distributed as dist

from nemo_oprd.batch.types import Rollout
from nemo_oprd.fault_tolerance.files import write_atomically
from nemo_oprd.rollout.engine import Request, SamplingParams
from nemo_oprd.rollout.replay import read_rollouts, write_rollouts


class ResumeCache:
    """`pending.jsonl` holds the rollouts; `pending.json` holds their step and how they were sampled.

    The step identifies the weights that sampled the rollouts: those after that many steps. Rollouts of another step
    than the checkpoint's are not used. Every step overwrites both files, so a run that resumes from an earlier
    checkpoint never reaches a step for which it still has rollouts of the abandoned steps.
    """

    def __init__(self, directory: Path, weights: dict[str, str]) -> None:
        """`weights` identifies the initial weights and the precision; it is compared when rollouts are read."""
        self.rollouts, self.about = directory / "pending.jsonl", directory / "pending.json"
        self.weights = weights

    def put(self, step: int, rollouts: list[Rollout], sampling: SamplingParams) -> None:
        """Writes the rollouts of a step in place of the previous step's. Only the world's first rank writes."""
        if dist.get_rank() != 0:
            return
        # the description is removed first and written last, so it never describes the rollouts of another step
        self.about.unlink(missing_ok=True)
        write_rollouts(self.rollouts, rollouts)
        write_atomically(self.about, json.dumps(self._about(step, sampling, len(rollouts))) + "\n")

    def take(self, step: int, requests: list[Request], sampling: SamplingParams) -> list[Rollout] | None:
        """The rollouts on disk if they are those of this step, else None; the same on every rank."""
        answer: list[list[Rollout] | None] = [None]
        if dist.get_rank() == 0:
            answer[0] = self._read(step, requests, sampling)
        dist.broadcast_object_list(answer, src=0)
        return answer[0]

    def _read(self, step: int, requests: list[Request], sampling: SamplingParams) -> list[Rollout] | None:
        try:
            about = json.loads(self.about.read_text())
        except (FileNotFoundError, ValueError):
            return None
        if about != json.loads(json.dumps(self._about(step, sampling, len(requests)))):
            return None
        try:
            rollouts = read_rollouts(self.rollouts, 1 << 62)
        except ValueError:  # the file was damaged, for instance by a loss of power: the step samples again
            return None
        same_prompts = len(rollouts) == len(requests) and all(
            rollout.prompt_ids == request.prompt_ids for rollout, request in zip(rollouts, requests, strict=True)
        )
        if not same_prompts:
            return None
        # these fields come from the prompt file, which may have changed
        return [
            dataclasses.replace(rollout, prompt=request.prompt, data_source=request.data_source, answer=request.answer)
            for rollout, request in zip(rollouts, requests, strict=True)
        ]

    def _about(self, step: int, sampling: SamplingParams, count: int) -> dict[str, Any]:
        return {"step": step, "responses": count, "sampling": dataclasses.asdict(sampling), **self.weights}
