"""The file of the paper's own code: it is read if it fits, refused if not, and no code from it is run."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from bridge_data import STUDENT, TEACHER, maps

from checkpoint_tools._ps_bank import import_ps_bank
from nemo_oprd.bridge.artifact import load_bridge, save_bridge
from nemo_oprd.bridge.covariance import LayerPair
from nemo_oprd.bridge.maps import CapturePoint


def bank(**changes: Any) -> dict[str, Any]:
    """Two 0-based layer pairs of rank 2 for STUDENT and TEACHER."""
    pairs = [(0, 0), (1, 2)]
    one = {pair: maps(k, bias=False) for k, pair in enumerate(pairs)}
    return {
        "rank": 2,
        "layer_pairs": [{"student_layer": s, "teacher_layer": t} for s, t in pairs],
        "state_dict": {f"projectors.s{s}_t{t}.weight": one[s, t].student_projector for s, t in pairs},
        "frozen_pt_weights": {f"s{s}_t{t}": one[s, t].teacher_basis for s, t in pairs},
        "frozen_pt_means": {f"s{s}_t{t}": one[s, t].teacher_mean for s, t in pairs},
        **changes,
    }


@pytest.mark.parametrize("plain_pairs", [False, True])
def test_ps_bank(tmp_path: Path, plain_pairs: bool) -> None:
    changes = (
        {"layer_pairs": [(0, 0), (1, 2)]} if plain_pairs else {"subspace_mode": "full", "projector_type": "linear"}
    )
    torch.save(bank(**changes), tmp_path / "ps_bank.pt")
    bridge = import_ps_bank(tmp_path / "ps_bank.pt", STUDENT, TEACHER)
    assert bridge.layers == {1: 1, 2: 3} and bridge.capture == CapturePoint("token", True)
    assert torch.equal(bridge.pairs[LayerPair(2, 3)].student_projector, maps(1).student_projector)
    save_bridge(bridge, tmp_path / "bridge")
    saved = load_bridge(tmp_path / "bridge", student=STUDENT, teacher=TEACHER)
    assert (saved.rank, saved.layers) == (2, {1: 1, 2: 3})


class Surprise:
    """An object whose unpickling would run code."""

    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("code ran",)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "mlp": ({"projector_type": "mlp"}, "projector_type='mlp', expected 'linear'"),
    "trained teacher side": ({"subspace_mode": "direct"}, "subspace_mode='direct', expected 'full'"),
    "rank": ({"rank": 4}, r"student_projector is \[2, 4\].*expected|is \[2, 6\], expected \[4, 6\]"),
    "rank type": ({"rank": "two"}, "rank is 'two', expected an integer"),
    "missing layer": ({"frozen_pt_means": {}}, r"frozen_pt_means\['s0_t0'\] is NoneType, expected a tensor"),
    "unused": ({"layer_pairs": [(0, 0)]}, r"projectors.s1_t2.weight.*no layer pair uses"),
    "pair": ({"layer_pairs": [(0, 0, 0)]}, r"layer pair \(0, 0, 0\), expected two"),
    "no pairs": ({"layer_pairs": [0, 2]}, "layer pair 0, expected two"),
    "number of pairs": ({"layer_pairs": 3}, "layer_pairs is int, expected a list of layer pairs"),
    "list of weights": ({"state_dict": []}, "state_dict is list, expected a dictionary of tensors"),
    "list of bases": ({"frozen_pt_weights": []}, "frozen_pt_weights is list, expected a dictionary of tensors"),
    "code": ({"args": Surprise()}, "no code from it is run"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_ps_bank_that_does_not_fit_is_refused(tmp_path: Path, case: str, capsys: pytest.CaptureFixture[str]) -> None:
    changes, message = REFUSED[case]
    torch.save(bank(**changes), tmp_path / "ps_bank.pt")
    with pytest.raises(ValueError, match=message) as error:
        import_ps_bank(tmp_path / "ps_bank.pt", STUDENT, TEACHER)
    assert "\n" not in str(error.value)
    assert "code ran" not in capsys.readouterr().out


def test_ps_bank_of_other_models_or_no_file_is_refused(tmp_path: Path) -> None:
    torch.save({"rank": 2}, tmp_path / "ps_bank.pt")
    with pytest.raises(ValueError, match=r"\['layer_pairs', 'state_dict', 'frozen_pt_weights', 'frozen_pt_means'\]"):
        import_ps_bank(tmp_path / "ps_bank.pt", STUDENT, TEACHER)
    torch.save(bank(), tmp_path / "ps_bank.pt")
    with pytest.raises(ValueError, match=r"teacher_mean is \[6\], expected \[8\]"):
        import_ps_bank(tmp_path / "ps_bank.pt", STUDENT, dataclasses.replace(TEACHER, hidden_size=8))
    with pytest.raises(ValueError, match="outside models of 1 and 3 layers"):
        import_ps_bank(tmp_path / "ps_bank.pt", dataclasses.replace(STUDENT, num_layers=1), TEACHER)
    with pytest.raises(ValueError, match="no such file"):
        import_ps_bank(tmp_path / "elsewhere.pt", STUDENT, TEACHER)
