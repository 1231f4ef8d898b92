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
from nemo_oprd.models.megatron.parallel import first_ranks
from nemo_oprd.rollout.engine import Request, SamplingParams
from nemo_oprd.rollout.replay import read_rollouts, write_rollouts
from nemo_oprd.runtime.files import write_atomically


class ResumeCache:
    """`pending.jsonl` holds the rollouts; `pending.json` holds their step, their requests and how they were sampled.

    A step that a signal cancelled has rollouts of some requests only.

    The step identifies the weights that sampled the rollouts: those after that many steps. Rollouts of another step
    than the checkpoint's are not used. Every step overwrites both files, so a run that resumes from an earlier
    checkpoint never reaches a step for which it still has rollouts of the abandoned steps.
    """

    def __init__(self, directory: Path, weights: dict[str, str]) -> None:
        """`weights` identifies the initial weights and the precision; it is compared when rollouts are read."""
        self.rollouts, self.about = directory / "pending.jsonl", directory / "pending.json"
        self.weights = weights

    def put(self, step: int, rollouts: dict[int, Rollout], sampling: SamplingParams, count: int) -> None:
        """Writes rollouts, by the index of their request, in place of the previous step's, on the world's first rank.

        Some of the step's `count` rollouts may be missing.
        """
        if dist.get_rank() != 0:
            return
        # the description is removed first and written last, so it never describes the rollouts of another step
        self.about.unlink(missing_ok=True)
        write_rollouts(self.rollouts, list(rollouts.values()))
        about = {**self._about(step, sampling, count), "requests": list(rollouts)}
        write_atomically(self.about, json.dumps(about) + "\n")

    def take(self, step: int, requests: list[Request], sampling: SamplingParams) -> dict[int, Rollout]:
        """The rollouts on disk by the index of their request, if they are of this step; the same on every rank."""
        return first_ranks(self._read(step, requests, sampling) if dist.get_rank() == 0 else {})

    def _read(self, step: int, requests: list[Request], sampling: SamplingParams) -> dict[int, Rollout]:
        try:
            about = json.loads(self.about.read_text())
        except (FileNotFoundError, ValueError):
            return {}
        if not isinstance(about, dict):
            return {}
        indices = about.pop("requests", list(range(len(requests))))  # earlier versions kept complete steps only
        if about != json.loads(json.dumps(self._about(step, sampling, len(requests)))):
            return {}
        try:
            rollouts = read_rollouts(self.rollouts, 1 << 62)
        except ValueError:  # the file was damaged, for instance by a loss of power: the step samples again
            return {}
        kept = [requests[i] for i in indices]
        if [rollout.prompt_ids.tolist() for rollout in rollouts] != [request.prompt_ids for request in kept]:
            return {}
        # these fields come from the prompt file, which may have changed
        return {
            i: dataclasses.replace(rollout, prompt=told.prompt, data_source=told.data_source, answer=told.answer)
            for i, rollout, told in zip(indices, rollouts, kept, strict=True)
        }

    def _about(self, step: int, sampling: SamplingParams, count: int) -> dict[str, Any]:
        # a switch that is off is left out: files of versions that did not have it fit
        how = {name: value for name, value in dataclasses.asdict(sampling).items() if value is not False}
        return {"step": step, "responses": count, "sampling": how, **self.weights}
