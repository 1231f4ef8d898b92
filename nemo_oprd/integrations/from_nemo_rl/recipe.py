"""Reads a NeMo-RL recipe: loads it as NeMo-RL does, returns its values, and records which keys were read.

A recipe is a YAML file. Its key `defaults` names one or several files, relative to it, which are merged in order, and
the recipe over them. A group with `_override_: true` replaces the inherited group. Values may refer to others
(`${policy.model_name}`) and compute (`${mul:2, 3}`). `Recipe.unread` lists keys that no caller has read.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partialmethod
from pathlib import Path
from typing import Any, TypeAlias

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from nemo_oprd.config.yaml_files import checked_text
from nemo_oprd.runtime.files import why_no_file

# longer values are cut off in messages
_LONGEST = 80
_RESOLVERS: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "mul": operator.mul,
    "div": operator.truediv,
    "max": max,
}


def load_recipe(path: str | Path) -> dict[str, Any]:
    """Loads the recipe with all files it inherits from, every reference resolved.

    Raises:
        ValueError: a file is missing or no mapping, files inherit from each other in a circle, or a reference has no
            target.
    """
    for name, function in _RESOLVERS.items():
        if not OmegaConf.has_resolver(name):
            OmegaConf.register_new_resolver(name, function)
    try:
        plain = OmegaConf.to_container(_inherited(Path(path), ()), resolve=True)
    except (OmegaConfBaseException, YAMLError, UnicodeDecodeError, RecursionError) as error:
        too_deep = isinstance(error, RecursionError)
        what = "groups or lists inside each other without end" if too_deep else " ".join(str(error).split())
        fix = "set that variable" if "Environment variable" in what else "correct the file"
        raise ValueError(f"{path}: {what}; expected a recipe of NeMo-RL: {fix}") from error
    assert isinstance(plain, dict)
    return {str(name): value for name, value in plain.items()}


def _inherited(path: Path, above: tuple[Path, ...]) -> Any:
    file = path.resolve()
    if file in above:
        raise ValueError(
            f"{path}: inherits from itself by way of {above[-1].name}; expected no circle: correct the defaults"
        )
    if not file.is_file():
        named = f", which {above[-1]} names in its defaults" if above else ""
        raise ValueError(f"{path}: {why_no_file(file, '.yaml')}{named}; expected a recipe of NeMo-RL: correct the path")
    checked_text(file)
    own = OmegaConf.load(file)
    if not isinstance(own, DictConfig):
        raise ValueError(f"{path}: holds a {type(own).__name__}; expected a mapping of keys: name a recipe of NeMo-RL")
    defaults = own.pop("defaults", None)
    parents = list(defaults) if isinstance(defaults, ListConfig) else [defaults] if defaults else []
    merged: Any = OmegaConf.create({})
    for parent in parents:
        merged = _merged(merged, _inherited(file.parent / str(parent), (*above, file)))
    return _merged(merged, own)


def _merged(below: Any, above: Any) -> Any:
    for name in list(above.keys()):
        group = above._get_node(name)
        if isinstance(group, DictConfig) and not group._is_none() and group.get("_override_", False):
            group.pop("_override_")
            below.pop(name, None)
    return OmegaConf.merge(below, above)


def wrong(key: str, value: Any, expected: str) -> ValueError:
    """Makes the error for a value of the wrong type or out of range."""
    shown = repr(value)
    shown = shown if len(shown) <= _LONGEST else f"{shown[:_LONGEST]}..."
    return ValueError(f"{key}={shown}: expected {expected}: correct the recipe")


@dataclass
class Translated:
    """Result of a translation: the configuration as nested keys, and notes on the differences."""

    config: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def set(self, key: str, value: Any) -> None:
        """Sets a key such as `train.lr`; null leaves the default."""
        if value is None:
            return
        *groups, last = key.split(".")
        place = self.config
        for group in groups:
            place = place.setdefault(group, {})
        place[last] = value

    def get(self, key: str, default: Any = None) -> Any:
        """Returns the value that was set, or `default`."""
        place: Any = self.config
        for name in key.split("."):
            place = place.get(name) if isinstance(place, dict) else None
        return default if place is None else place

    def take(self, recipe: Recipe, rows: Iterable[Row], theirs: str = "", ours: str = "") -> None:
        """Sets the keys of a table, in order; `theirs` and `ours` are prefixes of the recipe's keys and of ours."""
        for key, here, read in rows:
            self.set(ours + here, read(recipe, theirs + key))

    def choose(self, recipe: Recipe, theirs: str, ours: str, values: dict[str, str]) -> str:
        """Sets and returns the counterpart of a text in `values`; for a text without one, the first, with a note."""
        default, fallback = next(iter(values.items()))
        given = recipe.text(theirs, default)
        self.set(ours, values.get(given, fallback))
        if given not in values:
            self.note(f"{theirs}={given}: {fallback} is taken")
        return values.get(given, fallback)

    def note(self, text: str) -> None:
        """Adds a note, as one line of printable characters whatever the recipe's values hold."""
        line = " ".join(text.split())
        self.notes.append("".join(c if c.isprintable() else ascii(c)[1:-1] for c in line))


class Recipe:
    """The values of a recipe by key, such as `policy.generation.temperature`, and which of them were read.

    Methods that read a value of a type raise ValueError for a value of another type.
    """

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = values
        self._read: set[str] = set()
        # the group with the settings of the loop: `distillation`, or `grpo` for multi-teacher distillation
        self.algorithm = "distillation"

    def get(self, key: str, default: Any = None) -> Any:
        """Returns the value, or `default` if it is missing or null. Marks the key, and all below it, as read."""
        self._read.add(key)
        value = self.peek(key)
        return default if value is None else value

    def number(self, key: str, default: Any = None, *, whole: bool = False, low: float | None = None) -> Any:
        """Reads a number as `get`: an int if `whole`, and not below `low`. A number in quotes is a text."""
        value = self.get(key, default)
        if not self.has(key):
            return value
        good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not good or (whole and value != int(value)) or (low is not None and value < low):
            least = "" if low is None else f" of at least {low}"
            raise wrong(key, value, f"a {'whole ' if whole else ''}number{least}, without quotes")
        return int(value) if whole else value

    count = partialmethod(number, whole=True, low=1)
    not_negative = partialmethod(number, low=0)

    def text(self, key: str, default: str | None = None) -> Any:
        """Reads a text that is not empty as `get`."""
        value = self.get(key, default)
        if self.has(key) and not (isinstance(value, str) and value.strip()):
            raise wrong(key, value, "a text")
        return value

    def flag(self, key: str, *, default: bool = False) -> bool:
        """Reads true or false as `get`."""
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise wrong(key, value, "true or false, without quotes")
        return value

    def peek(self, key: str) -> Any:
        """Returns the value, or None; the key stays unread."""
        value: Any = self._values
        for part in key.split("."):
            if isinstance(value, list):
                value = value[int(part)] if part.isdecimal() and int(part) < len(value) else None
            else:
                value = value.get(part) if isinstance(value, dict) else None
        return value

    def has(self, key: str) -> bool:
        """Returns whether there is a value other than null; the key stays unread."""
        return self.peek(key) is not None

    def names(self, key: str) -> bool:
        """Returns whether the key is there, even with the value null; the key stays unread."""
        group, _, last = key.rpartition(".")
        place = self.peek(group) if group else self._values
        return isinstance(place, dict) and last in place

    def unread(self) -> dict[str, Any]:
        """Returns unread key -> value, except null, false and empty values and groups with `enabled: false`."""

        def leaves(key: str, value: Any) -> Iterator[tuple[str, Any]]:
            if key in self._read or value is None or value is False or value in ([], {}, ""):
                return
            if isinstance(value, list) and any(isinstance(item, dict) for item in value):
                value = dict(enumerate(value))
            if not isinstance(value, dict):
                yield key, value
            elif not key or value.get("enabled") is not False:
                for name, inner in value.items():
                    yield from leaves(f"{key}.{name}".removeprefix("."), inner)

        return dict(leaves("", self._values))


# (a recipe, a key) -> the value to set; None leaves the default
Reader: TypeAlias = Callable[[Recipe, str], Any]
# (key of a recipe, key here, how its value is read)
Row: TypeAlias = tuple[str, str, Reader]
