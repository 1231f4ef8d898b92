"""The losses of the student's routers, and routes of the rollouts that are replayed, against plain Hugging Face models.

Losses and every gradient of `verify` at each layout below against float64. The routers' losses are normalised by the
tokens of the whole update, so they depend neither on the layout nor on the microbatches.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from layout_cases import LAYERS, MODELS, VOCABULARY, Case, make_rollouts, read_result, save_model
from layout_grid import SMALL
from plain_routers import routed
from pool import Pools

from nemo_oprd.batch.types import Rollout
from nemo_oprd.config.loading import load_config
from nemo_oprd.distillation.reference import agreement, reference
from nemo_oprd.rollout.replay import read_rollouts, write_rollouts

TOLERANCE = 1e-5
QWEN, MIXTRAL = "qwen3_moe", "mixtral"
BOTH = ("student.router_aux_loss=0.3", "student.router_z_loss=0.02")
AUX, Z = BOTH[:1], BOTH[1:]
REPLAY = ("student.router_replay=true",)
# deeper layers are not computed; and all of them are, for a loss of the output space
FIVE, OUTPUT = "loss.representation.layers=[2,5]", "loss.output.kind=full_vocab"
GROUPS = "teacher.resident_microbatches=1"

DEFAULT = [
    Case("dp2 ep2", objective=MIXTRAL, tokens=SMALL, extra=(*BOTH, *REPLAY)),
    Case("tp2 sp ep2", objective=QWEN, recompute="uniform 1", extra=BOTH),
    Case("pp2 vpp2", objective=QWEN, tokens=SMALL, extra=(*BOTH, OUTPUT, "loss.output.weight=1")),
]
SLOW = [
    Case("dp1", objective=QWEN, tokens=SMALL, recompute="uniform 2", extra=(*BOTH, GROUPS)),
    Case("dp1", objective=QWEN, extra=(*BOTH, FIVE)),
    Case("cp2", objective=QWEN, recompute="block 3", extra=(*BOTH, *REPLAY)),
    Case("dp1", objective=MIXTRAL, extra=AUX),
    Case("dp1", objective=QWEN, tokens=SMALL, extra=(*Z, *REPLAY, FIVE)),
    Case("dp2 ep2 allgather", objective=QWEN, recompute="uniform 2", tokens=SMALL, extra=(*BOTH, GROUPS)),
    Case("tp2 sp etp2 allgather", objective=MIXTRAL, tokens=SMALL, extra=(*BOTH, *REPLAY)),
    Case("tp2 sp", objective=MIXTRAL, recompute="selective", extra=(*REPLAY,)),
    Case("cp2 ep2", "pp2", objective=MIXTRAL, recompute="uniform 1", extra=BOTH),
    Case("pp2", "dp2 ep2", objective=MIXTRAL, recompute="uniform 1", tokens=SMALL, extra=(*BOTH, *REPLAY)),
    Case("pp2 vpp4", "tp2", objective=QWEN, recompute="uniform 1", extra=BOTH),
    Case("dp1", "dp1 dedicated", objective=QWEN, tokens=SMALL, extra=(*BOTH, GROUPS)),
    Case("dp2 pp2 vpp2 ep2", objective=QWEN, recompute="uniform 2", tokens=SMALL, extra=(*BOTH, *REPLAY)),
    Case("tp2 sp dp2 ep4", objective=QWEN, tokens=SMALL, extra=BOTH),
    Case("cp2 dp2 ep4 allgather", objective=MIXTRAL, tokens=SMALL, extra=(*BOTH, *REPLAY)),
    Case("tp2 sp pp2 ep2", objective=MIXTRAL, recompute="uniform 1", extra=(*BOTH, *REPLAY)),
]


def record_routes(rollouts: list[Rollout], pair: str) -> list[Rollout]:
    """The rollouts with experts that are drawn at random; every second rollout lacks those of its last token."""
    model = MODELS[pair]
    experts = model.get("num_experts") or model["num_local_experts"]
    layers = LAYERS - len(model.get("mlp_only_layers", ()))
    draw, found = np.random.default_rng(5), []
    for i, rollout in enumerate(rollouts):
        scores = draw.random((rollout.length - i % 2, layers, experts))
        routes = scores.argsort(-1)[..., : model["num_experts_per_tok"]].astype(np.int16)
        found.append(Rollout(**{**vars(rollout), "expert_routes": routes}))
    return found


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("routers")
    for seed, (pair, role) in enumerate((p, r) for p in (QWEN, MIXTRAL) for r in ("student", "teacher")):
        save_model(root / pair / role, pair, seed, LAYERS)
        write_rollouts(root / pair / "rollouts.jsonl", record_routes(make_rollouts(), pair))
    return root


def settings(root: Path, case: Case) -> list[str]:
    place = root / case.objective
    models = [f"{role}.hf_path={place / role}" for role in ("student", "teacher")]
    return [*models, f"rollout.replay={place / 'rollouts.jsonl'}", "loss.representation.k=48", *case.extra]


@pytest.fixture(scope="module")
def expected(root: Path) -> Callable[[Case], dict[str, Any]]:
    """The plain computation of what is trained, once for all layouts."""

    @cache
    def compute(objective: str, extra: tuple[str, ...]) -> dict[str, Any]:
        case = Case("dp1", objective=objective, extra=extra)
        config = load_config("verify", [*settings(root, case), "output=unused"])
        return reference(config, read_rollouts(str(config.rollout.replay), VOCABULARY))

    return lambda case: compute(case.objective, tuple(e for e in case.extra if e != GROUPS))


@pytest.mark.parametrize("case", [*DEFAULT, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW)], ids=str)
def test_layout(
    pools: Pools, root: Path, expected: Callable[[Case], dict[str, Any]], tmp_path: Path, case: Case
) -> None:
    output = tmp_path / "out"
    overrides = [*settings(root, case), *case.overrides, f"output={output}"]
    metrics = pools[case.ranks].run("layout_cases:run_verify", overrides=overrides)
    losses, gradients = read_result(output)
    right = expected(case)
    names = {name for name in right if "loss" in name} - {"rep/loss_per_layer"}
    assert names == {name for name in losses if "loss" in name} - {"rep/loss_per_layer"}
    off = {name: abs(losses[name] / right[name] - 1) for name in names}
    deviations = agreement(gradients, right["gradients"])
    worst = max(deviations, key=deviations.__getitem__)
    print(f"{case}: losses {max(off.values()):.1e}, gradients {deviations[worst]:.1e} at {worst}")
    assert max(off.values()) < TOLERANCE and deviations[worst] < TOLERANCE, (off, worst)
    # routes that were drawn at random are not those that the router chooses
    assert 0.5 < metrics["moe/route_changed"] < 1


@pytest.mark.slow
def test_each_part_changes_the_gradients(expected: Callable[[Case], dict[str, Any]]) -> None:
    """Otherwise the layouts above would show nothing of the losses and of the replay."""
    name = "model.layers.3.mlp.gate.weight"
    plain, *others = (
        expected(Case("dp1", objective=QWEN, extra=extra))["gradients"][name] for extra in ((), AUX, Z, REPLAY)
    )
    for other in others:
        assert (other - plain).norm() > 0.1 * plain.norm()


def test_the_reference_is_what_transformers_computes(root: Path) -> None:
    """One layer's load-balancing loss is transformers'; autograd through f_e's exact value changes nothing."""
    from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

    case = Case("dp1", objective=QWEN, extra=BOTH)
    config = load_config("verify", [*settings(root, case), "output=unused"])
    rollouts = read_rollouts(str(config.rollout.replay), VOCABULARY)
    layers = routed(config, rollouts).values()
    aux = [float(load_balancing_loss_func((logits,), 4, 2)) for logits, _ in layers]
    z = torch.stack([(logits.logsumexp(-1) ** 2).mean() for logits, _ in layers]).mean()
    right = reference(config, rollouts)
    assert right["moe/aux_loss"] == pytest.approx(sum(aux) / len(aux), rel=1e-6)
    assert right["moe/z_loss"] == pytest.approx(float(z), rel=1e-9)
    whole = right["rep/loss"] + 0.3 * right["moe/aux_loss"] + 0.02 * right["moe/z_loss"]
    assert right["loss/total"] == pytest.approx(whole, rel=1e-12)
