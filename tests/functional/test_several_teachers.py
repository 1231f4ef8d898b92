"""Several teachers: each response has one, chosen by its data source; gradients under layouts of both roles.

Two teachers of the student's shape, one of another width and depth behind a bridge, and one whose only response has no
supervised token. Against plain Hugging Face models in float64, sequence by sequence.
"""

from __future__ import annotations

import dataclasses
import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from layout_cases import Case, check_result
from plain_computation import expected_result
from pool import Pools
from served_teachers import SERVED, ServedTeachers
from tiny_models import MODELS, SIZES, save_random, save_random_bridge

from nemo_oprd.batch.types import Rollout
from nemo_oprd.config.loading import load_config
from nemo_oprd.distillation.reference import agreement, reference
from nemo_oprd.rollout.replay import write_rollouts
from nemo_oprd.run.data import recorded_rollouts
from nemo_oprd.run.resolve import resolve_models

STUDENT = SIZES | MODELS["qwen3_untied"]
WIDE = SIZES | MODELS["phi3"] | {"num_hidden_layers": 6}
RANK = 4
PAIRS = {1: 1, 2: 3, 3: 4, 4: 6}  # by the paper's rule
SOURCES = {"math": 1.0, "code": 0.5, "wide": 2.0, "silent": 1.0}  # with their teachers' weights
REPRESENTATION = ["loss.representation.kind=normalized_mse", "loss.representation.k=9", "loss.representation.weight=3"]
OBJECTIVES = {
    "hidden": REPRESENTATION,
    "predicting": ["loss.representation.position=predicting", "loss.representation.aggregation=token_mean"],
    "composed": [
        *REPRESENTATION,
        "loss.output.kind=full_vocab",
        "loss.output.weight=1.5",
        "loss.output.chunk_tokens=7",
    ],
    "sampled": ["loss.representation.layers=none", "loss.output.kind=sampled_token", "loss.output.weight=1"],
}
# whose, tokens of prompt and response
RESPONSES = [("code", 4, 20), ("math", 3, 6), ("wide", 7, 11), ("math", 5, 2), ("code", 9, 30), ("silent", 2, 3)]
RESPONSES += [("other", 1, 13), ("math", 6, 25)]
SMALL = 40
WAVES = ("teacher.resident_microbatches=1", "teacher.offload=true")
ENGINES = ("teachers.0.engine=vllm", "teachers.2.engine=vllm")
CASES = [
    Case("dp1", objective="composed", tokens=SMALL),
    Case("dp1", objective="sampled", extra=WAVES),
    Case("tp2 sp", "pp2", objective="composed", tokens=SMALL, extra=WAVES),
    Case("pp2", "tp2", objective="predicting", tokens=SMALL),
    Case("pp2 vpp2", "tp2 sp", objective="composed", recompute="uniform 1", tokens=SMALL),
    Case("cp2", "dp2", objective="hidden"),
    Case("dp2", "cp2", objective="composed", tokens=SMALL),
    Case("tp2", "pp2 dedicated", objective="sampled", tokens=SMALL, extra=WAVES),
    # of one run, teachers in the trainer and teachers behind servers, one of them through a bridge
    Case("pp2", "tp2", objective="composed", tokens=SMALL, extra=(*ENGINES, "teacher.vllm.placement=dedicated")),
]


def make_rollouts() -> list[Rollout]:
    """Responses of all data sources; those of "silent" have no supervised token, and "other" is named by no teacher."""
    rng = np.random.default_rng(7)
    made = []
    for source, prompt, response in RESPONSES:
        ids = rng.integers(0, STUDENT["vocab_size"], prompt + response).tolist()
        mask = [0] * response if source == "silent" else (rng.random(response) < 0.8).astype(int).tolist()
        made.append(Rollout(ids[:prompt], ids[prompt:], mask, data_source=source))
    return made


class Bench:
    """Models, rollouts and a random bridge on disk."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for seed, (name, config) in enumerate({"student": STUDENT, **dict.fromkeys(SOURCES, STUDENT)}.items()):
            save_random(root / name, WIDE if name == "wide" else config, seed)
        write_rollouts(root / "rollouts.jsonl", make_rollouts())
        for position in ("token", "predicting"):
            save_random_bridge(root / f"bridge_{position}", STUDENT, WIDE, PAIRS, RANK, position)

    def settings(self, objective: str) -> list[str]:
        """Of an objective."""
        position = "predicting" if objective == "predicting" else "token"
        teachers = []
        for source, weight in SOURCES.items():
            theirs = f"{{hf_path: {self.root / source}, weight: {weight}, data_sources: [{source}]"
            if source == "wide":  # which takes the rest
                theirs = theirs.replace("[wide]", "null")
                if objective != "sampled":
                    theirs += f", bridge: {self.root / f'bridge_{position}'}"
            teachers.append(theirs + "}")
        return [
            f"student.hf_path={self.root / 'student'}",
            f"teachers=[{', '.join(teachers)}]",
            f"rollout.replay={self.root / 'rollouts.jsonl'}",
            *OBJECTIVES[objective],
        ]

    @cache  # noqa: B019 - one bench lives as long as the module's tests
    def expected(self, objective: str) -> dict[str, Any]:
        """The plain computation."""
        return expected_result(load_config("verify", [*self.settings(objective), "output=unused"]), make_rollouts())


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("several"))


def test_the_plain_computation(bench: Bench) -> None:
    """`reference` of all teachers is the weighted sum of one `reference` per teacher on its own responses."""
    rollouts, total, gradients = make_rollouts(), 0.0, dict[str, torch.Tensor]()
    active = sum(any(rollout.mask) for rollout in rollouts)
    for source, weight in SOURCES.items():
        mine = [r for r in rollouts if r.data_source == source or (source == "wide" and r.data_source == "other")]
        if source == "silent":
            continue
        bridge = f"bridge.path={bench.root / 'bridge_token'}" if source == "wide" else "bridge.path=none"
        alone = [f"student.hf_path={bench.root / 'student'}", f"teacher.hf_path={bench.root / source}", bridge]
        config = load_config("verify", [*alone, *OBJECTIVES["composed"], "output=unused"])
        found = reference(config, mine)
        share = weight * sum(any(rollout.mask) for rollout in mine) / active
        total += share * found["loss/total"]
        for name, gradient in found["gradients"].items():
            gradients[name] = gradients.get(name, 0) + share * gradient
    expected = bench.expected("composed")
    assert expected["loss/total"] == pytest.approx(total, rel=1e-9)
    # transformers computes norms and softmax in float32 whatever the dtype
    assert max(agreement(gradients, expected["gradients"]).values()) < 1e-6


SLOW = [
    Case("pp2", "tp2", objective="composed", tokens=SMALL, extra=ENGINES),
    Case("tp2 sp", "pp2 dedicated", objective="composed", tokens=SMALL, extra=ENGINES),
    Case("tp2 sp", objective="composed", tokens=SMALL, extra=SERVED),
]


@pytest.mark.parametrize(
    "case",
    [*sorted(CASES, key=lambda case: case.ranks), *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW)],
    ids=str,
)
def test_gradients(pools: Pools, bench: Bench, served_teachers: ServedTeachers, tmp_path: Path, case: Case) -> None:
    output = f"output={tmp_path / 'out'}"
    arguments = served_teachers.of([*bench.settings(case.objective), *case.overrides, output])
    pools[case.ranks].run("layout_cases:run_verify", overrides=arguments)
    check_result(tmp_path / "out", bench.expected(case.objective), str(case))


@pytest.mark.parametrize(("ranks", "more"), [(1, []), (2, ["teacher.resident_microbatches=1"])])
def test_each_teacher_reads_its_own_responses(pools: Pools, bench: Bench, ranks: int, more: list[str]) -> None:
    """And each of them once. Of the weights, one teacher's at a time are in device memory with `offload`."""
    tokens = f"train.tokens_per_microbatch={SMALL}"
    overrides = [*bench.settings("hidden"), tokens, "teacher.offload=true", *more, "output=unused"]
    read, resident = pools[ranks].run("cases:what_teachers_read", overrides=overrides)
    rollouts, names = make_rollouts(), [*SOURCES]
    of = {i: names.index("wide" if r.data_source == "other" else r.data_source) for i, r in enumerate(rollouts)}
    expected = [[i for i, teacher in of.items() if teacher == t and any(rollouts[i].mask)] for t in range(len(names))]
    assert [sorted(responses) for responses in read] == expected
    assert resident == [1] * len(resident) and len(resident) >= 3


def test_training_reports_on_each_teacher(pools: Pools, bench: Bench, tmp_path: Path) -> None:
    """The means of each teacher's own responses, and how many there are, beside the weighted totals."""
    output = ["loss.output.kind=full_vocab", "loss.output.weight=0.5", "loss.output.aggregation=sequence_mean"]
    run = [*output, "train.steps=1", "train.export_hf=false", f"output={tmp_path / 'run'}"]
    pools[1].run("cases:run_train", overrides=[*bench.settings("hidden"), *run])
    line = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    rollouts = make_rollouts()
    weighted, active = {"rep": 0.0, "output": 0.0}, sum(any(rollout.mask) for rollout in rollouts)
    counts = {"math": 3, "code": 2, "silent": 1, "others": 2}
    for label, count in counts.items():
        assert line[f"teachers/{label}/responses"] == count
        if label != "silent":
            for term in weighted:
                weighted[term] += SOURCES.get(label, 2.0) * count / active * line[f"teachers/{label}/{term}_loss"]
    assert not {"teachers/silent/rep_loss", "teachers/silent/output_loss"} & set(line)
    for term, value in weighted.items():
        assert line[f"{term}/loss"] == pytest.approx(value, rel=1e-6)
    assert line["rep/loss"] == pytest.approx(bench.expected("hidden")["rep/loss"], rel=1e-5)


def test_gradient_check_tries_every_teacher(pools: Pools, bench: Bench) -> None:
    """The random responses before the first step have all data sources."""
    said = pools[2].run("cases:check_gradients", overrides=[*bench.settings("composed"), "output=unused"])
    assert "each of the 4 supervised layers received its gradient once" in said


def test_data_sources_without_a_teacher_are_refused(bench: Bench, tmp_path: Path) -> None:
    """In recorded rollouts, before any model is loaded; they need not have all sources (see also bad_inputs.py)."""
    settings = [each.replace("data_sources: null", "data_sources: [wide]") for each in bench.settings("hidden")]
    config = load_config("verify", [*settings, "output=unused"])
    with pytest.raises(ValueError, match=r"rollouts.jsonl: data_source='other' has no teacher: expected one of"):
        recorded_rollouts(config, resolve_models(config))
    write_rollouts(tmp_path / "few.jsonl", [dataclasses.replace(make_rollouts()[0], data_source="code")])
    config = load_config("verify", [*settings, f"rollout.replay={tmp_path / 'few.jsonl'}", "output=unused"])
    assert recorded_rollouts(config, resolve_models(config)) is not None
