"""Writes an HF model directory from a stream of named tensors: bounded shards, index, config and tokenizer files."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from nemo_oprd.data.tokenizer import copy_tokenizer_files
from nemo_oprd.models import read_hf_config
from nemo_oprd.models.architecture import code_files
from nemo_oprd.models.quantization import unquantized
from nemo_oprd.runtime.files import replacing_directory

# tensors that transformers keeps in float32 in models of any dtype: the biases of routers
FLOAT32 = "e_score_correction_bias"


def write_hf_model(
    tensors: Iterable[tuple[str, torch.Tensor]],
    source: Path,
    target: Path,
    dtype: torch.dtype,
    shard_bytes: int = 4 << 30,
    *,
    config_changes: Mapping[str, object] | None = None,
) -> None:
    """Streams `tensors` into `target`, holding at most one shard in memory; config and tokenizer come from `source`.

    The model is written beside `target` and renamed at the end; an earlier export at `target` is replaced.

    Args:
        config_changes: keys of config.json that differ from those of `source`.

    Raises:
        ValueError: `source` has no readable config.json.
        OSError: the disk is full or a file can't be written; the error names `target`.
    """
    with replacing_directory(target) as partial:
        shards, total = _write_shards(tensors, partial, dtype, shard_bytes)
        _name_shards(partial, shards, total)
        hf_config = dict(unquantized(read_hf_config(source)))
        hf_config["dtype" if "dtype" in hf_config else "torch_dtype"] = str(dtype).removeprefix("torch.")
        hf_config |= config_changes or {}
        copy_tokenizer_files(source, partial)
        if not all((partial / name).is_file() for name in code_files(hf_config)):
            hf_config.pop("auto_map", None)
        (partial / "config.json").write_text(json.dumps(hf_config, indent=2) + "\n")


def _write_shards(
    tensors: Iterable[tuple[str, torch.Tensor]], directory: Path, dtype: torch.dtype, shard_bytes: int
) -> tuple[list[list[str]], int]:
    """Writes shard-0.safetensors, shard-1.safetensors, ...; returns tensor names per shard, and the total of bytes."""
    shards: list[list[str]] = []
    shard: dict[str, torch.Tensor] = {}
    size = total = 0

    def flush() -> None:
        nonlocal shard, size
        save_file(shard, directory / f"shard-{len(shards)}.safetensors", metadata={"format": "pt"})
        shards.append(list(shard))
        shard, size = {}, 0

    for name, tensor in tensors:
        # clone: tied and sliced tensors share storage, which safetensors refuses
        kept = tensor.detach().to("cpu", torch.float32 if name.endswith(FLOAT32) else dtype).contiguous().clone()
        needed = kept.nbytes
        if shard and size + needed > shard_bytes:
            flush()
        shard[name] = kept
        size += needed
        total += needed
    flush()
    return shards, total


def _name_shards(directory: Path, shards: list[list[str]], total: int) -> None:
    """Renames the shards to the names that transformers expects: one file, or numbered files with an index."""
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
        write_hf_model(stream, source, target, dtype)
    else:
        for _ in stream:  # every rank takes part in the collectives that gather the tensors
            pass
    dist.barrier()
