r"""Greedy evaluation of a Hugging Face model, written without this project: transformers' `generate` and own grading.

    python plain_evaluation.py MODEL SET.jsonl MAX_NEW_TOKENS

Prints JSON: the ids of every response and the metrics. A response is right if the integer in its last `\boxed{...}`
is the reference answer's; in rows with `"kind": "number"`, the last number of a response without a box counts, too.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def greedy(model: Any, tokenizer: Any, text: str, limit: int) -> list[int]:
    ids = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
    with torch.no_grad():
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=limit, do_sample=False,
            eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.eos_token_id,
        )  # fmt: skip
    return out[0, ids.shape[1] :].tolist()


def answer_of(text: str, kind: str) -> float | None:
    found = re.findall(r"\\boxed\{(\d+)\}", text)
    if not found and kind == "number":
        found = re.findall(r"\d+(?:\.\d+)?", text)
    return float(found[-1]) if found else None


def evaluate(directory: Path, rows: list[dict[str, str]], limit: int) -> dict[str, Any]:
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    responses = [greedy(model, tokenizer, row["prompt"], limit) for row in rows]
    texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in responses]
    answers = [answer_of(text, row.get("kind", "boxed")) for text, row in zip(texts, rows, strict=True)]
    right = [answer == float(row["answer"]) for answer, row in zip(answers, rows, strict=True)]
    count = len(rows)
    return {
        "responses": responses,
        "avg@1": sum(right) / count,
        "no_answer": sum(answer is None for answer in answers) / count,
        "avg_len": sum(map(len, responses)) / count,
        "truncated": sum(ids[-1] != tokenizer.eos_token_id for ids in responses) / count,
    }


if __name__ == "__main__":
    lines = Path(sys.argv[2]).read_text().splitlines()
    print(json.dumps(evaluate(Path(sys.argv[1]), [json.loads(line) for line in lines], int(sys.argv[3]))))
