"""Parameters that are trained in some steps only: what only the output term reaches, while that has no weight.

They are in the optimizer from the beginning, in parameter groups of their own, which are empty for it in steps whose
losses don't reach them: no update, no decay, no moments, no count. So they begin where their loss does, with fresh
moments and a step count of their own, and what they have is kept if their loss pauses. Megatron keeps one
step count for all parameters: while a checkpoint is written, they have the others' count, and theirs is kept beside it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

# Attribute of such parameters, and the key of their groups: one of the four by which Megatron tells groups apart when
# it loads a checkpoint. It means nothing else here: we set learning rates ourselves.
MARK, GROUP_KEY = "nemo_oprd_partial", "is_decoupled_lr"


class PartialTraining:
    """The groups of such parameters in Megatron's `optimizer`, and how many updates they had.

    Args:
        active: whether there are such parameters, on this or any other rank.
    """

    def __init__(self, optimizer: Any, *, active: bool) -> None:
        self.active, self.updates, self.updates_of_others = active, 0, 0
        self._parts = [part for part in optimizer.chained_optimizers if part.optimizer is not None] if active else []
        for part in self._parts:
            # What a first step would give them, so that there is something to save before. All get it: Megatron makes
            # state for what it loads only where there is none yet.
            for p in (p for group in part.optimizer.param_groups for p in group["params"]):
                state = {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
                counted = {"step": torch.zeros(())} if isinstance(part.optimizer, torch.optim.AdamW) else {}
                part.optimizer.state[p] = {**counted, **state}

    @contextmanager
    def step(self, *, reached: bool) -> Iterator[None]:
        """Around an optimizer step; `reached` says whether its losses reach these parameters."""
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
        """Within, all parameters have the step count of the others."""
        self._set_counts(self.updates_of_others)
        try:
            yield
        finally:
            self._set_counts(self.updates)

    def restore(self, state: dict[str, int]) -> None:
        """After loading: the counts that `state` gave."""
        self.updates, self.updates_of_others = state["updates"], state["updates_of_others"]
        self._set_counts(self.updates)

    @property
    def state(self) -> dict[str, int]:
        """What a checkpoint has to keep."""
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
                    part.optimizer.state[p]["step"] = torch.tensor(float(count))
