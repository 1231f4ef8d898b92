"""The language model inside a checkpoint of a model for text and pictures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from nemo_oprd.megatron.weights.hf import HFCheckpoint
from nemo_oprd.megatron.weights.hf_export import write_hf_model
from nemo_oprd.models import read_hf_config
from nemo_oprd.models.complete_config import language_model_config

TEXT = {"model_type": "qwen3_5_text", "hidden_size": 32, "tie_word_embeddings": False}
WHOLE: dict[str, Any] = {
    "model_type": "qwen3_5", "architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": TEXT,
    "vision_config": {"depth": 2}, "dtype": "bfloat16", "tie_word_embeddings": False,
}  # fmt: skip
EXPERTS = "model.language_model.layers.0.mlp.experts."


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(WHOLE))
    tensors = {
        "model.language_model.embed_tokens.weight": torch.arange(6.0).view(3, 2),
        EXPERTS + "gate_up_proj": torch.arange(24.0).view(2, 6, 2),
        "model.visual.merger.norm.weight": torch.ones(2),
        "lm_head.weight": torch.ones(3, 2),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path


def test_the_language_model_is_read_by_its_own_names(directory: Path) -> None:
    checkpoint = HFCheckpoint(directory)
    expected = load_file(directory / "model.safetensors")
    names = {"model.embed_tokens.weight", "model.visual.merger.norm.weight", "lm_head.weight"}
    assert set(checkpoint.keys()) == {*names, "model.layers.0.mlp.experts.gate_up_proj"}
    embedding = checkpoint["model.embed_tokens.weight"]
    assert torch.equal(embedding, expected["model.language_model.embed_tokens.weight"])
    up = "model.layers.0.mlp.experts.1.up_proj.weight"
    assert checkpoint.shape(up) == (3, 2)
    assert torch.equal(checkpoint[up], expected[EXPERTS + "gate_up_proj"][1, 3:])


def test_an_export_is_a_language_model_by_itself(directory: Path, tmp_path: Path) -> None:
    tensors = {"model.embed_tokens.weight": torch.ones(3, 2)}
    write_hf_model(iter(tensors.items()), directory, tmp_path / "out", torch.float32)
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written == {**TEXT, "architectures": ["Qwen3_5ForCausalLM"], "dtype": "float32"}
    assert read_hf_config(tmp_path / "out") == written


def test_end_ids_are_those_of_the_language_model() -> None:
    both = {**WHOLE, "eos_token_id": 5, "text_config": {**TEXT, "eos_token_id": 7}}
    assert language_model_config({**WHOLE, "eos_token_id": 5}, "config.json")["eos_token_id"] == 5
    assert language_model_config(both, "config.json")["eos_token_id"] == 7


def test_the_whole_says_whether_embeddings_are_tied() -> None:
    """As for transformers, whose configs of Qwen3-VL's experts have another default for the language model."""
    assert TEXT["tie_word_embeddings"] is False
    assert language_model_config({**WHOLE, "tie_word_embeddings": True}, "config.json")["tie_word_embeddings"] is True


def test_other_configs_are_left_alone_and_contradictions_refused() -> None:
    other = {"model_type": "gemma", "text_config": {"model_type": "x"}}
    assert language_model_config(other, "config.json") is other
    with pytest.raises(ValueError, match="dtype='float16', but 'bfloat16' in text_config; expected one value"):
        language_model_config(
            {**WHOLE, "dtype": "float16", "text_config": {**TEXT, "dtype": "bfloat16"}}, "config.json"
        )
    with pytest.raises(ValueError, match="text_config=None; expected the language model's config"):
        language_model_config({**WHOLE, "text_config": None}, "config.json")
