"""Plain values -> dataclasses: unknown keys, wrong types and secrets are errors that name the key."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import os
import re
import types
import typing
from typing import Any, Literal


@functools.cache
def _fields(cls: type) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    return {f.name: hints[f.name] for f in dataclasses.fields(cls)}


def _all_keys(cls: type, prefix: str = "") -> list[str]:
    keys = []
    for name, hint in _fields(cls).items():
        keys.append(prefix + name)
        inner = hint if dataclasses.is_dataclass(hint) else (*typing.get_args(hint), None)[0]
        if dataclasses.is_dataclass(inner):
            keys += _all_keys(typing.cast(type, inner), f"{prefix}{name}.")
    return keys


def _unknown(root: type, key: str, where: str) -> ValueError:
    if _SECRET_KEY.search(key):
        return ValueError(
            f"{where}: unknown key {key!r}; expected no secrets in a configuration, because it is saved with the run: "
            "set the environment variable that the program reads (WANDB_API_KEY, HF_TOKEN)"
        )
    near = difflib.get_close_matches(key, _all_keys(root), n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else f"; expected one of {', '.join(_fields(root))}, or a key in them"
    return ValueError(f"{where}: unknown key {key!r}{hint}")


# Names of keys and of environment variables that hold secrets, and what the keys of Hugging Face and W&B look like. A
# W&B key must be the whole value: directories of a Hugging Face cache have commit hashes in their names.
_SECRET_KEY = re.compile(r"(api_?key|(access|auth|hf)_?token|(^|\.)token|secret|passw(or)?d|credentials?)$", re.I)
_SECRET_VARIABLE = re.compile(r"(KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?)$", re.I)
_SECRET_VALUE = re.compile(r"hf_[A-Za-z0-9]{30,}|^[0-9a-f]{40}$")
# shorter values of environment variables (an empty or a dummy one) would be found in harmless text
_SECRET_LENGTH = 8


def refuse_secrets(value: Any, key: str) -> None:
    """Raises ValueError, without saying the value, where one would end up in config.yaml, e.g. by
    `${oc.env:HF_TOKEN}`."""
    if isinstance(value, dict | list):
        for name, item in value.items() if isinstance(value, dict) else enumerate(value):
            refuse_secrets(item, f"{key}.{name}" if key else str(name))
    elif isinstance(value, str):
        secrets = [
            n for n, v in os.environ.items() if _SECRET_VARIABLE.search(n) and len(v) >= _SECRET_LENGTH and v in value
        ]
        if secrets or _SECRET_VALUE.search(value):
            what = f"the value of the environment variable {secrets[0]}" if secrets else "what looks like an access key"
            raise ValueError(
                f"{key} holds {what} (not shown); expected no secrets, because the configuration is saved with the "
                "run: remove it, programs read it from the environment"
            )


# groups whose keys are the user's
_OPEN_GROUPS = ("data.validation", "loss.representation.kind_args")


def check_key(root: type, key: str, where: str) -> None:
    """Raises ValueError unless `key` is one of the schema `root` (list items by number), or one of the user's names."""
    known = _all_keys(root)
    if re.sub(r"\.\d+(?=\.)", "", key) not in known and key.rsplit(".", 1)[0] not in _OPEN_GROUPS:
        raise _unknown(root, key, where)


def build(root: type, value: Any) -> Any:
    """`value` (nested dicts, lists and scalars) as an object of the dataclass `root`.

    Raises:
        ValueError: an unknown key (the nearest known one is named), or a value of the wrong type.
    """
    return _build(root, root, value, "")


def _build(root: type, hint: Any, value: Any, key: str) -> Any:
    """`value` as an object of type `hint`; every mismatch is a ValueError that names `key`."""
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, dict):
            first = next(iter(_fields(typing.cast(type, hint))))
            raise ValueError(f"{key}={value!r}: expected a group of keys; give one of them, e.g. {key}.{first}")
        prefix = f"{key}." if key else ""
        for name in value:
            if name not in _fields(typing.cast(type, hint)):
                raise _unknown(root, prefix + str(name), "configuration")
        # only items of lists come without keys: everything else was laid over the schema's defaults
        needed = [f.name for f in dataclasses.fields(hint) if f.default is f.default_factory is dataclasses.MISSING]
        for name in needed:
            if name not in value:
                raise ValueError(f"{key}={value!r}: expected {_describe(hint)}; give {name}")
        parts = {
            name: _build(root, inner, value[name], prefix + name)
            for name, inner in _fields(typing.cast(type, hint)).items()
            if name in value
        }
        return typing.cast(type, hint)(**parts)
    if hint is Any:
        return value
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        for option in arguments:
            if isinstance(value, list) and dataclasses.is_dataclass((*typing.get_args(option), None)[0]):
                return _build(root, option, value, key)  # its message says which item is wrong
            try:
                return _build(root, option, value, key)
            except ValueError:
                continue
        raise ValueError(f"{key}={value!r}: expected {_describe(hint)}; give one")
    if origin is Literal and isinstance(value, str) and value in arguments:
        return value
    if origin is list and isinstance(value, list):
        return [_build(root, arguments[0], item, f"{key}[{i}]") for i, item in enumerate(value)]
    if origin is tuple and isinstance(value, (list, tuple)) and len(value) == len(arguments):
        return tuple(_build(root, inner, item, key) for inner, item in zip(arguments, value, strict=True))
    if origin is dict and isinstance(value, dict):
        return {str(name): _build(root, arguments[1], item, f"{key}.{name}") for name, item in value.items()}
    if hint is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        if not math.isfinite(value):
            raise ValueError(f"{key}={value}: expected a finite number; choose one")
        return float(value)
    if hint in (int, str, bool, types.NoneType) and type(value) is hint:
        return value
    raise ValueError(f"{key}={value!r}: expected {_describe(hint)}; give one")


def _describe(hint: Any) -> str:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return " | ".join(map(str, arguments))
    if origin in (typing.Union, types.UnionType):
        return " | ".join(_describe(option) for option in arguments)
    if dataclasses.is_dataclass(hint):
        return "{" + ", ".join(_fields(typing.cast(type, hint))) + "}"
    if origin in (list, tuple, dict):
        return f"{origin.__name__} of {_describe(arguments[-1])}"
    if hint is Any:
        return "values"
    return {types.NoneType: "null", int: "an integer", float: "a number", str: "text", bool: "true or false"}[hint]
