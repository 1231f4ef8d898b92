"""Measures the distance of a student's next-token distributions from its teacher's, with plain Hugging Face models.

A divergence on the student's own responses alone misleads: it is small, too, if the student has collapsed into
repeating itself, because such text is easy to predict for both models. So this module measures on two texts, the
teacher's responses and the student's, and also describes the student's by themselves: repetition, length, and
probability under the teacher. No code is shared with training.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from nemo_oprd.data.token_ids import TokenIds
from nemo_oprd.megatron.weights.hf import transformers_model

REPETITION_NGRAMS = (2, 4)


@dataclass(frozen=True)
class SamplingSettings:
    """Settings for sampling from the whole distribution at `temperature`; 0 takes the most probable token."""

    max_new_tokens: int
    temperature: float
    seed: int
    batch: int


@dataclass(frozen=True)
class SampledIds:
    """The ids of a prompt in the chat template and of one response, with the id that ended it if one did."""

    prompt: list[int]
    tokens: list[int]
    ended: bool


@dataclass(frozen=True)
class PromptAgreement:
    """Sums over the tokens of one response.

    Attributes:
        tokens: number of response tokens.
        reverse_kl, forward_kl: sums of KL(student | teacher) and KL(teacher | student), in nats.
        same_greedy: number of positions at which both models find the same token most probable.
        student_entropy, teacher_entropy: sums in nats.
        teacher_nll: sum of the teacher's -log q of the response's tokens.
    """

    tokens: int
    reverse_kl: float
    forward_kl: float
    same_greedy: int
    student_entropy: float
    teacher_entropy: float
    teacher_nll: float


def load_model(directory: Path, dtype: torch.dtype) -> Any:
    """Loads the Hugging Face model in `directory` for inference, on the GPU if there is one."""
    from transformers import GenerationConfig  # seconds to import

    place = "cuda" if torch.cuda.is_available() else "cpu"
    model = transformers_model(directory, dtype)
    # a model's own generation_config.json, such as a penalty on repetitions, would fill what `SamplingSettings` leaves
    # open
    model.generation_config = GenerationConfig()
    return model.to(place).eval()


def sample_responses(
    model: Any, prompts: Sequence[list[int]], eos_ids: tuple[int, ...], known: TokenIds, sampling: SamplingSettings
) -> list[SampledIds]:
    """Samples one response per prompt. The result depends on the seed, the prompts, their order and the batch size.

    Args:
        known: the ids that have a token; no others are sampled.
    """
    responses: list[SampledIds] = []
    with torch.random.fork_rng():
        torch.manual_seed(sampling.seed)
        for first in tqdm(range(0, len(prompts), sampling.batch), desc="sampling", unit="batch"):
            responses += _sample_batch(model, prompts[first : first + sampling.batch], eos_ids, known, sampling)
    return responses


def _sample_batch(
    model: Any, prompts: Sequence[list[int]], eos_ids: tuple[int, ...], known: TokenIds, sampling: SamplingSettings
) -> Iterator[SampledIds]:
    from transformers import GenerationConfig

    width, pad = max(map(len, prompts)), eos_ids[0]
    ids = torch.tensor([[pad] * (width - len(prompt)) + prompt for prompt in prompts], device=model.device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=model.device)
    chosen: dict[str, Any] = {"do_sample": False}
    if sampling.temperature > 0:
        chosen = {"do_sample": True, "temperature": sampling.temperature, "top_k": 0, "top_p": 1.0}
    settings = GenerationConfig(
        max_new_tokens=sampling.max_new_tokens,
        eos_token_id=list(eos_ids),
        pad_token_id=pad,
        suppress_tokens=[i for run in known.missing_below(model.config.vocab_size) for i in range(*run)] or None,
        **chosen,
    )
    output = model.generate(input_ids=ids, attention_mask=mask, generation_config=settings)
    for prompt, row in zip(prompts, output[:, width:].tolist(), strict=True):
        end = next((place for place, token in enumerate(row) if token in eos_ids), None)
        yield SampledIds(prompt, row if end is None else row[: end + 1], ended=end is not None)


@torch.no_grad()
def measure(student: Any, teacher: Any, responses: Sequence[SampledIds], vocab_size: int) -> list[PromptAgreement]:
    """Compares the two models' distributions at every token of every response.

    Args:
        vocab_size: ids from here on are padding of the embedding and are left out of both distributions.
    """
    found = []
    for response in tqdm(responses, desc="comparing", unit="response"):
        p_log = _log_probs(student, response, vocab_size)
        q_log = _log_probs(teacher, response, vocab_size)
        p, q = p_log.exp(), q_log.exp()
        gap = p_log - q_log
        targets = torch.tensor(response.tokens, device=q_log.device)
        found.append(
            PromptAgreement(
                tokens=len(response.tokens),
                reverse_kl=float((p * gap).sum(-1).double().sum()),
                forward_kl=float(-(q * gap).sum(-1).double().sum()),
                same_greedy=int((p_log.argmax(-1) == q_log.argmax(-1)).sum()),
                student_entropy=float(-(p * p_log).sum(-1).double().sum()),
                teacher_entropy=float(-(q * q_log).sum(-1).double().sum()),
                teacher_nll=float(-q_log.gather(-1, targets[:, None]).double().sum()),
            )
        )
    return found


def _log_probs(model: Any, response: SampledIds, vocab_size: int) -> torch.Tensor:
    """Returns the log-probabilities of all ids for every token of the response, float32 [tokens, vocab_size]."""
    ids = torch.tensor([response.prompt + response.tokens[:-1]], device=model.device)
    logits = model(input_ids=ids, use_cache=False, logits_to_keep=len(response.tokens)).logits[0]
    return logits[:, :vocab_size].float().log_softmax(-1)


def summarize(parts: Sequence[PromptAgreement]) -> dict[str, float]:
    """Returns means over all tokens of all responses; `teacher_perplexity` is exp of the mean of -log q.

    Raises:
        ValueError: there are no tokens.
    """
    tokens = sum(part.tokens for part in parts)
    if not tokens:
        raise ValueError("there are no response tokens to compare models on; expected prompts: give a file of them")

    names = {"same_greedy": "greedy_agreement", "teacher_nll": "teacher_perplexity"}
    sums = [field.name for field in fields(PromptAgreement) if field.name != "tokens"]
    means = {names.get(name, name): math.fsum(getattr(part, name) for part in parts) / tokens for name in sums}
    return {"tokens": tokens, **means, "teacher_perplexity": math.exp(means["teacher_perplexity"])}


def describe_text(responses: Sequence[SampledIds]) -> dict[str, float]:
    """Describes responses without any model: returns `distinct_n`, `length` and `truncated`.

    `distinct_n` is the share of different n-grams of token ids among all n-grams of a response, averaged over the
    responses that have any (1: nothing is repeated); `length` is the mean number of tokens, and `truncated` the share
    of responses that reached the limit without ending.
    """
    found: dict[str, float] = {}
    for n in REPETITION_NGRAMS:
        shares = []
        for response in responses:
            grams = [tuple(response.tokens[i : i + n]) for i in range(len(response.tokens) - n + 1)]
            if grams:
                shares.append(len(set(grams)) / len(grams))
        found[f"distinct_{n}"] = math.fsum(shares) / len(shares) if shares else 1.0
    found["length"] = sum(len(response.tokens) for response in responses) / len(responses)
    found["truncated"] = sum(not response.ended for response in responses) / len(responses)
    return found
