"""Random models, Qwen2 in general, as Hugging Face directories, and random rollouts for them.

Weights are drawn on the GPU if there is one, tensor by tensor and never in float32, so a 1.5B pair takes seconds.
"""

from __future__ import annotations

import json
import random
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from nemo_oprd.batch.types import Rollout
from nemo_oprd.rollout.replay import write_rollouts


@dataclass(frozen=True)
class Shape:
    """The shape of a model; the fields are keys of its config.json."""

    num_hidden_layers: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int
    max_position_embeddings: int


def save_random_model(
    path: Path,
    shape: Shape,
    *,
    seed: int,
    std: float,
    dtype: torch.dtype,
    model_type: str = "qwen2",
    tied: bool = False,
) -> None:
    """Writes config.json and a safetensors file: weights and biases of deviation `std`, norms of 1."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        model_type,
        **asdict(shape),
        tie_word_embeddings=tied,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    )
    config.dtype = dtype
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    config.architectures = [type(model).__name__]
    skeleton = model.state_dict()
    if tied:
        del skeleton["lm_head.weight"]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(seed)
    tensors = {}
    for name, empty in skeleton.items():
        tensor = torch.empty(empty.shape, dtype=dtype, device=device)
        tensor = tensor.fill_(1.0) if "norm" in name else tensor.normal_(0.0, std, generator=generator)
        tensors[name] = tensor.cpu()
    path.mkdir(parents=True)
    config.save_pretrained(path)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def save_random_rollouts(path: Path, shape: Shape, *, prompt: int, responses: list[int], seed: int = 0) -> None:
    """Writes one rollout per response length, each with a prompt of `prompt` tokens; the mask is 1 everywhere."""
    draw = random.Random(seed)
    ids = [[draw.randrange(shape.vocab_size) for _ in range(prompt + length)] for length in responses]
    write_rollouts(path, [Rollout(np.array(tokens[:prompt]), np.array(tokens[prompt:])) for tokens in ids])


def read_shape(path: Path) -> Shape:
    """The shape of a model that `save_random_model` wrote."""
    config = json.loads((path / "config.json").read_text())
    return Shape(**{name: config[name] for name in Shape.__dataclass_fields__})
