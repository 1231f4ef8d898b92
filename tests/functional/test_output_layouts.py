"""The output-space terms and the bridge under every kind of layout: losses, metrics and every gradient of `verify`.

Against plain Hugging Face models in float64, derivatives by autograd on whole distributions
(`distillation/reference.py`), and for the bridge against the golden numbers. Layouts are those where
something of these terms can go wrong: sequence parallelism (final states in parts), context parallelism, tied heads on
another stage, a teacher laid out differently, groups of microbatches, chunks that don't divide the rows.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from golden_runs import EXPECTED, check, overrides
from layout_cases import OTHER_HEADS, VOCABULARY, Case, check_result, make_rollouts, read_result, save_model
from plain_computation import expected_result
from pool import Pools
from served_teachers import DEDICATED, SERVED, ServedTeachers

from nemo_oprd.config.loading import load_config
from nemo_oprd.rollout.replay import read_rollouts, write_rollouts

TOLERANCE = 1e-5
SMALL = 120
WAVES = ("teacher.resident_microbatches=1", "teacher.offload=true")
REPRESENTATION = ["loss.representation.layers=even", "loss.representation.k=48"]


def output(kind: str, *more: str) -> list[str]:
    """Settings of an output-space term; 37 rows at a time divide no microbatch."""
    settings = [f"kind={kind}", "weight=1.5", "chunk_tokens=37", *more]
    return [f"loss.output.{setting}" for setting in settings]


OBJECTIVES = {
    "full_vocab": ("qwen3", [*REPRESENTATION, *output("full_vocab", "temperature=0.7")]),
    "sampled_token": ("qwen3", ["loss.representation.weight=0", *REPRESENTATION, *output("sampled_token")]),
    "top_k": ("qwen3", [*REPRESENTATION, *output("top_k", "k=5", "support=union", "aggregation=token_mean")]),
    "forward_kl, tied": ("qwen2", [*REPRESENTATION, *output("forward_kl")]),
    "alone": ("qwen3", ["loss.representation.layers=none", *output("full_vocab", "k=5")]),
    "weighted layers": (
        "qwen3",
        [
            *["loss.representation.layers=[8,2,5]", "loss.representation.layer_weights=[1,0.25,3]"],
            *output("full_vocab"),
        ],
    ),
    "one layer's weight, scheduled": (
        "qwen3",
        [
            *[*REPRESENTATION, "loss.representation.layer_weights={6:5}", *output("jsd")],
            "loss.representation.weight=[{until:4,start:0,weight:3},{weight:0}]",
        ],
    ),
    "full_vocab, bias": ("qwen3", [*REPRESENTATION, *output("full_vocab", "temperature=0.7")]),
    "top_k, scale": ("qwen3", [*REPRESENTATION, *output("top_k", "k=5", "support=union", "aggregation=token_mean")]),
    "jsd, cap": ("qwen3", [*REPRESENTATION, *output("jsd", "jsd_beta=0.3", "k=5")]),
    "jsd": ("qwen3", ["loss.representation.weight=3", *REPRESENTATION, *output("jsd", "jsd_beta=0.3", "k=5")]),
}
CASES = [
    Case("dp1", objective="full_vocab", tokens=SMALL),
    Case("dp1", objective="top_k", recompute="uniform 2"),
    Case("tp2 sp", objective="full_vocab", tokens=SMALL, extra=WAVES),
    Case("tp2 sp", "pp2", objective="sampled_token"),
    Case("cp2", "tp2", objective="jsd", tokens=SMALL, extra=WAVES),
    Case("dp2", "cp2", objective="top_k", tokens=SMALL),
    Case("pp2", "dp2", objective="forward_kl, tied", tokens=SMALL),
    Case("pp2 vpp2", "tp2", objective="jsd", recompute="uniform 1", tokens=SMALL),
    Case("tp2 sp", objective="forward_kl, tied"),
    Case("tp2 sp pp2", "cp2 dp2", objective="full_vocab", tokens=SMALL),
    Case("tp2 cp2", "pp4", objective="sampled_token", tokens=SMALL),
    Case("tp2 sp", "pp2 dedicated", objective="top_k", tokens=SMALL, extra=WAVES),
    Case("tp2 sp", "pp2", objective="weighted layers", tokens=SMALL),
    Case("pp2", objective="one layer's weight, scheduled", recompute="uniform 1"),
    Case("tp2 sp", "pp2", objective="alone", tokens=SMALL),
    Case("tp2 sp", objective="full_vocab, bias", tokens=SMALL, extra=SERVED),
    Case("tp2 sp", objective="top_k, scale", tokens=SMALL, extra=DEDICATED),
]
SLOW = [
    Case("tp2", objective="full_vocab"),
    Case("tp2", "tp2 sp", objective="sampled_token", tokens=SMALL),
    Case("cp2", "tp2", objective="sampled_token", tokens=SMALL),
    Case("pp2", "tp2 dedicated", objective="sampled_token"),
    Case("pp2", objective="sampled_token", tokens=SMALL, extra=(*SERVED, "teacher.resident_microbatches=1")),
    Case("cp2", objective="forward_kl, tied", tokens=SMALL, extra=SERVED),
    Case("dp2", objective="alone", tokens=SMALL, extra=SERVED),
    Case("tp2 sp", objective="full_vocab", tokens=SMALL, extra=SERVED),
    Case("tp2 sp", objective="jsd, cap", tokens=SMALL, extra=SERVED),
]


class Bench:
    """The models and the batch on disk, and what they must give."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for seed, (pair, role) in enumerate((p, r) for p in ("qwen3", "qwen2") for r in ("student", "teacher")):
            save_model(root / pair / role, pair, seed)
        for seed, head in enumerate(OTHER_HEADS):
            save_model(root / head, head, 4 + seed)
        write_rollouts(root / "rollouts.jsonl", make_rollouts())

    def settings(self, objective: str) -> list[str]:
        """What all layouts of an objective share."""
        pair, settings = OBJECTIVES[objective]
        head = objective.rpartition(", ")[2]
        teacher = self.root / (head if head in OTHER_HEADS else f"{pair}/teacher")
        models = [f"student.hf_path={self.root / pair / 'student'}", f"teacher.hf_path={teacher}"]
        return [*models, f"rollout.replay={self.root / 'rollouts.jsonl'}", *settings]

    @cache  # noqa: B019 - one bench lives as long as the module's tests
    def expected(self, objective: str) -> dict[str, Any]:
        """The plain computation."""
        config = load_config("verify", [*self.settings(objective), "output=unused"])
        return expected_result(config, read_rollouts(self.root / "rollouts.jsonl", VOCABULARY))

    @cache  # noqa: B019
    def entropies(self, objective: str) -> dict[str, float]:
        """Mean entropy of both models where they predict a response token with mask 1."""
        from transformers import AutoModelForCausalLM

        config = load_config("verify", [*self.settings(objective), "output=unused"])
        means = {}
        for name, path in (("actor", config.student.hf_path), ("teacher", config.teacher.hf_path)):
            model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, attn_implementation="eager")
            values = []
            for rollout in make_rollouts():
                where = [len(rollout.prompt_ids) + t - 1 for t, m in enumerate(rollout.mask) if m]
                with torch.no_grad():
                    logits = model(torch.tensor([rollout.ids.tolist()])).logits[0, where]
                log_p = (logits / config.loss.output.temperature).log_softmax(-1)
                values.append(-(log_p.exp() * log_p).sum(-1))
            means[f"{name}/entropy"] = float(torch.cat(values).mean())
        return means


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("output"))


@pytest.mark.parametrize(
    "case",
    [*sorted(CASES, key=lambda case: case.ranks), *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW)],
    ids=str,
)
def test_output_terms(pools: Pools, bench: Bench, served_teachers: ServedTeachers, tmp_path: Path, case: Case) -> None:
    output = f"output={tmp_path / 'out'}"
    arguments = served_teachers.of([*bench.settings(case.objective), *case.overrides, output])
    metrics = pools[case.ranks].run("layout_cases:run_verify", overrides=arguments)
    losses, _ = read_result(tmp_path / "out")
    assert ("rep/loss" in losses) == ("rep/loss" in metrics) == (case.objective != "alone")
    check_result(tmp_path / "out", bench.expected(case.objective), str(case), TOLERANCE)
    for name, value in bench.entropies(case.objective).items():
        assert metrics[name] == pytest.approx(value, rel=TOLERANCE), name
    assert ("actor/pg_loss" in metrics) == (case.objective == "sampled_token")
    if "k=5" in str(OBJECTIVES[case.objective]):
        assert 0 < metrics["val-topk/overlap_ratio"] < 1


BRIDGED = [
    (2, ["student.parallel.tensor=2", "student.parallel.sequence=true", "teacher.parallel.pipeline=2"]),
    (2, ["student.parallel.pipeline=2", "teacher.parallel.tensor=2", "train.tokens_per_microbatch=20"]),
    (2, ["student.parallel.context=2", "teacher.parallel.pipeline=2", "student.recompute=full"]),
    (3, ["student.parallel.tensor=2", "teacher.placement=dedicated", *WAVES, "train.tokens_per_microbatch=20"]),
    (2, ["student.parallel.tensor=2", "student.parallel.sequence=true", *SERVED, "train.tokens_per_microbatch=20"]),
    (3, ["student.parallel.pipeline=2", *DEDICATED]),
]


@pytest.mark.parametrize("case", [name for name in EXPECTED if name.startswith("bridge_")])
@pytest.mark.parametrize(("ranks", "layout"), BRIDGED)
def test_bridge(
    pools: Pools, served_teachers: ServedTeachers, tmp_path: Path, ranks: int, layout: list[str], case: str
) -> None:
    """Teacher and student of other depths and widths, laid out differently."""
    pools[ranks].run("cases:run_verify", overrides=served_teachers.of([*overrides(case, tmp_path / "out"), *layout]))
    check(tmp_path / "out", case)
