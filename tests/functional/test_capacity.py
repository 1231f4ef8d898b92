"""`nemo-oprd plan` against what small models really hold and compute: live bytes and operations, counted exactly."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from pool import Pools

from nemo_oprd.config.loading import load_config
from nemo_oprd.run.resolve import resolve, resolve_models
from nemo_oprd.tools.plan.estimate import Lengths, estimate
from nemo_oprd.tools.plan.gpus import GPUS, Cluster
from nemo_oprd.tools.plan.operations import step_flops
from nemo_oprd.tools.plan.parameters import all_attention_flops
from nemo_oprd.tools.plan.rollout_cost import Demand, rollout_copy, sample
from nemo_oprd.tools.plan.workload import make_workload
from tests.support.random_pair import Shape, save_random_model, save_random_rollouts

SHAPE = Shape(4, 128, 352, 8, 2, 2048, 2048)
PROMPT, RESPONSE, RESPONSES = 64, 448, 4
TP2, PP2 = "student.parallel.tensor=2", "student.parallel.pipeline=2"
SEQUENCE, FULL = "student.parallel.sequence=true", "student.recompute=full"


def output(kind: str) -> list[str]:
    return [f"loss.output.kind={kind}", "loss.output.weight=1", "loss.output.chunk_tokens=256"]


# name -> (ranks, settings)
CASES: dict[str, tuple[int, list[str]]] = {
    "all kept": (1, []),
    "all kept, bf16": (1, ["precision=bf16"]),
    "selective": (1, ["student.recompute=selective"]),
    "full": (1, [FULL]),
    "full, bf16": (1, [FULL, "precision=bf16"]),
    "full, two layers at a time": (1, [FULL, "student.recompute_num_layers=2"]),
    "block": (1, [FULL, "student.recompute_method=block", "student.recompute_num_layers=2"]),
    "all tokens": (1, ["loss.representation.positions=all"]),
    "only some layers": (1, ["loss.representation.layers=[1,2]"]),
    "targets in waves": (1, ["teacher.resident_microbatches=1"]),
    "sampled token": (1, output("sampled_token")),
    "top-16": (1, output("top_k")),
    "jsd, full": (1, [*output("jsd"), FULL]),
    "whole vocabulary, no chunks": (1, [*output("full_vocab"), "loss.output.chunk_tokens=4096"]),
    "Qwen3, tied": (1, ["student.hf_path=MODELS/qwen3", "teacher.hf_path=MODELS/qwen3"]),
    "DP2": (2, []),
    "DP2, optimizer not sharded, bf16": (2, ["train.distributed_optimizer=false", "precision=bf16"]),
    "TP2": (2, [TP2]),
    "TP2 with SP, bf16": (2, [TP2, SEQUENCE, "precision=bf16"]),
    "CP2": (2, ["student.parallel.context=2"]),
    "PP2": (2, [PP2]),
    "PP2, full": (2, [PP2, FULL]),
    "PP2, top-16": (2, [PP2, *output("top_k")]),
    "PP2, tied": (2, [PP2, "student.hf_path=MODELS/qwen3", "teacher.hf_path=MODELS/qwen3"]),
    "VPP2": (2, [PP2, "student.parallel.virtual_pipeline=2"]),
    "dedicated teacher": (2, ["teacher.placement=dedicated"]),
    "teacher PP2": (2, ["teacher.parallel.pipeline=2"]),
}
# what the others show already, for --all
SLOW = (
    "full, bf16",
    "full, two layers at a time",
    "all tokens",
    "only some layers",
    "targets in waves",
    "sampled token",
    "whole vocabulary, no chunks",
    "DP2",
    "TP2",
    "PP2, full",
    "PP2, tied",
    "VPP2",
    "teacher PP2",
)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random models and rollouts."""
    place = tmp_path_factory.mktemp("capacity")
    for seed, role in enumerate(("student", "teacher")):
        save_random_model(place / role, SHAPE, seed=seed, std=0.02, dtype=torch.float32)
    save_random_model(place / "qwen3", SHAPE, seed=2, std=0.02, dtype=torch.float32, model_type="qwen3", tied=True)
    save_random_rollouts(place / "rollouts.jsonl", SHAPE, prompt=PROMPT, responses=[RESPONSE] * RESPONSES)
    # sequences of one length need no copies for attention, which `plan` counts: those of a run differ
    unlike = [RESPONSE - i for i in range(RESPONSES)]
    save_random_rollouts(place / "unlike.jsonl", SHAPE, prompt=PROMPT, responses=unlike)
    return place


def overrides(models: Path, settings: list[str], rollouts: str = "rollouts.jsonl") -> list[str]:
    """A configuration whose steps are the recorded rollouts, two to a microbatch."""
    return [
        f"student.hf_path={models / 'student'}",
        f"teacher.hf_path={models / 'teacher'}",
        f"rollout.replay={models / rollouts}",
        f"train.tokens_per_microbatch={2 * (PROMPT + RESPONSE)}",
        f"train.prompts_per_step={RESPONSES}",
        f"rollout.max_new_tokens={RESPONSE}",
        "loss.representation.k=100",
        "output=unused",
        *(setting.replace("MODELS", str(models)) for setting in settings),
    ]


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in CASES])
def test_memory_is_what_a_step_holds(pools: Pools, models: Path, name: str) -> None:
    """Weights, gradients, optimizer and targets to the byte, but for padding of buffers; the rest within 10 %."""
    ranks, settings = CASES[name]
    arguments = overrides(models, settings, "unlike.jsonl")
    cluster = Cluster(ranks, GPUS["h100"], layers="cpu")
    found = estimate(resolve(load_config("verify", arguments), cluster.ranks), cluster, Lengths(prompt=PROMPT))
    kinds = {(kind.student, kind.teacher): kind.memory for kind in found.kinds}
    everywhere = pools[ranks].run("capacity_cases:live_bytes", overrides=arguments)
    for measured in everywhere:
        memory = kinds[tuple(measured["stages"])]
        for part in ("weights", "gradients", "optimizer", "teacher weights", "teacher's head"):
            planned, real = memory.always.get(part, 0.0), measured[part]
            assert real * 0.995 - 1024 <= planned <= real * 1.005 + 1024, (part, planned, real)
        update = {name: dict(memory.phases.get(name, {})) for name in ("update", "output loss")}
        targets = max(parts.pop("targets", 0.0) for parts in update.values())
        # of the rank with most rows: the last rows of a sequence may all be on one context rank
        fullest = max(each["targets"] for each in everywhere if each["stages"] == measured["stages"])
        assert targets == pytest.approx(fullest, rel=0.01, abs=64)
        assert max(sum(parts.values()) for parts in update.values()) == pytest.approx(measured["update"], rel=0.1)
        teacher = max(sum(memory.phases.get(phase, {}).values()) for phase in ("teacher", "transfer"))
        assert teacher == pytest.approx(measured["teacher"], rel=0.1)


@pytest.mark.parametrize("settings", [[], [FULL], output("sampled_token"), output("top_k")], ids=str)
def test_operations_are_those_of_a_step(pools: Pools, models: Path, settings: list[str]) -> None:
    """Within 1 %, recomputation included."""
    arguments = overrides(models, settings)
    config = load_config("verify", arguments)
    work = make_workload(config, resolve_models(config), prompt=PROMPT)
    found = step_flops(work, causal=False)
    measured = pools[1].run("capacity_cases:step_operations", overrides=arguments)
    # torch does not count attention's fused kernel on CPUs
    tokens = RESPONSES * (PROMPT + RESPONSE)
    attention = tokens * all_attention_flops(work.student, SHAPE.num_hidden_layers, PROMPT + RESPONSE, causal=False)
    passes = 4 if FULL in settings else 3
    assert found.teacher - attention == pytest.approx(measured["teacher"], rel=0.01)
    assert found.update - passes * attention == pytest.approx(measured["update"], rel=0.01)


@pytest.mark.parametrize(
    "ranks, settings",
    [(1, []), (1, ["precision=bf16", "rollout.max_cache_tokens=250"]), (2, ["rollout.tensor=2"])],
    ids=["one batch", "two batches, bf16", "TP2"],
)
def test_the_engine_holds_what_is_planned(pools: Pools, models: Path, ranks: int, settings: list[str]) -> None:
    """The copy of the student and the KV cache of one batch, to the byte; and the number of batches."""
    prompt, tokens = 64, 40  # lengths that the cache's grain of 8 positions divides
    arguments = [*overrides(models, settings), f"rollout.max_new_tokens={tokens}"]
    config = load_config("verify", arguments)
    work = make_workload(config, resolve_models(config), prompt=prompt)
    found = sample(work, Demand(RESPONSES, tokens, tokens, "rollout.max_new_tokens"), ranks, GPUS["h100"], 1e9)
    measured = pools[ranks].run("capacity_cases:engine_bytes", overrides=arguments, prompt=prompt, responses=RESPONSES)
    assert rollout_copy(work) == measured["copy"]
    assert found.parts["KV cache"] == measured["cache"]
    assert found.waves == measured["batches"]
