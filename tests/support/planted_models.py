"""Tiny models, a tokenizer for English and prompt files, into which `planted_faults.py` plants its faults.

The models are random Qwen2 of a few layers: the teacher is the student with a little noise, so that both have one
origin. The tokenizer has a token for each byte, one for each of a few words, and the marks of ChatML.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

SUFFIX = "Please reason step by step, and put your final answer within \\boxed{}."
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
WORDS = ("the", "step", "answer", "and", "apples", "has", "many")
TRAINING, VALIDATION = 1000, 64
LAYERS, HIDDEN, HEADS, POSITIONS = 6, 64, 4, 40960
Row = dict[str, Any]


def write_tokenizer(directory: Path, *, merges: bool = True) -> int:
    """Writes the tokenizer; returns its number of tokens.

    Args:
        merges: whether words are one token; without, all texts are cut into bytes, with the same vocabulary.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces, pairs = list(letters), []
    for word in WORDS:
        for end in range(2, len(word) + 1):
            if word[:end] not in pieces:
                pieces.append(word[:end])
                pairs.append((word[: end - 1], word[end - 1]))
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    made = Tokenizer(models.BPE(vocabulary, pairs if merges else []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    made.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
        "chat_template": TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return made.get_vocab_size()


def write_model(directory: Path, *, layers: int = LAYERS, hidden: int = HIDDEN, seed: int = 0, **changes: Any) -> None:
    """A random model with its tokenizer; a Qwen3-MoE if `changes` names `num_experts`."""
    from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    directory.mkdir(parents=True)
    rows = write_tokenizer(directory)
    ends = {"eos_token_id": rows - 1, "pad_token_id": rows - 3, "bos_token_id": rows - 3}
    settings = {
        "vocab_size": rows,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": 2,
        "max_position_embeddings": POSITIONS,
        "initializer_range": 0.1,  # so that layers change the states
        "tie_word_embeddings": False,
        **ends,
        **changes,
    }
    kinds = (Qwen3MoeConfig, Qwen3MoeForCausalLM) if "num_experts" in changes else (Qwen2Config, Qwen2ForCausalLM)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = kinds[1](kinds[0](**settings))
    model.save_pretrained(directory)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [rows - 1]}))


def disturbed(source: Path, target: Path, *, seed: int = 1, size: float = 0.05) -> None:
    """A copy with noise of `size` of each tensor's own: a checkpoint of the same origin."""
    shutil.copytree(source, target)
    generator = torch.Generator().manual_seed(seed)

    def disturb(tensors: dict[str, torch.Tensor]) -> None:
        for tensor in tensors.values():
            scale = tensor.float().std() if tensor.numel() > 1 else tensor.abs()
            tensor += size * scale * torch.randn(tensor.shape, generator=generator)

    edit_tensors(target, disturb)


def pruned(source: Path, target: Path, keep: list[int]) -> None:
    """A copy with the layers `keep` (from 1) alone, disturbed."""
    disturbed(source, target, seed=2)

    def prune(tensors: dict[str, torch.Tensor]) -> None:
        layers = {name: tensors.pop(name) for name in list(tensors) if name.startswith("model.layers.")}
        for name, tensor in layers.items():
            number, _, rest = name.removeprefix("model.layers.").partition(".")
            if int(number) + 1 in keep:
                tensors[f"model.layers.{keep.index(int(number) + 1)}.{rest}"] = tensor

    edit_tensors(target, prune)
    edit_json(target / "config.json", num_hidden_layers=len(keep), layer_types=["full_attention"] * len(keep))


def edit_tensors(directory: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Changes the tensors of a model in place."""
    file = directory / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, file, metadata={"format": "pt"})


def edit_json(file: Path, **changes: Any) -> None:
    """Changes keys of a JSON file; None removes one."""
    content = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def problems(count: int, seed: int, source: str = "sums") -> list[Row]:
    """Word problems with the suffix; no two seeds share one, because the numbers of a seed are its own residues."""
    rng = np.random.default_rng(seed)
    rows = []
    for number in range(count):
        a, b = (int(x) * 8 + seed % 8 for x in rng.integers(100, 9000, 2))
        text = (
            f"Box number {number + 1000 * seed} has {a} apples, and {b} more are put into it. How many are in the box?"
        )
        rows.append({"prompt": f"{text}\n{SUFFIX}", "answer": str(a + b), "data_source": source})
    return rows


def write_rows(file: Path, rows: list[Row]) -> None:
    """One JSON object per line."""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def make_world(root: Path) -> None:
    """All models and files: `student`, `teacher` (its origin), `deep` (10 layers) and `pruned` (4 of them), `wide` and
    `narrow` (other widths), `moe` and `moe_teacher`, `other` (independent weights), and the prompts."""
    write_model(root / "teacher")
    disturbed(root / "teacher", root / "student")
    write_model(root / "deep", layers=10, seed=3)
    pruned(root / "deep", root / "pruned", [1, 2, 3, 10])
    write_model(root / "wide", layers=8, hidden=96, seed=4)
    write_model(root / "narrow", layers=4, hidden=32, seed=5)
    write_model(root / "other", seed=6)
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}
    write_model(root / "moe_teacher", layers=2, seed=7, **experts)
    disturbed(root / "moe_teacher", root / "moe")
    write_rows(root / "train.jsonl", problems(TRAINING, 1))
    write_rows(root / "math_dapo.jsonl", problems(TRAINING, 2, "math_dapo"))
    write_rows(root / "code_prompts.jsonl", problems(TRAINING, 3, "code_prompts"))
    write_rows(root / "validation.jsonl", problems(VALIDATION, 4))
