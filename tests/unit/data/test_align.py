"""The alignment of two tokenizations: byte ends and partners worked by hand, properties over texts, and bad input."""

from __future__ import annotations

import unicodedata

import numpy as np
import pytest
from align_tokenizers import (
    BUILDERS,
    CORPUS,
    LETTERS,
    USER,
    align,
    aligned,
    characters,
    ids_of,
    load,
    tokens,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import decoders

from nemo_oprd.data.token_alignment import _to_text, align_batch, coverage_of, equal_spans
from nemo_oprd.data.token_bytes import byte_table
from nemo_oprd.data.tokenizer import Tokenizer


def byte_ends(tokenizer: Tokenizer, ids: list[int]) -> np.ndarray:
    """Where the tokens end in the text of a response whose bytes are valid."""
    return _to_text(tokenizer, ids).ends


@pytest.mark.parametrize(
    ("name", "text", "ends"),
    [
        ("bpe", "the cat", [3, 7]),
        ("bpe", " cat", [4]),
        ("bpe", "caf\u00e9s", [5, 6]),
        ("bpe", "\u4e2d\u5b57", [3, 4, 5, 6]),  # the second character in three tokens, two of which end inside it
        ("bpe", "a\U0001f600", [1, 2, 3, 4, 5]),
        ("bpe", "\\frac{12}", [1, 5, 6, 8, 9]),
        ("bpe", "<think>a", [7, 8]),  # added, but not special: text
        ("tiktoken", "the 1234", [3, 4, 7, 8]),
        ("llama", "the cat", [3, 7]),  # the first token is " the", whose space is not of the text
        ("llama", "the \u00e9", [3, 4, 5, 6]),  # <0xC3> <0xA9>
        ("llama", "a\nb", [0, 1, 2, 3]),  # a token that is only the space before the text
        ("letters", "The cat", [1, 2, 3, 4, 5, 6, 7]),
        ("toy", "12+3=", [1, 2, 3, 4, 5]),
    ],
)
def test_byte_ends(name, text, ends):
    ids = ids_of(name, text)
    assert byte_ends(load(name), ids).tolist() == ends, tokens(name, ids)
    assert byte_ends(load(name), [*ids, load(name).eos_ids[0]]).tolist() == [*ends, ends[-1]]


def test_byte_ends_of_nothing():
    assert byte_ends(load("bpe"), []).tolist() == []
    assert byte_ends(load("bpe"), [0]).tolist() == [0]


@pytest.mark.parametrize(
    ("student", "teacher", "text", "loose", "exact"),
    [
        # t h e _ c a t: ends 1..7; teacher the| cat: 3 7
        ("letters", "bpe", "the cat", [-1, -1, 0, 0, 0, 0, 1], [-1, -1, 0, -1, -1, -1, 1]),
        ("bpe", "letters", "the cat", [2, 6], [2, 6]),
        # leading spaces: student " cat" 4; teacher's letters 1 2 3 4
        ("bpe", "letters", " cat", [3], [3]),
        # Accent: caf\u00e9|s 5 6; bytes one by one
        ("bpe", "bytes", "caf\u00e9s", [4, 5], [4, 5]),
        ("bytes", "bpe", "caf\u00e9s", [-1, -1, -1, -1, 0, 1], [-1, -1, -1, -1, 0, 1]),
        # CJK: \u4e2d whole and \u5b57 in bytes; teacher's bytes 1..6
        ("bpe", "bytes", "\u4e2d\u5b57", [2, 3, 4, 5], [2, 3, 4, 5]),
        # Emoji: four bytes on both sides, behind the space that the teacher puts before the text
        ("bytes", "llama", "a\U0001f600", [1, 2, 3, 4, 5], [1, 2, 3, 4, 5]),
        # LaTeX: \\|frac|{|12|} 1 5 6 8 9; teacher byte by byte
        ("bpe", "bytes", "\\frac{12}", [0, 4, 5, 7, 8], [0, 4, 5, 7, 8]),
        ("bytes", "bpe", "\\frac{12}", [0, 0, 0, 0, 1, 2, 2, 3, 4], [0, -1, -1, -1, 1, 2, -1, 3, 4]),
        # Byte fallback: \u2581the|\u2581|<0xC3>|<0xA9> 3 4 5 6; teacher the|_|c3|a9
        ("llama", "bpe", "the \u00e9", [0, 1, 2, 3], [0, 1, 2, 3]),
        ("bpe", "llama", "the cat", [0, 1], [0, 1]),
        # x|_|ca|t 1 2 4 5; teacher x|_cat 1 5
        ("tiktoken", "bpe", "x cat", [0, 0, 0, 1], [0, -1, -1, 1]),
    ],
)
def test_by_hand(student, teacher, text, loose, exact):
    shown = tokens(student, ids_of(student, text)), tokens(teacher, ids_of(teacher, text))
    assert aligned(student, teacher, text) == loose, shown
    assert aligned(student, teacher, text, exact=True) == exact, shown


def test_end_of_sequence_on_both_sides():
    """The teacher's end is the student's; without one there is none, and one inside a response has no text."""
    student, teacher = load("letters"), load("bpe")
    ids = student.encode("the cat")
    whole = align(student, teacher, USER, [*ids, 0])
    assert whole.teacher_response_ids.tolist() == [*teacher.encode("the cat"), 0]
    assert whole.teacher_index.tolist() == [-1, -1, 0, 0, 0, 0, 1, 2]
    assert align(student, teacher, USER, [*ids, 0], exact=True).teacher_index.tolist()[-2:] == [1, 2]
    cut = align(student, teacher, USER, ids)
    assert cut.teacher_response_ids.tolist() == teacher.encode("the cat")
    inside = align(student, teacher, USER, [*ids[:3], 0, *ids[3:]])
    assert inside.teacher_index.tolist() == [-1, -1, 0, -1, 0, 0, 0, 1]
    only = align(student, teacher, USER, [0])
    assert (only.teacher_response_ids.tolist(), only.teacher_index.tolist(), only.coverage) == ([0], [0], 1.0)


def test_an_empty_response():
    empty = align(load("letters"), load("bpe"), USER, [])
    assert (empty.teacher_response_ids.tolist(), empty.teacher_index.tolist(), empty.coverage) == ([], [], 1.0)


def test_prompt_and_stop_come_from_the_teachers_template():
    """<eos> is id 0 and the first stop id; the template ends a turn with <end>, so that is what the teacher expects."""
    teacher = load("chatml")
    teacher.eos_ids = (0, 1)
    result = align(load("letters"), teacher, [{"role": "user", "content": "a"}], [*ids_of("letters", "b"), 0])
    assert result.teacher_prompt_ids.tolist() == teacher.encode("<user>a<end><assistant>")
    assert result.teacher_response_ids.tolist() == [*teacher.encode("b"), 1]


def test_special_tokens_written_out_are_text_to_the_teacher():
    """A student that spells `<eos>` does not end the teacher's turn; `<think>` is one token on both sides."""
    text = "a<eos>b"
    ids = ids_of("bytes", text)
    assert len(ids) == len(text)
    result = align(load("bytes"), load("tiktoken"), USER, ids)
    assert 0 not in result.teacher_response_ids and result.coverage == 1.0
    assert aligned("bpe", "tiktoken", "a<think>b") == [0, 1, 2]


def test_a_mask_is_kept_and_counted():
    ids = ids_of("bytes", "the")
    result = align(load("bytes"), load("tiktoken"), USER, ids, mask=[0, 1, 1])
    assert (result.teacher_index.tolist(), result.mask.tolist()) == ([-1, -1, 0], [False, False, True])
    assert (result.num_supervised, result.coverage) == (2, 0.5)


def test_bytes_that_are_no_text():
    """`a`, the first byte of an accent cut off, `b`: the teacher reads U+FFFD, and that token alone is masked."""
    a, accent, b = ids_of("bytes", "a"), ids_of("bytes", "\u00e9"), ids_of("bytes", "b")
    student, teacher = load("bytes"), load("tiktoken")
    result = align(student, teacher, USER, [*a, accent[0], *b])
    assert teacher.decode(result.teacher_response_ids) == "a\ufffdb"
    assert result.teacher_index.tolist() == [0, -1, 4]
    assert result.changed_bytes == 1
    cut = align(student, teacher, USER, [*a, accent[0]])
    assert cut.teacher_index.tolist() == [0, -1]


def test_text_that_the_teacher_changes():
    """An accent in two characters is composed by the teacher: masked there, aligned before and behind it."""
    text = "ab" + unicodedata.normalize("NFD", "\u00e9") + "cd ef gh"
    student, teacher = load("bytes"), load("nfc")
    result = align(student, teacher, USER, ids_of("bytes", text), exact=True)
    letters = teacher.encode(text)
    assert [teacher.decode([i]) for i in letters[:4]] == ["a", "b", "\u00e9", "c"]
    assert result.teacher_index.tolist() == [0, 1, -1, -1, -1, *range(3, len(letters))]
    assert result.changed_bytes == 3
    assert "1 responses with 3 bytes that do not survive" in str(coverage_of([result]))


def test_text_that_the_teacher_does_not_know():
    """The teacher drops digits: it has nothing to say about them, and what it says behind them still counts."""
    text = "the cat sat 12 and the dog sat"
    result = align(load("bytes"), load("letters"), USER, ids_of("bytes", text))
    expected = [*range(12), -1, -1, *range(12, len(text) - 2)]
    assert result.teacher_index.tolist() == expected
    # the unknown token has no bytes; the letter before it must not be paired with what has read further
    teacher = load("spm_unknown")
    ids = teacher.encode("the cat \U0001f600 sat")
    unknown = [at for at, i in enumerate(ids) if not byte_table(teacher).is_text[i]]
    assert unknown
    assert not set(unknown) & set(aligned("bytes", "spm_unknown", "the cat \U0001f600 sat"))


def test_a_page_that_the_teacher_does_not_know():
    """Longer than what is looked through at first: what stands before and behind it is aligned."""
    before, behind = "the cat sat on the mat ", " and the other cat sat there too"
    result = align(load("bytes"), load("letters"), USER, ids_of("bytes", before + "\u4e2d\u6587" * 500 + behind))
    assert result.changed_bytes == 3000
    assert result.teacher_index.tolist() == [
        *range(len(before)),
        *[-1] * 3000,
        *range(len(before), len(before + behind)),
    ]


def test_equal_spans_of_normal_forms():
    """Every word differs and no long run agrees: the letters are followed one by one."""
    for form in ("NFC", "NFKC"):
        text = unicodedata.normalize("NFD", "\u00e9a\u00e8b" * 50) + ("\ufb01n" if form == "NFKC" else "")
        spans = equal_spans(text.encode(), unicodedata.normalize(form, text).encode())
        assert [n for *_, n in spans.tolist()] == [1] * len(spans)
        assert len(spans) == 100 + (form == "NFKC")
        # e, its two-byte mark, a: in the text at 3 of every 4 bytes, in the other at 2 of every 3
        assert spans[:100, 0].tolist() == [4 * n + 3 for n in range(100)]
        assert spans[:100, 1].tolist() == [3 * n + 2 for n in range(100)]
    jamo = "\u1112\u1161\u11ab and more text"
    spans = equal_spans(jamo.encode(), unicodedata.normalize("NFC", jamo).encode())
    assert spans.tolist() == [[9, 3, 14]]


def test_equal_spans():
    assert equal_spans(b"abcdefgh-x", b"abcdefgh_x").tolist() == [[0, 0, 8], [9, 9, 1]]
    assert equal_spans(b"", b"abc").tolist() == []
    assert equal_spans(b"same", b"same").tolist() == [[0, 0, 4]]
    assert equal_spans(b"x" * 20 + b"  " + b"tail of text", b"x" * 20 + b"tail of text").tolist() == [
        [0, 0, 20],
        [22, 20, 12],
    ]
    # two accents that share their first byte are different letters
    assert equal_spans("\u00e9".encode(), "\u00e8".encode()).tolist() == []
    assert equal_spans("ab\u00e9 cdefghij".encode(), "ab\u00e8 cdefghij".encode()).tolist() == [[0, 0, 2], [4, 4, 9]]


def test_a_batch_is_its_responses():
    texts = ["the cat", "", "caf\u00e9 \U0001f600", "x\ny"]
    ids = [ids_of("bytes", text, stop=i % 2 == 0) for i, text in enumerate(texts)]
    batch = align_batch(load("bytes"), load("llama"), [USER] * 4, ids)
    for one, many in zip((align(load("bytes"), load("llama"), USER, i) for i in ids), batch, strict=True):
        assert one.teacher_index.tolist() == many.teacher_index.tolist()
        assert one.teacher_response_ids.tolist() == many.teacher_response_ids.tolist()
        assert one.teacher_prompt_ids.tolist() == many.teacher_prompt_ids.tolist()
    coverage = coverage_of(batch)
    assert (coverage.responses, coverage.tokens) == (4, sum(map(len, ids)))
    assert coverage.aligned == sum(int((a.teacher_index >= 0).sum()) for a in batch)
    assert str(coverage).startswith(f"alignment coverage {coverage.share:.4f} (")


# Properties. Texts of what breaks tokenizers, with letters between; student ids as it would write them, or any ids.

PARTS = [
    "the",
    " cat",
    "caf\u00e9",
    "e\u0301",
    "\u4e2d\u6587",
    "\U0001f600",
    "\\frac{1}{2}",
    "  ",
    "\n",
    "12",
    "a",
    "<eos>",
]
CHARACTERS = st.integers(0, 0x10FFFF).filter(lambda i: not 0xD800 <= i < 0xE000).map(chr)
TEXTS = st.lists(st.sampled_from(PARTS) | CHARACTERS, max_size=12).map("".join)
NAMES = sorted(set(BUILDERS) - {"chatml"})
FAITHFUL = ["bytes", "bpe", "tiktoken"]
PROPERTY = settings(
    max_examples=50, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)


@PROPERTY
@given(st.sampled_from(NAMES), TEXTS)
def test_offsets_rise_to_the_length_of_the_text(name, text):
    tokenizer = load(name)
    ids = tokenizer.encode_plain([text])[0]
    ends = byte_ends(tokenizer, ids)
    assert len(ends) == len(ids) and (np.diff(ends, prepend=0) >= 0).all()
    if name in FAITHFUL:
        assert ([0, *ends.tolist()])[-1] == len(text.encode())
        assert tokenizer.decode(ids) == text


@PROPERTY
@given(st.sampled_from(FAITHFUL), st.sampled_from(FAITHFUL), TEXTS, st.booleans(), st.booleans())
def test_partners_are_the_last_that_end_in_time(student, teacher, text, stop, exact):
    """Against a quadratic search over the bytes of the teacher's tokens."""
    ids = ids_of(student, text, stop=stop)
    result = align(load(student), load(teacher), USER, ids, exact=exact)
    ours, theirs = byte_ends(load(student), ids), byte_ends(load(teacher), result.teacher_response_ids)
    for t, partner in enumerate(result.teacher_index.tolist()):
        last = stop and t == len(ids) - 1
        in_time = [k for k in range(len(theirs) - int(stop)) if theirs[k] <= ours[t]]
        expected = len(theirs) - 1 if last else max(in_time, default=-1)
        if exact and student != teacher and expected >= 0 and theirs[expected] != ours[t]:
            expected = -1
        assert partner == expected
        assert partner < 0 or theirs[partner] <= ours[t] <= len(text.encode())


@PROPERTY
@given(st.sampled_from(NAMES), st.sampled_from(NAMES), st.data(), st.booleans())
def test_any_ids_stay_within_the_response(student, teacher, data, exact):
    """Ids as a model samples them: text that doesn't survive, special tokens anywhere. Partners never go back."""
    known = sorted(load(student).hf.get_vocab().values())
    ids = data.draw(st.lists(st.sampled_from(known), max_size=20))
    result = align(load(student), load(teacher), USER, ids, exact=exact)
    index = result.teacher_index
    assert index.dtype == np.int64 and len(index) == len(ids) and (index >= -1).all()
    assert (index < len(result.teacher_response_ids)).all()
    assert (np.diff(index[index >= 0]) >= 0).all()
    assert ((index >= 0) == result.mask).all() and 0 <= result.coverage <= 1
    if student != teacher:  # equal vocabularies share ids and look at no text
        text = byte_table(load(student)).join(ids).decode(errors="replace")
        shared = byte_table(load(teacher)).join(result.teacher_response_ids)
        if result.changed_bytes == 0:
            assert shared.decode().strip() == text.strip()


@PROPERTY
@given(st.sampled_from(NAMES), st.data())
def test_an_equal_tokenizer_gives_the_identity(name, data):
    """Whatever was sampled: ids of one vocabulary are shared, not written and read again."""
    known = sorted(load(name).hf.get_vocab().values())
    ids = data.draw(st.lists(st.sampled_from(known), max_size=20))
    result = align(load(name), load(name), USER, ids, exact=data.draw(st.booleans()))
    assert result.teacher_response_ids.tolist() == ids and result.teacher_index.tolist() == list(range(len(ids)))


@PROPERTY
@given(TEXTS, st.booleans(), st.booleans())
def test_an_equal_tokenization_gives_the_identity(text, stop, exact):
    """Two vocabularies that differ in a token which is never used: the identity by way of the bytes."""
    ids = ids_of("bpe", text, stop=stop)
    result = align(load("bpe"), load("bpe_again"), USER, ids, exact=exact)
    assert result.teacher_response_ids.tolist() == ids and result.teacher_index.tolist() == list(range(len(ids)))


# Bad input


def test_ids_of_another_tokenizer():
    with pytest.raises(ValueError, match=r"letters: token id 300 at position 1 .* expected ids below 30 .*; use the"):
        align(load("letters"), load("bpe"), USER, [1, 300])


@pytest.mark.parametrize(
    ("decoder", "reason"),
    [
        (None, "its decoder is none"),
        (decoders.WordPiece(), "its decoder is WordPiece"),
        (decoders.Replace("a", " "), r"the bytes of its tokens join to .*, but decode returns|never"),
        (decoders.Sequence([decoders.Replace("a", "b"), decoders.Fuse()]), "its decoder replaces .* by 'b'"),
        (decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 2, 0)]), "its decoder strips"),
    ],
    ids=["none", "wordpiece", "replace", "replace-letter", "strip"],
)
def test_a_tokenizer_without_offsets(tmp_path, decoder, reason):
    tokenizer = Tokenizer.load(characters(tmp_path / "model", LETTERS, decoder=decoder))
    if reason.endswith("never"):
        assert byte_table(tokenizer).pieces[1] == b" "  # odd, and what decode says too
        return
    with pytest.raises(ValueError, match=rf"model: the bytes of its tokens can't be derived.*{reason}"):
        byte_ends(tokenizer, [1])


def test_a_decoder_that_does_otherwise_than_it_says(tmp_path):
    """What a description doesn't tell is found by decoding: here a class that writes its text in capitals."""
    tokenizer = Tokenizer.load(characters(tmp_path / "model", LETTERS, decoder=decoders.Fuse()))
    tokenizer.decode = lambda ids: Tokenizer.decode(tokenizer, ids).upper()
    with pytest.raises(ValueError, match=r"the bytes of its tokens join to b'Let a.*', but decode returns b'LET A"):
        byte_ends(tokenizer, [1])


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ m['content'] | upper }}{% endfor %}",
        "{% for m in messages %}{{ m['content'] | replace('  ', ' ') }}{% endfor %}",
        "{% for m in messages %}{{ m['content'] | tojson }}{% endfor %}",
        "{% for m in messages if m['role'] == 'user' %}{{ m['content'] }}{% endfor %}",
    ],
    ids=["upper", "spaces", "json", "left-out"],
)
def test_a_template_that_changes_the_response(tmp_path, template):
    teacher = Tokenizer.load(characters(tmp_path / "model", LETTERS, decoder=decoders.Fuse(), template=template))
    with pytest.raises(ValueError, match=r"model: the chat template changes the text of a response: .*use a template"):
        align(load("bpe"), teacher, USER, ids_of("bpe", "the cat"))


def test_templates_of_reasoning_models(tmp_path):
    """They drop or move what stands before </think> in earlier turns; the response never passes through them."""
    template = "{% for m in messages %}{{ m['content'].split('</think>')[-1] | trim }}{% endfor %}"
    teacher = Tokenizer.load(
        characters(tmp_path / "model", LETTERS + "</>", decoder=decoders.Fuse(), template=template)
    )
    # the probe's digits and signs are not in this alphabet, but the template is looked at as text
    result = align(load("bytes"), teacher, USER, ids_of("bytes", " so</think>the"))
    assert teacher.decode(result.teacher_response_ids) == " so</think>the" and result.coverage == 1.0


def test_no_template(tmp_path):
    teacher = Tokenizer.load(characters(tmp_path / "model", LETTERS, decoder=decoders.Fuse(), template=None))
    with pytest.raises(ValueError, match="model: the tokenizer has no chat template"):
        align(load("bpe"), teacher, USER, ids_of("bpe", "the cat"))


def test_coverage_too_low():
    ids = [ids_of("bytes", "12 + 34 = 46 and "), ids_of("bytes", "0123456789" * 4)]
    align_batch(load("bytes"), load("letters"), [USER] * 2, ids, min_coverage=0.0)
    with pytest.raises(ValueError, match=r"coverage 0\.\d+ \(\d+ of 57 tokens .* expected at least 0\.5; check that"):
        align_batch(load("bytes"), load("letters"), [USER] * 2, ids)
    with pytest.raises(ValueError, match="expected at least 0.9; align without `exact`"):
        align_batch(load("letters"), load("bpe"), [USER], [ids_of("letters", "the cat")], exact=True, min_coverage=0.9)


def test_lengths_that_differ():
    student, teacher, ids = load("bytes"), load("bpe"), ids_of("bytes", "the")
    with pytest.raises(ValueError, match="2 conversations, 1 responses and 1 masks to align"):
        align_batch(student, teacher, [USER] * 2, [ids])
    with pytest.raises(ValueError, match="response 0: the mask has 1 entries, expected one for each of the 3 tokens"):
        align_batch(student, teacher, [USER], [ids], masks=[[1]])


def test_every_kind_aligns_its_own_corpus():
    """All pairs of the kinds that know the page they were trained on. The rest lies in a teacher's long token."""
    kinds = ["bytes", "bpe", "tiktoken", "llama", "spm_bpe", "spm_unigram", "spm_slow"]
    for student in kinds:
        ids = [ids_of(student, text, stop=True) for text in CORPUS]
        for teacher in kinds:
            coverage = coverage_of(align_batch(load(student), load(teacher), [USER] * len(ids), ids))
            # the class behind spm_slow writes small letters and drops punctuation, whatever its model could do
            faithful = teacher not in ("spm_slow", student) and student != "spm_slow"
            assert coverage.share > 0.7 and not (faithful and coverage.changed), f"{student} -> {teacher}: {coverage}"
