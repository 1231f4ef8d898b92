"""The import order of the packages, and of the modules inside them; `--help` imports nothing heavy.

An import counts wherever it stands: inside a function or under TYPE_CHECKING, too.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from nemo_oprd.cli import COMMANDS

ROOT = Path(__file__).parents[3] / "nemo_oprd"
# training imports nothing of these
BESIDE = ("commands", "tools", "integrations")
# Lowest first. A room is a package or a loose file; its modules import from their own room and from earlier lines.
ORDER = [
    ("vllm.worker",),  # runs in vLLM's processes, without this package; the trainer shares its forms of messages
    *((name,) for name in (ROOT / "rooms.txt").read_text().split() if name not in BESIDE),
    ("train",),
    ("commands",),
    ("cli",),  # names the modules of commands as text
    ("tools",),
    ("integrations",),
    ("__main__",),
]
RANK = {name: rank for rank, line in enumerate(ORDER) for name in line}
FILES = {
    ".".join(("nemo_oprd", *file.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__"): file
    for file in sorted(ROOT.rglob("*.py"))
    if file != ROOT / "__init__.py"
}

# the first heavy module that a command imports is named with it
SHOW_HELPS = """
import contextlib, io, json, sys
from nemo_oprd import cli
shown = {}
for command in ("", *cli.COMMANDS):
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
        cli.main([*command.split(), "--help"])
    heavy = {"torch", "transformers", "megatron", "hydra", "numpy"} & set(sys.modules)
    assert not heavy, (command, heavy)
    shown[command] = out.getvalue()
print(json.dumps(shown))
"""


def imports(file: Path) -> set[str]:
    """Modules of this project that a file imports, at any depth."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("nemo_oprd"):
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add(inner if inner in FILES else str(node.module))
        elif isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names if alias.name.startswith("nemo_oprd"))
    return found & set(FILES)


def room(module: str) -> str:
    """The longest name in ORDER that a module stands under."""
    parts = module.split(".")[1:]
    inner = ".".join(parts[:2])
    return inner if inner in RANK else parts[0]


@pytest.mark.parametrize("module", FILES)
def test_rooms_import_from_lower_rooms_only(module: str) -> None:
    assert room(module) in RANK, f"{room(module)} has no place in the import order"
    for other in imports(FILES[module]):
        if room(other) != room(module):
            assert RANK[room(other)] < RANK[room(module)], f"{module} imports {other}, which comes later"


def test_no_module_imports_itself_over_others() -> None:
    """Inside packages, too: `static_order` raises CycleError, which names the circle."""
    graph = {module: imports(file) - {module} for module, file in FILES.items()}
    assert set(TopologicalSorter(graph).static_order()) == set(FILES)


def test_benchmarks_and_studies_import_in_one_direction() -> None:
    """No circle in either, and benchmarks, which measure the product, import no study."""
    files = {
        f"{folder}.{file.stem}": file
        for folder in ("benchmarks", "studies")
        for file in (ROOT.parent / folder).glob("*.py")
    }
    graph = {}
    for name, file in files.items():
        found = set()
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
            elif isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
        graph[name] = found & set(files) - {name}
        assert not (name.startswith("benchmarks.") and any(other.startswith("studies.") for other in graph[name])), name
    assert len(graph) > 40 and set(TopologicalSorter(graph).static_order()) == set(graph)


# the tests of benchmarks, and the programs that these start
OF_BENCHMARKS = {
    "bridge_recipe_cases",
    "interrupted_evaluations", "interrupted_runs", "test_benchmarks", "test_gpu_check", "test_plan",
    "test_peers_benchmark", "test_planted_faults", "test_rollout_benchmark", "test_sigkill", "test_teacher_tables",
    "test_timeline_benchmark", "test_timeline_model", "test_vllm_kills",
}  # fmt: skip


def test_tests_import_benchmarks_only_to_test_them() -> None:
    """What both need is in `tests/support`."""
    pattern = re.compile(r"^\s*(?:from|import) benchmarks\b", re.MULTILINE)
    files = (ROOT.parent / "tests").rglob("*.py")
    assert {file.stem for file in files if pattern.search(file.read_text())} <= OF_BENCHMARKS


def test_few_loose_files() -> None:
    assert len(list(ROOT.glob("*.py"))) <= 8


def test_losses_know_neither_config_nor_megatron() -> None:
    for module, file in FILES.items():
        if room(module) == "losses":
            assert {room(other) for other in imports(file)} <= {"losses"}


def test_only_one_module_asks_global_parallel_state() -> None:
    asking = [module for module, file in FILES.items() if "parallel_state" in file.read_text()]
    assert asking == ["nemo_oprd.megatron.parallel"]


@pytest.fixture(scope="module")
def helps() -> dict[str, str]:
    """What `--help` of each command prints, in one process that has imported nothing heavy after any of them."""
    result = subprocess.run([sys.executable, "-c", SHOW_HELPS], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_is_light(helps: dict[str, str], command: str) -> None:
    assert f"usage: nemo-oprd {command}" in helps[command] and (command or "verify" in helps[command])
