"""Converts a NeMo tokenizer to the tokenizer files of a model directory.

This project reads a model's tokenizer from Hugging Face files in the model directory. NeMo has objects: its
`AutoTokenizer` wraps such files, its `SentencePieceTokenizer` wraps a SentencePiece model. `write_tokenizer` writes
either one as files, and `with_tokenizer` makes a directory with the weights of a model (links) and such files. Both
compare ids before a model uses the files. The module does not import NeMo: it reads the objects inside NeMo's wrappers.

Left out: NeMo's chat templates with `roles`, which are not Jinja; other tokenizers of NeMo (characters, regular
expressions, tiktoken), because no supported model family has one.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from nemo_oprd.config.schema import Config, ModelSource
from nemo_oprd.data.tokenizer import TOKENIZER_FILES, Tokenizer
from nemo_oprd.run.resolve import model_directory

Model = TypeVar("Model", bound=ModelSource)

# Texts whose ids both tokenizers must agree on: spaces in all places, digits, accents, full-width forms, other scripts,
# characters that no vocabulary has, and line ends.
PROBES = (
    "Hello world", " two  spaces ", "x=12345+0.5", "na\u00efve caf\u00e9 \ufb01ne", "\uff21\uff22\uff11\uff12",
    "\u6570\u5b66\u3068\u30b3\u30fc\u30c9", "\U0001f642\U0001f9ee", "a\nb\n\n  c\t d", "don't stop-me; (now)!",
    "\\frac{1}{2}", "",
)  # fmt: skip


def write_tokenizer(tokenizer: Any, directory: str | Path, chat_template: str | None = None) -> Path:
    """Writes NeMo's `AutoTokenizer` or `SentencePieceTokenizer` as Hugging Face files, with its end-of-sequence id.

    Args:
        directory: a new directory.
        chat_template: Jinja, in place of the tokenizer's own.

    Raises:
        ValueError: another kind of tokenizer, a chat template that is not Jinja, no end-of-sequence id, or the files
            give a text other ids than `tokenizer` does.
    """
    directory = Path(directory)
    inner, kind = getattr(tokenizer, "tokenizer", None), type(tokenizer).__name__
    template = chat_template if chat_template is not None else getattr(tokenizer, "chat_template", None)
    if template is not None and not isinstance(template, str):
        raise ValueError(
            f"{kind}.chat_template={template!r}: expected a Jinja template; give one in tokenizer.chat_template"
        )
    is_sentencepiece = hasattr(inner, "serialized_model_proto")
    if not is_sentencepiece and not hasattr(inner, "save_pretrained"):
        raise ValueError(
            f"tokenizer {kind}: expected NeMo's AutoTokenizer or SentencePieceTokenizer; give one of them, or leave "
            "the tokenizer to the model's directory"
        )
    if (eos := tokenizer.eos_id) is None or eos < 0:
        raise ValueError(f"tokenizer {kind}: eos_id={eos}, expected the id that ends a response; set its eos token")
    saved: Any = _from_sentencepiece(tokenizer) if is_sentencepiece else inner
    directory.mkdir(parents=True)
    saved.save_pretrained(str(directory))
    if template is not None:
        (directory / "chat_template.jinja").write_text(template)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": int(eos)}) + "\n")
    _compare(tokenizer, Tokenizer.load(directory))
    return directory


def with_tokenizer(model: ModelSource, tokenizer: Any, target: str | Path, chat_template: str | None = None) -> Path:
    """Makes `target`: a model directory or Megatron checkpoint with `model`'s weights (links) and another tokenizer.

    Several processes may make the same target; an existing one is used again. For the tokenizer and the template see
    `write_tokenizer`.

    Raises:
        ValueError: as `write_tokenizer`; the model does not exist, or `target` has another model or tokenizer.
    """
    files, target = model_directory(model).resolve(), Path(target)
    if not (files / "config.json").is_file():
        raise ValueError(f"{files}: no config.json; expected a model: correct hf_path or checkpoint")
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}."))
    try:
        partial.chmod(0o755)  # mkdtemp's is 0o700
        place = partial
        if model.checkpoint:
            _link((entry for entry in files.parent.iterdir() if entry != files), partial)
            place = partial / "hf"
            place.mkdir()
        own = {file for pattern in TOKENIZER_FILES for file in files.glob(pattern)}
        _link((entry for entry in files.iterdir() if entry not in own), place)
        with tempfile.TemporaryDirectory() as scratch:
            for file in write_tokenizer(tokenizer, Path(scratch) / "tokenizer", chat_template).iterdir():
                shutil.copyfile(file, place / file.name)
        # once more, because transformers reads the files differently if config.json says e.g. qwen2
        _compare(tokenizer, Tokenizer.load(place))
        try:
            partial.rename(target)
        except OSError as error:
            if not target.is_dir():
                raise
            if _content(partial) != _content(target):  # another process or an earlier start made it
                raise ValueError(
                    f"{target}: made for another model or tokenizer than {model.path} with the tokenizer of this run; "
                    "expected the same ones: choose another run directory"
                ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target


def config_with_tokenizer(config: Config, tokenizer: Any, directory: Path, chat_template: str | None = None) -> Config:
    """Returns `config` with models in `directory` that have this tokenizer: the student and teachers that read its ids.

    Raises:
        ValueError: as `with_tokenizer`.
    """

    def of(model: Model, name: str) -> Model:
        if model.hf_path is None and model.checkpoint is None:  # the student is its teacher, or there are several
            return model
        path = str(with_tokenizer(model, tokenizer, directory / name, chat_template))
        return replace(model, hf_path=path if model.hf_path else None, checkpoint=None if model.hf_path else path)

    config = replace(config, student=of(config.student, "student"))
    if config.teacher.reads != "ids":
        return config
    teachers = [of(teacher, f"teacher_{number}") for number, teacher in enumerate(config.teachers)]
    return replace(config, teacher=of(config.teacher, "teacher"), teachers=teachers)


def _link(entries: Iterable[Path], directory: Path) -> None:
    for entry in entries:
        (directory / entry.name).symlink_to(entry)


def _content(directory: Path) -> dict[str, str | bytes]:
    """Returns file -> the target of its link, or its content, for all files in a directory of `with_tokenizer`."""
    return {
        str(file.relative_to(directory)): os.readlink(file) if file.is_symlink() else file.read_bytes()
        for file in directory.rglob("*")  # does not follow links to directories
        if file.is_symlink() or file.is_file()
    }


def _compare(tokenizer: Any, written: Tokenizer) -> None:
    """Raises ValueError if the two disagree on the vocabulary or on the ids of a probe."""
    symbols = [str(token) for token in written.hf.added_tokens_decoder.values() if not token.special]
    for text in (*PROBES, " ".join(PROBES), *(f"a{symbol}b c {symbol} d" for symbol in symbols)):
        expected, found = list(tokenizer.text_to_ids(text)), written.encode(text)
        if expected != found:
            raise ValueError(
                f"tokenizer {type(tokenizer).__name__}: {text!r} is {expected}, but {found} with the files written "
                "from it; expected the same ids: give the model's directory a tokenizer.json of its own and leave out "
                "the tokenizer section"
            )
    size = int(tokenizer.vocab_size)
    known = written.hf.convert_ids_to_tokens(list(range(size)))
    wrong = [i for i, token in enumerate(tokenizer.ids_to_tokens(list(range(size)))) if token != known[i]]
    if wrong:
        raise ValueError(
            f"tokenizer {type(tokenizer).__name__}: id {wrong[0]} is {tokenizer.ids_to_tokens(wrong[:1])[0]!r}, but "
            f"{known[wrong[0]]!r} in the files written from it; expected the same tokens: use a tokenizer.json"
        )


def _from_sentencepiece(tokenizer: Any) -> Any:
    """Makes a fast tokenizer of transformers for a SentencePiece model and the special tokens of NeMo's legacy mode."""
    from sentencepiece import sentencepiece_model_pb2 as messages
    from tokenizers import AddedToken
    from transformers import PreTrainedTokenizerFast

    proto = messages.ModelProto()  # type: ignore[attr-defined]
    proto.ParseFromString(tokenizer.tokenizer.serialized_model_proto())
    backend = _backend(proto)
    kinds = proto.SentencePiece
    backend.add_tokens([
        AddedToken(piece.piece, normalized=False, special=piece.type == kinds.CONTROL)
        for piece in proto.pieces if piece.type in (kinds.CONTROL, kinds.USER_DEFINED)
    ])  # fmt: skip
    added = sorted(getattr(tokenizer, "id_to_special_token", {}).items())
    backend.add_special_tokens([AddedToken(token, normalized=False) for _, token in added])
    processor = tokenizer.tokenizer
    ids = {"bos_token": processor.bos_id(), "pad_token": processor.pad_id(), "eos_token": tokenizer.eos_id}
    names = {role: backend.id_to_token(i) for role, i in ids.items() if i is not None and i >= 0}
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token=proto.trainer_spec.unk_piece, **names)


def _backend(proto: Any) -> Any:
    """Makes a tokenizer of the library `tokenizers` that encodes like the SentencePiece model; no added tokens."""
    from tokenizers import Regex, decoders, models, normalizers
    from tokenizers import Tokenizer as Backend

    trainer, normal = proto.trainer_spec, proto.normalizer_spec
    pieces = [(piece.piece, piece.score) for piece in proto.pieces]
    if trainer.model_type == trainer.UNIGRAM:
        backend = Backend(models.Unigram(pieces, unk_id=trainer.unk_id, byte_fallback=trainer.byte_fallback))
    elif trainer.model_type == trainer.BPE:
        backend = Backend(
            models.BPE(
                {piece: i for i, (piece, _) in enumerate(pieces)},
                _merges(proto),
                unk_token=trainer.unk_piece,
                fuse_unk=True,
                byte_fallback=trainer.byte_fallback,
            )
        )
    else:
        kind = trainer.ModelType.Name(trainer.model_type)
        raise ValueError(f"SentencePiece model of type {kind}: expected UNIGRAM or BPE; use one of those")
    steps: list[Any] = []
    if normal.precompiled_charsmap:
        steps.append(normalizers.Precompiled(normal.precompiled_charsmap))
    if normal.remove_extra_whitespaces:
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    if normal.add_dummy_prefix:  # also after a special token, as in NeMo's legacy mode
        steps.append(normalizers.Prepend(" "))
    # the model sees the whole text, as SentencePiece's does: its pieces themselves say where words end
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "\u2581")])
    parts: list[Any] = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    if normal.add_dummy_prefix:
        parts.append(decoders.Strip(" ", 1, 0))
    backend.decoder = decoders.Sequence(parts)
    return backend


def _merges(proto: Any) -> list[tuple[str, str]]:
    """Lists the pairs of pieces that BPE joins, highest score of the joined piece first."""
    ids = {piece.piece: i for i, piece in enumerate(proto.pieces)}
    normal = [piece for piece in proto.pieces if piece.type == proto.SentencePiece.NORMAL and len(piece.piece) > 1]
    merges = []
    for piece in sorted(normal, key=lambda piece: -piece.score):
        text = piece.piece
        pairs = [(text[:cut], text[cut:]) for cut in range(1, len(text))]
        merges += sorted((p for p in pairs if p[0] in ids and p[1] in ids), key=lambda p: (ids[p[0]], ids[p[1]]))
    return merges
