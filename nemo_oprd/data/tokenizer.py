"""A model's tokenizer: conversations and text -> ids -> text, stop ids, fingerprint; and a teacher's prompts.

A thin wrapper around Hugging Face's `AutoTokenizer`. It exists because the stop ids may be in any of three files, and
because special tokens that a chat template has already added must not be added twice. Batches, padding and truncation
are not supported (packs are made of exact id lists); code from the model's repository is never run.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from nemo_oprd.data.conversation import Message, Tool
from nemo_oprd.data.token_ids import TokenIds
from nemo_oprd.models.complete_config import language_model_config
from nemo_oprd.runtime.files import read_json, refuse_lfs_pointer

# The files of which a tokenizer may consist, in all formats in use; generation_config.json holds the stop ids.
TOKENIZER_FILES = (
    "tokenizer*.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
    "generation_config.json",
)

# variables that the project itself passes to `apply_chat_template`, or that are settings of transformers
_NO_TEMPLATE_VARIABLES = {
    "conversation", "messages", "tools", "documents", "chat_template", "add_generation_prompt",
    "continue_final_message", "tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict",
    "return_assistant_tokens_mask", "tokenizer_kwargs",
}  # fmt: skip


class Tokenizer:
    """The tokenizer in a model's directory; build it with `Tokenizer.load`.

    Attributes:
        path: the directory that it was loaded from.
        system_prompt: the system message of every conversation, in place of its own; None: its own, if it has one.
        vocab_size: largest id + 1, including added tokens. A model's embedding may have more rows.
        eos_ids: the ids that end a response, in the order in which the model's file lists them.
        hf: the Hugging Face tokenizer, for code that reads its vocabulary or decoder.
    """

    def __init__(self, path: Path, hf_tokenizer: Any, eos_ids: tuple[int, ...]) -> None:
        self.path, self.eos_ids, self.hf = path, eos_ids, hf_tokenizer
        self.system_prompt: str | None = None
        self._variables: dict[str, Any] = {}
        self._vocab: dict[str, int] = hf_tokenizer.get_vocab()
        self.vocab_size = max(self._vocab.values()) + 1

    @staticmethod
    def load(path: str | Path) -> Tokenizer:
        """Reads the tokenizer of the model in directory `path`; nothing is downloaded.

        `eos_ids` are `eos_token_id` of generation_config.json, else of config.json, else the tokenizer's own.

        Raises:
            ValueError: there is no such directory, its tokenizer is missing, damaged or needs code of the model, or no
                file names the end-of-sequence id.
        """
        path = Path(path)
        if not path.is_dir():
            raise ValueError(f"{path}: no such directory; expected a downloaded Hugging Face model with its tokenizer")
        if not any((path / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
            raise ValueError(
                f"{path}: no tokenizer.json, tokenizer.model or vocab.json; "
                "copy the tokenizer files of the model's source there"
            )
        for file in (file for name in TOKENIZER_FILES for file in path.glob(name)):
            refuse_lfs_pointer(file)
        from transformers import AutoTokenizer  # seconds to import

        _refuse_remote_code(path)
        try:
            hf_tokenizer = AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
        except Exception as error:  # damaged files raise errors of many types; the Rust parser raises plain Exception
            raise ValueError(
                f"{path}: the tokenizer can't be read ({' '.join(str(error).split())[:200]}); copy the tokenizer files "
                "from the model's source again"
            ) from error
        if not hf_tokenizer.chat_template:
            hf_tokenizer.chat_template = _template_of_processor(path)
        return Tokenizer(path, hf_tokenizer, _eos_ids(path, hf_tokenizer.eos_token_id))

    def set_chat_template(
        self,
        file: str | Path | None,
        variables: Mapping[str, Any],
        *,
        system_prompt: str | None = None,
        keys: str = "data",
    ) -> None:
        """Sets the chat template (the Jinja template in `file`; None: unchanged), its variables and the system prompt.

        Example of variables: {"enable_thinking": False}. A template ignores those that it does not use. `keys` is the
        group of the settings, for messages.

        Raises:
            ValueError: there is no such file, it holds no Jinja template, or a variable has a reserved name.
        """
        self.system_prompt = system_prompt
        wrong = sorted(_NO_TEMPLATE_VARIABLES & variables.keys())
        if wrong:
            raise ValueError(
                f"{keys}.chat_template_args.{wrong[0]}={variables[wrong[0]]!r}: that is no variable of a template; "
                "expected one that the template reads, such as enable_thinking: remove it"
            )
        self._variables = dict(variables)
        if file is None:
            return
        import jinja2

        try:
            text = Path(file).read_text(encoding="utf-8")
            jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).parse(_without_generation_marks(text))
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(
                f"{keys}.chat_template={file}: can't be read ({error}); expected a file with a Jinja template: correct "
                "the path"
            ) from error
        except jinja2.TemplateError as error:
            raise ValueError(
                f"{keys}.chat_template={file}: not a Jinja template ({error}); expected one as in a model's "
                "chat_template.jinja: correct it"
            ) from error
        self.hf.chat_template = text

    def encode_prompt(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> list[int]:
        """Returns the ids of the conversation in the model's chat template, up to the start of the model's response.

        Raises:
            ValueError: the tokenizer has no chat template, or the template rejects the conversation.
        """
        encoded = self._apply_template(messages, tools, tokenize=True, add_generation_prompt=True, return_dict=True)
        return list(encoded["input_ids"])

    def render(
        self, messages: Sequence[Message], add_generation_prompt: bool, tools: Sequence[Tool] = (), **variables: Any
    ) -> str:
        """Returns the conversation as text in the model's chat template.

        Args:
            add_generation_prompt: also write the beginning of the model's next turn.
            variables: for the template; they override configured ones of the same name.

        Raises:
            ValueError: the tokenizer has no chat template, or the template rejects the conversation.
        """
        return str(
            self._apply_template(
                messages, tools, tokenize=False, add_generation_prompt=add_generation_prompt, **variables
            )
        )

    def reads_clock(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> bool:
        """Returns whether the chat template writes the time into this conversation, e.g. "Today Date: 26 Nov 2026".

        transformers gives templates a function `strftime_now`. With a text in its place, a template that calls the
        function fails.
        """
        self.render(messages, True, tools)
        try:
            self.render(messages, True, tools, strftime_now="no function")
        except ValueError:
            return True
        return False

    def encode_plain(self, texts: list[str]) -> list[list[int]]:
        """Returns the ids of each text, without added special tokens; special tokens in a text are ordinary characters.

        Added tokens that are not special (`<think>`) keep their ids: a model writes them as part of its text.
        """
        if not texts:
            return []
        encoded = self.hf(texts, add_special_tokens=False, split_special_tokens=True, verbose=False)
        return [list(ids) for ids in encoded["input_ids"]]

    def _apply_template(self, messages: Sequence[Message], tools: Sequence[Tool], **kwargs: Any) -> Any:
        if not self.hf.chat_template:
            raise ValueError(
                f"{self.path}: the tokenizer has no chat template, expected one to format the conversation; add "
                "chat_template.jinja there, or name it in data.chat_template (that of the model's instruction-tuned "
                "version, or \"{% for m in messages %}{{ m['content'] }}{% endfor %}\" for plain text)"
            )
        import jinja2  # a dependency of transformers

        told = [message for message in messages if self.system_prompt is None or message["role"] != "system"]
        if self.system_prompt is not None:
            told.insert(0, {"role": "system", "content": self.system_prompt})
        roles = [message["role"] for message in told]
        arguments = {**self._variables, "tools": list(tools) or None, "return_tensors": None, **kwargs}
        try:
            return self.hf.apply_chat_template(told, **arguments)
        except jinja2.TemplateError as error:
            raise ValueError(
                f"{self.path}: the chat template refuses the conversation with roles {roles} "
                f"({_first_line(error)}); expected one that it accepts: change the roles, or the template"
            ) from error
        except Exception as error:  # a template is a program: it may add texts to numbers, or include files
            raise ValueError(
                f"{self.path}: the chat template fails on the conversation with roles {roles} "
                f"({type(error).__name__}: {_first_line(error)}); expected one that renders it: correct the template, "
                "or what it reads of the row"
            ) from error

    def encode(self, text: str) -> list[int]:
        """Returns the ids of `text`, without beginning- or end-of-sequence tokens."""
        return list(self.hf.encode(text, add_special_tokens=False))

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Returns the text of `ids`, without special tokens such as the end of sequence; keeps spaces unchanged."""
        return str(
            self.hf.decode(
                np.asarray(ids, np.int64).tolist(), skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
        )

    def conversation(self) -> dict[str, Any]:
        """Returns the settings of rendering as plain values: the template's sha256, its variables, a system prompt."""
        template = json.dumps(self.hf.chat_template, sort_keys=True)
        return {
            "chat_template_sha256": hashlib.sha256(template.encode()).hexdigest(),
            "chat_template_args": self._variables,
            "system_prompt": self.system_prompt,
        }

    def ids(self, limit: int) -> TokenIds:
        """Returns the ids below `limit` that have a token; raises ValueError if there is none."""
        return TokenIds.of(self._vocab.values(), limit)

    def reads_ids_of(self, other: Tokenizer) -> bool:
        """Returns whether every id with a token in `other` has the same token here; this tokenizer may have more."""
        return other._vocab.items() <= self._vocab.items()

    def fingerprint(self) -> str:
        """Returns the sha256 (hex) of the token -> id mapping: equal for equal vocabularies, in any process.

        It excludes merges, normalisation and the chat template: the fingerprint shows whether two models share ids.
        """
        pairs = json.dumps(sorted(self._vocab.items()), ensure_ascii=True, separators=(",", ":"))
        return hashlib.sha256(pairs.encode("ascii")).hexdigest()


def _first_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


def _template_of_processor(path: Path) -> Any:
    """Returns the chat template in chat_template.json, a file of older models' processors; None without the file."""
    return _read_json(path / "chat_template.json").get("chat_template")


def _without_generation_marks(template: str) -> str:
    """Returns the template without transformers' own tag {% generation %}, which plain Jinja does not support."""
    return re.sub(r"\{%-?\s*(?:end)?generation\s*-?%\}", "", template)


def copy_tokenizer_files(source: Path, target: Path) -> list[str]:
    """Copies the tokenizer files in `source` byte for byte to `target`, which is created if missing.

    Returns:
        The names of the copied files, sorted.

    Raises:
        ValueError: `source` is not a directory.
    """
    source, target = Path(source), Path(target)
    if not source.is_dir():
        raise ValueError(f"{source}: no such directory; expected the model directory whose tokenizer is to be copied")
    target.mkdir(parents=True, exist_ok=True)
    found = (file for pattern in TOKENIZER_FILES for file in source.glob(pattern) if file.is_file())
    names = sorted({str(file.relative_to(source)) for file in found})
    for name in names:
        (target / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(source / name, target / name)
    return names


def _read_json(file: Path) -> dict[str, Any]:
    """Returns the JSON object in a file; {} if the file is missing."""
    return read_json(file, "an object", "copy the file from the model's source again") if file.is_file() else {}


def _refuse_remote_code(path: Path) -> None:
    file = path / "tokenizer_config.json"
    auto_map = _read_json(file).get("auto_map")
    if auto_map:
        raise ValueError(
            f"{file}: auto_map={auto_map!r} asks for code from the model's directory, which is never run; expected a "
            "tokenizer.json that needs no code: save it as a fast tokenizer and remove auto_map"
        )


def _eos_ids(path: Path, tokenizer_eos: int | None) -> tuple[int, ...]:
    """Returns the stop ids of the first file that names any, otherwise the tokenizer's own."""
    for name in ("generation_config.json", "config.json"):
        file = path / name
        value = language_model_config(_read_json(file), str(file)).get("eos_token_id")
        if value is None or value == []:
            continue
        ids = value if isinstance(value, list) else [value]
        if not all(type(i) is int and i >= 0 for i in ids):
            raise ValueError(f"{file}: eos_token_id is {value!r}, expected a token id or a list of them; correct it")
        return tuple(ids)
    if tokenizer_eos is None:
        raise ValueError(
            f"{path}: no eos_token_id in generation_config.json or config.json, and the tokenizer has none of its own; "
            "add the id that ends a response to generation_config.json"
        )
    return (tokenizer_eos,)


# Fingerprints and the teacher's prompts for the alignment of two models' tokenizers.
#
# Fingerprints and end ids are cached for the lifetime of a tokenizer: hashing 200,000 tokens per batch is too slow.

Messages = Sequence[Message]

# Text that a template must not change: inner spaces, a line break, characters that HTML or JSON escapes, both cases.
TEMPLATE_PROBE = "So x <  2 & \"y\" = 'z',\n\\frac{A}{b}: na\u00efve"

_FINGERPRINTS: WeakKeyDictionary[Tokenizer, str] = WeakKeyDictionary()
_EOS_IDS: WeakKeyDictionary[Tokenizer, int] = WeakKeyDictionary()


def fingerprint(tokenizer: Tokenizer) -> str:
    """Returns `Tokenizer.fingerprint()`, computed once per tokenizer."""
    if tokenizer not in _FINGERPRINTS:
        _FINGERPRINTS[tokenizer] = tokenizer.fingerprint()
    return _FINGERPRINTS[tokenizer]


def teacher_eos_id(teacher: Tokenizer) -> int:
    """Returns the id that ends the teacher's turn: the one of `teacher.eos_ids` that its template adds to a response.

    If it adds none, the first. Model files list ids in any order (Llama 3 has <|end_of_text|> before <|eot_id|>).

    Raises:
        ValueError: the template changes the text of a response.
    """
    if teacher not in _EOS_IDS:
        messages = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": TEMPLATE_PROBE}]
        text = teacher.render(messages, add_generation_prompt=False)
        _before, found, after = text.rpartition(TEMPLATE_PROBE)
        if not found:
            raise ValueError(
                f"{teacher.path}: the chat template changes the text of a response: {TEMPLATE_PROBE!r} becomes part of "
                f"{text!r}; expected it there unchanged, because the teacher reads the student's text as it is: use a "
                "template that writes message['content'] of the assistant as it stands"
            )
        written = {i: str(teacher.hf.convert_ids_to_tokens(i)) for i in teacher.eos_ids}
        found_ids = [i for i, token in written.items() if after.lstrip().startswith(token)]
        _EOS_IDS[teacher] = (found_ids or list(teacher.eos_ids))[0]
    return _EOS_IDS[teacher]


def teacher_prompts(
    teacher: Tokenizer, messages: Sequence[Messages], tools: Sequence[Sequence[Tool]] | None = None
) -> list[list[int]]:
    """Returns [B] prompts as token ids in the teacher's chat template; encodes equal conversations once, then copies.

    Args:
        tools: [B] tools of each conversation; None: no conversation has any.
    """
    known: dict[str, list[int]] = {}
    conversations = list(zip(messages, [()] * len(messages) if tools is None else tools, strict=True))
    keys = [json.dumps(conversation) for conversation in conversations]  # templates may write keys in their order
    for key, conversation in zip(keys, conversations, strict=True):
        if key not in known:
            known[key] = teacher.encode_prompt(*conversation)
    return [list(known[key]) for key in keys]
