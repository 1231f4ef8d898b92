"""What is written of values per token: which responses, the text of each token, and lines that are JSON."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from align_tokenizers import ids_of, load

from nemo_oprd.batch.token_table import make_rows
from nemo_oprd.batch.types import Rollout
from nemo_oprd.distillation.metrics.token_metrics import OUTPUT, REPRESENTATION, TokenMetrics, TokenSlots
from nemo_oprd.run.run_reader import remove_token_files, token_file, token_files
from nemo_oprd.run.step_recorder import prompt_id, token_records, token_texts

TEXT = "Let the  na\u00efve cat\nsee \u5b57 \U0001f600 so \\frac{12}{3}."


@pytest.mark.parametrize("name", ["bytes", "bpe", "tiktoken", "nfc", "llama", "spm_bpe", "toy"])
def test_texts_join_to_the_response(name: str) -> None:
    text = "12+34=" if name == "toy" else TEXT
    tokenizer, ids = load(name), ids_of(name, text)
    texts = token_texts(tokenizer, ids)
    assert len(texts) == len(ids)
    assert "".join(texts).removeprefix(" ") == tokenizer.decode(ids) == text  # sentencepiece begins with a space


def test_parts_of_a_character_belong_to_its_last_token() -> None:
    tokenizer = load("bytes")
    ids = ids_of("bytes", "a\u00e9\U0001f600")
    assert token_texts(tokenizer, ids) == ["a", "", "\u00e9", "", "", "", "\U0001f600"]
    assert token_texts(tokenizer, ids[:2]) == ["a", "\ufffd"]  # sampling ended inside the character


def test_special_tokens_have_their_names() -> None:
    tokenizer = load("bpe")
    [eos] = tokenizer.eos_ids
    ids = [*ids_of("bpe", "the"), eos, tokenizer.vocab_size + 5]
    assert token_texts(tokenizer, ids) == ["the", "<eos>", f"<{tokenizer.vocab_size + 5}>"]


def test_a_tokenizer_without_bytes_decodes_each_token() -> None:
    from unittest import mock

    tokenizer, ids = load("bpe"), ids_of("bpe", "the cat")
    with mock.patch("nemo_oprd.run.step_recorder.byte_table", side_effect=ValueError):
        assert token_texts(tokenizer, ids) == [tokenizer.decode([i]) for i in ids] == ["the", " cat"]


def rollouts(*lengths: int) -> list[Rollout]:
    return [Rollout([1, 2], list(range(length))) for length in lengths]


@pytest.mark.parametrize(
    ("count", "batch", "expected"), [(0, 4, None), (1, 4, [0]), (3, 6, [0, 2, 4]), (3, 4, [0, 1, 2]), (9, 2, [0, 1])]
)
def test_kept_responses_are_evenly_spread(count: int, batch: int, expected: list[int] | None) -> None:
    slots = TokenSlots.choose(rollouts(*[3] * batch), count)
    assert (None if slots is None else slots.responses) == expected


def test_slots_are_distinct_and_others_share_one() -> None:
    batch = rollouts(3, 2, 0, 4)
    slots = TokenSlots.choose(batch, 2)
    assert slots is not None and slots.responses == [0, 2] and slots.count == 3
    table = make_rows(batch, positions="last_k", k=2, position="token", aggregation="sequence_mean")
    assert slots.of_rows(table).tolist() == [1, 2, 3, 3, 3, 3]
    assert slots.covered(table).tolist() == [False, True, True]
    assert [len(part) for part in slots.per_response(np.arange(3))] == [3, 0]


def test_lines_are_json_with_null_for_what_is_not_known(tmp_path: Path) -> None:
    batch = rollouts(2, 2)
    slots = TokenSlots.choose(batch, 2)
    assert slots is not None
    table = make_rows(batch, positions="last_k", k=1, position="token", aggregation="token_mean")
    hidden = torch.tensor([[0.0, 1 / 3, 0.0, math.nan, 9.0], [0.0, 0.5, 0.0, math.inf, 9.0]], dtype=torch.float64)
    sums = {"rep_tokens": hidden, "output_tokens": torch.zeros(2, 5, dtype=torch.float64)}
    measured = {"rep/loss": 1.0, "rep/cosine_similarity": 0.5}
    metrics = TokenMetrics.from_sums(sums, slots, table, None, measured)
    lines = list(token_records(7, batch, metrics, None))
    assert [json.loads(json.dumps(line, allow_nan=False)) for line in lines] == lines
    assert lines[0] == {
        "step": 7, "number": 0, "prompt_id": prompt_id([1, 2]), "token_ids": [0, 1],
        "rep_loss": [None, 0.333333], "cosine": [None, 0.5],
    }  # fmt: skip
    assert lines[1]["rep_loss"] == [None, None] and lines[1]["cosine"] == [None, None]
    assert prompt_id([1, 2]) != prompt_id([12]) and len(prompt_id([1])) == 12
    assert len(REPRESENTATION) == len(OUTPUT) == 2


def test_texts_and_facts() -> None:
    [eos] = load("bpe").eos_ids
    rollout = Rollout(ids_of("bpe", "12+"), [*ids_of("bpe", "the"), eos], finish_reason="stop", answer="3")
    [line] = token_records(1, [rollout], TokenMetrics([0], [{"kl": [0.125, 1e-7]}]), load("bpe"))
    assert line["prompt"] == "12+" and line["response"] == "the" and line["tokens"] == ["the", "<eos>"]
    assert line["answer"] == "3" and line["finish_reason"] == "stop" and "data_source" not in line
    assert line["kl"] == [0.125, 1e-7]


def test_files_of_steps_that_are_not_reached_are_removed(tmp_path: Path) -> None:
    for step in (1, 20, 300):
        token_file(tmp_path, step).write_text("")
    (tmp_path / "step_0000300.jsonl").write_text("")
    assert list(token_files(tmp_path)) == [1, 20, 300]
    remove_token_files(tmp_path, 20)
    assert list(token_files(tmp_path)) == [1, 20] and (tmp_path / "step_0000300.jsonl").exists()
