"""Small tokenizers of every kind that the alignment knows, as a model's files: by hand, or trained on a page."""

from __future__ import annotations

import functools
import io
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

import sentencepiece
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as HFTokenizer

from nemo_oprd.data.token_alignment import Alignment, align_batch
from nemo_oprd.data.tokenizer import Messages, Tokenizer
from nemo_oprd.tools.toy import pair as task

TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
CHATML = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
CORPUS = [
    "The sum of the first n numbers is \\frac{n(n+1)}{2}, so the answer is \\boxed{42}.",
    "na\u00efve caf\u00e9, d\u00e9j\u00e0 vu; the cat sat on the mat and the other cat sat there too",
    "\u4e2d\u6587\u5b57\u7b26 \u4e2d\u6587 \u7b54\u6848 and so on, and so forth, therefore 12 + 34 = 46",
]


def _byte_level_text(text: bytes) -> str:
    [(piece, _)] = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text.decode())
    return str(piece)


def write(
    path: Path, backend: HFTokenizer | None, eos: str = "<eos>", template: str | None = TEMPLATE, **config: object
) -> Path:
    """Writes the files that `Tokenizer.load` reads; `backend` None where the vocabulary is there already."""
    path.mkdir(parents=True, exist_ok=True)
    if backend is not None:
        backend.save(str(path / "tokenizer.json"))
        config.setdefault("tokenizer_class", "PreTrainedTokenizerFast")
    content = {"eos_token": eos, "chat_template": template, "clean_up_tokenization_spaces": False, **config}
    (path / "tokenizer_config.json").write_text(json.dumps(content))
    return path


def byte_level(
    path: Path, pieces: list[str], *, tiktoken: bool = False, nfc: bool = False, template: str | None = TEMPLATE
) -> Path:
    """Byte-level BPE whose merges build `pieces` from the left; `tiktoken`: as Llama 3 is written (GPT-4's split).

    Ids: 0 <eos>, 1 <end>, both special, 2 <think>, which is text; 256 bytes from 3 on; then the pieces.
    """
    vocabulary = {"<eos>": 0, "<end>": 1, "<think>": 2}
    for character in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocabulary[character] = len(vocabulary)
    merges = []
    for piece in pieces:
        symbols = _byte_level_text(piece.encode())
        for n in range(1, len(symbols)):
            pair = (symbols[:n], symbols[n])
            if pair not in merges:
                merges.append(pair)
                vocabulary.setdefault("".join(pair), len(vocabulary))
    backend = HFTokenizer(models.BPE(vocabulary, merges, ignore_merges=tiktoken))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if tiktoken:
        split = pre_tokenizers.Split(Regex(r"\p{N}{1,3}| ?\p{L}+|\s+|[^\s\p{L}\p{N}]+"), "isolated")
        byte = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([split, byte])
    if nfc:
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    for token in ("<eos>", "<end>", "<think>"):
        added = AddedToken(token, special=token != "<think>", normalized=False)
        (backend.add_special_tokens if added.special else backend.add_tokens)([added])
    return write(path, backend, template=template)


def byte_fallback(path: Path, pieces: list[str], characters: str) -> Path:
    """Sentencepiece-style BPE as Llama 2 is written: a space before the text, bytes for unknown characters.

    Ids: 0 <unk>, 1 <s>, 2 <eos>; 256 bytes from 3 on; then the characters and the pieces (spaces as U+2581).
    """
    vocabulary = {"<unk>": 0, "<s>": 1, "<eos>": 2} | {f"<0x{i:02X}>": 3 + i for i in range(256)}
    for character in characters:
        vocabulary[character] = len(vocabulary)
    merges = []
    for piece in pieces:
        for n in range(1, len(piece)):
            merges.append((piece[:n], piece[n]))
            vocabulary.setdefault(piece[: n + 1], len(vocabulary))
    backend = HFTokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in ("<unk>", "<s>", "<eos>")])
    return write(path, backend, unk_token="<unk>")


def sentencepiece_model(path: Path, kind: str, tokenizer_class: str | None, *, byte_fallback: bool = True) -> Path:
    """A trained sentencepiece model; `kind` unigram or bpe. Which class reads it decides how it is decoded."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS * 5),
        model_writer=model,
        model_type=kind,
        vocab_size=420 if byte_fallback else 120,
        byte_fallback=byte_fallback,
        hard_vocab_limit=False,
        unk_id=0,
        bos_id=-1,
        eos_id=1,
        eos_piece="<eos>",
        pad_id=-1,
        num_threads=1,
        minloglevel=2,
    )
    path.mkdir(parents=True)
    (path / "tokenizer.model").write_bytes(model.getvalue())
    named = {"tokenizer_class": tokenizer_class} if tokenizer_class else {}
    return write(path, None, unk_token="<unk>", bos_token=None, **named)


def characters(path: Path, alphabet: str, *, decoder: decoders.Decoder | None, template: str | None = TEMPLATE) -> Path:
    """One token per character of `alphabet`, others dropped; 0 is <eos>."""
    vocabulary = {token: i for i, token in enumerate(["<eos>", *alphabet])}
    backend = HFTokenizer(models.BPE(vocabulary, []))
    if decoder is not None:
        backend.decoder = decoder
    backend.add_special_tokens([AddedToken("<eos>", special=True, normalized=False)])
    return write(path, backend, template=template)


USER = [{"role": "user", "content": "1+1="}]
LETTERS = "abcdefghijklmnopqrstuvwxyzTL "
ROOT = tempfile.TemporaryDirectory()


def build_toy(path: Path) -> Path:
    path.mkdir()
    task.write_tokenizer(path)
    return path


BUILDERS = {
    "bytes": lambda path: byte_level(path, []),
    "bpe": lambda path: byte_level(path, ["the", " cat", "caf\u00e9", "frac", "12", "\u4e2d", " sat"]),
    "bpe_again": lambda path: byte_level(path, ["the", " cat", "caf\u00e9", "frac", "12", "\u4e2d", " sat", "xyz"]),
    "tiktoken": lambda path: byte_level(path, ["the", " the", " so", "123", "ca", "}{"], tiktoken=True),
    "nfc": lambda path: byte_level(path, ["the", "\u00e9"], nfc=True),
    "llama": lambda path: byte_fallback(path, ["\u2581the", "\u2581cat", "th"], LETTERS.replace(" ", "\u2581")),
    "spm_bpe": lambda path: sentencepiece_model(path, "bpe", "LlamaTokenizer"),
    "spm_unigram": lambda path: sentencepiece_model(path, "unigram", None),
    "spm_slow": lambda path: sentencepiece_model(path, "unigram", "SiglipTokenizer"),
    "spm_unknown": lambda path: sentencepiece_model(path, "unigram", None, byte_fallback=False),
    "letters": lambda path: characters(path, LETTERS, decoder=decoders.Fuse()),
    "toy": build_toy,
    "chatml": lambda path: byte_level(path, ["user", " cat"], template=CHATML.replace("<eos>", "<end>")),
}


@functools.cache
def load(name: str) -> Tokenizer:
    """One of the tokenizers above, written and read once per process."""
    return Tokenizer.load(BUILDERS[name](Path(ROOT.name) / name))


def ids_of(name: str, text: str, *, stop: bool = False) -> list[int]:
    tokenizer = load(name)
    return tokenizer.encode_plain([text])[0] + ([tokenizer.eos_ids[0]] if stop else [])


def tokens(name: str, ids: list[int]) -> list[str]:
    return [load(name).hf.convert_ids_to_tokens(i) for i in ids]


def align(
    student: Tokenizer,
    teacher: Tokenizer,
    messages: Messages,
    student_ids: Sequence[int],
    *,
    mask: Sequence[int] | None = None,
    exact: bool = False,
) -> Alignment:
    """`align_batch` of one response, with no minimum coverage."""
    return align_batch(student, teacher, [messages], [student_ids], masks=[mask], exact=exact, min_coverage=0.0)[0]


def aligned(student: str, teacher: str, text: str, *, stop: bool = False, exact: bool = False) -> list[int]:
    ids = ids_of(student, text, stop=stop)
    return align(load(student), load(teacher), USER, ids, exact=exact).teacher_index.tolist()
