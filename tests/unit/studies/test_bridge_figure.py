"""The figure of a bridge's report, with baselines and without."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from studies import bridge_figure

NAMES = ["bridge", "before", "random_basis", "reduced_rank", "student_pca", "constant"]


def write_report(bridge: Path, names: list[str]) -> None:
    curve = {"1": 0.5, "2": 0.6, "4": 0.7}
    layer = {
        "curves": {name: {"cosine": curve, "predicted": curve} for name in names},
        "error_curve": {"0": 1.0, **curve},
        "optimal_rank": 2,
    }
    bridge.mkdir()
    (bridge / "bridge.json").write_text(json.dumps({"report": {"layers": {"s1.t1": layer, "s2.t3": layer}}}))


@pytest.mark.parametrize("names", [NAMES, NAMES[:1]])
def test_figure(
    tmp_path: Path, names: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bridge, file = tmp_path / "bridge", tmp_path / "bridge.svg"
    write_report(bridge, names)
    monkeypatch.setattr(sys, "argv", ["bridge_figure", str(bridge), "--output", str(file)])
    bridge_figure.main()
    drawn = file.read_text()
    for name in NAMES:
        assert (f"<!-- {name.replace('_', ' ')} -->" in drawn) == (name in names), name
    assert ("fit again with bridge.baselines=true" in capsys.readouterr().out) == (names == ["bridge"])


def test_a_bridge_without_a_report_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bridge.json").write_text(json.dumps({"report": {"imported_from": "ps_bank.pt"}}))
    with pytest.raises(ValueError, match="has no report; expected a bridge that `nemo-oprd fit-bridge` made"):
        bridge_figure.layers_of(tmp_path)
