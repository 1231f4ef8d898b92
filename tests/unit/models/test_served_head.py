"""The head of a teacher that a server computes: found and read beside tensors of formats that only the server reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from nemo_oprd.models.served import read_served_spec
from nemo_oprd.models.weights.hf import HFCheckpoint
from nemo_oprd.models.weights.served_head import ServedHead

CONFIG = {
    "model_type": "qwen3", "num_hidden_layers": 1, "hidden_size": 8, "vocab_size": 12, "max_position_embeddings": 16,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip


def head_of(directory: Path, config: dict, stored: torch.dtype) -> ServedHead:
    head = torch.arange(96).view(12, 8).bfloat16()
    tensors = {"lm_head.weight": head, "model.embed_tokens.weight": -head}
    tensors["model.layers.0.mlp.up_proj.weight"] = torch.ones(24, 8).to(stored)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config))
    return ServedHead(HFCheckpoint(directory), read_served_spec(directory))


@pytest.mark.parametrize("stored", [torch.float8_e4m3fn, torch.int8, torch.uint8, torch.bfloat16], ids=str)
def test_other_tensors_may_have_any_format(tmp_path: Path, stored: torch.dtype) -> None:
    quantization = {"quantization_config": {"quant_method": "compressed-tensors"}}
    head = head_of(tmp_path, CONFIG | quantization, stored)
    assert head.find() == "lm_head.weight"
    assert torch.equal(head("output_layer.weight"), torch.arange(96).view(12, 8).bfloat16())


def test_a_bound_that_config_json_leaves_out_is_found(tmp_path: Path) -> None:
    """transformers bounds Gemma 2's logits by default."""
    gemma = CONFIG | {"model_type": "gemma2", "tie_word_embeddings": True}
    with pytest.raises(ValueError, match=r"final_logit_softcapping=30\.0 changes the logits of a teacher"):
        head_of(tmp_path, gemma, torch.bfloat16).find()
