"""A student with rounded weights: rounding against plain Python, what is kept; and GGUF files that can't be read."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoint_tools._gguf import gguf_to_hf
from checkpoint_tools._rounding import round_layers, round_matrix
from nemo_oprd.megatron.weights.hf import HFCheckpoint
from nemo_oprd.megatron.weights.megatron_checkpoint import check_source

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("bits", [1, 2, 3])
def test_every_weight_is_moved_to_the_nearest_value_of_its_group(bits: int) -> None:
    torch.manual_seed(0)
    weight = torch.randn(3, 12)
    rounded = round_matrix(weight, bits, 4)
    for row in range(3):
        for first in range(0, 12, 4):
            group = weight[row, first : first + 4].tolist()
            low, high = min(group), max(group)
            values = [low + (high - low) * level / (2**bits - 1) for level in range(2**bits)]
            nearest = [min(values, key=lambda value, w=w: abs(value - w)) for w in group]
            assert rounded[row, first : first + 4].tolist() == pytest.approx(nearest, rel=1e-6)
    assert not torch.equal(rounded, weight)


def test_equal_weights_stay_and_dtypes_are_kept() -> None:
    weight = torch.full((1, 4), 0.3, dtype=torch.bfloat16)
    assert torch.equal(round_matrix(weight, 2, 4), weight)


@pytest.mark.parametrize(("bits", "group"), [(0, 4), (2, 5), (2, 0)])
def test_impossible_groups(bits: int, group: int) -> None:
    with pytest.raises(ValueError, match="groups that divide a row"):
        round_matrix(torch.zeros(2, 12), bits, group)


def test_the_command_rounds_the_matrices_of_layers_only(tmp_path: Path) -> None:
    source = ROOT / "tests" / "golden" / "student"
    words = [sys.executable, "checkpoint_tools/round_weights.py", "--hf-path", str(source), "--output"]
    done = subprocess.run([*words, str(tmp_path / "s"), "--bits", "2", "--group", "8"], cwd=ROOT, check=False)
    assert done.returncode == 0
    before, after = HFCheckpoint(source), HFCheckpoint(tmp_path / "s")
    names = set(before.keys())
    assert names == set(after.keys())
    for name in names:
        rounded = name.startswith("model.layers.") and before[name].dim() == 2
        assert torch.equal(before[name], after[name]) != rounded, name
    assert json.loads((tmp_path / "s" / "config.json").read_text())["model_type"]


def test_what_the_project_leaves_out_of_a_model_is_left_out(tmp_path: Path) -> None:
    """The golden student as the language model of a Qwen3-VL, with a tensor of its tower."""
    golden, source = ROOT / "tests" / "golden" / "student", tmp_path / "tower"
    source.mkdir()
    config = json.loads((golden / "config.json").read_text())
    whole = {"model_type": "qwen3_vl", "architectures": ["Qwen3VLForConditionalGeneration"], "text_config": config}
    config["model_type"] = "qwen3_vl_text"
    (source / "config.json").write_text(json.dumps(whole))
    tensors = load_file(golden / "model.safetensors")
    save_file({**tensors, "model.visual.merger.weight": torch.ones(4, 8)}, source / "model.safetensors")
    spec = round_layers(source, tmp_path / "s", 2, 8)
    written = HFCheckpoint(tmp_path / "s")
    assert set(written.keys()) == set(tensors)
    check_source(written, spec)


def test_the_models_own_directory_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source, script = str(ROOT / "tests" / "golden" / "student"), ROOT / "checkpoint_tools" / "round_weights.py"
    monkeypatch.syspath_prepend(str(script.parent))
    monkeypatch.setattr(sys, "argv", [str(script), "--hf-path", source, "--output", source, "--bits", "2"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(script), run_name="__main__")
    assert ended.value.code == 2 and "is the model itself" in capsys.readouterr().err


def test_files_that_are_no_gguf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="no such file"):
        gguf_to_hf(tmp_path / "a.gguf", tmp_path / "m")
    (tmp_path / "a.gguf").write_bytes(b"PK..")
    with pytest.raises(ValueError, match="not a GGUF file"):
        gguf_to_hf(tmp_path / "a.gguf", tmp_path / "m")
    (tmp_path / "a.gguf").write_bytes(b"GGUF....")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"of which gguf, accelerate can't be found; install the extra: .*smollm"):
        gguf_to_hf(tmp_path / "a.gguf", tmp_path / "m")
    assert not (tmp_path / "m").exists()
