"""An estimate of a step's seconds from a GPU's published numbers; `gpus.Assumptions` says what it rests on."""

from __future__ import annotations

from collections.abc import Sequence

from nemo_oprd.commands.plan.gpus import ASSUMED, Gpu
from nemo_oprd.commands.plan.operations import step_bytes, step_flops
from nemo_oprd.commands.plan.served import Servers
from nemo_oprd.commands.plan.workload import Workload
from nemo_oprd.layout import Layout


def bubble(layout: Layout, microbatches: int) -> float:
    """The share of a pipeline's time in which a rank waits: (P - 1) / (V m + P - 1)."""
    idle = layout.pipeline - 1
    return idle / (layout.virtual_pipeline * microbatches + idle)


def training_seconds(
    work: Workload,
    gpu: Gpu,
    student: Layout,
    teacher: Layout,
    *,
    gpus_per_node: int,
    servers: Sequence[Servers] = (),
) -> dict[str, float]:
    """Phase -> seconds of a step's teacher, update and communication: those of the fullest data-parallel rank.

    Args:
        servers: of the teachers that have some; these are asked one after the other, and after them the others.
    """
    flops, moved = step_flops(work), step_bytes(work, student)
    rate = gpu.flops * ASSUMED.compute
    link = gpu.link * ASSUMED.bandwidth
    crosses = student.size > gpus_per_node
    network = (gpu.network if crosses else gpu.link) * ASSUMED.bandwidth
    of_teacher, of_student = work.teacher_share(student, teacher), work.on(student).responses / work.responses
    # one data-parallel rank's responses, on the ranks that divide each of them
    own_flops = flops.teacher - sum(each.flops for each in servers)
    teacher_seconds = own_flops * of_teacher * teacher.data / teacher.size / rate
    teacher_seconds /= 1 - bubble(teacher, work.on(teacher).count)
    update = flops.update * of_student * student.data / student.size / rate
    update /= 1 - bubble(student, work.on(student).resident)
    between_experts = network if student.expert * student.expert_tensor > gpus_per_node else link
    exchange = (moved.tensor + moved.context) / link + moved.pipeline / network + moved.experts / between_experts
    updates = work.config.train.updates_per_rollout
    return {
        "teacher": teacher_seconds * (1 + 0.25 * exchange / max(update, 1e-9)) + sum(s.seconds for s in servers),
        "targets": moved.targets / network,
        "update": update + exchange * updates,
        "gradients and optimizer": moved.gradients / network * updates,
        "weights to the engine": moved.weights / network,
    }
