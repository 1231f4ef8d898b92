"""Prints docs/configuration.md from the schema: `python -m nemo_oprd.config.reference_page > docs/configuration.md`."""

from __future__ import annotations

import dataclasses
import re
import types
import typing
from collections.abc import Collection
from pathlib import Path
from typing import Any, Literal

import yaml

from nemo_oprd.config.keys import Key, keys
from nemo_oprd.config.loading import default_config_dir
from nemo_oprd.config.schema import Config

HEADER = """# Configuration keys

Every key of a configuration: its type, its default, its meaning, and the files in `conf/` that set it. This page is
made from the schema that the program checks against. A key is set in a YAML file or on the command line
(`train.lr=1e-4`), where a key of text takes any text as it stands, and lists and groups follow Hydra's syntax
(`"data.train=['a b.jsonl',c.jsonl]"`). In paths, `~` is the user's home directory. A violated rule between keys is an
error that names the keys ([errors.json](errors.json))."""


def type_name(hint: Any) -> str:
    """Describes a type for users: `fp32 | bf16`, `number or null`."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return type_name(arguments[0])
    if origin is Literal:
        return " or ".join(f"`{argument}`" for argument in arguments)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(dict.fromkeys(type_name(argument) for argument in arguments))
    if origin is list:
        return f"list of {type_name(arguments[0])}"
    if origin is tuple:
        return "[" + ", ".join(type_name(argument) for argument in arguments) + "]"
    if origin is dict:
        return f"{{{type_name(arguments[0])}: {type_name(arguments[1])}}}"
    names = {str: "text", int: "integer", float: "number", bool: "true or false", type(None): "null", Any: "anything"}
    return names.get(hint, "group of keys")


def value_name(value: Any) -> str:
    """Formats a default as YAML writes it."""
    if value is dataclasses.MISSING:
        return ""
    text = yaml.safe_dump(list(value) if isinstance(value, tuple) else value, default_flow_style=True).strip()
    return f"`{text.removesuffix('...').strip()}`"


def meaning(key: Key, known: Collection[str]) -> str:
    """Returns a key's meaning, with links to pages; a key of `teachers` that `teacher` has, too, refers to that."""
    same = key.name.replace("teachers.", "teacher.")
    if key.name.startswith("teachers.") and same in known:
        return f"as `{same}`"
    text = f"{key.meaning}. {key.details}" if key.details else key.meaning
    return re.sub(r"\bdocs/(\w+\.md)", r"[\1](\1)", text)


def set_in(directory: Path) -> dict[str, list[str]]:
    """Returns key -> the names of the configurations that set it in their own file."""
    found: dict[str, list[str]] = {}

    def note(group: dict, name: str, prefix: str = "") -> None:
        for part, value in group.items():
            key = f"{prefix}{part}"
            found.setdefault(key, []).append(name)
            if isinstance(value, dict):
                note(value, name, f"{key}.")
            for item in value if isinstance(value, list) else ():
                if isinstance(item, dict):
                    note(item, name, f"{key}.")

    for file in sorted(directory.glob("*.yaml")):
        note(yaml.safe_load(file.read_text()), file.stem)
    return {key: list(dict.fromkeys(names)) for key, names in found.items()}


def page() -> str:
    """Returns the text of the page."""
    lines, setters, group = [HEADER], set_in(default_config_dir()), None
    every = [key for key in keys(Config) if not key.is_group]
    known = {key.name for key in every}
    for key in every:
        head = key.name.split(".")[0] if "." in key.name or key.name == "teachers" else "run"
        if head != group:
            group = head
            lines.append(f"\n## {group}\n\n| key | type | default | meaning | set in |\n|---|---|---|---|---|")
        files = ", ".join(f"`{name}`" for name in setters.get(key.name, []))
        cells = (f"`{key.name}`", type_name(key.hint), value_name(key.default), meaning(key, known), files)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(page(), end="")
