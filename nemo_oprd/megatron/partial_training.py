"""Partially trained parameters: those that only the output loss reaches, while a schedule sets that loss's weight to 0.

The optimizer holds these parameters from the beginning, in separate parameter groups. A step whose losses do not reach
them sees these groups empty: no update, no decay, no moments, no step count. Training of these parameters therefore
starts with the loss that reaches them, with fresh moments and a separate step count, and their state is kept while that
loss pauses. Megatron saves one step count for all parameters. While a checkpoint is written, partially trained
parameters have the step count of the other parameters; their own count is saved separately (`PartialTraining.state`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from nemo_oprd.megatron.optimizer_state import first_state

# The attribute of partially trained parameters, and the key of their groups. The key is one of the four by which
# Megatron distinguishes groups when it loads a checkpoint; it has no other effect, because `set_learning_rate` sets all
# rates.
MARK, GROUP_KEY = "nemo_oprd_partial", "is_decoupled_lr"


class PartialTraining:
    """The groups of partially trained parameters in Megatron's `optimizer`, and their number of updates.

    `active` says whether any rank has such parameters.
    """

    def __init__(self, optimizer: Any, *, active: bool) -> None:
        self.active, self.updates, self.updates_of_others = active, 0, 0
        self._parts = [part for part in optimizer.chained_optimizers if part.optimizer is not None] if active else []
        for part in self._parts:
            # The state that a first step would create, so that it can be saved before that step. All parameters get it:
            # when Megatron loads a checkpoint, it creates missing state only if there is no state at all.
            for p in (p for group in part.optimizer.param_groups for p in group["params"]):
                part.optimizer.state[p] = first_state(p, counted=isinstance(part.optimizer, torch.optim.AdamW))

    @contextmanager
    def step(self, *, reached: bool) -> Iterator[None]:
        """Wraps an optimizer step; `reached`: whether the losses of the step reach the partially trained parameters."""
        if not self.active:
            yield
            return
        left_out = [] if reached else [g for part in self._parts for g in self._groups(part, partial=True)]
        parameters = [group["params"] for group in left_out]
        for group in left_out:
            group["params"] = []
        try:
            yield
        finally:
            for group, kept in zip(left_out, parameters, strict=True):
                group["params"] = kept
        self.updates += reached
        self.updates_of_others += 1

    @contextmanager
    def one_count(self) -> Iterator[None]:
        """Gives the partially trained parameters the step count of the other parameters, within the context."""
        self._set_counts(self.updates_of_others)
        try:
            yield
        finally:
            self._set_counts(self.updates)

    def restore(self, state: dict[str, int]) -> None:
        """Restores the counts that `state` returned, after a checkpoint is loaded."""
        self.updates, self.updates_of_others = state["updates"], state["updates_of_others"]
        self._set_counts(self.updates)

    @property
    def state(self) -> dict[str, int]:
        """The counts that a checkpoint must hold."""
        return {"updates": self.updates, "updates_of_others": self.updates_of_others}

    @staticmethod
    def _groups(part: Any, *, partial: bool) -> list[dict[str, Any]]:
        return [group for group in part.optimizer.param_groups if group[GROUP_KEY] == partial]

    def _set_counts(self, count: int) -> None:
        for part in self._parts:
            for group in self._groups(part, partial=True):
                if not isinstance(part.optimizer, torch.optim.AdamW):  # Apex and Transformer Engine count per group
                    group.pop("step", None)
                    if count:
                        group["step"] = count
                    continue
                for p in group["params"]:
                    part.optimizer.state[p]["step"] = torch.tensor(float(count), device=p.device)
