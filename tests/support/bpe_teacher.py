"""A teacher for the toy student that shares no vocabulary with it: a Llama with a sentencepiece BPE tokenizer.

It is trained from scratch on the toy problems, like the pair of `nemo-oprd toy`. Its tokens are merged characters such
as `\\boxed{` or `1'`, learned from the texts of the task. Most teacher tokens therefore end where a student token ends,
while many student tokens end inside a teacher token.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from nemo_oprd.data.tokenizer import Tokenizer
from nemo_oprd.runtime.files import read_json, write_atomically
from nemo_oprd.tools.toy import pair
from nemo_oprd.tools.toy.pair import HEADS, IGNORED, KV_HEADS, MAX_POSITIONS, Recipe, train_step

VOCAB_SIZE = 40
TOKENIZER_LINES = 2000
DONE_FILE = "bpe_teacher.json"


def make_bpe_teacher(
    output: Path,
    *,
    seed: int = 0,
    steps: int = 500,
    layers: int = 5,
    hidden: int = 128,
    batch: int = 64,
    log: Callable[[str], None] = print,
) -> float:
    """Writes the teacher's Hugging Face directory; an existing teacher with the same settings is kept.

    Returns:
        The share of 200 held-out problems that the teacher solves with greedy decoding.

    Raises:
        ValueError: `output` holds a teacher with other settings.
    """
    done = output / DONE_FILE
    settings = {"seed": seed, "steps": steps, "layers": layers, "hidden": hidden, "batch": batch, "tokens": VOCAB_SIZE}
    if done.is_file():
        found = read_json(done, "an object with the teacher's settings", "remove it or choose another output")
        if found["settings"] != settings:
            raise ValueError(
                f"{output}: holds a teacher with settings {found['settings']}, expected {settings}; remove it or "
                "choose another output"
            )
        return float(found["accuracy"])
    output.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng([seed, 1])
    held_out = pair.disjoint_problems(rng, {"held out": 200})["held out"]
    unseen = pair.problem_key(held_out)
    write_tokenizer(output, pair.sample_problems(rng, TOKENIZER_LINES, unseen))
    tokenizer = Tokenizer.load(output)
    model = new_model(tokenizer, seed, layers, hidden)
    recipe = Recipe(seed, steps, None, layers, hidden, batch=batch, warmup_steps=min(50, steps // 4 + 1))
    optimizer = torch.optim.AdamW(model.parameters(), betas=recipe.betas, weight_decay=recipe.weight_decay)
    start = time.monotonic()
    for step in range(1, steps + 1):
        inputs, labels = _batch(tokenizer, pair.sample_problems(rng, batch, unseen))
        loss = train_step(model, optimizer, recipe, step, inputs, labels)
        if step % 50 == 0:
            log(f"step {step:3d}/{steps}  loss {loss:.4f}  {time.monotonic() - start:.0f} s")
    model.save_pretrained(output)
    accuracy = _accuracy(model, tokenizer, held_out)
    log(f"teacher with {tokenizer.vocab_size} tokens: held-out accuracy {accuracy:.1%}, greedy")
    write_atomically(done, json.dumps({"settings": settings, "accuracy": accuracy}) + "\n")
    return accuracy


def write_tokenizer(directory: Path, problems: np.ndarray) -> None:
    """Trains a BPE model on the texts of the task and writes it as a sentencepiece file."""
    texts = [text for a, b in problems.tolist() for text in (pair.prompt_text(a, b), pair.response_text(a, b))]
    splits = {"split_by_number": False, "split_by_unicode_script": False}
    numbers = {"unk_id": 0, "eos_id": 1, "pad_id": -1}
    pair.write_sentencepiece(
        directory, texts, model_type="bpe", vocab_size=VOCAB_SIZE, eos_piece="</s>", **splits, **numbers
    )
    names = {"tokenizer_class": "LlamaTokenizer", "unk_token": "<unk>", "eos_token": "</s>", "bos_token": None}
    pair.write_tokenizer_config(directory, names)


def new_model(tokenizer: Tokenizer, seed: int, layers: int, hidden: int) -> LlamaForCausalLM:
    (eos,) = tokenizer.hf.convert_tokens_to_ids(["</s>"])
    config = LlamaConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=hidden,
        intermediate_size=-(-8 * hidden // 96) * 32,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=eos,
        pad_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=eos)
    return model


def _batch(tokenizer: Tokenizer, problems: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and labels, both int64 [B, S]; labels of prompt and padding are `IGNORED`."""
    pairs = problems.tolist()
    prompts = [tokenizer.encode_prompt([{"role": "user", "content": pair.prompt_text(a, b)}]) for a, b in pairs]
    responses = tokenizer.encode_plain([pair.response_text(a, b) for a, b in pairs])
    rows = [[*prompt, *ids, tokenizer.eos_ids[0]] for prompt, ids in zip(prompts, responses, strict=True)]
    longest = max(map(len, rows))
    ids = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows])
    labels = torch.full_like(ids, IGNORED)
    for i, (prompt, row) in enumerate(zip(prompts, rows, strict=True)):
        labels[i, len(prompt) : len(row)] = ids[i, len(prompt) : len(row)]
    return ids[:, :-1], labels[:, 1:]


@torch.inference_mode()
def _accuracy(model: LlamaForCausalLM, tokenizer: Tokenizer, problems: np.ndarray) -> float:
    """The share of problems solved greedily, by teacher forcing: every token of the response must be the likeliest."""
    inputs, labels = _batch(tokenizer, problems)
    predicted = model(input_ids=inputs, use_cache=False).logits.argmax(-1)
    return float(((predicted == labels) | (labels == IGNORED)).all(-1).float().mean())
