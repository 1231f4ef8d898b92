"""Lists the keys of the schema, each with the data of its field: type, default, meaning, and rule for resumed runs.

A field's docstring is its key's meaning, as docs/configuration.md shows it: a first paragraph without a full stop, and
further sentences. `Free`, `Learned` and `Fixed` (`types.py`) around its type, or around that of its group, give the
rule for a resumed run.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import typing
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from typing import Annotated, Any

from nemo_oprd.config.types import NAMES_A_FILE, ResumeRule, Rule


@dataclasses.dataclass(frozen=True)
class Key:
    """A key, or a group of keys, which is a field of the class `owner`."""

    name: str  # dotted, without the numbers of list items. Example: "teachers.weight"
    hint: Any  # its type, without the rule
    default: Any  # `dataclasses.MISSING` where a value must be given
    rule: Rule | None  # None if neither the key nor a group around it has one
    owner: type

    @property
    def is_group(self) -> bool:
        """Returns whether this is a group, which holds keys and no value of its own."""
        return dataclasses.is_dataclass(self.hint)

    @property
    def takes_users_names(self) -> bool:
        """Returns whether the key's value is a group with names of the user's choice."""
        return typing.get_origin(self.hint) is dict

    @property
    def names_files(self) -> bool:
        """Returns whether the key's values are paths, so that two different values may name one file."""
        return NAMES_A_FILE in _parts(self.hint)

    @property
    def meaning(self) -> str:
        """Returns the first paragraph of the field's docstring, in one line. Raises KeyError if it has none."""
        return self._paragraphs[0]

    @property
    def details(self) -> str:
        """Returns the other paragraphs of the field's docstring, in one line; empty if there are none."""
        return " ".join(self._paragraphs[1:])

    @property
    def _paragraphs(self) -> list[str]:
        docstring = _docstrings(self.owner)[self.name.rpartition(".")[2]]
        return [" ".join(paragraph.split()) for paragraph in docstring.split("\n\n")]


@cache
def keys(root: type) -> tuple[Key, ...]:
    """Returns every key of a schema in its order, including groups and the keys of groups in lists."""
    return tuple(_keys(root, "", None))


def _keys(root: type, prefix: str, rule: Rule | None) -> Iterator[Key]:
    for field in dataclasses.fields(root):
        hint, own = _hints(root)[field.name]
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        key = Key(prefix + field.name, hint, default, own or rule, root)
        yield key
        inner = (*typing.get_args(hint), None)[0] if typing.get_origin(hint) is list else hint
        if dataclasses.is_dataclass(inner):
            yield from _keys(typing.cast(type, inner), f"{key.name}.", key.rule)


def plain_key(key: str) -> str:
    """Removes the numbers of list items. Example: teachers.0.weight -> teachers.weight."""
    return re.sub(r"\.\d+(?=\.)", "", key)


def types_of(group: type) -> dict[str, Any]:
    """Returns the keys of a group, and their types."""
    return {name: hint for name, (hint, _) in _hints(group).items()}


@cache
def _hints(group: type) -> dict[str, tuple[Any, Rule | None]]:
    """Returns field -> its type, and the rule around it."""
    hints = typing.get_type_hints(group, include_extras=True)
    return {field.name: _without_rule(hints[field.name]) for field in dataclasses.fields(group)}


def _without_rule(hint: Any) -> tuple[Any, Rule | None]:
    plain, *metadata = typing.get_args(hint) if typing.get_origin(hint) is Annotated else (hint,)
    rule = next((each.rule for each in metadata if isinstance(each, ResumeRule)), None)
    others = [each for each in metadata if not isinstance(each, ResumeRule)]
    return (Annotated[(plain, *others)] if others else plain), rule


def _parts(hint: Any) -> Iterator[Any]:
    """Yields the arguments of a type, at every depth."""
    for each in typing.get_args(hint):
        yield each
        yield from _parts(each)


@cache
def _docstrings(group: type) -> dict[str, str]:
    """Returns field -> the string below it, or below the base class's field if a subclass redeclares it without one.

    Pydantic's `use_attribute_docstrings` gives no docstrings of inherited fields.
    """
    found: dict[str, str] = {}
    for owner in filter(dataclasses.is_dataclass, reversed(group.__mro__)):
        (node,) = ast.parse(inspect.getsource(owner)).body
        assert isinstance(node, ast.ClassDef)
        for field, text in pairwise(node.body):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                found[ast.unparse(field.target)] = inspect.cleandoc(str(text.value.value))
    return found
