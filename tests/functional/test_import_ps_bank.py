"""`checkpoint_tools/import_ps_bank.py`: a file in the format of the paper's code becomes a bridge for `verify`."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from layout_cases import read_result
from pool import Pools
from safetensors.torch import load_file

from nemo_oprd.config.loading import load_config
from nemo_oprd.distillation.reference import agreement, reference
from nemo_oprd.rollout.replay import read_rollouts

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden"
MODELS = {"student": GOLDEN / "student", "teacher": GOLDEN / "wide_teacher"}
PAIRS = [(1, 1), (2, 3), (3, 5)]  # those of the golden bridge, layers from 1


def write_bank(file: Path, **changes: object) -> dict[str, torch.Tensor]:
    """The golden bridge without its biases as a ps_bank.pt, layers from 0; returns the bridge's tensors."""
    tensors = load_file(GOLDEN / "bridge.safetensors")
    tensors = {name: value for name, value in tensors.items() if not name.endswith("student_bias")}
    bank = {
        "rank": 3,
        "layer_pairs": [{"student_layer": s - 1, "teacher_layer": t - 1} for s, t in PAIRS],
        "state_dict": {
            f"projectors.s{s - 1}_t{t - 1}.weight": tensors[f"s{s}.t{t}.student_projector"] for s, t in PAIRS
        },
        "frozen_pt_weights": {f"s{s - 1}_t{t - 1}": tensors[f"s{s}.t{t}.teacher_basis"] for s, t in PAIRS},
        "frozen_pt_means": {f"s{s - 1}_t{t - 1}": tensors[f"s{s}.t{t}.teacher_mean"] for s, t in PAIRS},
        **changes,
    }
    torch.save(bank, file)
    return tensors


Command = Callable[[Path, Path], tuple[int, str, str]]


@pytest.fixture
def import_bank(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """`import_bank(file, output)` runs the command in this process; its exit code, stdout and stderr."""
    monkeypatch.syspath_prepend(ROOT / "checkpoint_tools")
    models = [argument for role, path in MODELS.items() for argument in (f"--{role}", str(path))]

    def run(file: Path, output: Path) -> tuple[int, str, str]:
        arguments = ["--ps-bank", str(file), *models, "--output", str(output)]
        monkeypatch.setattr(sys, "argv", ["import_ps_bank", *arguments])
        code = 0
        try:
            importlib.import_module("import_ps_bank").main()
        except SystemExit as stop:
            code = int(stop.code or 0)
        return code, *capsys.readouterr()

    return run


def test_an_imported_bridge_is_used(pools: Pools, tmp_path: Path, import_bank: Command) -> None:
    expected_tensors, bridge = write_bank(tmp_path / "ps_bank.pt"), tmp_path / "bridge"
    result = import_bank(tmp_path / "ps_bank.pt", bridge)
    assert result == (0, f"{bridge}: rank 3, layer pairs s1.t1 s2.t3 s3.t5\n", "")
    tensors = load_file(bridge / "bridge.safetensors")
    assert set(tensors) == set(expected_tensors)
    assert all(torch.equal(tensors[name], value) for name, value in expected_tensors.items())
    manifest = json.loads((bridge / "bridge.json").read_text())
    assert (manifest["rank"], manifest["layer_pairs"]) == (3, [list(pair) for pair in PAIRS])
    assert manifest["capture"] == {"position": "token", "final_norm": True}

    layout = ["student.parallel.pipeline=2", "teacher.parallel.tensor=2"]
    settings = [*(f"{role}.hf_path={path}" for role, path in MODELS.items()), f"bridge.path={bridge}", *layout]
    overrides = [*settings, f"rollout.replay={GOLDEN / 'rollouts.jsonl'}", f"output={tmp_path / 'out'}"]
    pools[2].run("cases:run_verify", overrides=overrides)
    losses, gradients = read_result(tmp_path / "out")
    expected = reference(load_config("verify", overrides), read_rollouts(GOLDEN / "rollouts.jsonl", 61))
    assert losses["rep/loss"] == pytest.approx(expected["rep/loss"], rel=1e-5)
    assert max(agreement(gradients, expected["gradients"]).values()) < 1e-5


class Surprise:
    """An object whose unpickling would run code."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.file,)


def test_mistakes_are_one_line(tmp_path: Path, import_bank: Command) -> None:
    output, proof = tmp_path / "bridge", tmp_path / "code_ran"
    write_bank(tmp_path / "code.pt", args=Surprise(proof))
    code, _, message = import_bank(tmp_path / "code.pt", output)
    assert code == 2 and not proof.exists() and not output.exists()
    assert message.startswith(f"error: {tmp_path / 'code.pt'}: not readable as tensors and plain values")
    output.mkdir()
    (output / "notes.txt").write_text("mine")
    write_bank(tmp_path / "ps_bank.pt")
    code, _, message = import_bank(tmp_path / "ps_bank.pt", output)
    assert code == 2 and [file.name for file in output.iterdir()] == ["notes.txt"]
    assert message == f"error: {output} exists and is not an empty directory; choose another output or remove it\n"
