"""Compares two configurations, and finds the rule by which a resumed run may change a key.

Every key has its rule at its field in the schema: `Free`, `Learned` or `Fixed` (`types.py`). Two of the learned keys
need permission only if other keys make them effective, see `_matters`. This module compares configurations only;
`run/resume.py` recognises a model that has moved.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields
from functools import cache
from typing import Any

from nemo_oprd.config.keys import Key, keys, plain_key
from nemo_oprd.config.loading import as_plain
from nemo_oprd.config.schema import Config, TeacherSource
from nemo_oprd.config.types import Rule

_SHOWN = 100  # characters of a value in a message


@dataclass(frozen=True)
class Change:
    """A key with a changed value: both values as texts, and the rule of the change.

    The key is dotted; a key of `teachers` has the teacher's number in it, e.g. "teachers.0.weight".
    """

    key: str
    before: str
    after: str
    rule: Rule

    def __str__(self) -> str:
        return f"{self.key}: {self.before} -> {self.after}"


def rule_of(key: str) -> Rule:
    """Returns the rule of a key of the schema. Raises KeyError for a key that has none."""
    rule = _schema()[key].rule
    if rule is None:
        raise KeyError(f"{key} has no rule in the schema, expected Free, Learned or Fixed around its type")
    return rule


def changes(before: Mapping[str, Any], after: Mapping[str, Any], started_in: str = "") -> list[Change]:
    """Returns the differences between two complete configurations (as in config.yaml), in the order of the schema.

    A key that `before` lacks had its default: a later version added it. `train.allow_changes` is left out: it permits
    changes of one start, and is no property of the run.

    Args:
        started_in: the working directory of relative paths in `before`; "": the current one.
    """
    found: list[Change] = []
    for key in _schema():
        if key == "train.allow_changes" or key.startswith("teachers."):
            continue
        old, new = _value(before, key), _value(after, key)
        pairs = [(key, old, new)]
        if key == "teachers" and len(old) == len(new):
            pairs = [
                (f"teachers.{number}.{field.name}", *(one.get(field.name, _default(field)) for one in both))
                for number, both in enumerate(zip(old, new, strict=True))
                for field in fields(TeacherSource)
            ]
        for pair in pairs:
            found += _change(*pair, before, after, started_in)
    return found


def _default(field: Field) -> Any:
    """Returns the default of a dataclass's field, even if a factory makes it."""
    return field.default if field.default_factory is MISSING else field.default_factory()


def allowed(change: Change, allow: Sequence[str]) -> bool:
    """Returns whether `train.allow_changes` names the key of a change, or a group around it."""
    return any(f"{name}.".startswith(f"{entry}.") for name in (change.key, plain_key(change.key)) for entry in allow)


def shown(value: Any) -> str:
    """Formats a value for a message: as in JSON, without quotes around texts; cuts long values."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


@cache
def _schema() -> dict[str, Key]:
    """Returns every key that holds a value, in the order of the schema."""
    return {key.name: key for key in keys(Config) if not key.is_group}


def _change(
    key: str, old: Any, new: Any, before: Mapping[str, Any], after: Mapping[str, Any], started_in: str
) -> list[Change]:
    plain = plain_key(key)
    if plain == "data.train":  # a single file may be given without a list
        old, new = ([value] if isinstance(value, str) else value for value in (old, new))
    is_reordered = plain == "data.train" and _reorders(old, new, started_in)
    if not is_reordered and (old == new or (_schema()[plain].names_files and _real(old, started_in) == _real(new))):
        return []
    rule = rule_of(plain)
    if rule == "learned" and not _matters(plain, before, after):
        rule = "free"
    if isinstance(old, dict) and isinstance(new, dict):  # names of the user's choice
        names = [name for name in dict.fromkeys([*old, *new]) if old.get(name) != new.get(name)]
        found = [Change(f"{key}.{name}", shown(old.get(name)), shown(new.get(name)), rule) for name in names]
        return found or [Change(key, shown(list(old)), shown(list(new)), rule)]
    return [Change(key, shown(old), shown(new), rule)]


def _reorders(old: Any, new: Any, started_in: str) -> bool:
    """Returns whether two mappings name the same files in another order, which decides a step's prompts."""
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return False
    pairs = ((list(old), list(new)), (list(_real(old, started_in)), list(_real(new))))
    return any(before != after and sorted(before) == sorted(after) for before, after in pairs)


def _matters(key: str, *configs: Mapping[str, Any]) -> bool:
    """Returns whether a changed key changes the training result, for keys whose effect depends on other keys."""
    if key == "train.steps":  # the rate of a step depends on it during warm-up and with a cosine schedule
        warmups = {math.ceil(_value(c, "train.warmup_fraction") * _value(c, "train.steps")) for c in configs}
        return len(warmups) > 1 or any(_value(c, "train.schedule") == "cosine" for c in configs)
    if key == "data.validation":
        return any(_value(c, "data.contamination") == "drop" for c in configs)
    return True


def _value(config: Mapping[str, Any], key: str) -> Any:
    value: Any = config
    for part in key.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return None if config is _defaults() else _value(_defaults(), key)
        value = value[part]
    return value


@cache
def _defaults() -> Mapping[str, Any]:
    return as_plain(Config())


def _real(value: Any, started_in: str = "") -> Any:
    """Returns `value` with each text resolved from a working directory to a path without links."""
    if isinstance(value, dict):
        return {_real(name, started_in): _real(item, started_in) for name, item in value.items()}
    if isinstance(value, list):
        return [_real(item, started_in) for item in value]
    return os.path.realpath(os.path.join(started_in, value)) if isinstance(value, str) else value
