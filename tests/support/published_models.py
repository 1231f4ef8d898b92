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

# Parameters in billions, of the models' cards and reports; of a model with a tower, those of its language model, which
# is a Qwen3 of that size. The reader of configurations knows none of them.
PUBLISHED = {
    "meta-llama--Meta-Llama-3.1-8B": 8.03, "meta-llama--Meta-Llama-3.1-70B": 70.6,
    "meta-llama--Meta-Llama-3.1-405B": 405.9, "nvidia--Llama-3.1-70B-Instruct-FP8": 70.6,
    "Qwen--Qwen3-0.6B": 0.596, "Qwen--Qwen3-1.7B": 1.72, "Qwen--Qwen3-8B": 8.19, "Qwen--Qwen3-32B": 32.8,
    "Qwen--Qwen3-32B-FP8-Static-PerTensor": 32.8, "Qwen--Qwen3-30B-A3B": 30.5, "Qwen--Qwen3-235B-A22B": 235.1,
    "nvidia--Qwen3-235B-A22B-NVFP4": 235.1, "Qwen--Qwen3-Coder-480B-A35B-Instruct": 480.2,
    "Qwen--Qwen3-VL-2B-Instruct": 1.72, "Qwen--Qwen3-VL-8B-Instruct": 8.19, "Qwen--Qwen3-VL-32B-Instruct": 32.8,
    "Qwen--Qwen3-VL-30B-A3B-Instruct": 30.5, "Qwen--Qwen3-VL-235B-A22B-Instruct": 235.1,
    "MiniMaxAI--MiniMax-M2.5": 228.7, "nvidia--MiniMax-M2.7-NVFP4": 228.7, "XiaomiMiMo--MiMo-V2-Flash": 309.0,
    "google--gemma-4-26B-A4B": 25.2, "nvidia--Gemma-4-26B-A4B-NVFP4": 25.2,
    "moonshotai--Kimi-K2.5": 1026.0,
    "mistralai--Mixtral-8x7B-v0.1": 46.7, "mistralai--Mixtral-8x22B-v0.1": 140.6,
    "openai--gpt-oss-120b": 116.83, "openai--gpt-oss-20b": 20.91,
    "deepseek-ai--DeepSeek-V3": 671.0, "deepseek-ai--DeepSeek-R1": 671.0, "nvidia--DeepSeek-V3.1-NVFP4": 671.0,
    "moonshotai--Kimi-K2-Instruct": 1026.0, "Qwen--Qwen3.5-397B-A17B": 397.0,
    "MiniMaxAI--MiniMax-M2.7": 228.7, "nvidia--MiniMax-M2.5-NVFP4": 228.7, "nvidia--Kimi-K2.5-NVFP4": 1026.0,
    "nvidia--Kimi-K2.6-NVFP4": 1026.0, "nvidia--Kimi-K2.7-Code-NVFP4": 1026.0, "Qwen--Qwen3-32B-FP8": 32.8,
    "Qwen--Qwen3-30B-A3B-FP8": 30.5, "Qwen--Qwen3-235B-A22B-FP8": 235.1, "Qwen--Qwen3-VL-32B-Thinking": 32.8,
    "Qwen--Qwen3-VL-4B-Instruct": 4.02, "Qwen--Qwen3.5-27B": 27.0, "nvidia--Qwen3.6-27B-NVFP4": 27.0,
    "Qwen--Qwen3.5-35B-A3B": 35.0, "nvidia--Qwen3.6-35B-A3B-NVFP4": 35.0, "Qwen--Qwen3.5-122B-A10B": 122.0,
    "nvidia--Qwen3.5-122B-A10B-NVFP4": 122.0, "nvidia--Qwen3.5-397B-A17B-NVFP4": 397.0,
    # without the layer that predicts a further token, of 0.21
    "XiaomiMiMo--MiMo-7B-Base": 7.62,
}  # fmt: skip


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
