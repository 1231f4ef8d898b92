"""The rollouts of the step at work, kept so that an interruption does not cost them.

Sampling is the longest part of a step. What was sampled is written before anything is made of it; a run that goes on
from its last checkpoint takes it up, if it was sampled from that checkpoint's weights for the same prompts.
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
    """`pending.jsonl` holds the rollouts, `pending.json` for which step and how they were sampled.

    A step's weights are those after as many updates, so the step says which weights sampled: the file of any other step
    than the checkpoint's is of weights that will be made again, and is not used. Both files are overwritten with every
    step, so a run that goes back has no file of the later weights by the time it reaches their step again.
    """

    def __init__(self, directory: Path, weights: dict[str, str]) -> None:
        """`weights` names what the weights after no update are, and how they are computed with."""
        self.rollouts, self.about = directory / "pending.jsonl", directory / "pending.json"
        self.weights = weights

    def put(self, step: int, rollouts: list[Rollout], sampling: SamplingParams) -> None:
        """Keeps the rollouts of a step in place of the last one's. Only the world's first rank writes."""
        if dist.get_rank() != 0:
            return
        # what they are is said last and taken back first: rollouts are never taken for another step's
        self.about.unlink(missing_ok=True)
        write_rollouts(self.rollouts, rollouts)
        write_atomically(self.about, json.dumps(self._about(step, sampling, len(rollouts))) + "\n")

    def take(self, step: int, requests: list[Request], sampling: SamplingParams) -> list[Rollout] | None:
        """The kept rollouts, if they are those that the step would sample; the same answer on every rank."""
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
        except ValueError:  # a disk that lost it with the power; it is sampled anew
            return None
        same = len(rollouts) == len(requests) and all(
            rollout.prompt_ids == request.prompt_ids for rollout, request in zip(rollouts, requests, strict=True)
        )
        if not same:
            return None
        # what goes with a prompt is the prompt file's to say, which may have changed
        return [
            dataclasses.replace(rollout, prompt=request.prompt, data_source=request.data_source, answer=request.answer)
            for rollout, request in zip(rollouts, requests, strict=True)
        ]

    def _about(self, step: int, sampling: SamplingParams, count: int) -> dict[str, Any]:
        return {"step": step, "responses": count, "sampling": dataclasses.asdict(sampling), **self.weights}
