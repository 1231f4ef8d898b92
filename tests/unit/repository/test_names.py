"""Modules, files and functions that pages, docstrings and comments name exist."""

from __future__ import annotations

import ast
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PACKAGE = ROOT / "nemo_oprd"
MODULES = sorted(PACKAGE.rglob("*.py"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
FOLDERS = ("nemo_oprd", "tests", "benchmarks", "studies", "scripts", "checkpoint_tools", "examples", "docs")
FILES = [file.as_posix() for folder in FOLDERS for file in (ROOT / folder).rglob("*.py")]
# of Megatron-core, Megatron-Bridge, NeMo-Aligner, Transformer Engine, vLLM and users
NOT_OURS = {
    "attention.py",
    "megatron_gpt_knowledge_distillation.py",
    "my_losses.py",
    "reward_critic_clients.py",
    "setup.py",
}


def names_in(module: Path) -> set[str]:
    """Names of functions, classes, methods, attributes and variables of a module, and what it imports."""
    found = set()
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.id if isinstance(node, ast.Name) else node.attr)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
    return found


NAMES = {module: names_in(module) for module in MODULES}


def prose(file: Path) -> str:
    """A page as it is; of a module its strings in three quotes and its comments."""
    if file.suffix == ".md":
        return file.read_text()
    with file.open("rb") as stream:
        tokens = list(tokenize.tokenize(stream.readline))
    kinds = {tokenize.STRING: '"""', tokenize.COMMENT: "#"}
    return "\n".join(token.string for token in tokens if token.string.startswith(kinds.get(token.type, "\0")))


def absent_files(text: str) -> Iterator[str]:
    """Files in backticks that are no end of a file's path."""
    for path in re.findall(r"`((?:\w+/)*\w+\.py)(?:::\w+)?`", text):
        if path not in NOT_OURS and not any(file.endswith(f"/{path}") for file in FILES):
            yield path


def absent_names(text: str) -> Iterator[str]:
    """Dotted names of the package, and `file.py::NAME`, that lead nowhere."""
    for dotted in re.findall(r"\bnemo_oprd((?:\.[A-Za-z_]\w*)+)", text):
        parts = dotted[1:].split(".")
        for length in range(len(parts), 0, -1):
            stem = PACKAGE.joinpath(*parts[:length])
            module = next((each for each in (stem.with_suffix(".py"), stem / "__init__.py") if each in NAMES), None)
            if module is not None:
                break
        else:
            yield f"nemo_oprd{dotted}"
            continue
        if length < len(parts) and parts[length] not in NAMES[module]:
            yield f"nemo_oprd{dotted}"
    for path, name in re.findall(r"((?:\w+/)*\w+\.py)::(\w+)", text):
        if not any(name in names for module, names in NAMES.items() if module.as_posix().endswith(f"/{path}")):
            yield f"{path}::{name}"


@pytest.mark.parametrize("file", [*PAGES, *MODULES], ids=lambda file: file.relative_to(ROOT).as_posix())
def test_what_is_named_exists(file: Path) -> None:
    text = prose(file)
    # before -> now, and files of containers
    moved = r"nemo_oprd\.(nemo|recipes)(\.NAME|\.nemo_run)?`|nemo_oprd\.integrations\.NAME|nemo_oprd\.(sqsh|sif)"
    text = re.sub(moved, "", text)
    assert [*absent_files(text), *absent_names(text)] == []


def test_absent_names_are_seen() -> None:
    text = "`losses/no_such.py`, `nemo_oprd.losses.registry.no_such`, `nemo_oprd.no_such`, `registry.py::no_such`"
    assert list(absent_files(text)) == ["losses/no_such.py"]
    assert list(absent_names(text)) == [
        "nemo_oprd.losses.registry.no_such", "nemo_oprd.no_such", "registry.py::no_such",
    ]  # fmt: skip
    assert list(absent_names("`nemo_oprd.losses.registry.ROW_LOSSES`, `nemo_oprd.run`, `layout.py::Layout`")) == []
