"""What this project calls of Megatron-core and Megatron-Bridge, found in the source, with the installed signatures.

    python tests/unit/megatron/megatron_calls.py --write     notes the installed versions' signatures

`calls` finds every call of a name that is imported from `megatron.core` or `megatron.bridge`, and every method of
Megatron's that a class of this project overrides. Calls of methods on objects are not found, because their classes are
not in the source.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import json
import re
import sys
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
NOTED = Path(__file__).with_name("megatron_signatures.json")
PACKAGES = {"megatron-core": "megatron.core", "megatron-bridge": "megatron.bridge"}
SOURCES = ("nemo_oprd", "examples", "checkpoint_tools", "tests/functional")


@dataclass(frozen=True)
class Call:
    """One call in the source.

    Attributes:
        name: what is called, such as "megatron.core.utils.get_model_config".
        place: "file:line".
        positional: number of positional arguments; None behind a `*sequence`.
        keywords: names of keyword arguments; "**" for a mapping.
    """

    name: str
    place: str
    positional: int | None
    keywords: tuple[str, ...]


def sources() -> list[Path]:
    """The project's files that may call Megatron-core."""
    found = [file for folder in SOURCES for file in sorted((ROOT / folder).rglob("*.py"))]
    return [file for file in found if "te_stand_in" not in file.parts and "nemo_rl_stand_in" not in file.parts]


def calls(text: str, file: str) -> tuple[list[Call], set[str]]:
    """The calls in a file's text, and the names of Megatron's methods that the file's classes override."""
    tree = ast.parse(text)
    names = _imported(tree)
    found, overridden = [], set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = _resolve(node.func, names)
            if name is not None:
                starred = any(isinstance(argument, ast.Starred) for argument in node.args)
                keywords = tuple(keyword.arg or "**" for keyword in node.keywords)
                found.append(Call(name, f"{file}:{node.lineno}", None if starred else len(node.args), keywords))
        elif isinstance(node, ast.ClassDef):
            for base in (_resolve(each, names) for each in node.bases):
                methods = {item.name for item in node.body if isinstance(item, ast.FunctionDef)}
                overridden |= {f"{base}.{method}" for method in methods if base is not None}
    return found, overridden


def package_of(name: str) -> str | None:
    """The distribution that has a dotted name, of those that are looked at."""
    return next((each for each, module in PACKAGES.items() if f"{name}.".startswith(f"{module}.")), None)


def _imported(tree: ast.AST) -> dict[str, str]:
    """Local name -> dotted name, for everything that is imported from these packages anywhere in a file."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and package_of(node.module or "") is not None:
            names |= {each.asname or each.name: f"{node.module}.{each.name}" for each in node.names}
        elif isinstance(node, ast.Import):
            names |= {
                each.asname: each.name for each in node.names if each.asname and package_of(each.name) is not None
            }
    return names


def _resolve(node: ast.expr, names: dict[str, str]) -> str | None:
    """The dotted name of an expression such as `dist_checkpointing.save`; None if it isn't Megatron's."""
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, ast.Attribute):
        owner = _resolve(node.value, names)
        return None if owner is None else f"{owner}.{node.attr}"
    return None


def all_calls() -> tuple[list[Call], set[str]]:
    """`calls` of all files."""
    found: list[Call] = []
    overridden: set[str] = set()
    for file in sources():
        more, methods = calls(file.read_text(), str(file.relative_to(ROOT)))
        found += more
        overridden |= methods
    return found, overridden


def installed_signature(name: str) -> list[str] | None:
    """The parameters of the installed function, class or method, such as "config", "*", "cp_group=None".

    Returns:
        None if there is no such name, or if a method is inherited by the class from outside of Megatron.
    """
    target = _find(name)
    if target is None:
        return None
    try:
        parameters = list(inspect.signature(target).parameters.values())
    except (TypeError, ValueError):
        return None
    shown: list[str] = []
    for parameter in parameters:
        if parameter.name == "self":
            continue
        prefix = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        if parameter.kind is parameter.KEYWORD_ONLY and not any(each.startswith("*") for each in shown):
            shown.append("*")
        default = "" if parameter.default is parameter.empty else f"={_shown(parameter.default)}"
        shown.append(prefix + parameter.name + default)
    return shown


def _shown(default: Any) -> str:
    """A default value without what differs between two processes."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(default))


def _find(name: str) -> Any:
    """The object behind a dotted name; None if there is none."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for part in parts[length:]:
            if inspect.isclass(found) and part not in dir(found):
                return None
            found = getattr(found, part, None)
        return found
    return None


def installed_signatures(package: str) -> dict[str, list[str]]:
    """The signatures of everything that this project calls or overrides of a distribution, as installed."""
    from nemo_oprd.megatron import cpu_patches

    cpu_patches.import_uncompiled()
    found, overridden = all_calls()
    names = sorted(name for name in {call.name for call in found} | overridden if package_of(name) == package)
    signatures = {name: installed_signature(name) for name in names}
    return {name: signature for name, signature in signatures.items() if signature is not None}


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    noted = json.loads(NOTED.read_text()) if NOTED.exists() else {}
    for package in PACKAGES if "--write" in sys.argv else ():
        if importlib.util.find_spec(PACKAGES[package]) is not None:
            noted.setdefault(package, {})[version(package)] = installed_signatures(package)
            noted[package] = dict(sorted(noted[package].items()))
    if "--write" in sys.argv:
        NOTED.write_text(json.dumps(noted, indent=1) + "\n")
