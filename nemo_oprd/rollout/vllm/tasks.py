"""What a call of `generate` asks servers for: one request per response."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nemo_oprd.data.tokenization.token_ids import TokenIds
from nemo_oprd.rollout.engine import Request, SamplingParams


@dataclass(frozen=True)
class Task:
    """The requests of a call, and the limits that all responses share."""

    requests: Sequence[Request]
    sampling: SamplingParams
    max_positions: int
    eos_ids: tuple[int, ...]
    known_ids: TokenIds
    timeout_s: float

    def body(self, index: int) -> dict[str, Any]:
        """The request of one response. Unknown sampling parameters are ignored by the server without a word."""
        request = self.requests[index]
        sampling, number = request.sampled or (self.sampling, index)
        return {
            "token_ids": [*map(int, request.prompt_ids)],
            "sampling_params": {
                "max_tokens": sampling.limit_of(request, self.max_positions),
                "temperature": sampling.temperature,
                "top_p": sampling.top_p if sampling.temperature else 1.0,
                "seed": seed_of(sampling.key_of(request, number)),
                "logprobs": 0,  # of the sampled id only
                # the ids that end a response are ours, whatever generation_config.json says
                "ignore_eos": True,
                "stop_token_ids": list(self.eos_ids),
                "detokenize": False,
            },
        }


def seed_of(key: tuple[int, ...]) -> int:
    """The seed of a response, or of a part; 32 bits, of which every one depends on all of the key."""
    return int(np.random.SeedSequence(key).generate_state(1)[0])
