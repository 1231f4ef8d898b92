"""Computes the hidden states of a run's models, built and loaded at its layout, and compares them with transformers'.

`doctor` checks all models, `train` those that another program builds (`provider=`), once per weights, layout and
versions. Teachers behind servers pass the same comparison (`canary/`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from nemo_oprd.batch.plan import BatchPlan
from nemo_oprd.batch.token_table import make_rows
from nemo_oprd.batch.types import Rollout
from nemo_oprd.canary import CanaryVerdict, canary_key, canary_prompts, keep_verdict, kept_verdict, prove
from nemo_oprd.canary.prompts import sliding_window
from nemo_oprd.canary.reference import ReferenceStates, reference_states, why_unavailable
from nemo_oprd.config.teacher_kinds import TEACHER_KINDS
from nemo_oprd.distillation.capture import HiddenStateCapture
from nemo_oprd.distillation.distiller import Distiller
from nemo_oprd.distillation.teacher import MegatronTeacher
from nemo_oprd.megatron.model import DistillingModel
from nemo_oprd.megatron.parallel import Role, device, everyones, on_device
from nemo_oprd.megatron.pipeline_schedule import make_microbatch, run_schedule
from nemo_oprd.models import ModelSpec
from nemo_oprd.run.models import ModelFiles, RunPlan
from nemo_oprd.run.provider import OWN

# Hidden states of a model of this job on whole prompts, gathered from the ranks that compute them.
#
# N tokens of all prompts, D hidden size.


@torch.no_grad()
def model_states(
    chunks: list[DistillingModel], spec: ModelSpec, role: Role, prompts: Sequence[list[int]], depth: int
) -> dict[int, list[torch.Tensor]]:
    """Returns the states of all tokens in the layers 1 to `depth`. Every rank of the role calls this.

    The prompts are packed like a batch, into microbatches of the longest prompt's length; one data-parallel rank
    computes each prompt.

    Returns:
        Layer -> one float32 tensor [T, D] per prompt, on the CPU; the model's last layer after the final norm. Empty on
        all ranks but the role's first.
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


@dataclass(frozen=True)
class Proof:
    """The canary's result for one model; the same on every rank.

    Attributes:
        key: the model's group in the configuration.
        verdict: None if the model was refused, or not compared.
        line: the verdict, or why there is none.
    """

    key: str
    verdict: CanaryVerdict | None
    line: str
    refused: bool = False


@dataclass(frozen=True)
class _Built:
    """A model of this run. `chunks` are None on ranks outside the role; `in_memory` brings offloaded weights back."""

    key: str
    files: ModelFiles
    role: Role
    chunks: list[DistillingModel] | None
    depth: int
    router_dtype: str | None
    in_memory: AbstractContextManager[None]


def prove_models(plan: RunPlan, distiller: Distiller, *, provided_only: bool = False) -> Iterator[Proof]:
    """Yields the proof of each model with weights of its own. Every rank of the world consumes all of them.

    The models must still hold the weights of their files.

    Args:
        provided_only: leave out the models that this project builds, whose families its tests check.
    """
    for teacher, model in zip(distiller.teachers, plan.spec.models.teachers, strict=True):
        if model.model.served:  # its servers have proven it at their start
            from nemo_oprd.vllm.teacher_servers import ServedTeacher

            assert isinstance(teacher, ServedTeacher)
            verdict = everyones(teacher.servers.verdict)[teacher.role.layout.first_rank]
            assert verdict is not None
            yield Proof(model.model.key, verdict, verdict.line)
    for built in _models(plan, distiller):
        source = built.files.source
        if provided_only and source.provider == OWN:
            continue
        why = "transformers does not read a Megatron checkpoint" if source.checkpoint else why_unavailable()
        if why is not None:
            yield Proof(built.key, None, f"states are not compared with transformers': {why}")
            continue
        with built.in_memory:
            yield _proof(built, plan.spec.config.precision)


def refuse_wrong_states(plan: RunPlan, distiller: Distiller) -> list[str]:
    """Checks the models that another program builds or serves; returns one line for each. Every rank calls this.

    Raises:
        ValueError: the states of a model are not transformers', or transformers does not run the model.
    """
    lines = []
    for proof in prove_models(plan, distiller, provided_only=True):
        if proof.refused:
            raise ValueError(f"{proof.key}.provider: {proof.line}")
        lines.append(f"{proof.key}: {proof.line}")
    return lines


def _models(plan: RunPlan, distiller: Distiller) -> Iterator[_Built]:
    """Yields the models with weights of their own in memory: the student, and the teachers that are not the student."""
    config, student = plan.spec.config, distiller.student
    router_dtype, depth = config.student.router_dtype, student.spec.num_layers
    files = plan.files.student
    yield _Built("student", files, student.role, student.chunks or None, depth, router_dtype, nullcontext())
    kind = TEACHER_KINDS[config.teacher.weights]
    if not kind.copied:
        return
    for teacher, files, model in zip(distiller.teachers, plan.files.teachers, plan.spec.models.teachers, strict=True):
        if not isinstance(teacher, MegatronTeacher):
            continue
        depth = plan.needs.teacher_depth(distiller.objective, teacher.number)
        dtype = None if kind.own_model else router_dtype
        key = model.model.key if kind.own_model else "teacher"
        yield _Built(key, files, teacher.role, teacher.chunks, depth, dtype, teacher.weights_on_device())


def _proof(built: _Built, precision: str) -> Proof:
    """Returns the proof of one model, cached or by comparison with transformers. Every rank of the world calls this."""
    spec, layout, first = built.files.spec, built.role.layout, built.role.layout.first_rank
    # Transformer Engine multiplies float32 matrices in TF32, which is between float32 and bfloat16
    exact = precision == "fp32" and built.chunks is not None and not _rounds(built.chunks[0])
    dtype = "float32" if everyones(exact)[first] else "bfloat16"
    window = sliding_window(spec.hf_config)
    prompts = canary_prompts(spec.vocab_size, window, 0, spec.max_positions)
    here, key, kept = dist.get_rank() == first, "", None
    if here:
        assert built.chunks is not None
        engine = f"{built.chunks[0].backend} {built.files.source.provider} depth {built.depth} {built.router_dtype}"
        directory = built.files.directory
        key = canary_key(directory, prompts=prompts, layout=repr(layout), dtype=f"{precision} {dtype}", engine=engine)
        kept = kept_verdict(key)
    kept = everyones(kept)[first]
    if kept is not None:
        return Proof(built.key, kept, f"{kept.line} (known from an earlier start)")
    found = {}
    if built.chunks is not None:
        found = model_states(built.chunks, spec, built.role, prompts, built.depth)
    verdict, line = None, ""
    if here:
        measure = functools.cache(lambda dtype: reference_states(built.files.directory, prompts, dtype))
        verdict, line = _compared(found, measure, spec.model_type, dtype, window, key)
    verdict, line = everyones((verdict, line))[first]
    return Proof(built.key, verdict, line, refused=verdict is None)


def _compared(
    found: dict[int, list[torch.Tensor]],
    measure: Callable[[str], ReferenceStates],
    family: str,
    dtype: str,
    window: int | None,
    key: str,
) -> tuple[CanaryVerdict | None, str]:
    """Compares states with transformers' and keeps the verdict; returns (verdict or None if refused, its line)."""
    try:
        verdict = prove(found, measure("float32"), family, dtype=dtype, measure=measure, window=window)
    except ValueError as error:
        return None, str(error)
    try:
        keep_verdict(key, verdict)
    except OSError as error:
        return verdict, f"{verdict.line} (not kept for the next start: {error})"
    return verdict, verdict.line


def _rounds(chunk: DistillingModel) -> bool:
    """Returns whether a chunk multiplies float32 matrices in TF32."""
    return chunk.backend == "transformer_engine" and torch.cuda.is_available()
