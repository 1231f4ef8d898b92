"""The hidden states of a model of this job on whole prompts, brought together from the ranks that compute them.

N tokens of all prompts, D hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist

from nemo_oprd.batch.plan import BatchPlan
from nemo_oprd.batch.token_table import make_rows
from nemo_oprd.batch.types import Rollout
from nemo_oprd.distillation.capture import HiddenStateCapture
from nemo_oprd.models import ModelSpec
from nemo_oprd.models.megatron.model import DistillingModel
from nemo_oprd.models.megatron.parallel import Role, device, on_device
from nemo_oprd.models.megatron.pipeline_schedule import make_microbatch, run_schedule


@torch.no_grad()
def model_states(
    chunks: list[DistillingModel], spec: ModelSpec, role: Role, prompts: Sequence[list[int]], depth: int
) -> dict[int, list[torch.Tensor]]:
    """The states of all tokens in the layers 1 to `depth`. Every rank of the role calls this.

    The prompts are packed as a batch is, into microbatches of the longest prompt's length; each prompt is computed by
    one data-parallel rank.

    Returns:
        Layer -> a float32 tensor [T, D] per prompt on the CPU, of the last layer after the final norm; empty on all
        ranks but the role's first.
    """
    coords, final_layer = role.member_coords, depth if depth == spec.num_layers else None
    rollouts = [Rollout(np.array([], np.int32), np.array(ids, np.int32)) for ids in prompts]
    lengths = [len(ids) for ids in prompts]
    table = make_rows(rollouts, positions="all", k=1, position="token", aggregation="token_mean")
    plan = BatchPlan.build(table, lengths, role.layout, max(lengths))
    layers = [layer for layer in role.layout.owned_layers(coords.pipeline, spec.num_layers) if layer <= depth]
    owned = plan.owned_rows(coords)
    own_rows, captures = [], []
    for local in plan.local_rows(coords):
        chosen = np.isin(local.table_index, owned)  # without sequence parallelism tensor ranks hold the same rows
        own_rows.append(local.table_index[chosen])
        rows = on_device(local.hidden_index[chosen])
        captures.append(HiddenStateCapture(rows, {layer: [layer] for layer in layers}, final_layer))
    microbatches = [
        make_microbatch(pack, rollouts, role, capture, depth)
        for pack, capture in zip(plan.packs[coords.data], captures, strict=True)
    ]
    run_schedule(chunks, role, microbatches, forward_only=True)
    index = on_device(np.concatenate(own_rows))
    found: dict[int, list[torch.Tensor]] = {}
    for layer in range(1, depth + 1):
        states_ND = torch.zeros(len(table), spec.hidden_size, device=device())
        if layer in layers:
            states_ND[index] = torch.cat([capture.captured[layer] for capture in captures]).float()
        # exact: each row is nonzero on one rank only
        dist.all_reduce(states_ND, group=role.member_groups.intra_dist_opt)
        if dist.get_rank() == role.layout.first_rank:
            found[layer] = list(states_ND.cpu().split(lengths))
    return found
