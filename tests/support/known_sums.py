"""Trained models of seconds: a student that solves some problems, teachers that solve all.

For the doctor's tests and `planted_faults.py`. The problems are 36 sums such as 1002+1005, which the models learn by
heart; responses are the boxed answer alone. All models but the one that reads text have the toy pair's tokenizer.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from transformers import Qwen2ForCausalLM

from nemo_oprd.data.tokenizer import Tokenizer
from nemo_oprd.tools.toy import pair
from nemo_oprd.tools.toy.pair import IGNORED, Recipe, new_model, train_step
from tests.support import bpe_teacher

PROBLEMS = [(1000 + i, 1000 + j) for i in range(6) for j in range(6)]
STUDENT_LOSS, TEACHER_LOSS = 0.06, 0.004
# what the teacher of a self-distillation reads
TOLD = "{answer}'{prompt}"


def batch(tokenizer: Tokenizer, told: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and labels, both int64 [36, S], of all problems; labels outside responses are `IGNORED`.

    Args:
        told: the prompt as a text with {prompt} and {answer}.
    """
    texts = [told.replace("{prompt}", pair.prompt_text(a, b)).replace("{answer}", str(a + b)) for a, b in PROBLEMS]
    prompts = [tokenizer.encode_prompt([{"role": "user", "content": text}]) for text in texts]
    responses = tokenizer.encode_plain([pair.boxed(a + b) for a, b in PROBLEMS])
    rows = [[*p, *r, tokenizer.eos_ids[0]] for p, r in zip(prompts, responses, strict=True)]
    longest = max(map(len, rows))
    ids = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows])
    labels = torch.full_like(ids, IGNORED)
    for i, (prompt, row) in enumerate(zip(prompts, rows, strict=True)):
        labels[i, len(prompt) : len(row)] = ids[i, len(prompt) : len(row)]
    return ids[:, :-1], labels[:, 1:]


def train(model: torch.nn.Module, tokenizer: Tokenizer, recipe: Recipe, until: float, told: str = "{prompt}") -> int:
    """Trains until the loss per token is below `until`; returns the number of steps."""
    optimizer = torch.optim.AdamW(model.parameters(), betas=recipe.betas, weight_decay=recipe.weight_decay)
    data = batch(tokenizer, told)
    for step in range(1, recipe.steps + 1):
        if train_step(model, optimizer, recipe, step, *data) < until:  # type: ignore[arg-type]
            return step
    raise AssertionError("not learned")


def recipe(layers: int, hidden: int) -> Recipe:
    return Recipe(0, 400, None, layers, hidden, learning_rate=6e-3, final_learning_rate=3e-3, warmup_steps=10)


def write(model: torch.nn.Module, path: Path) -> None:
    model.save_pretrained(path)  # type: ignore[operator]
    pair.write_tokenizer(path)


def make_pair(root: Path) -> None:
    """`student`, `teacher` and prompts."""
    # the models know all problems, but no problem is in two files
    drawn = np.random.default_rng(0).permutation(np.array(PROBLEMS))
    (root / "prompts").mkdir(parents=True)
    for name, rows in zip(("train", "code", "heldout"), np.split(drawn, [10, 20]), strict=True):
        pair.write_prompts(root / "prompts" / f"{name}.jsonl", rows)
    code = root / "prompts" / "code.jsonl"
    read = [json.loads(line) for line in code.read_text().splitlines()]
    other = [{"prompt": row["prompt"], "answer": row["reward_model"]["ground_truth"]} for row in read]
    code.write_text("".join(json.dumps(row) + "\n" for row in other))
    settings = recipe(2, 48)
    model = new_model(settings)
    (root / "tokenizer").mkdir()
    pair.write_tokenizer(root / "tokenizer")
    (root / "tokenizer" / "generation_config.json").write_text(json.dumps({"eos_token_id": pair.EOS_ID}))
    tokenizer = Tokenizer.load(root / "tokenizer")
    train(model, tokenizer, settings, STUDENT_LOSS)
    write(model, root / "student")
    train(model, tokenizer, settings, TEACHER_LOSS)
    write(model, root / "teacher")


def make_wide_teacher(root: Path) -> None:
    """`wide`: another depth and width, for a bridge."""
    settings = recipe(3, 56)
    model = new_model(settings)
    train(model, Tokenizer.load(root / "tokenizer"), settings, TEACHER_LOSS)
    write(model, root / "wide")


def make_told_student(root: Path) -> None:
    """`told`: the student, which also uses an answer in its prompt."""
    model = Qwen2ForCausalLM.from_pretrained(root / "student", dtype=torch.float32)
    train(model, Tokenizer.load(root / "tokenizer"), recipe(2, 48), STUDENT_LOSS, TOLD)
    write(model, root / "told")


def make_text_teacher(root: Path) -> None:
    """`text`: another tokenizer."""
    directory = root / "text"
    directory.mkdir()
    bpe_teacher.write_tokenizer(directory, np.array(PROBLEMS * 20))
    tokenizer = Tokenizer.load(directory)
    model = bpe_teacher.new_model(tokenizer, 0, 2, 48)
    train(model, tokenizer, recipe(2, 48), TEACHER_LOSS)
    model.save_pretrained(directory)
