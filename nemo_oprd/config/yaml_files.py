"""Reads the YAML files of a configuration before Hydra composes them: lists the files and checks their contents.

A file names others in its list `defaults`. Hydra follows a circle of them, and OmegaConf copies what an alias stands
for, until memory or Python's stack ends. So this module first looks for circles, and counts values in the nodes of
YAML's parser, where an alias costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MOST_BYTES, MOST_VALUES = 1 << 20, 100_000
GLOBAL = "# @package _global_"


@dataclass(frozen=True)
class YamlFile:
    """A file of a configuration, and the group of keys that its content goes into ("" for the top)."""

    path: Path
    group: str

    def holds(self, key: str) -> bool:
        """Returns whether the file sets a key, or a group around it."""
        names = key.split(".")
        prefix = self.group.split(".") if self.group else []
        if names[: len(prefix)] != prefix:
            return False
        value: Any = _content(self.path)
        for name in names[len(prefix) :]:
            if not isinstance(value, dict) or name not in value:
                return False
            value = value[name]
        return True


def composed_files(directory: Path, name: str, choices: dict[str, Any]) -> list[YamlFile]:
    """Returns the files that Hydra composes for configuration `name`, in its order: later files override earlier ones.

    Args:
        choices: files that the command line chooses, by their folder.

    Raises:
        ValueError: the lists `defaults` lead in a circle, or a file is too large or stands for too many values.
    """
    found = [*_below(directory, Path(f"{name}.yaml"), "", choices, ())]
    chosen = {each.path.parent for each in found}
    for folder, choice in choices.items():  # added by the command line
        if directory / folder not in chosen:
            found += _chosen(directory, folder, choice, folder.replace("/", "."), choices, ())
    return found


def _below(
    directory: Path, file: Path, group: str, choices: dict[str, Any], above: tuple[Path, ...]
) -> Iterator[YamlFile]:
    path = directory / file
    if file in above:
        circle = " -> ".join(str(each) for each in (*above[above.index(file) :], file))
        meant = " (the file's own place in it is written _self_)" if len(above) == 1 else ""
        raise ValueError(
            f"{directory / above[0]}: the list `defaults` leads in a circle, {circle}{meant}; expected files that do "
            "not name each other: correct the list"
        )
    if not path.is_file():
        return  # `load_config` reports it
    text = checked_text(path)
    own = YamlFile(path, "" if text.startswith(GLOBAL) else group)
    content = _content(path) if "defaults" in text else None
    defaults = content.get("defaults") if isinstance(content, dict) else None
    entries = defaults if isinstance(defaults, list) else []
    for entry in entries if "_self_" in entries else [*entries, "_self_"]:
        if entry == "_self_":
            yield own
        elif isinstance(entry, str):
            yield from _below(directory, file.parent / f"{entry}.yaml", group, choices, (*above, file))
        elif isinstance(entry, dict):
            for key, choice in entry.items():
                folder, _, package = str(key).removeprefix("optional ").partition("@")
                inner = package or ".".join(filter(None, (group, folder.replace("/", "."))))
                folder = str(file.parent / folder)
                yield from _chosen(directory, folder, choices.get(folder, choice), inner, choices, (*above, file))


def _chosen(
    directory: Path, folder: str, choice: Any, group: str, choices: dict[str, Any], above: tuple[Path, ...]
) -> Iterator[YamlFile]:
    for name in choice if isinstance(choice, list) else [choice]:
        if isinstance(name, str):
            file = Path(folder) / f"{name.removesuffix('.yaml')}.yaml"
            yield from _below(directory, file, group, choices, above)


def checked_text(path: Path) -> str:
    """Returns a file's text, "" for broken YAML with `&` or `defaults`. Raises ValueError if too large or endless."""
    import yaml

    if path.stat().st_size > MOST_BYTES:
        raise ValueError(
            f"{path}: has {path.stat().st_size:,} bytes; expected a configuration of at most {MOST_BYTES:,}: name "
            "large data in files of their own"
        )
    text = path.read_bytes().decode("utf-8", errors="replace")
    if "&" in text or "defaults" in text:
        try:
            root = yaml.compose(text, Loader=yaml.SafeLoader)
        except (yaml.YAMLError, RecursionError):
            return ""  # `load_config` reports the mistake
        values = _values(root, {}, str(path))
        if values > MOST_VALUES:
            raise ValueError(
                f"{path}: its aliases stand for {values:,} values; expected at most {MOST_VALUES:,}: write out what "
                "is meant"
            )
    return text


def _values(node: Any, known: dict[int, int | None], where: str) -> int:
    """Counts the values below a node, those below an alias once per use."""
    key = id(node)
    if known.get(key, 0) is None:
        raise ValueError(f"{where}: an alias stands inside its own anchor; expected values that end: write them out")
    if key not in known:
        known[key] = None  # until all below it is counted
        below: Sequence[Any] = node.value if node is not None and not isinstance(node.value, str) else ()
        inner = [each for pair in below for each in (pair if isinstance(pair, tuple) else (pair,))]
        known[key] = 1 + sum(_values(each, known, where) for each in inner)
    return known[key] or 0


def _content(path: Path) -> Any:
    """Returns the content of a file; None if it is not plain YAML."""
    import yaml

    try:
        return yaml.safe_load(path.read_bytes())
    except (yaml.YAMLError, ValueError, RecursionError):
        return None
