"""The lines of `rollouts/token_metrics_*.jsonl`: the values per token of some responses of a step.

One line per response (docs/runs.md, "Values per token"). Token ids are those that were sampled; the text of a token is
what it adds to the text of the response.
"""

from __future__ import annotations

import codecs
import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

from nemo_oprd.batch.types import Rollout
from nemo_oprd.data.tokenization.token_bytes import byte_table
from nemo_oprd.data.tokenization.tokenizer import Tokenizer
from nemo_oprd.distillation.metrics.token_metrics import TokenMetrics

_DIGITS = 6  # significant ones: float32 has seven


def token_records(
    done: int, rollouts: Sequence[Rollout], tokens: TokenMetrics, tokenizer: Tokenizer | None
) -> Iterator[dict[str, Any]]:
    """The lines of the file of step `done`.

    Args:
        tokenizer: of the student; None (recorded rollouts): no texts.
    """
    for i, values in zip(tokens.responses, tokens.values, strict=True):
        rollout = rollouts[i]
        texts = {}
        if tokenizer is not None:
            prompt = tokenizer.decode(rollout.prompt_ids) if rollout.prompt is None else rollout.prompt
            response = tokenizer.decode(rollout.response_ids)
            tokens_text = token_texts(tokenizer, rollout.response_ids.tolist())
            texts = {"prompt": prompt, "response": response, "tokens": tokens_text}
        facts = {"data_source": rollout.data_source, "answer": rollout.answer, "finish_reason": rollout.finish_reason}
        yield {
            "step": done,
            "number": i,
            "prompt_id": prompt_id(rollout.prompt_ids.tolist()),
            **{name: value for name, value in facts.items() if value is not None},
            **texts,
            "token_ids": rollout.response_ids.tolist(),
            **{name: [_rounded(value) for value in column] for name, column in values.items()},
        }


def prompt_id(prompt_ids: Sequence[int]) -> str:
    """12 hexadecimal digits that are equal for equal prompts of one tokenizer, in any step and run."""
    return hashlib.sha256(",".join(map(str, prompt_ids)).encode()).hexdigest()[:12]


def token_texts(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """The text that each token adds; a special token has its name.

    A character of several tokens is the text of the last of them. Where the bytes of the tokens can't be derived
    (`token_bytes.py`), each token is decoded by itself, which loses spaces and parts of characters.
    """
    try:
        table = byte_table(tokenizer)
    except ValueError:
        return [tokenizer.decode([i]) or _name(tokenizer, i) for i in ids]
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    texts = []
    for number, i in enumerate(ids):
        known = i < len(table.pieces) and table.is_text[i] and table.lengths[i] >= 0
        text = decoder.decode(table.pieces[i] if known else b"", final=not known or number + 1 == len(ids))
        texts.append(text if known else text + _name(tokenizer, i))
    return texts


def _name(tokenizer: Tokenizer, i: int) -> str:
    # a model's embedding may have more rows than its tokenizer has tokens
    return str(tokenizer.hf.convert_ids_to_tokens(i) or f"<{i}>") if i < tokenizer.vocab_size else f"<{i}>"


def _rounded(value: float | None) -> float | None:
    """JSON has no NaN and no infinity: both become null."""
    if value is None or value != value or value in (float("inf"), float("-inf")):
        return None
    return float(f"{value:.{_DIGITS}g}")
