"""The artifact: saved bridges load unchanged, bridges that do not fit are refused; the golden bridge losses."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bridge_data import LAMBDAS, RHO2, STUDENT, TEACHER, collected, gaussian_pair, maps
from messages import messages
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from nemo_oprd.batch.token_table import make_rows
from nemo_oprd.bridge.artifact import describe_tensors, load_bridge, open_bridge, save_bridge, write_manifest
from nemo_oprd.bridge.build import build_bridge
from nemo_oprd.bridge.covariance import LayerPair, PairStatistics
from nemo_oprd.bridge.fit import fit_ridge
from nemo_oprd.bridge.maps import Bridge, CapturePoint, LayerBridge, ModelIdentity, draw_projector, full_width_bridge
from nemo_oprd.losses.layer_mapping import layer_map
from nemo_oprd.losses.registry import resolve_row_loss
from nemo_oprd.rollout.replay import read_rollouts
from nemo_oprd.runtime.exits import run_as_command

GOLDEN = Path(__file__).parents[2] / "golden"


def example() -> Bridge:
    pairs = {LayerPair(1, 1): maps(0), LayerPair(2, 3): maps(1, bias=False)}
    return Bridge(2, pairs, STUDENT, TEACHER, CapturePoint(), {"penalty": [1e-3, 1e-2]})


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save_bridge(example(), tmp_path / "bridge")
    return tmp_path / "bridge"


def test_round_trip(saved: Path) -> None:
    bridge = load_bridge(saved, student=STUDENT, teacher=TEACHER, capture=CapturePoint("token", True))
    assert (bridge.rank, bridge.layers, bridge.report) == (2, {1: 1, 2: 3}, example().report)
    assert set(bridge.tensors()) == set(load_file(saved / "bridge.safetensors"))
    for name, value in example().tensors().items():
        assert torch.equal(bridge.tensors()[name], value), name
    assert sorted(file.name for file in saved.iterdir()) == ["bridge.json", "bridge.safetensors"]
    save_bridge(dataclasses.replace(example(), report={}), saved)
    assert load_bridge(saved).report == {}


def full_width() -> Bridge:
    pairs = {LayerPair(layer, layer): LayerBridge(student_projector=torch.randn(6, 4)) for layer in (1, 2)}
    return Bridge(6, pairs, STUDENT, TEACHER)


def test_full_width(tmp_path: Path) -> None:
    """The student's maps alone, with more dimensions than the student has; the teacher's states are not projected."""
    made = full_width()
    save_bridge(made, tmp_path)
    assert set(load_file(tmp_path / "bridge.safetensors")) == {f"s{n}.t{n}.student_projector" for n in (1, 2)}
    bridge = load_bridge(tmp_path, student=STUDENT, teacher=TEACHER)
    assert bridge.full_width and bridge.rank == 6
    teacher_NDt, student_NDs = torch.randn(5, 6), torch.randn(5, 4)
    assert torch.equal(bridge.project_teacher(1, teacher_NDt), teacher_NDt)
    expected = student_NDs.numpy() @ made.tensors()["s2.t2.student_projector"].numpy().T
    torch.testing.assert_close(bridge.project_student(2, student_NDs), torch.from_numpy(expected))
    with pytest.raises(ValueError, match="full-width maps of rank 4, expected the teacher's width 6"):
        save_bridge(dataclasses.replace(made, rank=4), tmp_path)
    mixed = {**made.pairs, LayerPair(1, 1): dataclasses.replace(maps(0), student_projector=torch.randn(6, 4))}
    with pytest.raises(ValueError, match="expected 1..4, the smaller of the two widths"):
        save_bridge(dataclasses.replace(made, pairs=mixed), tmp_path)
    start_over = full_width_bridge({1: 1, 2: 2}, STUDENT, TEACHER, CapturePoint())
    with pytest.raises(ValueError, match="s1.t1.student_projector is missing"):
        save_bridge(start_over, tmp_path)


def test_where_a_full_width_map_starts() -> None:
    one = draw_projector(0, 1, 300, 200)
    assert torch.equal(one, draw_projector(0, 1, 300, 200)) and one.dtype == torch.float32
    assert float(one.std()) == pytest.approx(200**-0.5, rel=0.02)
    for other in (draw_projector(0, 2, 300, 200), draw_projector(1, 1, 300, 200)):
        assert abs(float((one * other).sum() / one.norm() / other.norm())) < 0.02


def test_projections(saved: Path) -> None:
    bridge = load_bridge(saved)
    at = bridge.pairs[LayerPair(1, 1)]
    teacher_NDt, student_NDs = torch.randn(5, 6), torch.randn(5, 4, requires_grad=True)
    projected = bridge.project_student(1, student_NDs)
    torch.testing.assert_close(
        bridge.project_teacher(1, teacher_NDt), (teacher_NDt - at.teacher_mean) @ at.teacher_basis.T
    )
    torch.testing.assert_close(projected, student_NDs @ at.student_projector.T + at.student_bias)
    projected.sum().backward()
    assert student_NDs.grad is not None and not any(value.requires_grad for value in bridge.tensors().values())
    assert bridge.project_student(2, student_NDs.bfloat16()).dtype == torch.float32
    assert bridge.project_teacher(2, teacher_NDt.double()).dtype == torch.float64
    assert bridge.to("meta").project_teacher(1, teacher_NDt.to("meta")).shape == (5, 2)


EXPECTATIONS: dict[str, tuple[dict[str, Any], str]] = {
    "width": ({"teacher": dataclasses.replace(TEACHER, hidden_size=8)}, "teacher with hidden_size=6 .* hidden_size=8"),
    "depth": ({"student": dataclasses.replace(STUDENT, num_layers=4)}, "student with num_layers=2 .* num_layers=4"),
    "family": ({"student": dataclasses.replace(STUDENT, model_type="llama")}, "model_type=qwen3 .* model_type=llama"),
    "tokenizer": ({"teacher": dataclasses.replace(TEACHER, tokenizer="cc")}, "tokenizer=bb .* tokenizer=cc"),
    "weights": ({"teacher": dataclasses.replace(TEACHER, weights="v")}, "weights=w .large.* weights=v"),
    "position": ({"capture": CapturePoint("predicting")}, "position=token, .*position=predicting"),
    "final norm": ({"capture": CapturePoint(final_norm=False)}, "final_norm=True, .*final_norm=False"),
}


@pytest.mark.parametrize("case", EXPECTATIONS)
def test_bridge_of_something_else_is_refused(saved: Path, case: str) -> None:
    expected, message = EXPECTATIONS[case]
    with pytest.raises(ValueError, match=message) as caught:
        load_bridge(saved, **expected)
    assert str(saved) in str(caught.value)


def test_layers_of_a_run(saved: Path) -> None:
    models = {"student": STUDENT, "teacher": TEACHER, "capture": CapturePoint()}
    assert open_bridge(saved, layers=[2], **models).layers == {1: 1, 2: 3}
    with pytest.raises(ValueError, match=r"no maps for student layer 3, the bridge has student layers \[1, 2\]"):
        open_bridge(saved, layers=[1, 3], **models)


def test_unknown_identity_is_not_compared(saved: Path) -> None:
    """Names are not compared, nor are properties that the run does not know."""
    load_bridge(saved, student=ModelIdentity("qwen3", 2, 4, name="elsewhere"), teacher=ModelIdentity("qwen3", 3, 6))


def change(directory: Path, edit: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    """Edits the tensors and gives the manifest their new hash."""
    tensors = load_file(directory / "bridge.safetensors")
    edit(tensors)
    save_file(tensors, directory / "bridge.safetensors")
    write_manifest(example(), directory)


DAMAGE: dict[str, tuple[Callable[[dict[str, torch.Tensor]], Any], str]] = {
    "nan": (
        lambda t: t["s2.t3.teacher_basis"][1, 2:4].fill_(float("nan")),
        r"s2.t3.teacher_basis \(student layer 2, teacher layer 3\) has 2 values",
    ),
    "missing": (lambda t: t.pop("s1.t1.teacher_mean"), "s1.t1.teacher_mean is missing"),
    "extra": (
        lambda t: t.update({"s2.t2.teacher_mean": torch.zeros(6)}),
        "s2.t2.teacher_mean.*none of the layer pairs",
    ),
    "shape": (lambda t: t.update({"s2.t3.student_projector": torch.zeros(3, 4)}), r"is \[3, 4\], expected \[2, 4\]"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damaged_tensors_are_refused(saved: Path, case: str) -> None:
    edit, message = DAMAGE[case]
    change(saved, edit)
    with pytest.raises(ValueError, match=message):
        load_bridge(saved)


def test_damaged_files_are_refused(saved: Path, tmp_path: Path) -> None:
    manifest = saved / "bridge.json"
    text = manifest.read_text()
    for broken, message in (
        ("{", "not valid JSON"),
        (json.dumps({"rank": 2}), r"\['format', 'layer_pairs'"),
        (text.replace('"format": 1', '"format": 9'), "format 9, this version reads 1"),
        (text.replace('"position"', '"place"'), "place"),
        (text.replace('"rank": 2', '"rank": 5'), "rank 5, expected 1..4"),
        (text.replace('"sha256": "', '"sha256": "0'), "different fits"),
    ):
        manifest.write_text(broken)
        with pytest.raises(ValueError, match=message):
            load_bridge(saved)
    manifest.unlink()
    with pytest.raises(ValueError, match=r"bridge.json: no such file"):
        load_bridge(saved)
    (saved / "bridge.safetensors").write_bytes(b"not tensors")
    with pytest.raises(ValueError, match="not a readable safetensors file"):
        load_bridge(saved)
    with pytest.raises(ValueError, match=r"no such file; expected a bridge made by nemo-oprd fit-bridge"):
        load_bridge(tmp_path / "nowhere")


def test_saving_checks_too(tmp_path: Path) -> None:
    bridge = example()
    bridge.pairs[LayerPair(1, 1)].student_projector[0, 0] = float("inf")
    with pytest.raises(ValueError, match=r"this bridge: s1.t1.student_projector .* 1 values"):
        save_bridge(bridge, tmp_path)
    outside = dataclasses.replace(example(), pairs={LayerPair(1, 4): maps(0)})
    with pytest.raises(ValueError, match="layer pair s1.t4 is outside models of 2 and 3 layers"):
        save_bridge(outside, tmp_path)
    assert not list(tmp_path.iterdir())


MODELS = ModelIdentity("qwen3", 2, 16), ModelIdentity("llama", 2, 12)


def built(stats: list[PairStatistics], **changes: Any) -> Bridge:
    settings = {"rank": "auto", "fit": "ridge", "center_student": True, "baselines": True, "seed": 0}
    gather = {"gather": lambda value: [value]}
    return build_bridge(stats, *MODELS, CapturePoint(), **{**settings, **gather, **changes})


@pytest.mark.parametrize("fit", ["ridge", "adamw"])
def test_statistics_become_an_artifact(tmp_path: Path, fit: Any) -> None:
    stats = collected(*gaussian_pair(LAMBDAS, RHO2, 16, 20000, mean=2.0))
    with messages() as lines:
        made = built([stats], fit=fit)
    save_bridge(made, tmp_path)
    bridge = load_bridge(tmp_path, student=MODELS[0], teacher=MODELS[1])
    assert (bridge.rank, bridge.layers) == (6, {1: 2})
    assert bridge.report == made.report  # JSON keeps it as it is
    teacher_NDt, student_NDs = stats.reservoir.rows()
    whole = fit_ridge(stats, center_student=True).projection.head(6)
    projected_NR = bridge.project_student(1, student_NDs)
    torch.testing.assert_close(
        bridge.project_teacher(1, teacher_NDt), whole.teacher(teacher_NDt).float(), rtol=0, atol=1e-4
    )
    if fit == "ridge":
        torch.testing.assert_close(projected_NR, whole.student(student_NDs).float(), rtol=0, atol=1e-4)
    assert len(lines) == (1 if fit == "ridge" else 21) and lines[-1].startswith("s1.t2: rank 6, held-out cosine 0.")
    report = bridge.report["layers"]["s1.t2"]
    assert (report["optimal_rank"], report["crossing_rank"]) == (6, 6)
    assert len(report["held_out_rho2"]) == 6 and 0.9 < report["explained_variance"] < 1
    assert report["curves"]["bridge"]["cosine"]["4"] > 0.9 > 0.3 > report["curves"]["constant"]["cosine"]["4"]
    with pytest.raises(ValueError, match="bridge.rank=13: layer pair s1.t2 allows 1..12"):
        built([stats], rank=13)


def test_every_rank_says_what_it_has_fitted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The pairs are divided among the ranks; those of other ranks than the first are shown like its own."""
    stats = collected(*gaussian_pair(LAMBDAS, RHO2, 16, 2000))

    def fit() -> int:
        built([stats], rank=2)
        return 0

    monkeypatch.setenv("RANK", "1")
    run_as_command(fit, alone=False)
    assert re.fullmatch(r"s1\.t2: rank 2, held-out cosine 0\.\d{4}\n", capsys.readouterr().out)


def test_baselines_only_where_asked_for() -> None:
    stats = collected(*gaussian_pair(LAMBDAS, RHO2, 16, 2000))
    with_baselines, without = (built([stats], baselines=asked).report["layers"]["s1.t2"] for asked in (True, False))
    assert set(with_baselines["curves"]) == {
        "bridge", "before", "random_basis", "reduced_rank", "student_pca", "constant",
    }  # fmt: skip
    assert without == {**with_baselines, "curves": {"bridge": with_baselines["curves"]["bridge"]}}


@pytest.mark.parametrize("division", [([0], [1]), ([1], [0]), ([], [0, 1])])
def test_pairs_divided_among_processes(division: tuple[list[int], ...]) -> None:
    """Every process returns the bridge of one process that fits all pairs; threads stand in for processes."""
    stats = [
        collected(*gaussian_pair(LAMBDAS, rho2, 16, 2000), pair=LayerPair(layer, layer))
        for layer, rho2 in ((1, RHO2), (2, np.roll(RHO2, 1)))
    ]
    whole = built(stats)
    assert whole.layers == {1: 1, 2: 2}
    barrier, values = threading.Barrier(2), [None, None]

    def fit(process: int) -> Bridge:
        def gather(value: Any) -> list[Any]:
            values[process] = value
            barrier.wait(60)
            gathered = list(values)
            barrier.wait(60)
            return gathered

        return built([stats[index] for index in division[process]], gather=gather)

    with ThreadPoolExecutor(2) as pool:
        bridges = list(pool.map(fit, range(2)))
    for bridge in bridges:
        assert (bridge.rank, bridge.layers, bridge.report) == (whole.rank, whole.layers, whole.report)
        for name, value in whole.tensors().items():
            assert torch.equal(bridge.tensors()[name], value), name


# --- golden: the losses of a program that knows nothing of this project, from its tensors through our projections


def identity(name: str) -> ModelIdentity:
    config = json.loads((GOLDEN / name / "config.json").read_text())
    return ModelIdentity(
        config["model_type"], config["num_hidden_layers"], config["hidden_size"], config["vocab_size"], name=name
    )


@pytest.fixture(scope="module")
def golden_states() -> tuple[Any, dict[str, dict[int, torch.Tensor]]]:
    """Supervised rows, and role -> layer -> [N, D] float64 hidden states at them."""
    rollouts = read_rollouts(GOLDEN / "rollouts.jsonl", 61)
    table = make_rows(rollouts, positions="last_k", k=4, position="token", aggregation="sequence_mean")
    states: dict[str, dict[int, torch.Tensor]] = {}
    for role in ("student", "wide_teacher"):
        model = AutoModelForCausalLM.from_pretrained(GOLDEN / role, dtype=torch.float64).eval()
        rows: dict[int, list[torch.Tensor]] = {}
        for i, rollout in enumerate(rollouts):
            with torch.no_grad():
                ids = torch.tensor([rollout.ids.tolist()])
                hidden = model(ids, output_hidden_states=True).hidden_states
            for layer in range(1, len(hidden)):
                rows.setdefault(layer, []).append(hidden[layer][0, table.position[table.response == i]])
        states[role] = {layer: torch.cat(parts) for layer, parts in rows.items()}
    return table, states


@pytest.mark.parametrize("case", ["bridge_mse", "bridge_normalized_sum"])
def test_golden_bridge_losses(golden_states: tuple[Any, Any], case: str, tmp_path: Path) -> None:
    expected = json.loads((GOLDEN / "expected.json").read_text())[case]
    student, teacher = identity("student"), identity("wide_teacher")
    shutil.copyfile(GOLDEN / "bridge.safetensors", tmp_path / "bridge.safetensors")
    write_manifest(describe_tensors(tmp_path, student, teacher, CapturePoint()), tmp_path)
    layers = layer_map([1, 2, 3], student.num_layers, teacher.num_layers)
    bridge = load_bridge(tmp_path, student=student, teacher=teacher, capture=CapturePoint())
    assert (bridge.layers, bridge.rank) == (layers, 3)
    table, states = golden_states
    options = {"kind": "mse", "dim_reduction": "mean", **expected["options"]}
    losses = {}
    for layer, teacher_layer in layers.items():
        ours = bridge.project_student(layer, states["student"][layer])
        theirs = bridge.project_teacher(layer, states["wide_teacher"][teacher_layer])
        row_N = resolve_row_loss(options["kind"], {})(ours, theirs, options["dim_reduction"])
        losses[str(layer)] = float((row_N * torch.from_numpy(table.weight)).sum())
    assert losses == pytest.approx(expected["rep/loss_per_layer"], rel=1e-9)
    assert sum(losses.values()) / 3 == pytest.approx(expected["rep/loss"], rel=1e-9)
