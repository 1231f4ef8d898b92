"""Layouts of the conversion tests, and what Hugging Face computes for a model."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tiny_models import SIZES

LAYOUTS: dict[str, dict[str, Any]] = {
    "TP1": {},
    "TP2": {"tensor": 2},
    "PP2": {"pipeline": 2},
    "PP2xVPP2": {"pipeline": 2, "virtual_pipeline": 2},
    "DP2": {"data": 2},
    "EP2": {"data": 2, "expert": 2},
    "TP2xEP2": {"tensor": 2, "expert": 2},
    "TP2xETP2": {"tensor": 2, "expert_tensor": 2, "dispatcher": "allgather"},
}


def ranks(layout: str) -> int:
    """Processes that a layout takes."""
    return prod(size for axis, size in LAYOUTS[layout].items() if axis in ("tensor", "pipeline", "data"))


def save_hf_states(
    path: Path, file: Path, lengths: tuple[int, ...] = (23, 9), dtype: torch.dtype = torch.float32
) -> None:
    """Writes the ids, hidden states and logits that Hugging Face computes for sequences of these lengths."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    model.set_experts_implementation("eager")
    generator = torch.Generator().manual_seed(0)
    states = {}
    for i, length in enumerate(lengths):
        ids = torch.randint(SIZES["vocab_size"], (length,), generator=generator)
        with torch.no_grad():
            out = model(ids[None], output_hidden_states=True)
        states |= {f"ids.{i}": ids, f"logits.{i}": out.logits[0]}
        states |= {f"hidden.{i}.{layer}": state[0] for layer, state in enumerate(out.hidden_states) if layer > 0}
    save_file(states, file)
