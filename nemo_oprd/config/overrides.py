"""Parses KEY=VALUE of the command line by Hydra's grammar, with this project's messages; converts groups to KEY=VALUE.

The grammar has no `~`, `#`, quotes inside a text or letters beyond ASCII. A key of text takes such a value literally,
so that paths need no quotes. Values in lists, and the values of other keys, follow the grammar.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override

_OPENING = {"[": "]", "{": "}", "(": ")"}


def key_of(text: str) -> str:
    """Returns the key of KEY=VALUE without Hydra's `+`, which has no effect here. Raises ValueError for other texts."""
    if text.startswith("~"):
        raise ValueError(
            f"command line: {text!r} deletes a key, and every key has a value here; expected KEY=VALUE: give another "
            "value, such as null"
        )
    key, equals, value = text.lstrip("+").partition("=")
    if not equals:
        colon = re.fullmatch(r"([\w.]+):\s*(\S.*)", text)
        name = key.strip() if re.fullmatch(r"\s*[A-Za-z][\w.]*\s*", key) else "KEY"
        fix = f"write {colon[1]}={colon[2]}" if colon else f"write {name}=VALUE"
        raise ValueError(f"command line: {text!r} has no '='; expected KEY=VALUE: {fix}")
    if not key.strip():
        raise ValueError(f"command line: {text!r} has no key before '='; expected KEY=VALUE: name a key")
    if key.split() != [key]:
        raise ValueError(
            f"command line: {key!r} is not a key; expected KEY=VALUE without spaces around the key: write "
            f"{''.join(key.split())}=VALUE"
        )
    if value.startswith("="):
        raise ValueError(f"command line: {text!r} has '=' twice; expected KEY=VALUE: write one")
    return key


def parse(text: str, *, may_be_text: bool, may_be_list: bool, may_be_group: bool = False) -> Override:
    """Parses KEY=VALUE to Hydra's form; the flags say which kinds of values the key takes.

    Raises:
        ValueError: the value is not in the grammar, or is several values.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    key, _, value = text.lstrip("+").partition("=")
    as_text = f"{key}={quoted(value)}"
    parser = OverridesParser.create()
    if may_be_text and value[:1] in ("[", "{") and not (may_be_list or may_be_group):
        return parser.parse_override(as_text)  # a template, such as "{prompt} Think."
    try:
        parsed = parser.parse_override(f"{key}={value}")
    except HydraException as error:
        if may_be_text and value[:1] not in ("[", "{", "'", '"'):
            return parser.parse_override(as_text)
        message = f"{key}={value}: {_what_is_wrong(key, value)}"
        may_hold_secret = key.endswith((".flags", ".endpoints"))
        raise ValueError(message.replace(value, "(not shown)") if may_hold_secret else message) from error
    if not parsed.is_sweep_override():
        return parsed
    if may_be_text and not may_be_list:
        return parser.parse_override(as_text)
    fix = f'put a list into brackets, "{key}=[{value}]"' if may_be_list else "give one"
    raise ValueError(f"{key}={value}: several values, which Hydra calls a sweep; expected one value: {fix}")


def quoted(text: str) -> str:
    """Returns the text in Hydra's quotes."""
    # in quotes Hydra reads backslashes literally, except before a quote
    escaped = re.sub(r"(\\*)'", lambda found: found[1] * 2 + "\\'", text)
    return "'" + re.sub(r"\\+$", lambda found: found[0] * 2, escaped) + "'"


def _what_is_wrong(key: str, value: str) -> str:
    """Describes a value that is not in the grammar: the reason, the expected value, and the fix."""
    stripped = value.strip()
    first = stripped[:1]
    if first in ("'", '"'):
        rest = re.sub(r"\\.", "", stripped[1:])
        why = "has more text after the closing quote" if first in rest else f"begins with the quote {first} alone"
        return f"{why}; expected a text in one pair of quotes: correct it"
    if stripped.endswith(","):
        return f"ends with a comma; expected one value: write {key}={stripped.rstrip(', ')}"
    if first == "(":
        return f'begins with a parenthesis; expected a list in brackets: write "{key}=[{stripped.strip("()")}]"'
    for opening, closing in _OPENING.items():
        missing = stripped.count(opening) - stripped.count(closing)
        if missing:
            return f"has '{opening}' and '{closing}' that are no pairs; expected one of each: correct it"
    return (
        "is not a value that can be read; expected a number, a list [a,b] or a group {a:1,b:2}: write texts with other "
        """characters than letters, digits and /-.:_ in quotes inside the shell's, such as "['~/a','b c']\""""
    )


# Conversion of a launcher's nested groups of values to KEY=VALUE of Hydra's command line.


def as_overrides(values: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """Yields the leaves of nested groups as KEY=VALUE in Hydra's syntax. An empty group sets nothing."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from as_overrides(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}={_literal(value)}"


def _literal(value: Any) -> str:
    """Formats a value in Hydra's syntax. Launchers pass true, false and null as text, so these get no quotes."""
    if isinstance(value, str) and value.lower() not in ("true", "false", "null"):
        return quoted(value)
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(map(_literal, value)) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{name}:{_literal(item)}" for name, item in value.items()) + "}"
    return "null" if value is None else str(value).lower()
