"""Tokens aligned per minute on one core: `python -m benchmarks.align [--out FILE.json]`.

Two vocabularies are trained on this repository's own documents and sources: a byte-level BPE and a sentencepiece
unigram model with byte fallback. The same texts are cut into responses, so nothing is downloaded. The measured time is
the whole cost of alignment in a training step: converting ids to text, tokenizing again, finding partners. The time for
building the byte tables, once per run, is recorded separately.
"""

from __future__ import annotations

import os

os.environ["RAYON_NUM_THREADS"] = "1"  # one core; read when the tokenizers library starts
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import argparse
import io
import json
import tempfile
import time
from pathlib import Path

import sentencepiece
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

from nemo_oprd.data.token_alignment import align_batch, coverage_of
from nemo_oprd.data.token_bytes import byte_table
from nemo_oprd.data.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parent.parent
VOCABULARY = 8000
RESPONSE_CHARACTERS = 6000
REQUIRED_PER_MINUTE = 1_000_000
MESSAGES = [{"role": "user", "content": "Go on."}]
CONFIG = {"eos_token": "<eos>", "chat_template": "{% for m in messages %}{{ m['content'] }}{% endfor %}"}


def read_texts() -> list[str]:
    """Texts of `RESPONSE_CHARACTERS` each, to be used as responses."""
    files = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("nemo_oprd/**/*.py")])
    text = "\n".join(file.read_text(encoding="utf-8") for file in files)
    return [text[at : at + RESPONSE_CHARACTERS] for at in range(0, len(text), RESPONSE_CHARACTERS)]


def byte_level(path: Path, texts: list[str]) -> Tokenizer:
    """Trains a byte-level BPE, the kind of GPT-2 and Qwen."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=["<eos>"], initial_alphabet=alphabet)
    )
    path.mkdir()
    backend.save(str(path / "tokenizer.json"))
    return _load(path, {"tokenizer_class": "PreTrainedTokenizerFast"})


def unigram(path: Path, texts: list[str]) -> Tokenizer:
    """Trains a sentencepiece model that does not normalise the text."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(line for text in texts for line in text.splitlines()),
        model_writer=model,
        model_type="unigram",
        vocab_size=VOCABULARY // 2,
        byte_fallback=True,
        hard_vocab_limit=False,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        unk_id=0,
        eos_id=1,
        eos_piece="<eos>",
        bos_id=-1,
        num_threads=1,
        minloglevel=2,
    )
    path.mkdir()
    (path / "tokenizer.model").write_bytes(model.getvalue())
    return _load(path, {"unk_token": "<unk>"})


def _load(path: Path, config: dict[str, str]) -> Tokenizer:
    (path / "tokenizer_config.json").write_text(json.dumps(CONFIG | config))
    return Tokenizer.load(path)


def measure(student: Tokenizer, teacher: Tokenizer, texts: list[str]) -> dict[str, float]:
    """The best of three passes over all responses."""
    ids = [[*one, student.eos_ids[0]] for one in student.encode_plain(texts)]
    start = time.perf_counter()
    byte_table(student), byte_table(teacher)
    tables = time.perf_counter() - start
    seconds, coverage = [], 0.0
    for _ in range(3):
        start = time.perf_counter()
        alignments = align_batch(student, teacher, [MESSAGES] * len(ids), ids)
        seconds.append(time.perf_counter() - start)
        coverage = coverage_of(alignments).share
    count = sum(map(len, ids))
    return {
        "tokens": count,
        "seconds": min(seconds),
        "tokens_per_minute": 60 * count / min(seconds),
        "coverage": coverage,
        "tables_s": tables,
    }


def main() -> None:
    """Prints one line per direction; writes the numbers to the file of `--out`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    texts = read_texts()
    with tempfile.TemporaryDirectory() as directory:
        pair = {
            "byte-level BPE": byte_level(Path(directory) / "bpe", texts),
            "sentencepiece unigram": unigram(Path(directory) / "unigram", texts),
        }
        rows = {
            f"{a} -> {b}": measure(pair[a], pair[b], texts)
            for a, b in (tuple(pair), tuple(reversed(pair)))  # student -> teacher
        }
    print(f"{'student -> teacher':<42}{'tokens':>10}{'tokens/minute':>16}{'coverage':>10}")
    for name, row in rows.items():
        enough = "" if row["tokens_per_minute"] >= REQUIRED_PER_MINUTE else f"  below {REQUIRED_PER_MINUTE}"
        print(f"{name:<42}{row['tokens']:>10.0f}{row['tokens_per_minute']:>16,.0f}{row['coverage']:>10.4f}{enough}")
    if arguments.out:
        arguments.out.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
