"""The student's side of a bridge where it is trained: parameters of the model chunk that owns the layer.

So everything else comes from Megatron, as for any replicated weight: DDP adds the gradients over data and context
parallel ranks (and, under sequence parallelism, `finalize_model_grads` over tensor ranks), the optimizer updates them
with the student's settings, clipping counts them once, checkpoints hold them at any layout. They are float32 whatever
the model is, and no weight mapping names them, so neither weight sync nor HF export sees them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from nemo_oprd.bridge.covariance import LayerPair
from nemo_oprd.bridge.full_width import draw_projector
from nemo_oprd.bridge.maps import Bridge, LayerBridge, apply_projector
from nemo_oprd.distillation.objective import Objective
from nemo_oprd.megatron.model import DistillingModel
from nemo_oprd.megatron.parallel import Role, device
from nemo_oprd.weights.hf import broadcast_from_stage

PARTS = ("student_projector", "student_bias")


class LayerProjector(torch.nn.Module):
    """P_S [r, d_S] and, where the bridge has one, b [r] of one layer."""

    def __init__(self, projector: torch.Tensor, bias: torch.Tensor | None, *, sequence_parallel: bool) -> None:
        super().__init__()
        self.student_projector = torch.nn.Parameter(projector.to(device(), torch.float32, copy=True))
        self.student_bias = None if bias is None else torch.nn.Parameter(bias.to(device(), torch.float32, copy=True))
        for parameter in self.parameters():
            # tensor ranks then hold different rows, and Megatron adds their gradients; else all hold all rows
            parameter.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]

    def forward(self, student_ND: torch.Tensor) -> torch.Tensor:
        """P_S h_S + b: [n, d_S] -> [n, r]."""
        return apply_projector(self.student_projector, self.student_bias, student_ND)


def attach_projectors(chunks: Sequence[DistillingModel], role: Role, objective: Objective, seed: int) -> None:
    """Gives each chunk the projectors of its supervised layers, as in the bridge or, at full width, drawn from `seed`.

    After the weights are loaded, before DDP wraps the chunks.
    """
    match = objective.teachers[0]
    bridge = match.bridge
    assert bridge is not None
    for chunk in chunks:
        mine = [layer.layer_number for layer in chunk.decoder.layers if layer.layer_number in match.layers]
        projectors = torch.nn.ModuleDict()
        for layer in mine:
            start = bridge.for_layer(layer).student_projector
            if start is None:
                start = draw_projector(seed, layer, match.spec.hidden_size, objective.student.hidden_size)
            bias = bridge.for_layer(layer).student_bias
            projectors[str(layer)] = LayerProjector(start, bias, sequence_parallel=role.layout.sequence)
        if mine:
            chunk.bridge = projectors


def projectors_of(chunks: Sequence[DistillingModel]) -> dict[int, LayerProjector]:
    """Student layer -> its projector, for the layers of this rank."""
    found: dict[int, Any] = {}
    for chunk in chunks:
        for layer, projector in getattr(chunk, "bridge", torch.nn.ModuleDict()).items():
            found[int(layer)] = projector
    return found


@torch.no_grad()
def gather_projectors(
    chunks: Sequence[DistillingModel],
    role: Role,
    objective: Objective,
    value: Callable[[torch.nn.Parameter], torch.Tensor],
) -> Iterator[tuple[LayerPair, str, torch.Tensor]]:
    """(Layer pair, part, `value` of the parameter) on every rank of the role, layer by layer."""
    assert role.coords is not None
    mine = projectors_of(chunks)
    for pair in (LayerPair(*layers) for layers in sorted(objective.teachers[0].layers.items())):
        stage = role.layout.stage_of_layer(pair.student, objective.student.num_layers)[0]
        for part in PARTS:
            parameter = getattr(mine[pair.student], part) if pair.student in mine else None
            tensor = None if parameter is None else value(parameter)
            if role.layout.pipeline > 1:
                tensor = broadcast_from_stage(tensor, stage, role)
            if tensor is not None:
                yield pair, part, tensor


def with_projectors(maps: LayerBridge, trained: dict[str, torch.Tensor]) -> LayerBridge:
    """The maps of a pair with another student's side."""
    return LayerBridge(maps.teacher_mean, maps.teacher_basis, trained["student_projector"], trained.get("student_bias"))


def bridge_gradients(
    chunks: Sequence[DistillingModel], role: Role, objective: Objective
) -> Iterator[tuple[str, torch.Tensor]]:
    """("bridge.s1.t2.student_projector", whole float32 gradient), where they are whole. None if it is frozen."""
    if objective.trains_bridge and role.is_member:
        gathered = gather_projectors(chunks, role, objective, lambda p: p.main_grad.float())  # type: ignore[attr-defined]
        yield from ((f"bridge.{pair.key}.{part}", tensor) for pair, part, tensor in gathered)


def trained_bridge(
    chunks: Sequence[DistillingModel], role: Role, objective: Objective, report: dict[str, Any]
) -> Bridge | None:
    """The bridge with its trained projectors, on the CPU of the first rank; every rank of the role calls this.

    Args:
        report: what the bridge's manifest is to say of it.
    """
    bridge, trained = objective.teachers[0].bridge, dict[LayerPair, dict[str, torch.Tensor]]()
    assert bridge is not None and objective.trains_bridge
    for pair, part, tensor in gather_projectors(chunks, role, objective, lambda p: p.detach()):
        if dist.get_rank() == 0:
            trained.setdefault(pair, {})[part] = tensor.cpu()
    if dist.get_rank() != 0:
        return None
    pairs = {pair: with_projectors(bridge.pairs[pair], parts) for pair, parts in trained.items()}
    return replace(bridge, pairs=pairs, report=report)
