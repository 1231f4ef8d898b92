"""The head of a teacher that a server computes: found and read beside tensors of formats that only the server reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from nemo_oprd.megatron.weights.hf import HFCheckpoint, ServedHead
from nemo_oprd.models.served import read_served_spec

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
    head_of(tmp_path, CONFIG | {"model_type": "gemma2"}, torch.bfloat16)
    assert read_served_spec(tmp_path).output_cap == 30.0


@pytest.mark.parametrize(
    ("family", "key", "value", "scale"),
    [("cohere", "logit_scale", 0.0625, 0.0625), ("granite", "logits_scaling", 8.0, 0.125), ("qwen3", None, None, 1.0)],
)
def test_scale(tmp_path: Path, family: str, key: str | None, value: float | None, scale: float) -> None:
    changed = CONFIG | {"model_type": family} | ({} if key is None else {key: value})
    head_of(tmp_path, changed, torch.bfloat16)
    assert read_served_spec(tmp_path).output_scale == scale


def test_a_scale_of_zero_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"logits_scaling=0; expected a number other than 0"):
        head_of(tmp_path, CONFIG | {"model_type": "granite", "logits_scaling": 0}, torch.bfloat16)


@pytest.mark.parametrize("part", ["some text", [CONFIG], []])
def test_a_part_that_is_no_config_is_refused(tmp_path: Path, part: object) -> None:
    with pytest.raises(ValueError, match=r"config.json: text_config=.*; expected the language model's config: copy"):
        head_of(tmp_path, CONFIG | {"text_config": part}, torch.bfloat16)


def test_bias(tmp_path: Path) -> None:
    """A tensor of another shape is not it."""
    assert head_of(tmp_path, CONFIG, torch.bfloat16).bias() is None
    for length, is_read in ((12, True), (7, False)):
        bias = torch.arange(length).bfloat16()
        save_file({"lm_head.bias": bias, "lm_head.weight": torch.ones(12, 8)}, tmp_path / "model.safetensors")
        found = ServedHead(HFCheckpoint(tmp_path), read_served_spec(tmp_path)).bias()
        assert (found is not None and torch.equal(found, bias)) == is_read
