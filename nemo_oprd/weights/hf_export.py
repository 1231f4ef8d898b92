"""Writes an HF model directory from a stream of named tensors: bounded shards, index, config and tokenizer files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from nemo_oprd.fault_tolerance.disk import naming
from nemo_oprd.tokenization.tokenizer import copy_tokenizer_files

SHARD_BYTES = 4 << 30


def write_hf_model(
    tensors: Iterable[tuple[str, torch.Tensor]],
    source: Path,
    target: Path,
    dtype: torch.dtype,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Streams `tensors` into `target`, holding at most one shard; config and tokenizer come from `source`.

    Written beside `target` and renamed at the end; an earlier export there is replaced.
    """
    partial = target.with_name(f".partial_{target.name}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    shards: list[list[str]] = []
    shard: dict[str, torch.Tensor] = {}
    size = total = 0

    def flush() -> None:
        nonlocal shard, size
        save_file(shard, partial / f"shard-{len(shards)}.safetensors", metadata={"format": "pt"})
        shards.append(list(shard))
        shard, size = {}, 0

    for name, tensor in tensors:
        # clone: tied and sliced tensors share storage, which safetensors refuses
        kept = tensor.detach().to("cpu", dtype).contiguous().clone()
        needed = kept.numel() * kept.element_size()
        if shard and size + needed > shard_bytes:
            flush()
        shard[name] = kept
        size += needed
        total += needed
    flush()
    _name_shards(partial, shards, total)
    hf_config = json.loads((source / "config.json").read_text())
    hf_config["dtype" if "dtype" in hf_config else "torch_dtype"] = str(dtype).removeprefix("torch.")
    (partial / "config.json").write_text(json.dumps(hf_config, indent=2) + "\n")
    copy_tokenizer_files(source, partial)
    shutil.rmtree(target, ignore_errors=True)
    partial.rename(target)


def _name_shards(directory: Path, shards: list[list[str]], total: int) -> None:
    """The names that transformers looks for: one file, or numbered ones with an index."""
    if len(shards) == 1:
        (directory / "shard-0.safetensors").rename(directory / "model.safetensors")
        return
    weight_map = {}
    for i, names in enumerate(shards):
        file = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        (directory / f"shard-{i}.safetensors").rename(directory / file)
        weight_map.update(dict.fromkeys(names, file))
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def export_hf(stream: Iterable[tuple[str, torch.Tensor]], source: Path, target: Path, dtype: torch.dtype) -> None:
    """Writes `stream` (HF name, whole tensor) as an HF directory; every rank of the world calls this, rank 0 writes."""
    if dist.get_rank() == 0:
        with naming(target):
            write_hf_model(stream, source, target, dtype)
    else:
        for _ in stream:  # takes part in the gathering
            pass
    dist.barrier()
