"""`nemo-oprd families`: the table of families, printed without Megatron-Bridge, and the answers for directories."""

from __future__ import annotations

import json
from pathlib import Path
from unittest import mock

import pytest

from nemo_oprd.cli import main
from nemo_oprd.megatron.megatron_bridge.provider_fields import PLAIN, REFUSED
from nemo_oprd.models import FAMILIES
from nemo_oprd.models.megatron_bridge_families import KINDS, REFUSED_FAMILIES
from nemo_oprd.tools import families

GOLDEN = Path(__file__).parents[2] / "golden"


@pytest.mark.parametrize(
    ("found", "says"), [(None, "is not installed here (scripts/"), (object(), "is installed here")]
)
def test_the_table_is_printed(capsys: pytest.CaptureFixture[str], found: object, says: str) -> None:
    with mock.patch.object(families, "find_spec", return_value=found):
        main(["families"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:-1]] == [*sorted(FAMILIES), *KINDS, *REFUSED_FAMILIES]
    assert says in lines[-1]
    assert [line.split()[1] for line in lines[1:-1]].count("refused") == len(REFUSED_FAMILIES)


def test_accepted_parts_are_those_that_others_are_refused_for() -> None:
    known = {*REFUSED, *PLAIN, "another softmax"}
    for name, kind in KINDS.items():
        assert kind.parts <= known, name
    assert not set(KINDS) & set(REFUSED_FAMILIES)


def make(directory: Path, **changes: object) -> str:
    """A directory with the config.json of the golden student, changed, and no weights."""
    directory.mkdir()
    content = json.loads((GOLDEN / "student" / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**content, **changes}))
    return str(directory)


def test_answers_for_directories(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One row per directory, in their order; parameters are those that the model has."""
    from safetensors.torch import load_file

    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    directories = [
        str(GOLDEN / "student"),
        make(tmp_path / "quantised", quantization_config=fp8),
        make(tmp_path / "hybrid", model_type="nemotron_h"),
        make(tmp_path / "unknown", model_type="unheard_of", num_hidden_layers=None),
        make(tmp_path / "gemma", model_type="gemma"),
        str(tmp_path / "nowhere"),
    ]
    with mock.patch.object(families, "_bridge_is_installed", return_value=False):
        main(["families", *directories, "--json", str(tmp_path / "rows.json")])
    found = json.loads((tmp_path / "rows.json").read_text())
    keys = ["directory", "family", "route", "parameters", "weights", "layers", "kv_heads", "why"]
    assert [list(row) for row in found] == [keys] * 6 and [row["directory"] for row in found] == directories
    assert [row["route"] for row in found] == ["own", "own", "served", "refused", "bridge", "refused"]
    assert [row["family"] for row in found] == ["qwen3", "qwen3", "nemotron_h", "unheard_of", "gemma", None]
    stored = sum(tensor.numel() for tensor in load_file(GOLDEN / "student" / "model.safetensors").values())
    assert [row["parameters"] for row in found[:2]] == [stored] * 2
    assert [row["weights"] for row in found[:2]] == ["float32", "fp8 in blocks of 128 x 128"]
    assert [(row["layers"], row["kv_heads"]) for row in found[:2]] == [(3, 2)] * 2
    assert [row["why"] == "" for row in found] == [True, True, False, False, False, False]
    assert "layers of different kinds" in found[2]["why"] and "no such directory" in found[5]["why"]
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 7 and lines[1].split()[1:] == ["qwen3", "own", "36.5", "K", "float32", "3", "2"]


def test_a_file_without_a_directory_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["families", "--json", str(tmp_path / "rows.json")])
    assert ended.value.code == 2 and "without a directory; expected one" in capsys.readouterr().err
