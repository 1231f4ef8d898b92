"""The frozen teacher: reads the rollouts and hands every student rank the hidden states that it is to match.

No gradients, no DDP buffers, no LM head, no layer deeper than the deepest one that is asked for. What leaves a layer is
compacted to the supervised rows at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from nemo_oprd.batch import BatchPlan
from nemo_oprd.families import ModelSpec
from nemo_oprd.megatron.capture import Capture
from nemo_oprd.megatron.model import DistillingModel
from nemo_oprd.megatron.parallel import Role, device
from nemo_oprd.megatron.step import make_microbatch, run_schedule
from nemo_oprd.teacher.transport import Shard, exchange, gather_replicas, plan_transfers
from nemo_oprd.types import Rollout, TeacherTargets


@dataclass
class Teacher:
    """The teacher on this rank; on ranks without the role `chunks` is None and it only takes part in transfers.

    `layers` maps student layers to teacher layers; `final_layer` is the teacher layer taken after the final norm.
    """

    spec: ModelSpec
    role: Role
    chunks: list[DistillingModel] | None
    layers: dict[int, int]
    final_layer: int | None
    dtype: torch.dtype
    host_weights: list[torch.Tensor] | None = None

    def offload(self) -> None:
        """Moves the weights to host memory (pinned where there is CUDA); `targets` brings them back while it runs."""
        if self.host_weights is None:
            pin = torch.cuda.is_available()
            # frozen, so one copy serves for ever
            self.host_weights = [
                p.detach().to("cpu", copy=True).pin_memory() if pin else p.detach().clone() for p in self._parameters()
            ]
        for parameter in self._parameters():
            parameter.data = parameter.data.new_empty(0)

    @contextmanager
    def _weights_here(self) -> Iterator[None]:
        if self.host_weights is None:
            yield
            return
        for parameter, host in zip(self._parameters(), self.host_weights, strict=True):
            parameter.data = host.to(device(), non_blocking=True, copy=True)
        yield
        self.offload()

    def _parameters(self) -> list[torch.nn.Parameter]:
        return [p for chunk in self.chunks or [] for p in chunk.parameters()]

    @property
    def depth(self) -> int:
        """The deepest teacher layer that is needed."""
        return max(self.layers.values())

    @torch.no_grad()
    def targets(
        self, rollouts: list[Rollout], plan: BatchPlan, student_plan: BatchPlan, student_role: Role, student_depth: int
    ) -> TeacherTargets:
        """Forward over `rollouts`, then the exchange. Every rank of the world calls this.

        Args:
            plan: the rollouts packed for the teacher's layout.
            student_plan: the same rollouts packed for the student's layout.
            student_depth: number of layers of the student.
        """
        outgoing = self._capture(rollouts, plan) if self.chunks is not None else None
        transfers = plan_transfers(
            plan, student_plan, self.layers, self.spec.num_layers, student_depth, rank=dist.get_rank()
        )
        wanted, wanted_layers = None, []
        if student_role.at is not None:
            wanted = student_plan.share(student_role.at)
            owned = student_plan.layout.owned_layers(student_role.at.pipeline, student_depth)
            wanted_layers = [layer for layer in sorted(self.layers) if layer in owned]
        shard, received = exchange(
            transfers, outgoing, self.layers, wanted, wanted_layers, self.spec.hidden_size, self.dtype, device()
        )
        if shard is None or student_role.at is None:
            return TeacherTargets(bytes_received=received)
        if student_plan.replicated:
            full = np.concatenate([held.row for held in student_plan.held(student_role.at)])
            shard = gather_replicas(shard, full, student_role.groups.tp)  # type: ignore[attr-defined]
        return TeacherTargets(shard.values, received)

    def _capture(self, rollouts: list[Rollout], plan: BatchPlan) -> Shard:
        assert self.role.at is not None and self.chunks is not None
        at, here = self.role.at, device()
        mine = plan.share(at)
        wanted_here = np.zeros(len(plan.table), dtype=bool)
        wanted_here[mine] = True
        owned = set(plan.layout.owned_layers(at.pipeline, self.spec.num_layers))
        layers = sorted(owned & set(self.layers.values()))
        observers, microbatches = [], []
        for pack, held in zip(plan.packs[at.data], plan.held(at), strict=True):
            rows = torch.from_numpy(held.local[wanted_here[held.row]]).to(here)
            observer = Capture(dict.fromkeys(layers, rows), self.final_layer)
            observers.append(observer)
            microbatches.append(make_microbatch(pack, rollouts, self.role, observer, self.depth))
        with self._weights_here():
            run_schedule(self.chunks, self.role, microbatches, forward_only=True)
        values = {layer: torch.cat([observer.captured[layer] for observer in observers]) for layer in layers}
        return Shard(mine, values)
