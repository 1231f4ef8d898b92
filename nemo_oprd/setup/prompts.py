"""The prompts of a run, encoded with the student's tokenizer, and the order in which training visits them."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, replace

from nemo_oprd.config.schema import Config
from nemo_oprd.data.conversation import fields_beside_text
from nemo_oprd.data.order import PromptOrder, exact_weights
from nemo_oprd.data.preparation import DataReport, PreparedPrompts
from nemo_oprd.data.prompts import Prompt
from nemo_oprd.data.tokenization.template_use import template_notes
from nemo_oprd.data.tokenization.tokenizer import Tokenizer
from nemo_oprd.rollout.engine import Request
from nemo_oprd.rollout.schedule import TrainingPrompts
from nemo_oprd.setup.prompt_files import prepare_prompts, say_shares


@dataclass(frozen=True)
class RunPrompts:
    """Encoded training prompts, the problems that `data.held_out` sets aside, and what was done to the prompts."""

    training: TrainingPrompts
    held_out: list[Prompt]
    report: DataReport


def read_run_prompts(config: Config, tokenizer: Tokenizer, max_positions: int) -> RunPrompts:
    """Reads, prepares and encodes the training prompts.

    Raises:
        ValueError: as `prepare_prompts` and `encode_prompts`.
    """
    report = DataReport()
    prepared = prepare_prompts(config, report)
    requests = encode_prompts(config, prepared, tokenizer, max_positions, report)
    sizes, train = tuple(map(len, requests)), config.data.train
    weights = exact_weights(list(train.values())) if isinstance(train, dict) else None
    training = TrainingPrompts([request for each in requests for request in each], PromptOrder(sizes, weights))
    say_shares(config, sizes, report)
    report.content |= {"prompts": sum(sizes), "fingerprint": _fingerprint(training)}
    return RunPrompts(training, prepared.held_out, report)


def encode_prompts(
    config: Config, prepared: PreparedPrompts, tokenizer: Tokenizer, max_positions: int, report: DataReport
) -> list[list[Request]]:
    """The training prompts as requests, per file; longer ones than `data.max_prompt_tokens` as `data.over_long` says.

    Raises:
        ValueError: all prompts of a file are too long, a prompt is too long and `data.over_long=refuse`, or cannot be
            cut, or leaves no room for a response, has no teacher, or lacks a field that `teacher.prompt` needs, or a
            teacher has no prompts.
    """
    limit, longest, number = config.data.max_prompt_tokens, 0, 0
    files = config.data.train_files
    requests: list[list[Request]] = [[] for _ in files]
    own_prompts = zip(requests, files, prepared.files, strict=True)
    for own, file, prompt in ((own, file, prompt) for own, file, prompts in own_prompts for prompt in prompts):
        where = f"data.train={file}: prompt {prompt.index}"
        try:
            ids = tokenizer.encode_prompt(prompt.messages, prompt.tools)
            if limit is not None and len(ids) > limit:
                number, longest = number + 1, max(longest, len(ids))
                if config.data.over_long == "drop":
                    continue
                prompt, ids = _over_long(config, prompt, tokenizer, len(ids))
            teacher_messages = prompt.teacher_messages(config.teacher.prompt)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
        if len(ids) >= max_positions:
            raise ValueError(
                f"{where} has {len(ids)} tokens and leaves no room in the model's {max_positions} positions; set "
                "data.max_prompt_tokens"
            )
        conversation = prompt.messages, teacher_messages, prompt.tools
        own.append(Request(ids, prompt.text, prompt.data_source, prompt.answer, *conversation))
    _check_lengths(config, requests)
    encoded = [request for each in requests for request in each]
    report.lines += template_notes(tokenizer, encoded, f"data.train={files_in_words(config)}", "the student")
    if number:
        _say_over_long(config, number, sum(map(len, prepared.files)), longest, report)
    return requests


def _over_long(config: Config, prompt: Prompt, tokenizer: Tokenizer, length: int) -> tuple[Prompt, list[int]]:
    """The prompt without the beginning of its problem, and its ids: as many words as fit stay."""
    limit = config.data.max_prompt_tokens
    assert limit is not None
    if config.data.over_long == "refuse":
        raise ValueError(
            f"has {length} tokens, expected at most data.max_prompt_tokens={limit}; raise it, or set "
            "data.over_long=drop to leave longer prompts out"
        )
    content = prompt.text
    starts = [found.start() for found in re.finditer(r"\S+", content)]

    def cut(word: int) -> tuple[Prompt, list[int]]:
        messages = prompt.with_text(content[starts[word] :])
        return replace(prompt, messages=messages), tokenizer.encode_prompt(messages, prompt.tools)

    low, high = 1, len(starts)  # the first word that stays is in [low, high); the number of tokens falls with it
    while low < high:
        middle = (low + high) // 2
        if len(cut(middle)[1]) <= limit:
            high = middle
        else:
            low = middle + 1
    if low < len(starts):
        return cut(low)
    raise ValueError(
        f"has {length} tokens, and without the beginning of its last message still more than data.max_prompt_tokens="
        f"{limit}; expected a last word that fits: raise it, or set data.over_long=drop"
    )


def _check_lengths(config: Config, requests: list[list[Request]]) -> None:
    limit = config.data.max_prompt_tokens
    empty = [file for file, own in zip(config.data.train_files, requests, strict=True) if not own]
    if not any(requests):
        raise ValueError(
            f"data.train={files_in_words(config)}: every prompt is longer than data.max_prompt_tokens={limit}; raise it"
        )
    if empty and isinstance(config.data.train, dict):
        raise ValueError(
            f"data.train={empty[0]} has a weight, but every prompt is longer than data.max_prompt_tokens={limit}; "
            "raise it, or remove the file"
        )


def _say_over_long(config: Config, number: int, total: int, longest: int, report: DataReport) -> None:
    action, limit = config.data.over_long, config.data.max_prompt_tokens
    report.content["over_long"] = {
        "prompts": number, "of": total, "longest": longest, "max_prompt_tokens": limit, "action": action
    }  # fmt: skip
    done = "are left out" if action == "drop" else "lost the beginning of their last message"
    report.say(
        f"data.over_long={action}: {number:,} of {total:,} prompts have more than data.max_prompt_tokens={limit} "
        f"tokens (the longest {longest:,}); they {done}"
    )


def files_in_words(config: Config) -> str:
    """`data.train` in a message: the file, or all files."""
    files = config.data.train_files
    return files[0] if len(files) == 1 else f"[{','.join(files)}]"


def _fingerprint(prompts: TrainingPrompts) -> str:
    """sha256 (hex) of what a position in the visiting order means, but for the seed."""
    known = hashlib.sha256(repr((prompts.order.sizes, prompts.order.weights)).encode())
    for request in prompts.requests:
        known.update(json.dumps([request.prompt_ids, request.answer]).encode())
        # what only the teacher's template may show
        known.update(fields_beside_text(request.messages, request.tools).encode())
    return known.hexdigest()
