"""Toy models with more rows than tokens, whose rows without a token are likely, and tokenizers with more tokens."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

# logit of a planted row at the mean state; the others of a toy model are within about 8 of 0
PLANTED_LOGIT = 14.0


def add_tokens(model: Path, tokens: Mapping[str, int]) -> None:
    """Gives the toy's tokenizer in a model's directory further tokens, of any ids."""
    file = model / "tokenizer.json"
    content = json.loads(file.read_text())
    content["model"]["vocab"] |= tokens
    file.write_text(json.dumps(content))
    (model / "tokenizer.model").unlink(missing_ok=True)  # which would still have the old ones


def widen(model: Path, rows: int) -> None:
    """Pads embedding and head to `rows` rows, with small random numbers."""
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "vocab_size": rows}))
    tensors, generator = load_file(model / "model.safetensors"), torch.Generator().manual_seed(0)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        more = 0.02 * torch.randn(rows - len(tensors[name]), tensors[name].shape[1], generator=generator)
        tensors[name] = torch.cat([tensors[name], more])
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})


@torch.no_grad()
def make_likely(model: Path, ids: Iterable[int], texts: Sequence[list[int]]) -> float:
    """Makes rows of the head likely within the `texts`; returns the mean of their probability together."""
    from transformers import AutoModelForCausalLM

    whole = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    states = torch.cat([whole.model(torch.tensor([text])).last_hidden_state[0] for text in texts])
    mean, rows = states.mean(0), list(ids)
    tensors = load_file(model / "model.safetensors")
    tensors["lm_head.weight"][rows] = PLANTED_LOGIT * mean / mean.square().sum()
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    return float((states @ tensors["lm_head.weight"].T).softmax(-1)[:, rows].sum(-1).mean())
