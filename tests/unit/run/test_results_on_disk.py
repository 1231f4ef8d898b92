"""What `fit-bridge` and `verify` leave in their output, so that no later result is mixed with an earlier one."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from nemo_oprd.config.loading import load_config
from nemo_oprd.run import fit_bridge, verify
from nemo_oprd.run.fit_bridge import SampledRollouts
from nemo_oprd.runtime.output_directories import mark

MODELS = ["student.hf_path=a", "teacher.hf_path=b"]


def claim(output: Path, monkeypatch: pytest.MonkeyPatch, *settings: str) -> list[Any]:
    """Claims the directory of rollouts as a fit on one rank does; returns the recorded sampling settings."""
    monkeypatch.setattr(fit_bridge.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(fit_bridge, "first_ranks", lambda value: value)
    source = SampledRollouts.__new__(SampledRollouts)
    source.config = load_config("verify", [*MODELS, f"output={output}", *settings])
    source.student = SimpleNamespace(directory=Path("a"))  # type: ignore[assignment]
    source._claim_directory()
    return json.loads((output / "rollouts" / "about.json").read_text())["sampling"]


def test_kept_responses_have_the_limit_that_was_sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of `rollout.stop_after=supervised` that is loss.representation.k, else rollout.max_new_tokens, as before."""
    plain = ["rollout.max_new_tokens=64", "loss.representation.positions=first_k", "loss.representation.k=8"]
    temperature, _, limit = claim(tmp_path / "plain", monkeypatch, *plain)
    assert (temperature, limit) == (1.0, 64)
    stops = [*plain, "rollout.stop_after=supervised"]
    assert claim(tmp_path / "stops", monkeypatch, *stops)[2] == 8
    assert claim(tmp_path / "stops", monkeypatch, *stops)[2] == 8
    with pytest.raises(ValueError, match="holds rollouts that were sampled with .*; remove that directory, or choose"):
        claim(tmp_path / "stops", monkeypatch, *stops, "loss.representation.k=16")


def test_an_interrupted_verify_leaves_no_losses_of_other_gradients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write that fails leaves the earlier gradients whole, without the losses, which are written last."""
    student: Any = SimpleNamespace(chunks=(), role=None, objective=None)
    student.hf_gradients = lambda: [("w", torch.ones(2))]
    distiller: Any = SimpleNamespace(student=student, batch=lambda *_: None, objective_of=lambda *_, **__: None)
    result: Any = SimpleNamespace(metrics=SimpleNamespace(nonfinite_reason=None))
    monkeypatch.setattr(verify, "bridge_gradients", lambda *_: [])
    monkeypatch.setattr(verify.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(verify, "loss_report", lambda *_: {"loss/total": 1.0})
    config = load_config("verify", [*MODELS, f"output={tmp_path}"])

    def run() -> None:
        verify._verify(config, distiller, [], lambda *_, **__: result, against_reference=False)

    mark(tmp_path, "verify")
    run()
    first = (tmp_path / "grads.safetensors").read_bytes()
    assert load_file(tmp_path / "grads.safetensors")["w"].tolist() == [1, 1]
    assert json.loads((tmp_path / "losses.json").read_text()) == {"loss/total": 1.0}

    def fails(tensors: dict[str, torch.Tensor], file: Path) -> None:
        file.write_bytes(b"part")
        raise OSError(28, "No space left on device", str(file))

    monkeypatch.setattr(verify, "save_file", fails)
    with pytest.raises(OSError, match="No space left"):
        run()
    assert (tmp_path / "grads.safetensors").read_bytes() == first
    assert sorted(file.name for file in tmp_path.iterdir()) == [".made_by", "grads.safetensors"]
