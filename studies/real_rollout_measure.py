"""Divergences of SmolLM2's students from their teacher, by position of the teacher's responses to held-out prompts.

The responses are sampled once and committed, so that runs of several machines can be paired; the teacher's
log-probabilities on them, a gigabyte, are kept beside the runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from nemo_oprd.data.prompts import load_prompts
from nemo_oprd.data.tokenizer import Tokenizer
from nemo_oprd.evaluation.agreement import SampledIds, SamplingSettings, load_model, sample_responses
from nemo_oprd.evaluation.responses import read_lines, write_lines
from nemo_oprd.runtime.files import replacing
from studies.real_models import HELDOUT
from studies.real_rollout_tables import BUCKETS, TEACHER_RESPONSES

PROMPTS = 48
MEASURES = ("tokens", "forward_kl", "reverse_kl", "same_greedy")

Measured = dict[str, dict[str, list[float]]]


def sample_teacher(teacher: Path, limit: int) -> None:
    """Writes the teacher's responses of at most `limit` tokens to the held-out prompts, unless they are there."""
    if TEACHER_RESPONSES.is_file():
        return
    tokenizer, model = Tokenizer.load(teacher), load_model(teacher, torch.float32)
    prompts = [tokenizer.encode_prompt(prompt.messages, prompt.tools) for prompt in load_prompts(HELDOUT)[:PROMPTS]]
    sampling = SamplingSettings(limit, temperature=1.0, seed=0, batch=PROMPTS)
    found = sample_responses(model, prompts, tokenizer.eos_ids, tokenizer.ids(model.config.vocab_size), sampling)
    lines = ({"prompt_ids": each.prompt, "response_ids": each.tokens, "ended": each.ended} for each in found)
    write_lines(TEACHER_RESPONSES, lines)


def read_teacher() -> list[SampledIds]:
    """The teacher's responses to the held-out prompts."""
    rows = read_lines(TEACHER_RESPONSES, "responses", "remove the file: the study samples them again")
    return [SampledIds(row["prompt_ids"], row["response_ids"], row["ended"]) for _, row in rows]


@torch.no_grad()
def measure(
    students: dict[str, Path], teacher: Path, responses: Sequence[SampledIds], kept: Path
) -> dict[str, Measured]:
    """Student -> bucket of positions -> measure -> a sum per response: {"22": {"1-16": {"reverse_kl": [...]}}}.

    Args:
        kept: a file with the teacher's log-probabilities on these responses, written if it is missing.
    """
    vocab_size = Tokenizer.load(teacher).vocab_size
    if not kept.is_file():
        model = load_model(teacher, torch.float32)
        with replacing(kept) as partial:
            torch.save([log_probs(model, each, vocab_size) for each in responses], partial)
    found = {}
    for name, directory in students.items():
        model = load_model(directory, torch.float32)
        reference = torch.load(kept, weights_only=True, mmap=True)
        rows = [
            buckets(log_probs(model, each, vocab_size), q_log) for each, q_log in zip(responses, reference, strict=True)
        ]
        found[name] = {
            bucket: {key: [row[bucket][key] for row in rows] for key in MEASURES} for bucket in map(title, BUCKETS)
        }
    return found


def log_probs(model: Any, response: SampledIds, vocab_size: int) -> torch.Tensor:
    """log p of the next token at every token of the response, [tokens, vocab_size] in float32."""
    ids = torch.tensor([response.prompt + response.tokens[:-1]])
    logits = model(input_ids=ids, use_cache=False, logits_to_keep=len(response.tokens)).logits[0]
    return logits[:, :vocab_size].float().log_softmax(-1)


def buckets(p_log: torch.Tensor, q_log: torch.Tensor) -> dict[str, dict[str, float]]:
    """Sums over the tokens of each bucket: the tokens, KL(q|p) and KL(p|q) in nats, equal most probable tokens.

    Args:
        p_log: the student's log-probabilities, [tokens, vocab_size]; `q_log` the teacher's.
    """
    gap = p_log - q_log
    per_token = {
        "tokens": torch.ones(len(gap)),
        "forward_kl": -(q_log.exp() * gap).sum(-1),
        "reverse_kl": (p_log.exp() * gap).sum(-1),
        "same_greedy": p_log.argmax(-1) == q_log.argmax(-1),
    }
    return {title(each): dict(_sums(per_token, *each)) for each in BUCKETS}


def _sums(per_token: dict[str, torch.Tensor], first: int, last: int) -> Iterator[tuple[str, float]]:
    for key, values in per_token.items():
        yield key, float(values[first - 1 : last].double().sum())


def title(bucket: tuple[int, int]) -> str:
    """The name of a bucket in results and tables."""
    return f"{bucket[0]}-{bucket[1]}"
