"""The sizes of a model that vLLM servers compute, whose family need not be one of this project.

Parameters are counted in the headers of the weight files, and where there are none, by the shape of one of this
project's families. Caches and attention follow from names that families share.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_oprd.commands.plan.parameters import expert_parameters, model_parameters
from nemo_oprd.models import FAMILIES, ModelSpec, read_model_spec
from nemo_oprd.models.quantization import MXFP4, NUMBERS_OF_A_BYTE, Quantization, known_quantization
from nemo_oprd.models.weight_files import weight_files

_EXPERTS = re.compile(r"\.experts\.")
_LENGTH_BYTES = 8
# what families call the same number; the first one that a config has counts
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "num_attention_heads", "n_head")
_HEADS = ("num_attention_heads", "n_head")
_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k")
_ALL_EXPERTS = ("num_local_experts", "n_routed_experts", "num_experts", "moe_num_experts")


@dataclass(frozen=True)
class ServedModel:
    """A model that servers compute.

    Attributes:
        parameters: of the whole model.
        active: those that a token is multiplied with, the embedding left out.
        cached: numbers that a token leaves in the caches of all layers, sliding windows not taken into account.
        cached_per_worker: whether tensor-parallel workers divide these (latent attention is not divided).
        attention: heads times their size, of one layer.
        quantized: parameters that the files hold quantised, as the servers do.
        quantized_bytes: bytes of these with their scales.
    """

    parameters: int
    active: int
    cached: int
    cached_per_worker: bool
    attention: int
    quantized: int = 0
    quantized_bytes: int = 0

    def weight_bytes(self, value_bytes: float) -> float:
        """Bytes of all weights on a server, those that are not quantised with `value_bytes` each."""
        return (self.parameters - self.quantized) * value_bytes + self.quantized_bytes

    def cache_bytes(self, tensor: int, value_bytes: int) -> float:
        """Bytes of a token's cache on one of `tensor` GPUs."""
        return self.cached * value_bytes / (tensor if self.cached_per_worker else 1)


def served_model(directory: Path, spec: ModelSpec) -> ServedModel:
    """The numbers of the model in `directory`, whose spec says no more than depth, width and vocabulary.

    Raises:
        ValueError: there are no weight files, and the family is none of this project's.
    """
    text = {**spec.hf_config, **(spec.hf_config.get("text_config") or {})}
    tensors = _tensors(directory)
    sizes = {name: count for name, (count, _) in tensors.items()}
    quantization = known_quantization(spec.hf_config)
    parts = {} if quantization is None else quantization.names(sizes, str(directory))
    for name, (numbers, scales) in parts.items():
        count = sizes.pop(numbers) * (NUMBERS_OF_A_BYTE if quantization == Quantization(MXFP4) else 1)
        del sizes[scales]
        sizes[name] = count
    if not sizes and spec.model_type not in FAMILIES:
        raise ValueError(
            f"{directory}: there are no *.safetensors, and {spec.model_type} is none of this project's families, whose "
            "parameters can be counted without; expected weights: plan where they are"
        )
    total = sum(sizes.values()) or model_parameters(read_model_spec(directory))
    experts = sum(size for name, size in sizes.items() if _EXPERTS.search(name))
    if not sizes:
        own = read_model_spec(directory)
        experts = sum(expert_parameters(own, layer) for layer in range(1, own.num_layers + 1))
    share = _number(text, _CHOSEN, 1) / max(1, _number(text, _ALL_EXPERTS, 1)) if experts else 1.0
    embedding = spec.vocab_size * spec.hidden_size
    active = total - experts + int(experts * share) - (0 if spec.tied_embeddings else embedding)
    heads = max(1, _number(text, _HEADS, 1))
    head_size = int(text.get("head_dim") or spec.hidden_size // heads)
    latent = text.get("kv_lora_rank")
    per_layer = 2 * _number(text, _KV_HEADS, heads) * head_size
    if latent:
        per_layer = int(latent) + int(text.get("qk_rope_head_dim") or 0)
    quantized = sum(sizes[name] for name in parts), sum(tensors[part][1] for both in parts.values() for part in both)
    return ServedModel(total, active, per_layer * spec.num_layers, not latent, heads * head_size, *quantized)


def _number(text: Mapping[str, Any], names: tuple[str, ...], default: int) -> int:
    return int(next((text[name] for name in names if text.get(name) is not None), default))


def _tensors(directory: Path) -> dict[str, tuple[int, int]]:
    """Name -> (items, bytes) of every tensor in the weight files, from their headers alone."""
    found: dict[str, tuple[int, int]] = {}
    for file in weight_files(directory) if any(directory.glob("*.safetensors")) else ():
        with file.open("rb") as stream:
            header = json.loads(stream.read(int.from_bytes(stream.read(_LENGTH_BYTES), "little")))
        header.pop("__metadata__", None)
        for name, entry in header.items():
            start, stop = entry["data_offsets"]
            found[name] = math.prod(entry["shape"]), stop - start
    return found
