"""NeMo's tokenizers as files beside a model: the ids of SentencePiece itself, refusals, and the directory of links."""

from __future__ import annotations

import json
from pathlib import Path

import nemo_tokenizers as stand_ins
import pytest

from nemo_oprd.config.loading import load_config
from nemo_oprd.config.schema import ModelSource
from nemo_oprd.data.tokenizer import Tokenizer
from nemo_oprd.integrations.tokenizers import config_with_tokenizer, with_tokenizer, write_tokenizer

TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
# not among the texts that write_tokenizer compares
TEXTS = ("What is 56 / 7? The answer is 8.", "  x = 1 ;  y", "a naïve £ sign, ½ and ①", "def f():\n    return None\n")


def sentencepiece(directory: Path, kind: str, **settings) -> stand_ins.SentencePieceTokenizer:
    return stand_ins.SentencePieceTokenizer(str(stand_ins.train_model(directory / "tokenizer.model", kind, **settings)))


@pytest.mark.parametrize("name", stand_ins.EQUAL)
def test_ids_and_texts_are_those_of_sentencepiece(name: str, tmp_path: Path) -> None:
    theirs = sentencepiece(tmp_path, **stand_ins.EQUAL[name])
    ours = Tokenizer.load(write_tokenizer(theirs, tmp_path / "written", TEMPLATE))
    assert ours.eos_ids == (theirs.eos_id,) and ours.vocab_size == theirs.vocab_size
    for text in (*TEXTS, *stand_ins.TEXT):
        ids = theirs.text_to_ids(text)
        assert ours.encode(text) == ids
        if theirs.tokenizer.unk_id() not in ids:
            assert ours.decode(ids) == theirs.tokenizer.decode_ids(ids)
    assert ours.encode_prompt([{"role": "user", "content": TEXTS[0]}]) == theirs.text_to_ids(TEXTS[0])


@pytest.mark.parametrize("name", stand_ins.REFUSED)
def test_what_is_refused(name: str, tmp_path: Path) -> None:
    settings, message = stand_ins.REFUSED[name]
    with pytest.raises(ValueError, match=f"^[^\n]*{message}"):
        write_tokenizer(sentencepiece(tmp_path, **settings), tmp_path / "written")


def test_a_wrapper_that_changes_ids_is_refused(tmp_path: Path) -> None:
    theirs = sentencepiece(tmp_path, "unigram")
    theirs.text_to_ids = lambda text: [0]  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="tokenizer SentencePieceTokenizer: 'Hello world' is"):
        write_tokenizer(theirs, tmp_path / "written")


def test_a_template_of_roles_is_refused(tmp_path: Path) -> None:
    theirs = sentencepiece(tmp_path, "unigram")
    theirs.chat_template = {"prefix": "", "roles": {"user": "{_content_}"}}
    with pytest.raises(ValueError, match=r"expected a Jinja template; give one in tokenizer\.chat_template"):
        write_tokenizer(theirs, tmp_path / "written")
    assert write_tokenizer(theirs, tmp_path / "written", TEMPLATE).is_dir()


def test_another_kind_of_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="tokenizer object: expected NeMo's AutoTokenizer or SentencePieceTokenizer"):
        write_tokenizer(object(), tmp_path / "written")


def test_a_hugging_face_tokenizer(tmp_path: Path) -> None:
    """Its own chat template stays, and its end-of-sequence id becomes the one that ends a response."""
    source = write_tokenizer(sentencepiece(tmp_path, "bpe"), tmp_path / "source", TEMPLATE)
    theirs = stand_ins.AutoTokenizer(str(source))
    ours = Tokenizer.load(write_tokenizer(theirs, tmp_path / "written"))
    assert ours.eos_ids == (theirs.eos_id,)
    assert ours.fingerprint() == Tokenizer.load(source).fingerprint()
    assert ours.render([{"role": "user", "content": "x"}], False) == "x"


def make_model(directory: Path, model_type: str) -> Path:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps({"model_type": model_type}))
    (directory / "model.safetensors").write_bytes(b"weights")
    (directory / "tokenizer.json").write_text("{}")
    (directory / "generation_config.json").write_text('{"eos_token_id": 7}')
    return directory


@pytest.mark.parametrize("model_type", ["llama", "mistral", "phi3", "qwen3"])
def test_a_model_with_another_tokenizer(model_type: str, tmp_path: Path) -> None:
    """Weights are links, the model's own tokenizer files are gone, and a second process gets the same directory."""
    model = make_model(tmp_path / "model", model_type)
    theirs = sentencepiece(tmp_path, "unigram")
    target = tmp_path / "run" / "student"
    for _ in range(2):
        assert with_tokenizer(ModelSource(hf_path=str(model)), theirs, target) == target
    assert (target / "model.safetensors").resolve() == (model / "model.safetensors").resolve()
    ours = Tokenizer.load(target)
    assert [ours.encode(text) for text in TEXTS] == [theirs.text_to_ids(text) for text in TEXTS]
    assert ours.vocab_size == theirs.vocab_size and ours.eos_ids == (theirs.eos_id,)
    assert [file.name for file in target.parent.iterdir()] == ["student"]


def test_files_that_transformers_reads_differently_beside_a_model(tmp_path: Path) -> None:
    """It takes its class Qwen2Tokenizer for every Qwen2 model, whatever the tokenizer's files say."""
    model = make_model(tmp_path / "model", "qwen2")
    with pytest.raises(ValueError, match="expected the same ids"):
        with_tokenizer(ModelSource(hf_path=str(model)), sentencepiece(tmp_path, "unigram"), tmp_path / "student")


def test_a_model_with_a_tokenizer_of_another_run(tmp_path: Path) -> None:
    theirs, target = sentencepiece(tmp_path, "unigram"), tmp_path / "run" / "student"
    with_tokenizer(ModelSource(hf_path=str(make_model(tmp_path / "model", "llama"))), theirs, target)
    other = make_model(tmp_path / "other", "llama")
    with pytest.raises(ValueError, match="made for another model or tokenizer"):
        with_tokenizer(ModelSource(hf_path=str(other)), theirs, target)
    with pytest.raises(ValueError, match=r"no config\.json"):
        with_tokenizer(ModelSource(hf_path=str(tmp_path)), theirs, tmp_path / "nothing")
    theirs.text_to_ids = lambda text: [0]  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="expected the same ids"):
        with_tokenizer(ModelSource(hf_path=str(other)), theirs, tmp_path / "run" / "another")
    assert [file.name for file in target.parent.iterdir()] == ["student"]


@pytest.mark.parametrize(
    ("overrides", "replaced"),
    [
        (["teacher.hf_path=MODEL"], ["student", "teacher"]),
        (["teacher.hf_path=MODEL", "teacher.reads=text"], ["student"]),
        (["teacher.weights=ema", "teacher.prompt='{prompt} {answer}'"], ["student"]),
        (["teachers=[{hf_path:MODEL,data_sources:[a]},{hf_path:MODEL}]"], ["student", "teacher_0", "teacher_1"]),
    ],
)
def test_the_models_that_get_the_tokenizer(overrides: list[str], replaced: list[str], tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "llama")
    settings = ["student.hf_path=MODEL", *overrides]
    config = load_config("verify", [setting.replace("MODEL", str(model)) for setting in settings])
    config = config_with_tokenizer(config, sentencepiece(tmp_path, "unigram"), tmp_path / "models")
    paths = [source.hf_path for source in (config.student, config.teacher, *config.teachers) if source.hf_path]
    expected = [str(tmp_path / "models" / name) for name in replaced]
    assert paths == [*expected, *([str(model)] if "teacher.reads=text" in overrides else [])]
    assert sorted(file.name for file in (tmp_path / "models").iterdir()) == replaced


def test_a_megatron_checkpoint_with_another_tokenizer(tmp_path: Path) -> None:
    root = tmp_path / "checkpoint"
    make_model(root / "hf", "llama")
    (root / ".metadata").write_bytes(b"m")
    (root / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    theirs = sentencepiece(tmp_path, "unigram")
    target = with_tokenizer(ModelSource(checkpoint=str(root)), theirs, tmp_path / "student")
    assert (target / ".metadata").read_bytes() == b"m" and not (target / "hf").is_symlink()
    assert Tokenizer.load(target / "hf").encode(TEXTS[0]) == theirs.text_to_ids(TEXTS[0])
    assert (root / "hf" / "tokenizer.json").read_text() == "{}"
