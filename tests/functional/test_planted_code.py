"""Python files beside a model, which `auto_map` names, are never run, and a model that needs none is taken."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from nemo_oprd.models import parse_model_spec
from nemo_oprd.models.architecture import unused_code

GOLDEN = Path(__file__).parent.parent / "golden"
CODE = "from pathlib import Path\nPath({marker!r}).write_text('run')\nclass Model: ...\nclass Config: ...\n"
AUTO_MAP = {"AutoConfig": "modeling_mine.Config", "AutoModelForCausalLM": "someone/else--modeling_mine.Model"}


@pytest.fixture
def planted(tmp_path: Path) -> tuple[Path, Path]:
    """(A copy of the golden models whose code writes a file, that file)."""
    marker = tmp_path / "marker"
    for role in ("student", "teacher"):
        shutil.copytree(GOLDEN / role, tmp_path / role)
        (tmp_path / role / "modeling_mine.py").write_text(CODE.format(marker=str(marker)))
        file = tmp_path / role / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "auto_map": AUTO_MAP}))
    return tmp_path, marker


def test_it_is_never_run(planted: tuple[Path, Path]) -> None:
    """Not by `train`, its export, `plan`, or the plain computation of `verify`, which transformers loads."""
    root, marker = planted
    models = [f"{role}.hf_path={root / role}" for role in ("student", "teacher")]
    common = ["--config-name", "verify", *models, f"rollout.replay={GOLDEN / 'rollouts.jsonl'}"]
    said = {}
    for command, more in {
        "train": ["train.steps=1", f"output={root / 'run'}"],
        "verify": ["--against=reference", f"output={root / 'verified'}"],
        "plan": ["--ranks=1", "--gpu=h100"],
    }.items():
        words = [sys.executable, "-m", "nemo_oprd", command, *common, *more]
        done = subprocess.run(words, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-2000:]
        said[command] = done.stdout + done.stderr
    assert not marker.exists()
    for text in said.values():
        assert text.count("auto_map names modeling_mine.py, someone/else--modeling_mine.py, which is not run") == 2
    assert "largest gradient deviation" in said["verify"]
    exported = json.loads((root / "run" / "hf" / "config.json").read_text())
    assert "auto_map" not in exported and exported["model_type"] == "qwen3"


@pytest.mark.parametrize("model_type", ["qwen3", "llama"])
def test_the_line(model_type: str) -> None:
    config = {**json.loads((GOLDEN / "student" / "config.json").read_text()), "model_type": model_type}
    assert unused_code(config, "config.json") is None
    assert parse_model_spec({**config, "auto_map": AUTO_MAP}).num_layers == 3
    assert unused_code({**config, "auto_map": {}}, "config.json") is None


@pytest.mark.parametrize(
    ("model_type", "says"),
    [
        ("gemma", "is not one of this project's own families; expected provider=bridge: set student.provider=bridge"),
        ("nemotron_h", "is not supported, because of layers of different kinds; expected one of ['llama'"),
        ("mine", "is not supported; expected one of ['llama'"),
    ],
)
def test_a_family_of_others(model_type: str, says: str) -> None:
    """The message says which provider has the family, or that vLLM may teach it; code is no way out."""
    with pytest.raises(ValueError) as error:
        parse_model_spec({"model_type": model_type, "auto_map": AUTO_MAP}, "config.json")
    assert says in str(error.value) and "\n" not in str(error.value)
