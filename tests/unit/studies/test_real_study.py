"""The study on a real language model: its runs, how a rate is chosen, intervals, and the tables in the documents."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nemo_oprd.bridge.artifact import load_bridge
from nemo_oprd.config.loading import load_config
from nemo_oprd.evaluation.files import read_lines
from nemo_oprd.losses.representation import mse
from studies import real_rollout_tables, real_study, real_tables
from studies.real_arms import LOSSES, RATES, SEARCHED, Arm, changes, is_hidden, on_student, seeds, sweep
from studies.real_bridges import MAPS, teacher_moments, write_bridge
from studies.real_gradients import injected
from studies.real_losses import relative_mse
from studies.real_models import layer_map

ROOT = Path(__file__).parents[3]
RESULTS = real_tables.read_results()
PAGE = ROOT / "docs" / "results_smollm2.md"


def measured(forward: list[float], tokens: list[int] | None = None) -> dict[str, dict[str, list[float]]]:
    """Measurements in which both divergences are `forward`, sums over the tokens of each response."""
    counts: Any = tokens or [10] * len(forward)
    keys = ("reverse_kl", "forward_kl", "same_greedy", "student_entropy", "teacher_entropy", "teacher_nll")
    one = {"tokens": counts, **dict.fromkeys(keys, forward)}
    return {
        "on_teacher": one,
        "on_student": {**one, "distinct_4": [1.0] * len(forward), "truncated": [0.0] * len(forward)},
    }


def run(loss: str, rate: float, forward: list[float], seed: int = 0) -> dict[str, Any]:
    arm = {"loss": loss, "rate": rate, "seed": seed, "student": "pruned", "change": "", "settings": []}
    return {"arm": arm, "measured": measured(forward)}


def test_every_run_has_a_name_of_its_own_and_settings_that_load() -> None:
    base = Arm("mse", 1e-4)
    arms = [*sweep(), *on_student("quantised", [base]), *seeds([base]), *changes(base)]
    assert len({arm.name for arm in arms}) == len(arms)
    assert len(list(sweep())) == len(LOSSES) + len(SEARCHED) * (len(RATES) - 1)
    for arm in arms:
        settings = [setting for setting in arm.all_settings if not setting.startswith("bridge=")]
        load_config("real_model", [*settings, f"train.lr={arm.rate}"])
    assert [arm.loss for arm in sweep() if arm.rate == RATES[0] and not is_hidden(arm)] == [
        "sampled_token", "top_16", "full_vocab", "forward_kl", "cosine_full_vocab",
    ]  # fmt: skip


def test_layer_maps_of_a_pruned_student() -> None:
    kept = [1, 2, 5, 8]
    assert layer_map("kept", kept, 8) == {1: 1, 2: 2, 3: 5, 4: 8}
    # the last layer before the next one that was kept: what that layer read in the teacher
    assert layer_map("next_input", kept, 8) == {1: 1, 2: 4, 3: 7, 4: 8}
    assert layer_map("uniform", kept, 8) is None


def test_a_rate_is_chosen_on_the_first_half_of_the_prompts() -> None:
    results = {
        "a": run("mse", 1e-4, [10.0, 10.0, 90.0, 90.0]),
        "b": run("mse", 3e-4, [20.0, 20.0, 0.0, 0.0]),
        "c": run("cosine", 3e-4, [5.0, 5.0, 5.0, 5.0]),
        "d": run("mse", 1e-3, [0.0] * 4, seed=1),
    }
    assert real_tables.best_runs(results, "pruned") == {"mse": "a", "cosine": "c"}
    assert real_tables.distance(results["a"]["measured"]) == 1.0


def test_means_are_over_the_tokens_of_the_reported_half() -> None:
    found = measured([9.0, 9.0, 2.0, 12.0], tokens=[1, 1, 4, 10])
    _, reported = real_tables.halves(found)
    (_, forward), *_ = real_tables.COLUMNS
    assert forward(found, reported) == 1.0


def test_runs_on_other_texts_are_not_paired() -> None:
    with pytest.raises(ValueError, match="other responses of the teacher"):
        real_tables.interval([(measured([1.0, 2.0]), measured([1.0, 2.0], tokens=[3, 4]))], real_tables.COLUMNS[0][1])


def test_responses_without_a_4_gram_do_not_count() -> None:
    found = measured([1.0] * 4)
    found["on_student"]["distinct_4"] = [1.0, None, 0.5, None]  # type: ignore[list-item]
    (distinct,) = (value for name, value in real_tables.COLUMNS if name == "distinct 4-grams")
    assert distinct(found, slice(None)) == 0.75


def test_intervals_against_a_plain_loop() -> None:
    draw = np.random.default_rng(7)
    tokens = draw.integers(1, 30, 12).tolist()
    one, other = (measured(draw.uniform(0, 20, 12).tolist(), tokens) for _ in range(2))
    _, forward = real_tables.COLUMNS[0]
    found = real_tables.interval([(one, other)], forward)
    chosen = np.random.default_rng(0).choice(np.arange(6, 12), (real_tables.DRAWS, 6))
    differences = []
    for prompts in chosen:
        values = []
        for side in (one["on_teacher"], other["on_teacher"]):
            total = sum(side["forward_kl"][prompt] for prompt in prompts)
            values.append(total / sum(side["tokens"][prompt] for prompt in prompts))
        differences.append(values[0] - values[1])
    differences.sort()
    assert found[1] == pytest.approx(differences[int(0.025 * len(differences))], rel=0.02)
    assert found[2] == pytest.approx(differences[int(0.975 * len(differences))], rel=0.02)


def test_bridges_of_one_width(tmp_path: Path) -> None:
    """The maps, from states whose moments are known, and what the artifact holds."""
    torch.manual_seed(0)
    states_ND = torch.randn(4000, 6, dtype=torch.float64) * torch.tensor([1.0, 2.0, 0.5, 40.0, 1.0, 1.0]).double() + 3
    mean_D, second_DD = states_ND.mean(0), states_ND.T @ states_ND / len(states_ND)
    assert ((states_ND @ MAPS["standardized"](mean_D, second_DD)).std(0) - 1).abs().max() < 1e-3
    assert MAPS["without_outliers"](mean_D, second_DD).diagonal().tolist() == [1, 1, 1, 0, 1, 1]
    assert MAPS["principal"](mean_D, second_DD)[0].abs().argmax() == 3
    whitened = (states_ND - mean_D) @ MAPS["principal_whitened"](mean_D, second_DD).T
    assert (whitened.T @ whitened / len(whitened) - torch.eye(6)).abs().max() < 1e-6
    golden = ROOT / "tests" / "golden" / "student"
    width = json.loads((golden / "config.json").read_text())["hidden_size"]
    moments = torch.zeros(2, width), torch.eye(width).expand(2, width, width)
    write_bridge("standardized", moments, {1: 1, 2: 2}, (golden, golden), tmp_path / "bridge")
    bridge = load_bridge(tmp_path / "bridge")
    rows = torch.randn(3, width)
    assert torch.allclose(bridge.project_teacher(1, rows), bridge.project_student(1, rows))
    assert torch.allclose(bridge.project_teacher(1, rows), rows)


def test_moments_are_those_of_response_tokens() -> None:
    """Against states gathered one by one; prompts do not count."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(ROOT / "tests" / "golden" / "student", dtype=torch.float64).eval()
    sequences = [([5, 6, 7, 8, 9], 2), ([4, 3, 2], 1)]
    mean_LD, second_LDD = teacher_moments(model, sequences)
    rows = []
    for ids, prompt in sequences:
        with torch.no_grad():
            states = model.model(torch.tensor([ids]), output_hidden_states=True).hidden_states[1:]
        rows.append(torch.stack([state[0, prompt:] for state in states]))
    rows_LND = torch.cat(rows, 1)
    assert torch.allclose(mean_LD, rows_LND.mean(1))
    assert torch.allclose(second_LDD[-1], rows_LND[-1].T @ rows_LND[-1] / rows_LND.shape[1])


def test_injected_gradients() -> None:
    torch.manual_seed(0)
    student, teacher = torch.randn(2, 3, 5), torch.randn(2, 3, 5)
    values, gradient = injected(mse, student, teacher)
    assert torch.allclose(gradient, 2 * (student - teacher) / (5 * 6))
    assert torch.allclose(values, (student - teacher).square().mean(-1))
    relative = relative_mse(student[0], teacher[0], "mean")
    assert relative.tolist() == pytest.approx(
        [float(((s - t) ** 2).sum() / (t**2).sum()) for s, t in zip(student[0], teacher[0], strict=True)]
    )


def test_equal_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    cheap, dear = Arm("mse", 1e-4), Arm("full_vocab", 3e-4)
    counted = {cheap.name: {"teacher": 10.0, "update": 20.0}, dear.name: {"teacher": 10.0, "update": 26.0}}
    results = {name: {"operations": each} for name, each in counted.items()}
    monkeypatch.setattr(real_study, "read_results", lambda: results)
    (arm,) = real_study.equal_operations(cheap, dear)
    assert (arm.loss, arm.steps, arm.change) == ("mse", 36, "equal_operations")


def test_all_runs_of_a_student_are_listed() -> None:
    results = {
        "quantised-start": {"measured": measured([40.0] * 4)},
        "pruned": run("mse", 3e-4, [10.0] * 4),
        "a": run("mse", 1e-3, [30.0] * 4),
        "b": run("mse", 3e-4, [20.0] * 4, seed=1),
    }
    for name in "ab":
        results[name]["arm"]["student"] = "quantised"
    rows = [line.split(" | ")[:2] for line in real_tables.runs_table(results, "quantised").splitlines()[2:]]
    assert rows == [["| (start)", "4"], ["| mse, 0.0003, seed 1", "2"], ["| mse, 0.001, seed 0", "3"]]


def test_seeds_are_paired() -> None:
    """Seeds of both losses: their mean difference, and the smallest and largest of one seed."""
    ours, theirs = {0: 2.0, 1: 2.5, 2: 9.0}, {0: 1.0, 1: 2.0}
    results = {f"mse {seed}": run("mse", 3e-4, [10 * each] * 4, seed) for seed, each in ours.items()}
    results |= {f"cosine {seed}": run("cosine", 3e-4, [10 * each] * 4, seed) for seed, each in theirs.items()}
    results["alone"] = run("full_vocab", 3e-4, [1.0] * 4)
    cell = "+0.750 [+0.750, +0.750], seeds +0.500 to +1.000"
    table = real_tables.against_seeds_table(results, "pruned").splitlines()
    assert table[2:] == [f"| mse, 0.0003 minus cosine, 0.0003 | {cell} | {cell} | {cell} |"]
    assert len(real_tables.seeds_table(results, "pruned").splitlines()) == 4


def test_a_change_is_compared_with_the_same_run_without_it() -> None:
    """Of the same loss, rate and seed; operations of all updates of the runs."""

    def made(name: str, forward: float, change: str = "", steps: int = 30, rate: float = 3e-4) -> dict[str, Any]:
        result = run("mse", rate, [10 * forward] * 4)
        result["arm"].update(change=change, steps=steps)
        return {name: {**result, "operations": {"update": 5.0}}}

    results = {
        **made("other rate", 9.0, rate=1e-4),
        **made("base", 2.0),
        **made("longer", 1.5, "more", steps=36),
    }
    table = real_tables.against_base_table(results, "pruned").splitlines()
    same = "-0.500 [-0.500, -0.500]"
    assert table[2:] == [f"| more, 36 updates | {same} | {same} | {same} | 1.20 |"]
    rows = [line.split(" | ")[:2] for line in real_tables.changes_table(results, "pruned").splitlines()[2:]]
    assert rows == [["| mse, 0.0003", "2"], ["| mse, more, 0.0003", "1.5"]]
    assert real_tables.against_base_table(made("base", 2.0), "pruned") == ""


def test_results_are_small_and_name_nothing_of_the_machine() -> None:
    assert RESULTS, "studies/results/real_study holds the finished runs"
    teacher = list(read_lines(real_tables.TEACHER_RESPONSES, "responses", ""))
    for name, result in RESULTS.items():
        text = json.dumps(result)
        assert len(text) < 20_000 and "/tmp" not in text and "/home" not in text, name
        tokens = result["measured"]["on_teacher"]["tokens"]
        assert tokens == [len(row["response_ids"]) for _, row in teacher]
        assert len(tokens) == real_study.HELDOUT_PROMPTS and min(tokens) > 0
        if "arm" in result:
            arm = real_study.arm_of(result)
            assert arm.name == name
            real_study.check_result(arm, result)
            with pytest.raises(ValueError, match="expected the same: remove the file"):
                real_study.check_result(replace(arm, steps=31), result)
            assert len(result["training"]["loss/total"]) == result["arm"]["steps"]


def test_the_documents_have_the_tables_of_the_results() -> None:
    page = PAGE.read_text()
    for table in real_tables.tables(RESULTS).split("\n\n"):
        assert table in page, f"docs/results_smollm2.md lacks a table of `studies.real_study table`:\n{table}"


def test_the_intervals_of_the_page_are_those_of_the_tables() -> None:
    """Also those in its sentences, from tables that only the commands print."""
    pattern = r"[-+][\d.]+ \[[-+][\d.]+, [-+][\d.]+\]"
    printed = real_tables.tables(RESULTS) + real_tables.details(RESULTS)
    known = re.findall(pattern, printed + real_rollout_tables.tables(real_rollout_tables.read_results()))
    found = re.findall(pattern, " ".join(PAGE.read_text().split()))
    assert len(found) > 50 and not set(found) - set(known)
