"""What a teacher with another tokenizer reads of rollouts, and the rows that come of it: worked by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from align_tokenizers import byte_level, characters

from nemo_oprd.batch.layout import Layout
from nemo_oprd.batch.plan import StepPlan
from nemo_oprd.batch.token_table import TokenTable, make_rows, teacher_positions
from nemo_oprd.batch.types import Rollout
from nemo_oprd.data.tokenizer import Tokenizer
from nemo_oprd.rollout.engine import Request
from nemo_oprd.rollout.teacher_inputs import PromptInputs, TextInputs, add_teacher_inputs, alignment_metrics

# the student reads "ab|cab" in characters, the teacher in ab, c, ab behind a prompt of another length
ROLLOUT = Rollout([9, 9], [1, 2, 3, 1, 2], None, None, None, None, None, None, [8, 8, 8], [5, 6, 5], [-1, 0, 1, 1, 2])


def rows(*rollouts: Rollout, position: str = "token", positions: str = "all", k: int = 9) -> TokenTable:
    return make_rows(list(rollouts), positions=positions, k=k, position=position, aggregation="sequence_mean")


def test_rows_have_two_positions() -> None:
    table = rows(ROLLOUT)
    assert table.token.tolist() == [1, 2, 3, 4]  # the first character ends inside the teacher's first token
    assert table.position.tolist() == [3, 4, 5, 6]
    assert table.teacher_position.tolist() == [3, 4, 4, 5]
    assert table.weight.tolist() == [0.25] * 4
    assert table.from_start.tolist() == [0, 1, 2, 3]
    assert table.as_read_by_teacher().position.tolist() == [3, 4, 4, 5]


def test_before_a_token_means_behind_what_was_read_before_it() -> None:
    """The state that predicts token t is that of token t - 1; before the first token both have read their prompts."""
    assert teacher_positions(ROLLOUT, 1).tolist() == [2, -1, 3, 4, 4]
    table = rows(ROLLOUT, position="predicting")
    assert table.token.tolist() == [0, 2, 3, 4]
    assert table.position.tolist() == [1, 3, 4, 5]
    assert table.teacher_position.tolist() == [2, 3, 4, 4]


def test_first_and_last_count_what_has_a_partner() -> None:
    assert rows(ROLLOUT, positions="first_k", k=1).token.tolist() == [1]
    masked = Rollout(**{**vars(ROLLOUT), "response_mask": [1, 1, 1, 1, 0]})
    assert rows(masked, positions="last_k", k=2).token.tolist() == [2, 3]


def test_the_same_ids_stay_where_they_are() -> None:
    plain = Rollout([9, 9], [1, 2, 3])
    for position in ("token", "predicting"):
        table = rows(plain, position=position)
        assert table.teacher_position.tolist() == table.position.tolist()
    other_prompt = Rollout([9, 9], [1, 2], teacher_prompt_ids=[4, 4, 4, 4, 4])
    assert rows(other_prompt).teacher_position.tolist() == [5, 6]
    assert other_prompt.as_read_by_teacher() == Rollout([4] * 5, [1, 2])


def test_the_teacher_computes_up_to_its_last_partner() -> None:
    """Its packs have its own lengths; what no row depends on is left out."""
    early = Rollout(**{**vars(ROLLOUT), "teacher_response_ids": [5] * 40})
    plan = StepPlan.build(rows(early, Rollout([1], [2])), None, 2, Layout(), 100)
    theirs = plan.for_teacher(Layout(), 2, 100)
    assert plan.hidden.lengths == {0: 7, 1: 2}
    assert theirs.hidden.lengths == {0: 6, 1: 2}
    assert [rows.hidden_index.tolist() for rows in theirs.hidden.local_rows(Layout().coordinates(0))] == [
        [3, 4, 4, 5, 7]
    ]


@pytest.fixture
def tokenizers(tmp_path: Path) -> tuple[Tokenizer, Tokenizer]:
    from tokenizers import decoders

    student = characters(tmp_path / "student", "abc?", decoder=decoders.Fuse())
    teacher = byte_level(tmp_path / "teacher", ["ab", "abc"])
    return Tokenizer.load(student), Tokenizer.load(teacher)


def reader(tokenizers: tuple[Tokenizer, Tokenizer], positions: int = 64, exact: bool = False, least: float = 0.5):
    return TextInputs(*tokenizers, positions, exact, least)


def sampled(student: Tokenizer, *texts: str) -> tuple[list[Rollout], list[Request]]:
    message = ({"role": "user", "content": "?"},)
    prompt = student.encode("?")
    rollouts = [Rollout(prompt, [*student.encode(text), student.eos_ids[0]], finish_reason="stop") for text in texts]
    return rollouts, [Request(prompt, "?", teacher_messages=message)] * len(texts)


def test_text_is_read_in_the_teachers_tokens(tokenizers: tuple[Tokenizer, Tokenizer]) -> None:
    student, teacher = tokenizers
    first, second = reader(tokenizers).add_to(*sampled(student, "abcab", "cc"))
    pieces = teacher.hf.convert_ids_to_tokens(first.teacher_response_ids)
    assert pieces == ["abc", "ab", "<eos>"]
    assert first.teacher_index.tolist() == [-1, -1, 0, 0, 1, 2]
    assert second.teacher_index.tolist() == [0, 1, 2]
    assert teacher.decode(first.teacher_prompt_ids) == "?"
    assert alignment_metrics([first, second]) == {"align/coverage": 7 / 9, "align/coverage_lowest": 4 / 6}
    exact, _ = reader(tokenizers, exact=True).add_to(*sampled(student, "abcab", "cc"))
    assert exact.teacher_index.tolist() == [-1, -1, 0, -1, 1, 2]


def test_too_little_in_common_is_refused(tokenizers: tuple[Tokenizer, Tokenizer]) -> None:
    with pytest.raises(ValueError, match=r"alignment coverage 0\.7778 \(7 of 9 tokens.*expected at least 0\.8"):
        reader(tokenizers, least=0.8).add_to(*sampled(tokenizers[0], "abcab", "cc"))


def test_no_partner_behind_the_teachers_positions(tokenizers: tuple[Tokenizer, Tokenizer]) -> None:
    (cut,) = reader(tokenizers, positions=3, least=0.0).add_to(*sampled(tokenizers[0], "cccc"))
    assert len(cut.teacher_response_ids) == 2
    assert cut.teacher_index.tolist() == [0, 1, -1, -1, -1]
    assert alignment_metrics([cut])["align/coverage"] == 2 / 5
    assert np.flatnonzero(teacher_positions(cut, 0) >= 0).tolist() == [0, 1]


def test_rollouts_that_were_not_aligned_have_no_coverage() -> None:
    assert alignment_metrics([Rollout([1], [2])]) == {}
    assert alignment_metrics([Rollout([1], [2]), ROLLOUT]) == {}


def test_another_prompt_before_the_same_response(tokenizers: tuple[Tokenizer, Tokenizer]) -> None:
    """Behind the teacher's positions there is no partner."""
    student = tokenizers[0]
    rollouts, requests = sampled(student, "abcab", "cc")
    told = [replace(request, teacher_messages=({"role": "user", "content": "ab?"},)) for request in requests]
    first, second = PromptInputs(student, 64).add_to(rollouts, told)
    assert student.decode(first.teacher_prompt_ids) == "ab?"
    assert (first.teacher_response_ids, first.teacher_index) == (None, None)
    assert first.as_read_by_teacher() == Rollout(first.teacher_prompt_ids, first.response_ids)
    assert teacher_positions(second, 0).tolist() == [3, 4, 5]
    cut, whole = PromptInputs(student, 7).add_to(rollouts, told)
    assert cut.teacher_response_ids.tolist() == first.response_ids[:4].tolist()
    assert cut.teacher_index.tolist() == [0, 1, 2, 3, -1, -1]
    assert whole == second
    assert teacher_positions(cut, 1).tolist() == [2, 3, 4, 5, 6, -1]


def test_every_teacher_has_its_own_reader(tokenizers: tuple[Tokenizer, Tokenizer]) -> None:
    rollouts, requests = sampled(tokenizers[0], "abcab", "cc", "a")
    read = add_teacher_inputs([None, PromptInputs(tokenizers[0], 64)], [1, 0, 1], rollouts, requests)
    assert [rollout.teacher_prompt_ids is not None for rollout in read] == [True, False, True]
    assert read[1] is rollouts[1]
    assert [rollout.response_ids.tolist() for rollout in read] == [
        rollout.response_ids.tolist() for rollout in rollouts
    ]
