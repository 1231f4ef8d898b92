"""What the pool's workers run for the conversion tests: Megatron's own loader, saver and forward on a checkpoint."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from nemo_oprd.batch.layout import Layout
from nemo_oprd.batch.packing import Pack
from nemo_oprd.batch.types import Rollout
from nemo_oprd.distillation.capture import HiddenStateCapture
from nemo_oprd.megatron.model import DistillingModel, build_chunks
from nemo_oprd.megatron.parallel import Role, init_distributed, make_role
from nemo_oprd.megatron.pipeline_schedule import make_microbatch, run_schedule
from nemo_oprd.megatron.weights.hf import HFCheckpoint, gather_hf, load_hf
from nemo_oprd.megatron.weights.megatron_checkpoint import MegatronCheckpoint
from nemo_oprd.models import ModelSpec, read_model_spec


def _model(hf_path: str, layout: dict[str, int], dtype: str) -> tuple[ModelSpec, Role, list[DistillingModel]]:
    """A model whose weights are NaN until something loads them."""
    init_distributed()
    spec = read_model_spec(hf_path)
    role = make_role("student", Layout(**layout))
    chunks = build_chunks(spec, role, getattr(torch, dtype))
    with torch.no_grad():
        for chunk in chunks:
            chunk.eval()  # in training, Megatron's experts need sequence parallelism beside tensor parallelism
            for parameter in chunk.parameters():
                parameter.fill_(torch.nan)
    return spec, role, chunks


def _sharded_state(role: Role, chunks: list[DistillingModel], prefix: str = "") -> dict[str, Any]:
    metadata = {"dp_cp_group": role.groups.dp_cp}  # type: ignore[attr-defined]
    return {f"model{i}": chunk.sharded_state_dict(prefix, metadata=metadata) for i, chunk in enumerate(chunks)}


def _load(checkpoint: str, role: Role, chunks: list[DistillingModel]) -> None:
    """As a Megatron program loads: strictly, through its own loader."""
    from megatron.core import dist_checkpointing

    loaded = dist_checkpointing.load(_sharded_state(role, chunks), checkpoint)
    for i, chunk in enumerate(chunks):
        chunk.load_state_dict(loaded[f"model{i}"])


def differing_after_load(checkpoint: str, hf_path: str, layout: dict[str, int], dtype: str) -> list[str]:
    """HF names that differ from the source, on any rank, after Megatron loaded the checkpoint at `layout`."""
    spec, role, chunks = _model(hf_path, layout, dtype)
    _load(checkpoint, role, chunks)
    source = HFCheckpoint(hf_path)
    names = []
    for name, tensor in gather_hf(chunks, spec, role):
        names.append(name)
        if not torch.equal(tensor, source[name]):
            names[-1] += " differs"
    # a tied head's copy of the embedding, and the padding rows, are in no HF tensor
    if any(not bool(p.isfinite().all()) for chunk in chunks for p in chunk.parameters()):
        names.append("a parameter was not loaded")
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, names)
    expected = [part for rule in _rules(spec) for part in rule.hf]
    return sorted({name for ranks in everywhere for name in set(ranks) ^ set(expected)})


def object_messages(config: str, layout: dict[str, int]) -> list[dict[str, int]]:
    """Per rank, of one stream of a model's weights: its tensors, collectives of pickled objects, and their bytes."""
    import pickle
    from unittest import mock

    spec, role, chunks = _model(config, layout, "float32")
    found = {"tensors": 0, "messages": 0, "bytes": 0}

    def counted(call: Any) -> Any:
        def counting(*arguments: Any, **options: Any) -> Any:
            found["messages"] += 1
            found["bytes"] += len(pickle.dumps(arguments[-1]))
            return call(*arguments, **options)

        return counting

    with (
        mock.patch.object(dist, "broadcast_object_list", counted(dist.broadcast_object_list)),
        mock.patch.object(dist, "all_gather_object", counted(dist.all_gather_object)),
    ):
        found["tensors"] = sum(1 for _ in gather_hf(chunks, spec, role))
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, found)
    return everywhere


def _rules(spec: ModelSpec) -> list[Any]:
    return spec.family.param_mappings(spec)


def save_with_megatron(
    checkpoint: str, hf_path: str, layout: dict[str, int], prefix: str = "", optimizer: bool = False
) -> None:
    """Loads the HF weights at `layout` and saves them with Megatron's own saver.

    Args:
        prefix: put before the model's keys.
        optimizer: also save tensors named and shaped as an optimizer's state.
    """
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    spec, role, chunks = _model(hf_path, layout, "float32")
    load_hf(chunks, spec, role, HFCheckpoint(hf_path).__getitem__, hf_path)
    state = _sharded_state(role, chunks, prefix)
    if optimizer and dist.get_rank() == 0:
        # fewer layers than the model: must not be taken for it
        decoy = torch.full((1, spec.hidden_size), 7.0)
        for kind in ("exp_avg", "fp32_param"):
            for name in (
                "decoder.final_layernorm.weight",
                "decoder.layers.self_attention.linear_qkv.layer_norm_weight",
            ):
                key = f"optimizer.state.{kind}.{name}"
                state[key] = ShardedTensor.from_rank_offsets(key, decoy)
    if dist.get_rank() == 0:
        Path(checkpoint).mkdir()
    dist.barrier()
    # Megatron writes from a process of its own, which the pool's daemon processes may not start
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    # Megatron would spawn the queue's process, which imports torch for seconds on each rank
    with multiprocessing.get_context("fork").Manager() as manager:
        filesystem_async._results_queue = manager.Queue()
        dist_checkpointing.save(state, checkpoint)
    filesystem_async._results_queue = None


def deviations(checkpoint: str, hf_path: str, expected: str, layout: dict[str, int], by_name: bool) -> dict[str, float]:
    """Largest |difference| of each layer's hidden state and of the logits from those of HF, over all ranks.

    Args:
        expected: safetensors with `ids.{i}` [S_i], `hidden.{i}.{l}` [S_i, H] and `logits.{i}` [S_i, V].
        by_name: load through `MegatronCheckpoint` in place of Megatron's loader.
    """
    spec, role, chunks = _model(hf_path, layout, "float32")
    if by_name:
        load_hf(chunks, spec, role, MegatronCheckpoint(checkpoint).__getitem__, checkpoint)
    else:
        _load(checkpoint, role, chunks)
    reference = load_file(expected)
    ids = [reference[f"ids.{i}"].tolist() for i in range(sum(name.startswith("ids.") for name in reference))]
    rollouts = [Rollout(prompt_ids=sequence[:1], response_ids=sequence[1:]) for sequence in ids]
    pack = Pack.build(list(range(len(ids))), [len(sequence) for sequence in ids], role.layout)
    L = spec.num_layers
    wanted = {layer: [layer] for layer in range(1, L + 1)}
    observer = HiddenStateCapture(torch.arange(pack.total), wanted, final_layer=L)
    with torch.no_grad():
        run_schedule(chunks, role, [make_microbatch(pack, rollouts, role, observer, None)], forward_only=True)
        found = {f"hidden.{{i}}.{layer}": hidden for layer, hidden in observer.captured.items()}
        if L in observer.captured:
            found["logits.{i}"] = chunks[-1].logits(observer.captured[L][:, None])[:, 0, : spec.vocab_size]
    worst: dict[str, float] = {}
    for name, tensor in found.items():
        for i, offset in enumerate(pack.offsets[: len(ids)]):
            part = tensor[offset : offset + len(ids[i])]
            assert bool(part.isfinite().all()), name  # a NaN would pass for no deviation below
            difference = float((part - reference[name.format(i=i)]).abs().max())
            kind = name.replace(".{i}", "")
            worst[kind] = max(worst.get(kind, 0.0), difference)
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, worst)
    return {kind: max(w.get(kind, 0.0) for w in everywhere) for kind in sorted({k for w in everywhere for k in w})}
