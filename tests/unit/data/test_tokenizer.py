"""The tokenizer wrapper: where stop ids come from, special tokens that are not added twice, a hash, and copying."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nemo_oprd.data.tokenizer import Tokenizer, copy_tokenizer_files
from nemo_oprd.tools.toy import pair

TEXT = "1234+5678=482'371'269.156.\\boxed{6912}"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """The toy tokenizer and no model config."""
    path = tmp_path / "model"
    path.mkdir()
    pair.write_tokenizer(path)
    return path


def edit_json(file: Path, **changes: object) -> None:
    """Sets keys of a JSON file (made if missing); None removes one."""
    content = json.loads(file.read_text()) if file.exists() else {}
    content.update(changes)
    file.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def appending_eos(directory: Path) -> None:
    """Makes the tokenizer one that ends every text with <eos> unless told not to, as many do with <bos>."""
    single = [{"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "<eos>", "type_id": 0}}]
    special = {"<eos>": {"id": "<eos>", "ids": [pair.EOS_ID], "tokens": ["<eos>"]}}
    processor = {"type": "TemplateProcessing", "single": single, "pair": single, "special_tokens": special}
    edit_json(directory / "tokenizer.json", post_processor=processor)


def test_ids_and_text(directory):
    tokenizer = Tokenizer.load(str(directory))
    assert tokenizer.path == directory
    assert tokenizer.vocab_size == pair.VOCAB_SIZE == 25
    assert tokenizer.encode(TEXT) == pair.encode(TEXT)
    assert tokenizer.decode([pair.PAD_ID, *pair.encode(TEXT), pair.EOS_ID]) == TEXT
    assert tokenizer.decode([]) == ""


def test_special_tokens_are_not_added(directory):
    appending_eos(directory)
    tokenizer = Tokenizer.load(directory)
    assert tokenizer.hf.encode("12") == [4, 5, pair.EOS_ID], "the fixture does not add what it should"
    assert tokenizer.encode("12") == [4, 5]
    assert tokenizer.encode_prompt([{"role": "user", "content": "12"}]) == [4, 5]


def test_prompt_in_the_chat_template(directory):
    template = "{% for m in messages %}+{{ m['content'] }}.{% endfor %}{% if add_generation_prompt %}={% endif %}"
    edit_json(directory / "tokenizer_config.json", chat_template=template)
    messages = [{"role": "system", "content": "1"}, {"role": "user", "content": "23"}]
    assert Tokenizer.load(directory).encode_prompt(messages) == pair.encode("+1.+23.=")


def test_no_chat_template(directory):
    edit_json(directory / "tokenizer_config.json", chat_template=None)
    tokenizer = Tokenizer.load(directory)
    assert tokenizer.encode("12") == [4, 5]
    with pytest.raises(ValueError, match=r"model: the tokenizer has no chat template.*add chat_template\.jinja"):
        tokenizer.encode_prompt([{"role": "user", "content": "12"}])


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ([5, 1], 3, (5, 1)),
        (7, [3, 4], (7,)),
        (0, 3, (0,)),
        (None, [3, 4], (3, 4)),
        (None, 3, (3,)),
        ([], 3, (3,)),
        (None, None, (pair.EOS_ID,)),
    ],
)
def test_stop_ids(directory, generation, config, expected):
    edit_json(directory / "generation_config.json", eos_token_id=generation, do_sample=True)
    edit_json(directory / "config.json", eos_token_id=config, model_type="qwen2")
    assert Tokenizer.load(directory).eos_ids == expected


def test_stop_ids_without_any_config(directory):
    assert Tokenizer.load(directory).eos_ids == (pair.EOS_ID,)


def test_no_stop_id(directory):
    edit_json(directory / "tokenizer_config.json", eos_token=None)
    with pytest.raises(ValueError, match=r"no eos_token_id in generation_config\.json or config\.json"):
        Tokenizer.load(directory)


@pytest.mark.parametrize("value", ["<eos>", [1, "x"], -1, True, 1.5])
def test_malformed_stop_id(directory, value):
    edit_json(directory / "generation_config.json", eos_token_id=value)
    with pytest.raises(ValueError, match=r"generation_config\.json: eos_token_id is .*expected a token id"):
        Tokenizer.load(directory)


def test_nothing_to_load(tmp_path):
    with pytest.raises(ValueError, match=r"missing: no such directory"):
        Tokenizer.load(tmp_path / "missing")
    with pytest.raises(ValueError, match=r"no tokenizer\.json, tokenizer\.model or vocab\.json"):
        Tokenizer.load(tmp_path)


def test_fingerprint_is_that_of_the_vocabulary(directory):
    """Fixed by value: it is written into artifacts and compared by later processes."""
    pinned = "ea130c816ace01e191a16603b0b32a842f33a73e2618dce99999c68afc428504"
    assert Tokenizer.load(directory).fingerprint() == pinned
    edit_json(directory / "tokenizer_config.json", chat_template="other", model_max_length=5)
    assert Tokenizer.load(directory).fingerprint() == pinned

    file = directory / "tokenizer.json"
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["b"], vocabulary["o"] = vocabulary["o"], vocabulary["b"]
    file.write_text(json.dumps(content))
    assert Tokenizer.load(directory).fingerprint() != pinned


def test_copying(directory, tmp_path):
    edit_json(directory / "generation_config.json", eos_token_id=[1, 0])
    for name in ("config.json", "model.safetensors", "README.md"):
        (directory / name).write_text("{}")
    for name in ("special_tokens_map.json", "vocab.json", "merges.txt", "added_tokens.json", "chat_template.jinja"):
        (directory / name).write_text(name)
    target = tmp_path / "exported" / "hf"
    assert copy_tokenizer_files(directory, target) == [
        "added_tokens.json",
        "chat_template.jinja",
        "generation_config.json",
        "merges.txt",
        "special_tokens_map.json",
        "tokenizer.json",
        "tokenizer.model",
        "tokenizer_config.json",
        "vocab.json",
    ]
    assert sorted(file.name for file in target.iterdir()) == copy_tokenizer_files(directory, target)
    assert all(file.read_bytes() == (directory / file.name).read_bytes() for file in target.iterdir())
    with pytest.raises(ValueError, match="nowhere: no such directory"):
        copy_tokenizer_files(tmp_path / "nowhere", target)


def test_a_copy_is_the_same_tokenizer(directory, tmp_path):
    edit_json(directory / "generation_config.json", eos_token_id=[1, 0])
    copy_tokenizer_files(directory, tmp_path / "copy")
    original, copy = Tokenizer.load(directory), Tokenizer.load(tmp_path / "copy")
    assert (copy.eos_ids, copy.fingerprint()) == ((1, 0), original.fingerprint())
    assert copy.encode(TEXT) == original.encode(TEXT)
