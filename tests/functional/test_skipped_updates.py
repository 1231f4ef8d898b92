"""Numbers that go wrong: updates that are skipped, runs that stop of it, spikes whose rollouts are kept."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from golden_runs import BASE
from pool import Pools, WorkerError

from nemo_oprd.rollout.replay import read_rollouts
from nemo_oprd.tools.report.page import write_report

LAYOUTS = {
    "TP2": (2, ["student.parallel.tensor=2"]),
    "PP2": (2, ["student.parallel.pipeline=2"]),
    "dedicated teacher": (2, ["teacher.placement=dedicated", "teacher.ranks=1"]),
}
SMALL = ["train.tokens_per_microbatch=32", "train.export_hf=false"]


def run(pools: Pools, output: Path, layout: str, *overrides: str, **poison: Any) -> dict[str, Any]:
    ranks, sizes = LAYOUTS[layout]
    everything = [*BASE, *SMALL, *sizes, f"output={output}", *overrides]
    return pools[ranks].run("fault_tolerance_cases:run_poisoned_train", overrides=everything, **poison)


def lines(output: Path) -> list[dict[str, Any]]:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    return [json.loads(line, parse_constant=refuse) for line in (output / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_nan_in_a_response_skips_the_update(pools: Pools, tmp_path: Path, layout: str) -> None:
    """Skipped, counted, said with layer, response and microbatch; the weights stay bit for bit; then it goes on."""
    steps = ["train.steps=4", "train.stop_after_skipped=2", "train.export_hf=true"]
    found = run(pools, tmp_path, layout, *steps, steps=[1, 3], response=1, value="nan")
    assert [changed for changed, _ in found["updates"]] == [True, False, True, False]
    (said, _, at_the_end) = (text for text in found["said"] if "was skipped" in text)
    assert at_the_end == (
        "in the last step an update was skipped, because its loss or gradient was not finite (train/skipped_update in "
        f"metrics.jsonl): evaluate the student in {tmp_path / 'hf'} before you use it"
    )
    assert said.startswith("step 2: this update was skipped: loss nan and gradient norm nan at layer 2")
    assert "response 1 in microbatch " in said
    assert " of data-parallel rank 0" in said
    written = lines(tmp_path)
    assert [line["train/skipped_update"] for line in written] == [0.0, 1.0, 0.0, 1.0]
    assert [line["loss/total"] is None for line in written] == [False, True, False, True]
    kept = [json.loads(line) for line in (tmp_path / "rollouts" / "spike_0000002.jsonl").read_text().splitlines()]
    assert kept[0]["loss_share"] is None or kept[0]["loss_share"] != kept[0]["loss_share"]
    page = write_report([tmp_path], tmp_path / "report.html")
    assert not re.search(r"\bnan\b", page.read_text(), re.IGNORECASE)


OUTPUT = ["loss.output.kind=full_vocab", "loss.output.weight=1"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_nan_in_a_distribution_names_the_response(pools: Pools, tmp_path: Path, layout: str) -> None:
    alone = [*OUTPUT, "loss.representation.layers=none", "train.steps=2"]
    found = run(pools, tmp_path, layout, *alone, steps=[1], response=1, layer=None, value="nan")
    assert [changed for changed, _ in found["updates"]] == [True, False]
    (said,) = (text for text in found["said"] if "was skipped" in text)
    assert said.startswith("step 2: this update was skipped: the output-space loss is nan, response 1 in microbatch ")
    kept = [json.loads(line) for line in (tmp_path / "rollouts" / "spike_0000002.jsonl").read_text().splitlines()]
    shares = [record["loss_share"] for record in kept]
    assert shares[0] is None or shares[0] != shares[0]
    replayed = next(o for o in BASE if o.startswith("rollout.replay=")).split("=")[1]
    masked = sum(not any(rollout.mask) for rollout in read_rollouts(replayed, 61))
    others = len(shares) - 1 - masked
    assert [share > 0 for share in shares[1:]] == [True] * others + [False] * masked  # a divergence of each


def test_what_is_only_measured_skips_nothing(pools: Pools, tmp_path: Path) -> None:
    measured = [*OUTPUT, "loss.representation.weight=0", "train.steps=2"]
    found = run(pools, tmp_path, "TP2", *measured, steps=[1], value="inf")
    assert [changed for changed, _ in found["updates"]] == [True, True]
    written = lines(tmp_path)
    assert written[1]["rep/loss"] is None
    assert written[1]["loss/total"] == pytest.approx(written[1]["output/loss"], rel=1e-12)


def test_infinite_gradient_names_the_parameter(pools: Pools, tmp_path: Path) -> None:
    parameter = "decoder.layers.1.mlp.linear_fc2.weight"
    found = run(pools, tmp_path, "TP2", "train.steps=2", steps=[0], parameter=parameter)
    assert [changed for changed, _ in found["updates"]] == [False, True]
    assert found["updates"][0][1] == f"the gradient's norm is inf; non-finite in {parameter}"
    assert lines(tmp_path)[0]["actor/grad_norm"] is None


@pytest.mark.parametrize("layout", ["TP2", pytest.param("dedicated teacher", marks=pytest.mark.slow)])
def test_too_many_in_a_row_stop_the_run_also_over_a_resume(pools: Pools, tmp_path: Path, layout: str) -> None:
    shared = ["train.stop_after_skipped=3", "train.save_every=1"]
    first = run(pools, tmp_path, layout, *shared, "train.steps=3", steps=[1, 2], value="inf", response=2)
    assert [changed for changed, _ in first["updates"]] == [True, False, False]
    with pytest.raises(WorkerError, match=r"updates were skipped in 3 steps in a row, up to step 4: .*lower train\.lr"):
        run(pools, tmp_path, layout, *shared, "train.steps=6", steps=[0], value="nan", response=2)
    assert (tmp_path / "checkpoints" / "latest_checkpointed_iteration.txt").read_text() == "3\n"


def test_a_spike_keeps_its_rollouts_also_right_after_a_resume(pools: Pools, tmp_path: Path) -> None:
    """11 quiet steps, a resume, and one response whose targets are 100 times as large."""
    shared = ["train.save_every=11", "train.lr=1e-5", "train.keep_checkpoints=1"]
    run(pools, tmp_path, "TP2", *shared, "train.steps=11", steps=[])
    assert not list((tmp_path / "rollouts").glob("spike_*"))
    found = run(pools, tmp_path, "TP2", *shared, "train.steps=13", steps=[0], response=2, factor=100.0)
    (said,) = (text for text in found["said"] if "its median size was" in text)
    file = tmp_path / "rollouts" / "spike_0000012.jsonl"
    assert said.startswith("step 12: rep/loss is ")
    assert said.endswith(f"its rollouts are in {file}")
    kept = [json.loads(line) for line in file.read_text().splitlines()]
    shares = [record["loss_share"] for record in kept]
    assert shares == sorted(shares, reverse=True)
    assert sum(shares) == pytest.approx(lines(tmp_path)[11]["loss/total"])
    replayed = next(o for o in BASE if o.startswith("rollout.replay=")).split("=")[1]
    assert kept[0]["response_ids"] == read_rollouts(replayed, 61)[2].response_ids.tolist()
    assert [path.name for path in (tmp_path / "rollouts").glob("spike_*")] == [file.name]
    assert read_rollouts(file, 61)  # replays
