"""The import order of the packages: a lower layer never imports a higher one, and `--help` imports nothing heavy."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent / "nemo_oprd"
# lowest first; a module may import from its own group and from groups before it
# fmt: off
ORDER = [
    ("types", "layout", "weight_schedule", "config", "config_values", "config_checks", "disk", "survival"),
    ("losses", "families", "tokens", "data", "batch", "bridge"),
    ("objective",),
    ("megatron",),
    ("teacher", "rollout"),
    (
        "reference", "system", "setup", "inputs", "evaluation", "runlog", "run_directory", "spikes", "report",
        "report_figures", "validation", "toy",
    ),
    ("run", "train", "verify", "evaluate", "fit_bridge"),
    ("cli", "__main__"),
]
# fmt: on
RANK = {name: rank for rank, group in enumerate(ORDER) for name in group}
# pure arithmetic that lower layers may share: no torch, no processes
PURE = {"nemo_oprd.teacher.layermap"}


def imports(file: Path) -> set[str]:
    """Modules of this package that a file imports, at any depth."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("nemo_oprd"):
            names = (
                [f"{node.module}.{alias.name}" for alias in node.names] if node.module == "nemo_oprd" else [node.module]
            )
            found.update(names)
        elif isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names if alias.name.startswith("nemo_oprd"))
    return found


FILES = sorted(file for file in ROOT.rglob("*.py") if file != ROOT / "__init__.py")


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(ROOT)))
def test_import_order(file: Path) -> None:
    mine = file.relative_to(ROOT).parts[0].removesuffix(".py")
    assert mine in RANK, f"{mine} has no place in the import order"
    for module in imports(file) - PURE:
        theirs = module.split(".")[1]
        if theirs in RANK:
            assert RANK[theirs] <= RANK[mine], f"{file.name} imports {module}, which comes later"


def test_losses_know_neither_config_nor_megatron() -> None:
    for file in (ROOT / "losses").glob("*.py"):
        assert not {m for m in imports(file) if m.split(".")[1] in ("config", "megatron", "layout")}


def test_only_one_module_asks_global_parallel_state() -> None:
    asking = [f.name for f in FILES if "parallel_state" in f.read_text()]
    assert asking == ["parallel.py"]


def test_help_is_light() -> None:
    code = "import sys, nemo_oprd.cli as c\ntry:\n c.main(['--help'])\nexcept SystemExit: pass\n"
    code += (
        "heavy = {'torch', 'transformers', 'megatron', 'hydra', 'numpy'} & set(sys.modules); assert not heavy, heavy"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "verify" in result.stdout
