"""The rollout engines by name, as far as a configuration depends on them: what each records of a response.

The engines themselves are in `rollout/engine_kinds.py`, which builds on this package.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

EngineName = Literal["megatron", "vllm"]


@dataclass(frozen=True)
class Records:
    """What an engine records of a response beside its ids.

    Attributes:
        no_logprobs: why it records no log-probabilities, as a clause for messages; None: it records them.
        no_expert_routes: the same of the experts that tokens visit.
    """

    no_logprobs: str | None = None
    no_expert_routes: str | None = None


RECORDS: dict[EngineName, Records] = {
    "megatron": Records(no_logprobs="which samples with the trainer's own weights and records no log-probabilities"),
    "vllm": Records(no_expert_routes="whose servers report no experts to this project"),
}
