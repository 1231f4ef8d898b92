"""The configurations of published models in the wheel aiconfigurator-core, and the table of docs/models.md.

    .venv-nemo-bridge/bin/python tests/support/published_models.py    writes the table (PYTHONPATH as in the tests)

Nothing of the wheel is in the project: the table holds what `nemo-oprd families` says of each configuration.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
PACKAGE, SUFFIX, QUANTIZATION = "aiconfigurator_core", "_config.json", "hf_quant_config.json"
HEADINGS = ("model", "family", "route", "parameters", "weights", "layers", "key/value heads", "why not trained")
_BEGIN, _END = "<!-- published: written by tests/support/published_models.py -->", "<!-- end -->"


def make_directories(root: Path) -> list[str]:
    """ROOT/MODEL/config.json for every configuration of the wheel; returns the models. [] if it is not installed."""
    found = find_spec(PACKAGE)
    if found is None or found.origin is None:
        return []
    source = Path(found.origin).parent / "model_configs"
    for file in sorted(source.glob(f"*{SUFFIX}")):
        if not file.name.endswith(f"_{QUANTIZATION}"):
            model = root / file.name.removesuffix(SUFFIX)
            model.mkdir(parents=True)
            shutil.copy(file, model / "config.json")
            if (beside := source / f"{model.name}_{QUANTIZATION}").is_file():
                shutil.copy(beside, model / QUANTIZATION)
    return sorted(path.name for path in root.iterdir())


def rows_of(root: Path) -> list[dict[str, Any]]:
    """The rows of `nemo-oprd families` for all directories in ROOT, in this interpreter."""
    models, file = sorted(path.name for path in root.iterdir()), root.parent / "rows.json"
    command = [sys.executable, "-W", "ignore", "-m", "nemo_oprd", "families", *models, "--json", str(file)]
    subprocess.run(command, cwd=root, check=True, capture_output=True, text=True)
    return json.loads(file.read_text())


def table(rows: list[dict[str, Any]]) -> str:
    """The table of docs/models.md."""
    lines = ["| " + " | ".join(HEADINGS) + " |", "|" + "---|" * len(HEADINGS)]
    for row in rows:
        size = "" if row["parameters"] is None else f"{row['parameters'] / 1e9:.2f} B"
        counts = ("" if row[key] is None else str(row[key]) for key in ("layers", "kv_heads"))
        name = row["directory"].replace("--", "/")
        cells = (name, row["family"], row["route"], size, row["weights"] or "", *counts, _reason(row))
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def _reason(row: dict[str, Any]) -> str:
    """The finding of a refusal, without the file, the expectation and the fix."""
    text = row["why"].removeprefix(f"{row['directory']}/config.json: ")
    return re.split(r"[;,] expected|\. Should|; and as", text)[0].replace("|", "/")


def on_page() -> str:
    """The table that the page has."""
    return PAGE.read_text().partition(_BEGIN)[2].partition(_END)[0].strip()


def main() -> None:
    """Writes the table into the page."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "models"
        if not make_directories(root):
            raise SystemExit(f"{PACKAGE} is not installed here: scripts/setup_nemo_bridge.sh installs it")
        before, _, rest = PAGE.read_text().partition(_BEGIN)
        PAGE.write_text(f"{before}{_BEGIN}\n\n{table(rows_of(root))}\n\n{_END}{rest.partition(_END)[2]}")


if __name__ == "__main__":
    main()
