"""What the pool's workers measure of the memory that `nemo-oprd plan` estimates: live bytes, counted exactly."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from host_syncs import plain_causal_masks

from nemo_oprd.config.loading import load_config
from nemo_oprd.distillation.distiller import Distiller
from nemo_oprd.rollout.replay import read_rollouts
from nemo_oprd.run.models import distiller_for
from tests.support.live_bytes import LiveBytes
from tests.support.operations import count_operations


def live_bytes(overrides: list[str]) -> list[dict[str, Any]]:
    """One step on recorded rollouts; per rank its pipeline stages, and the bytes of the parts of its memory.

    `teacher` and `update` are the largest numbers of live bytes that the teacher's pass and the update add.
    """
    config = load_config("verify", overrides)
    distiller = distiller_for(config)
    student = distiller.student
    rollouts = read_rollouts(str(config.rollout.replay), student.spec.vocab_size)
    batch = distiller.batch(rollouts, distiller.objective_of(0, watch=False))
    with plain_causal_masks(), LiveBytes() as teaching:
        targets = distiller.targets(batch, batch.groups[0])
    accumulation = distiller.start(batch)
    with plain_causal_masks(), LiveBytes() as update:
        accumulation.forward_backward(batch.groups[0], targets)
    for group in batch.groups[1:]:
        accumulation.forward_backward(group, distiller.targets(batch, group))
    student.optimizer_step(0, batch.objective, accumulation.finish())
    found = {
        "stages": tuple(
            None if role.coords is None else role.coords.pipeline for role in (student.role, distiller.teachers[0].role)
        ),
        **_resident(distiller),
        "targets": sum(each.bytes_held for each in targets.values()),
        "teacher": teaching.peak,
        "update": update.peak,
    }
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, found)
    return everywhere


def _resident(distiller: Distiller) -> dict[str, int]:
    """Bytes of the tensors that stay between steps."""
    student = distiller.student
    optimizers = [] if student.optimizer is None else student.optimizer.chained_optimizers
    states = [value for each in optimizers for state in each.optimizer.state.values() for value in state.values()]
    copies = [
        shard
        for each in optimizers
        for name in ("shard_fp32_from_float16_groups", "fp32_from_float16_groups")
        for group in getattr(each, name, [])
        for shard in group
    ]
    buffers = [buffer.grad_data for chunk in student.ddp for buffer in chunk.buffers]
    teachers = [p for each in distiller.teachers for chunk in each.chunks or [] for p in chunk.parameters()]
    return {
        "weights": _storage_bytes([p for chunk in student.chunks for p in chunk.parameters()]),
        "gradients": _storage_bytes(buffers),
        "optimizer": _storage_bytes([value for value in states if torch.is_tensor(value) and value.numel() > 1])
        + _storage_bytes(copies),
        "teacher weights": _storage_bytes(teachers),
        "teacher's head": _storage_bytes([head.weight for head in student._teacher_heads if head is not None]),
    }


def _storage_bytes(tensors: list[torch.Tensor]) -> int:
    """Bytes of the storages of some tensors, each storage once."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def step_operations(overrides: list[str]) -> dict[str, float]:
    """Floating-point operations of matrix products of one step on one rank, as torch counts them."""
    config = load_config("verify", overrides)
    distiller = distiller_for(config)
    rollouts = read_rollouts(str(config.rollout.replay), distiller.student.spec.vocab_size)
    batch = distiller.batch(rollouts, distiller.objective_of(0, watch=False))
    with count_operations() as teacher:
        targets = distiller.targets(batch, batch.plan)
    accumulation = distiller.start(batch)
    with count_operations() as update:
        accumulation.forward_backward(batch.plan, targets)
    return {"teacher": float(teacher.get_total_flops()), "update": float(update.get_total_flops())}


def engine_bytes(overrides: list[str], prompt: int, responses: int) -> dict[str, int]:
    """Bytes of the in-process engine's weights, and of the KV cache of its largest batch, on one rank."""
    from unittest import mock

    from nemo_oprd.batch.layout import Layout
    from nemo_oprd.megatron.parallel import init_distributed
    from nemo_oprd.megatron.weights.hf import HFCheckpoint
    from nemo_oprd.models import read_model_spec
    from nemo_oprd.rollout import decoding as generation
    from nemo_oprd.rollout.engine import Request, SamplingParams
    from nemo_oprd.rollout.in_process_engine import MegatronEngine

    init_distributed()
    config = load_config("verify", overrides)
    source = str(config.student.hf_path)
    engine = MegatronEngine(
        config.rollout,
        read_model_spec(source),
        Layout(data=dist.get_world_size()),
        eos_ids=(),
        precision=config.precision,
    )
    engine.load(HFCheckpoint(source).__getitem__, source)
    assert engine.model is not None
    batches: list[Any] = []

    class Recorded(generation._Batch):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            batches.append(self)

    requests = [Request([(7 * i + t) % engine.spec.vocab_size for t in range(prompt)]) for i in range(responses)]
    with mock.patch.object(generation, "_Batch", Recorded):
        engine.generate(requests, SamplingParams(1.0, 1.0, config.rollout.max_new_tokens, (0,)))
    caches = [[t for pair in batch.cache.layers.values() for t in pair] for batch in batches]
    return {
        "copy": _storage_bytes(list(engine.model.parameters())),
        "cache": max(_storage_bytes(tensors) for tensors in caches),
        "batches": len(batches),
    }
