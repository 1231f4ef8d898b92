r"""The toy task: adding two 4-digit numbers digit by digit, as text, with a character tokenizer and prompt files.

    prompt    1234+5678=
    response  482'371'269.156.\boxed{6912}

The response starts with the least significant column. A column is four characters: the digits of the two numbers, the
last digit of their sum plus the carry, and `'` for a carry of one or `.` for none (4+8: write 2, carry 1). A model
learns copying, adding and carrying one after the other, so a half-trained model is partly correct, and its mistakes
come early in the response, far from the graded answer in `\boxed{}`.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

ALPHABET = "0123456789+='.\\boxed{}"
PAD_ID, EOS_ID, UNK_ID = 0, 1, 2
SPECIAL_TOKENS = ("<pad>", "<eos>", "<unk>")
VOCAB_SIZE = len(SPECIAL_TOKENS) + len(ALPHABET)
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
DATA_SOURCE = "toy_addition"
COLUMNS = 4
SMALLEST, LARGEST = 10 ** (COLUMNS - 1), 10**COLUMNS - 1
PROMPT_LENGTH = 2 * COLUMNS + 2

_CHARACTER_TO_ID = {character: len(SPECIAL_TOKENS) + i for i, character in enumerate(ALPHABET)}


def prompt_text(a: int, b: int) -> str:
    """The user's message: `PROMPT_LENGTH` characters for 4-digit numbers."""
    return f"{a}+{b}="


def response_text(a: int, b: int) -> str:
    """The correct response, without the end-of-sequence token: 28 characters, 29 if the sum has five digits."""
    columns, carry = [], 0
    for place in range(COLUMNS):
        x, y = a // 10**place % 10, b // 10**place % 10
        carry, digit = divmod(x + y + carry, 10)
        columns.append(f"{x}{y}{digit}{chr(39) if carry else '.'}")
    return "".join(columns) + boxed(a + b)


def boxed(answer: int) -> str:
    """The boxed answer that ends a response."""
    return f"\\boxed{{{answer}}}"


def encode(text: str) -> list[int]:
    """The ids of a toy text: those of the tokenizer that `write_tokenizer` writes, without loading a tokenizer."""
    return [_CHARACTER_TO_ID[character] for character in text]


def is_correct(ids: list[int], a: int, b: int) -> bool:
    """Whether sampled response ids end with the correct boxed answer, followed by the end-of-sequence id."""
    ending = [*encode(boxed(a + b)), EOS_ID]
    stop = ids.index(EOS_ID) + 1 if EOS_ID in ids else len(ids)
    return ids[:stop][-len(ending) :] == ending


def sample_problems(rng: np.random.Generator, count: int, exclude: np.ndarray) -> np.ndarray:
    """int64 [count, 2]: random problems (a, b), possibly repeated, none with a `problem_key` in `exclude`."""
    problems = rng.integers(SMALLEST, LARGEST + 1, (count, 2))
    while (taken := np.isin(problem_key(problems), exclude)).any():
        problems[taken] = rng.integers(SMALLEST, LARGEST + 1, (int(taken.sum()), 2))
    return problems


def problem_key(problems: np.ndarray) -> np.ndarray:
    """int64 [n]: a key for disjoint sets, the same for a+b and b+a."""
    return problems.min(axis=1) * (LARGEST + 1) + problems.max(axis=1)


def disjoint_problems(rng: np.random.Generator, sizes: dict[str, int]) -> dict[str, np.ndarray]:
    """int64 [size, 2] for each name: no problem occurs twice, in one set or in two, not even as b+a."""
    total = sum(sizes.values())
    drawn = rng.integers(SMALLEST, LARGEST + 1, (2 * total, 2))
    _, first = np.unique(problem_key(drawn), return_index=True)
    chosen = drawn[np.sort(first)][:total]
    assert len(chosen) == total, "the sets are too large for drawing twice as many problems as needed"
    ends = np.cumsum(list(sizes.values()))[:-1]
    return dict(zip(sizes, np.split(chosen, ends), strict=True))


def write_prompts(file: Path, problems: np.ndarray) -> None:
    """One JSON object per problem ([n, 2]), in the shape that `nemo_oprd.data.prompts` reads."""
    rows = (
        {
            "prompt": [{"role": "user", "content": prompt_text(a, b)}],
            "data_source": DATA_SOURCE,
            "reward_model": {"ground_truth": str(a + b)},
        }
        for a, b in problems.tolist()
    )
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_tokenizer(directory: Path) -> None:
    """Writes the tokenizer as a sentencepiece file and as Hugging Face files, because engines read one or the other."""
    pad, eos, unk = SPECIAL_TOKENS
    # pieces are numbered by decreasing frequency, so the training text determines the order
    text = "".join(character * (len(ALPHABET) - i) for i, character in enumerate(ALPHABET))
    numbers = {"pad_id": PAD_ID, "eos_id": EOS_ID, "unk_id": UNK_ID, "remove_extra_whitespaces": False}
    pieces = {"pad_piece": pad, "eos_piece": eos, "unk_piece": unk}
    write_sentencepiece(directory, [text], model_type="char", vocab_size=VOCAB_SIZE, **numbers, **pieces)
    _write_tokenizer_json(directory / "tokenizer.json")
    # The generic class: a release of transformers that follows this entry reads everything from tokenizer.json.
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": pad, "eos_token": eos, "unk_token": unk}
    write_tokenizer_config(directory, names)


def write_tokenizer_config(directory: Path, names: Mapping[str, str | None]) -> None:
    """Writes tokenizer_config.json; `names` are the class and the special tokens."""
    config = {**names, "clean_up_tokenization_spaces": False, "chat_template": CHAT_TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def write_sentencepiece(directory: Path, texts: list[str], **settings: Any) -> None:
    """Trains a sentencepiece model without a beginning of sequence on `texts`, and writes tokenizer.model."""
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts),
        model_writer=model,
        character_coverage=1.0,
        normalization_rule_name="identity",
        add_dummy_prefix=False,
        bos_id=-1,
        num_threads=1,
        minloglevel=2,
        **settings,
    )
    (directory / "tokenizer.model").write_bytes(model.getvalue())


def _write_tokenizer_json(file: Path) -> None:
    """The same vocabulary as byte-pair encoding without merges, so that every token is a single character.

    transformers 5 loads the tokenizer of any Qwen2 model as `Qwen2Tokenizer`, which reads only the vocabulary and the
    merges from this file and drops characters outside the alphabet. This tokenizer also drops them: it has no unknown
    token.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models

    vocabulary = {token: i for i, token in enumerate([*SPECIAL_TOKENS, *ALPHABET])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.save(str(file))
