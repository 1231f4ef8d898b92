"""NeMo's two tokenizers of text, as far as `integrations/tokenizers.py` uses them, for tests without NeMo; and models.

`tests/e2e/nemo_tokenizer_cases.py` runs the same cases with NeMo's own classes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

TEXT = (
    "The quick brown fox jumps over the lazy dog, and 12 + 34 = 46. What is 7 * 8? The answer is 56.",
    "Let $x = \\frac{1}{2}$ be a number; then x + x = 1, which isn't much (but it's a start).",
    "def add(a, b): return a + b  # naïve café",
)


def train_model(file: Path, kind: str, **settings: Any) -> Path:
    """A SentencePiece model of type `kind` on `TEXT`, written to `file`."""
    import sentencepiece

    with file.open("wb") as stream:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(TEXT * 3), model_writer=stream, model_type=kind, hard_vocab_limit=False,
            vocab_size=settings.pop("vocab_size", 120), minloglevel=2, **settings,
        )  # fmt: skip
    return file


class SentencePieceTokenizer:
    """NeMo's class of this name (3.0), without its legacy mode."""

    def __init__(self, model_path: str, chat_template: Any = None) -> None:
        import sentencepiece

        self.tokenizer = sentencepiece.SentencePieceProcessor()
        self.tokenizer.Load(model_path)
        self.vocab_size = self.tokenizer.get_piece_size()
        self.chat_template = chat_template
        self.special_token_to_id: dict[str, int] = {}
        self.id_to_special_token: dict[int, str] = {}

    @property
    def eos_id(self) -> int:
        return self.tokenizer.eos_id()

    def text_to_ids(self, text: str) -> list[int]:
        return self.tokenizer.encode_as_ids(text)

    def ids_to_tokens(self, ids: list[int]) -> list[str]:
        return [self.tokenizer.id_to_piece(i) for i in ids]


class AutoTokenizer:
    """NeMo's class of this name (3.0)."""

    def __init__(self, pretrained_model_name: str) -> None:
        from transformers import AutoTokenizer as Hugging

        self.tokenizer = Hugging.from_pretrained(pretrained_model_name)

    @property
    def vocab_size(self) -> int:
        return len(self.tokenizer)

    @property
    def eos_id(self) -> int | None:
        return self.tokenizer.eos_token_id

    def text_to_ids(self, text: str) -> list[int]:
        return self.tokenizer.convert_tokens_to_ids(self.tokenizer.tokenize(text))

    def ids_to_tokens(self, ids: list[int]) -> list[str]:
        return self.tokenizer.convert_ids_to_tokens(ids)


# name: settings of the trainer; all of them are written with equal ids
EQUAL = {
    "unigram": {"kind": "unigram"},
    "bpe": {"kind": "bpe"},
    "bpe as in Llama": {
        "kind": "bpe", "byte_fallback": True, "vocab_size": 360, "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False, "split_digits": True,
    },
    "no prefix": {"kind": "unigram", "add_dummy_prefix": False, "vocab_size": 360, "byte_fallback": True},
    "symbols": {"kind": "unigram", "control_symbols": ["<|end|>"], "pad_id": 3},
}  # fmt: skip
# name: settings whose ids the files cannot give, and what the refusal names
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "characters": ({"kind": "char"}, "SentencePiece model of type CHAR: expected UNIGRAM or BPE"),
    "words": ({"kind": "word"}, "SentencePiece model of type WORD: expected UNIGRAM or BPE"),
    "user-defined symbols": (
        {"kind": "bpe", "user_defined_symbols": ["<u>"]},
        "'a<u>b c <u> d' is .* expected the same ids",
    ),
    "suffix": ({"kind": "unigram", "treat_whitespace_as_suffix": True}, "expected the same ids"),
    "no end": ({"kind": "unigram", "eos_id": -1}, "eos_id=-1, expected the id that ends a response"),
}
