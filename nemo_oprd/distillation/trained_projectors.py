"""The trained projectors of a bridge's student side: parameters of the model chunk that owns the layer.

Megatron treats these parameters like any replicated weight. DDP adds their gradients over data and context parallel
ranks, and under sequence parallelism `finalize_model_grads` adds them over tensor ranks. The optimizer updates them
with the student's settings, gradient clipping counts them once, and checkpoints hold them for any layout. They are
float32 in every run. No weight mapping names them, so weight sync and HF export omit them.

n rows, D hidden size of the student, R bridge rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from nemo_oprd.bridge.covariance import LayerPair
from nemo_oprd.bridge.maps import Bridge, apply_projector, draw_projector
from nemo_oprd.distillation.objective import Objective
from nemo_oprd.megatron.model import DistillingModel
from nemo_oprd.megatron.parallel import Role, device
from nemo_oprd.megatron.weights.hf import broadcast_from_stage

PARTS = ("student_projector", "student_bias")  # fields of `LayerBridge`


class LayerProjector(torch.nn.Module):
    """The student projector P_S [R, D] of one layer and, if the bridge has one, its bias b [R]."""

    def __init__(self, projector: torch.Tensor, bias: torch.Tensor | None, *, sequence_parallel: bool) -> None:
        super().__init__()
        self.student_projector = torch.nn.Parameter(projector.to(device(), torch.float32, copy=True))
        self.student_bias = None if bias is None else torch.nn.Parameter(bias.to(device(), torch.float32, copy=True))
        for parameter in self.parameters():
            # With sequence parallelism tensor ranks hold different rows, and this mark makes Megatron add their
            # gradients. Without it all tensor ranks hold all rows and have the same gradients.
            parameter.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]

    def forward(self, student_ND: torch.Tensor) -> torch.Tensor:
        """Returns P_S h_S + b: [n, D] -> [n, R]."""
        return apply_projector(self.student_projector, self.student_bias, student_ND)


def attach_projectors(chunks: Sequence[DistillingModel], role: Role, objective: Objective, seed: int) -> None:
    """Adds to each chunk the projectors of the chunk's supervised layers.

    They start as in the bridge; those of a full-width bridge are drawn from `seed`. Called after the weights are loaded
    and before DDP wraps the chunks.
    """
    match = objective.teachers[0]
    bridge = match.bridge
    assert bridge is not None
    for chunk in chunks:
        supervised = [layer.layer_number for layer in chunk.decoder.layers if layer.layer_number in match.layers]
        projectors = torch.nn.ModuleDict()
        for layer in supervised:
            start = bridge.for_layer(layer).student_projector
            if start is None:
                start = draw_projector(seed, layer, match.spec.hidden_size, objective.student.hidden_size)
            bias = bridge.for_layer(layer).student_bias
            projectors[str(layer)] = LayerProjector(start, bias, sequence_parallel=role.layout.sequence)
        if supervised:
            chunk.bridge = projectors


def projectors_of(chunks: Sequence[DistillingModel]) -> dict[int, LayerProjector]:
    """Returns student layer -> its projector, for the layers of this rank."""
    projectors: dict[int, Any] = {}
    for chunk in chunks:
        for layer, projector in getattr(chunk, "bridge", torch.nn.ModuleDict()).items():
            projectors[int(layer)] = projector
    return projectors


def student_projection(
    chunks: Sequence[DistillingModel], objective: Objective, teacher: int
) -> Callable[[int, torch.Tensor], torch.Tensor]:
    """Returns the map (layer, student states [n, D]) -> values [n, R] to compare; without a bridge: the states."""
    if objective.trains_bridge:
        projectors = projectors_of(chunks)
        return lambda layer, rows_ND: projectors[layer](rows_ND)
    bridge = objective.teachers[teacher].bridge
    return (lambda layer, rows_ND: rows_ND) if bridge is None else bridge.project_student


@torch.no_grad()
def gather_projectors(
    chunks: Sequence[DistillingModel],
    role: Role,
    objective: Objective,
    value: Callable[[torch.nn.Parameter], torch.Tensor],
) -> Iterator[tuple[LayerPair, str, torch.Tensor]]:
    """Yields (layer pair, name in `PARTS`, `value` of the parameter), layer by layer, on every rank of the role."""
    assert role.coords is not None
    projectors = projectors_of(chunks)
    for pair in (LayerPair(*layers) for layers in sorted(objective.teachers[0].layers.items())):
        stage = role.layout.stage_of_layer(pair.student, objective.student.num_layers)[0]
        for part in PARTS:
            parameter = getattr(projectors[pair.student], part) if pair.student in projectors else None
            tensor = None if parameter is None else value(parameter)
            if role.layout.pipeline > 1:
                tensor = broadcast_from_stage(tensor, stage, role)
            if tensor is not None:
                yield pair, part, tensor


def bridge_gradients(
    chunks: Sequence[DistillingModel], role: Role, objective: Objective
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields (name such as "bridge.s1.t2.student_projector", float32 gradient) on every rank of the role.

    Needs gradients that were accumulated with `whole_gradients`. Yields nothing if the bridge is frozen.
    """
    if objective.trains_bridge and role.is_member:
        gathered = gather_projectors(chunks, role, objective, lambda p: p.main_grad.float())  # type: ignore[attr-defined]
        yield from ((f"bridge.{pair.key}.{part}", tensor) for pair, part, tensor in gathered)


def trained_bridge(
    chunks: Sequence[DistillingModel], role: Role, objective: Objective, report: dict[str, Any]
) -> Bridge | None:
    """Returns the bridge with trained projectors and a `report` for its manifest, on rank 0's CPU; None elsewhere.

    Every rank of the role calls this.
    """
    bridge, trained = objective.teachers[0].bridge, dict[LayerPair, dict[str, torch.Tensor]]()
    assert bridge is not None and objective.trains_bridge
    for pair, part, tensor in gather_projectors(chunks, role, objective, lambda p: p.detach()):
        if dist.get_rank() == 0:
            trained.setdefault(pair, {})[part] = tensor.cpu()
    if dist.get_rank() != 0:
        return None
    pairs = {pair: replace(bridge.pairs[pair], **parts) for pair, parts in trained.items()}
    return replace(bridge, pairs=pairs, report=report)
