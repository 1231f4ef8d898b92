"""Limits of files, functions and classes, imports of test modules, who sends signals; test_imports.py has packages."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[3]
DIRECTORIES = ("nemo_oprd", "checkpoint_tools", "benchmarks", "studies", "tests")
FILES = [file for directory in DIRECTORIES for file in sorted((ROOT / directory).rglob("*.py"))]
FILE_LINES, FUNCTION_LINES, CLASS_LINES = 700, 70, 250


def too_long(name: str, source: str) -> Iterator[str]:
    """What of a file is longer than allowed, as "file" or "file: definition", decorators not counted."""
    if len(source.splitlines()) > FILE_LINES:
        yield name
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            limit = CLASS_LINES if isinstance(node, ast.ClassDef) else FUNCTION_LINES
            if node.end_lineno - node.lineno + 1 > limit:
                yield f"{name}: {node.name}"


def test_no_two_files_of_tests_have_the_same_name() -> None:
    """Together pytest could not import them; the default lanes never collect all."""
    names = Counter(file.name for file in (ROOT / "tests").rglob("test_*.py"))
    assert len(names) > 100 and names.most_common(1)[0][1] == 1, names.most_common(1)


def test_limits() -> None:
    assert len(FILES) > 200
    found = {long for file in FILES for long in too_long(file.relative_to(ROOT).as_posix(), file.read_text())}
    assert found == set(), f"over {FILE_LINES} (file), {FUNCTION_LINES} (function), {CLASS_LINES} (class)"


def test_the_limits_are_seen() -> None:
    function = "def f():\n" + "    x = 1\n" * FUNCTION_LINES
    method = "class C:\n" + "    x = 1\n" * (CLASS_LINES - 1) + "    async def g(self):\n" + "        y = 1\n" * 69
    assert list(too_long("a.py", function)) == ["a.py: f"]
    assert list(too_long("a.py", function.removesuffix("    x = 1\n"))) == []
    assert list(too_long("a.py", method)) == ["a.py: C"]
    assert list(too_long("a.py", "x = 1\n" * (FILE_LINES + 1))) == ["a.py"]


def test_no_test_module_is_imported() -> None:
    """What tests share is in modules that hold no tests: importing a test module would collect its tests twice."""
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            imported = [name for name in names if name.split(".")[-1].startswith("test_")]
            assert not imported, f"{file.relative_to(ROOT)} imports {imported}; move what it shares"


def test_who_sends_signals_sets_the_answers_to_them() -> None:
    """A process inherits which signals are ignored, from `nohup` or a shell's `&`, too; see default_signals.py."""
    sends = re.compile(r"\.send_signal\(|\bos\.kill(?:pg)?\b|\.terminate\(\)")
    spared = re.compile(r"SIGKILL|SIGSTOP|getpid|, 0\)")  # not to be ignored, to itself, no signal at all
    found = 0
    for file in (ROOT / "tests").rglob("*.py"):
        text = file.read_text()
        if file != Path(__file__) and any(sends.search(s) and not spared.search(s) for s in text.splitlines()):
            found += 1
            assert re.search(r"default_signals|forked_run", text), f"{file.relative_to(ROOT)} sends signals"
    assert found > 8
