"""In-process generation without a cache, for models that Megatron-Bridge builds: every token is a pass over all others.

A response of n tokens costs about n times as much as reading it. That is for trying a family, for tests and for toys;
vLLM is for anything else. Any model samples this way, whatever its layers keep between tokens: keys and values, narrow
states, or the state of a gated delta net.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from nemo_oprd.batch.packing import Pack
from nemo_oprd.batch.types import Rollout
from nemo_oprd.data.tokenization.token_ids import TokenIds
from nemo_oprd.models.megatron.parallel import Role, device, on_device
from nemo_oprd.models.megatron.pipeline_schedule import make_microbatch
from nemo_oprd.rollout.in_process.sampling import SampledColumns, pick_tokens
from nemo_oprd.rollout.response import Response

# tokens between two calls of `should_cancel`
CANCEL_CHECK_EVERY = 16


@torch.no_grad()
def generate_whole_sequences(
    model: Any,
    role: Role,
    sampled: TokenIds,
    prompts: list[list[int]],
    uniforms: np.ndarray,
    limits: list[int],
    *,
    temperature: float,
    top_p: float,
    eos_ids: tuple[int, ...],
    should_cancel: Callable[[], bool] | None = None,
) -> list[Response] | None:
    """Samples one response for each of B prompts, with the arguments of `decoding.generate_batch`; None if cancelled.

    Args:
        model: the only chunk of a model without pipeline stages.
        role: of the model; its tensor ranks compute the same result.
    """
    sequences = [list(prompt) for prompt in prompts]
    stopped = [False] * len(prompts)
    draws = torch.from_numpy(uniforms).to(device())
    columns = SampledColumns(sampled, device())
    alive = [i for i, limit in enumerate(limits) if limit > 0]
    for t in range(uniforms.shape[1]):
        if not alive:
            break
        if should_cancel is not None and t and t % CANCEL_CHECK_EVERY == 0 and should_cancel():
            return None
        logits = columns.of(_last_logits(model, role, [sequences[i] for i in alive]))
        for i, token in zip(alive, pick_tokens(logits, draws[alive, t], temperature, top_p).tolist(), strict=True):
            sequences[i].append(token)
            stopped[i] = token in eos_ids
        alive = [i for i in alive if not stopped[i] and t + 1 < limits[i]]
    responses = [np.array(ids[len(prompt) :], np.int32) for ids, prompt in zip(sequences, prompts, strict=True)]
    return [Response(ids, end) for ids, end in zip(responses, stopped, strict=True)]


def _last_logits(model: Any, role: Role, sequences: list[list[int]]) -> torch.Tensor:
    """The logits [B, padded V] after each sequence."""
    rollouts = [Rollout(np.array([], np.int32), np.array(ids, np.int32)) for ids in sequences]
    pack = Pack.build(list(range(len(rollouts))), [len(ids) for ids in sequences], role.layout)
    microbatch = make_microbatch(pack, rollouts, role, None, None)
    microbatch.set_sequence_bounds(model)
    hidden = model(microbatch.input_ids, microbatch.sequences)  # [S, 1, D]
    last = on_device(pack.offsets + np.array(pack.lengths) - 1)
    return model.logits(hidden.index_select(0, last))[:, 0]
