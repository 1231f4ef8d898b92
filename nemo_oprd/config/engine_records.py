"""The rollout engines by name, as far as a configuration depends on them: what each records of a response.

The engines themselves are in `rollout/engine_kinds.py`, which builds on this package.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

EngineName = Literal["megatron", "vllm"]


@dataclass(frozen=True)
class Records:
    """Why an engine does not record something of a response beside its ids, as clauses; None: it records it."""

    no_logprobs: str | None = None
    no_expert_routes: str | None = None  # the experts that tokens visit


RECORDS: dict[EngineName, Records] = {
    "megatron": Records(no_logprobs="which samples with the trainer's own weights and records no log-probabilities"),
    "vllm": Records(no_expert_routes="whose servers report no experts to this project"),
}
