"""What the tests with a real vLLM share: whether it is installed, small models that it can run, and what it leaves."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import torch

from nemo_oprd.vllm.launch import DEFAULT_PYTHON

# vLLM's attention on CPU needs heads of 32 at least
SIZES: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.15,  # at the default, all distributions are nearly uniform
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
# responses grow beyond the original length
YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 8.0, "original_max_position_embeddings": 16}
MODELS: dict[str, dict[str, Any]] = {
    "qwen2_tied": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen2_untied": {"model_type": "qwen2", "tie_word_embeddings": False},
    "qwen3": {"model_type": "qwen3", "tie_word_embeddings": True, "head_dim": 32},
    "qwen3_moe": {
        "model_type": "qwen3_moe", "tie_word_embeddings": False, "head_dim": 32, "num_experts": 8,
        "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True,
    },
    "llama": {"model_type": "llama", "tie_word_embeddings": False, "head_dim": 32, "rope_parameters": LLAMA3},
    "qwen3_yarn": {"model_type": "qwen3", "tie_word_embeddings": True, "head_dim": 32, "rope_parameters": YARN},
}  # fmt: skip


def missing() -> str | None:
    """Why no vLLM server can be started here, None if one can."""
    if not DEFAULT_PYTHON.with_name("..").joinpath("ready").exists():
        return "vLLM's environment is missing: bash scripts/setup_vllm.sh makes it"
    return None


def make_model(name: str, directory: Path, seed: int = 0) -> Any:
    """A random model of a family in float32, saved in `directory`; biases and norms are random, too."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    settings = {**SIZES, **MODELS[name]}
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(directory)
    return model


def shared_memory() -> set[str]:
    """Names in shared memory that belong to no process: none maps them, and no guard is told to remove them.

    Servers of other programs on this machine do not count. Semaphores that Python has named do not count: those of a
    server have another name (nemo_oprd_serve.py), and a program maps its own a moment after it made them.
    """
    used = ""
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            for file in ("maps", "cmdline"):
                try:
                    used += (process / file).read_text()
                except OSError:  # ended meanwhile
                    continue
    names = set(os.listdir("/dev/shm"))
    # a server's files are named after the folder of the process that started it, which its guard is told to remove
    folders = {name: re.search(r"nemo_oprd_.+?_[0-9a-f]{12}", name) for name in names}
    return {
        name
        for name, folder in folders.items()
        if not name.startswith("sem.mp-")
        and f"/dev/shm/{name}" not in used
        and not (folder and f"/dev/shm/{folder[0]}" in used)
    }
