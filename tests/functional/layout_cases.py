"""Layouts to compare, the models and rollouts they run on, what must come out, and what the pool's workers run.

A `Case` is written in words: "tp2 sp pp2 vpp2 cp2 dp2 first3 last2" are parallel sizes of a role (all ranks of the role
must be named), "dedicated" gives the teacher ranks of its own.
"""

from __future__ import annotations

import json
import math
import random
import re
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from plain_routers import router_metrics

from nemo_oprd.batch.types import Rollout
from nemo_oprd.config.loading import load_config
from nemo_oprd.config.schema import Config
from nemo_oprd.distillation.reference import agreement, reference
from nemo_oprd.rollout.replay import read_rollouts, write_rollouts

LAYERS, WIDTH, VOCABULARY = 8, 32, 97
QWEN3_MOE = {
    "model_type": "qwen3_moe",
    "tie_word_embeddings": False,
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": False,
}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {"model_type": "qwen3", "tie_word_embeddings": False, "head_dim": 16},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True},
    "pruned": {"model_type": "qwen3", "tie_word_embeddings": False, "head_dim": 16},
    # two layers without experts among those with experts
    "qwen3_moe": {**QWEN3_MOE, "mlp_only_layers": [0, 5]},
    # no experts on the first stage of a model of four layers
    "qwen3_moe_late": {**QWEN3_MOE, "mlp_only_layers": [0, 1]},
    "mixtral": {
        "model_type": "mixtral",
        "tie_word_embeddings": False,
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
    },
}
# teachers for servers alone: families that do more with logits than multiply states by a matrix
OTHER_HEADS: dict[str, dict[str, Any]] = {
    "cap": {"model_type": "gemma2", "head_dim": 8, "final_logit_softcapping": 0.5, "tie_word_embeddings": True},
    "scale": {"model_type": "granite", "logits_scaling": 0.25, "tie_word_embeddings": True},
    "bias": {"model_type": "phi", "tie_word_embeddings": False},
}
# layers of students that are not as deep as their teachers
STUDENT_LAYERS = {"pruned": 6}
K = 48
# what is trained on -> (model pair, settings)
OBJECTIVES: dict[str, tuple[str, list[str]]] = {
    "qwen3": ("qwen3", [f"loss.representation.k={K}"]),
    # stages without a supervised layer, and stages without a layer that runs at all
    "qwen3-sparse": ("qwen3", ["loss.representation.layers=[2,5]", "loss.representation.positions=all"]),
    "qwen3-first": ("qwen3", ["loss.representation.layers=[1]", f"loss.representation.k={K}"]),
    # biases, and an embedding whose tied head sits on another stage
    "qwen2-tied": (
        "qwen2",
        [
            f"loss.representation.k={K}",
            "loss.representation.position=predicting",
            "loss.representation.aggregation=token_mean",
        ],
    ),
    "qwen3_moe": ("qwen3_moe", [f"loss.representation.k={K}"]),
    "mixtral": ("mixtral", [f"loss.representation.k={K}"]),
    # a student of the teacher's width and another depth, without a bridge
    "pruned": ("pruned", [f"loss.representation.k={K}"]),
}

# (prompt tokens, response tokens, where its mask is 1)
RESPONSES = [
    (7, 200, "full"),
    (1, 1, "full"),
    (12, 33, "holes"),
    (40, 128, "holes"),
    (3, 2, "full"),
    (21, 90, "none"),
    (5, 17, "full"),
    (9, 64, "holes"),
    (16, 150, "full"),
    (2, 5, "last"),
    (30, K, "full"),
    (8, 9, "first"),
    (11, 101, "holes"),
    (26, 1, "full"),
    (4, 0, "full"),
]

WORDS = {
    "tp": "tensor",
    "pp": "pipeline",
    "cp": "context",
    "vpp": "virtual_pipeline",
    "first": "first_stage_layers",
    "last": "last_stage_layers",
    "ep": "expert",
    "etp": "expert_tensor",
}


@dataclass(frozen=True)
class Case:
    """One layout of both roles.

    Args:
        student, teacher: sizes in words; a teacher of "" is colocated and only data-parallel.
        recompute: "none", "selective", "uniform N" or "block N" (the student's).
        tokens: train.tokens_per_microbatch; the batch has 1044 tokens, the longest response 200.
        objective: a key of `OBJECTIVES`.
        extra: further settings.
    """

    student: str
    teacher: str = ""
    recompute: str = "none"
    tokens: int = 4096
    objective: str = "qwen3"
    extra: tuple[str, ...] = ()

    @property
    def ranks(self) -> int:
        """Processes."""
        served = sum(setting.endswith("engine=vllm") for setting in self.extra)
        of_server = served * ("teacher.vllm.placement=dedicated" in self.extra)
        return _ranks(self.student) + (_ranks(self.teacher) if self.dedicated else 0) + of_server

    @property
    def dedicated(self) -> bool:
        """Whether the teacher has ranks of its own."""
        return "dedicated" in self.teacher

    @property
    def overrides(self) -> list[str]:
        """The layout as configuration overrides."""
        assert self.dedicated or not self.teacher or _ranks(self.teacher) == _ranks(self.student), self
        method, _, layers = self.recompute.partition(" ")
        recompute = [f"student.recompute={'full' if layers else method}"]
        if layers:
            recompute += [f"student.recompute_method={method}", f"student.recompute_num_layers={layers}"]
        placement = ["teacher.placement=dedicated", f"teacher.ranks={_ranks(self.teacher)}"] if self.dedicated else []
        return [
            *_parallel("student", self.student),
            *_parallel("teacher", self.teacher),
            *placement,
            *recompute,
            f"train.tokens_per_microbatch={self.tokens}",
            *self.extra,
        ]

    def __str__(self) -> str:
        teacher = f", teacher {self.teacher}" if self.teacher else ""
        recompute = "" if self.recompute == "none" else f", recompute {self.recompute}"
        small = ", small microbatches" if self.tokens < 4096 else ""
        extra = "".join(f", {setting}" for setting in self.extra)
        return f"{self.objective}: {self.student}{teacher}{recompute}{small}{extra}"


def sizes_in_words(words: str) -> dict[str, int]:
    """Name -> size of what is named in a role's words: {"tp": 2, "first": 3} of "tp2 sp first3"."""
    return {name: int(number) for name, number in re.findall(r"([a-z]+)(\d+)", words)}


def _ranks(words: str) -> int:
    return math.prod(number for name, number in sizes_in_words(words).items() if name in ("tp", "pp", "cp", "dp"))


def _parallel(role: str, words: str) -> list[str]:
    sizes = [
        f"{role}.parallel.{WORDS[name]}={number}" for name, number in sizes_in_words(words).items() if name != "dp"
    ]
    named = words.split()
    sequence = [f"{role}.parallel.sequence=true"] if "sp" in named else []
    dispatcher = [f"{role}.parallel.dispatcher=allgather"] if "allgather" in named else []
    return [*sizes, *sequence, *dispatcher]


def save_model(path: Path, family: str, seed: int, layers: int = LAYERS) -> None:
    """A random model whose weights are large enough for hidden states of different seeds to have little in common."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        **(MODELS | OTHER_HEADS)[family],
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 50000.0},
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.15, generator=generator)
    model.save_pretrained(path)


def make_rollouts() -> list[Rollout]:
    """The batch that all layouts train on."""
    draw = random.Random(0)
    masks = {
        "full": lambda n: None,
        "holes": lambda n: [int(draw.random() < 0.7) for _ in range(n)],
        "none": lambda n: [0] * n,
        "first": lambda n: [1] + [0] * (n - 1),
        "last": lambda n: [0] * (n - 1) + [1],
    }
    rollouts = []
    for prompt, response, mask in RESPONSES:
        prompt_ids, response_ids = ([draw.randrange(VOCABULARY) for _ in range(n)] for n in (prompt, response))
        rollouts.append(Rollout(prompt_ids, response_ids, masks[mask](response)))
    return rollouts


@dataclass(frozen=True)
class Workbench:
    """The models of all pairs and the batch in the directory `root`, and what they must give."""

    root: Path

    def __post_init__(self) -> None:
        for seed, (pair, role) in enumerate((p, r) for p in MODELS for r in ("student", "teacher")):
            layers = STUDENT_LAYERS.get(pair, LAYERS) if role == "student" else LAYERS
            save_model(self.root / pair / role, pair, seed, layers)
        write_rollouts(self.root / "rollouts.jsonl", make_rollouts())

    def settings(self, objective: str) -> list[str]:
        """What all layouts of an objective share."""
        pair, settings = OBJECTIVES[objective]
        models = [f"{role}.hf_path={self.root / pair / role}" for role in ("student", "teacher")]
        return [*models, f"rollout.replay={self.root / 'rollouts.jsonl'}", *settings]

    @cache  # noqa: B019 - one workbench lives as long as the tests
    def expected(self, objective: str) -> tuple[dict[str, Any], dict[str, float]]:
        """The plain computation: losses and gradients, and the metrics."""
        config = load_config("verify", [*self.settings(objective), "output=unused"])
        rollouts = read_rollouts(self.root / "rollouts.jsonl", VOCABULARY)
        return reference(config, rollouts), direct_metrics(config, rollouts)


def direct_metrics(config: Config, rollouts: list[Rollout]) -> dict[str, float]:
    """`StepMetrics.named` from whole hidden states of plain Hugging Face models in float64; only for the MSE."""
    from transformers import AutoModelForCausalLM

    loss = config.loss.representation
    assert loss.kind == "mse" and loss.dim_reduction == "mean" and loss.final_norm and loss.positions != "first_k"
    rows: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])  # student, teacher: [layers, n, H] per response
    weights: list[float] = []
    places: list[tuple[int, int]] = []  # number of the token among the response's, from its start and from its end
    for states, path in zip(rows, (config.student.hf_path, config.teacher.hf_path), strict=True):
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, attn_implementation="eager")
        model.set_experts_implementation("eager")
        weights.clear()
        places.clear()
        for rollout in rollouts:
            tokens = [t for t, m in enumerate(rollout.mask) if m]
            tokens = tokens[-loss.k :] if loss.positions == "last_k" else tokens
            where = [len(rollout.prompt_ids) + t - (loss.position == "predicting") for t in tokens]
            ids = torch.tensor([rollout.ids.tolist()])
            with torch.no_grad():
                out = model.model(ids, output_hidden_states=True, use_cache=False)
            states.append(torch.stack(out.hidden_states[1:])[:, 0, where])
            weights += [1 / len(tokens) for _ in tokens]
            total = sum(rollout.mask)
            places += [(total - 1 - back, back) for back in reversed(range(len(tokens)))]
    student, teacher = (torch.cat(states, dim=1) for states in rows)
    if loss.aggregation == "token_mean":
        weights = [1.0] * len(weights)
    weight = torch.tensor(weights, dtype=torch.float64) / sum(weights)
    layers = loss.layers if isinstance(loss.layers, list) else range(1, len(student) + 1)
    named: dict[str, float] = {}
    for layer in layers:
        # the paper's depth alignment; Python rounds a fraction half to even
        matched = 1 + round(Fraction((layer - 1) * (len(teacher) - 1), len(student) - 1))
        ours, theirs = student[layer - 1], teacher[matched - 1]
        cosine = (ours * theirs).sum(-1) / (ours.norm(dim=-1) * theirs.norm(dim=-1))
        gradient = loss.weight / len(layers) * weight[:, None] * 2 / WIDTH * (ours - theirs)
        named[f"rep/loss_layer/{layer}"] = float(weight @ (ours - theirs).square().mean(-1))
        named[f"rep/cosine_similarity_layer/{layer}"] = float(cosine.mean())
        named[f"rep/relative_error_layer/{layer}"] = float((ours - theirs).norm() / theirs.norm())
        named[f"rep/norm_ratio_layer/{layer}"] = float((ours.norm(dim=-1) / theirs.norm(dim=-1)).mean())
        named[f"rep/gradient_norm_layer/{layer}"] = float(gradient.norm())
    norms = {layer: named[f"rep/gradient_norm_layer/{layer}"] for layer in layers}
    for layer, norm in norms.items():
        named[f"rep/gradient_share_layer/{layer}"] = norm**2 / sum(other**2 for other in norms.values())
    for end, name in enumerate(("first_k", "last_k")):
        k = 1
        while loss.positions in ("all", name):  # `cosine` is the deepest layer's
            chosen = torch.tensor([place[end] < k for place in places])
            named[f"rep/cosine_{name}/{k}"] = float(cosine[chosen].mean())
            if chosen.all():
                break
            k *= 2
    for total, per_layer in (("loss", "loss_layer"), ("cosine_similarity", "cosine_similarity_layer")):
        named[f"rep/{total}"] = sum(named[f"rep/{per_layer}/{layer}"] for layer in layers) / len(layers)
    return {"loss/total": loss.weight * named["rep/loss"], **named, **router_metrics(config, rollouts)}


def run_verify(overrides: list[str]) -> dict[str, float]:
    """The command `nemo-oprd verify` as the other tests run it; returns what its step would have logged as metrics."""
    import cases

    from nemo_oprd.distillation.step import GradientAccumulation

    results = []
    finish = GradientAccumulation.finish

    def spy(accumulation: GradientAccumulation) -> Any:
        results.append(finish(accumulation))
        return results[-1]

    with mock.patch.object(GradientAccumulation, "finish", spy):
        cases.run_verify(overrides)
    (result,) = results
    return {} if result is None else result.named


def move_targets(overrides: list[str]) -> dict[str, Any]:
    """Teacher forward and exchange of one batch; what travelled, by plan and in fact, over all ranks.

    Returns:
        "rows" (how many) and "layers" (which) of the batch; "planned" [((source, target), [(layer, row)])] as every
        receiver plans it; "received" bytes per rank.
    """
    import torch.distributed as dist

    from nemo_oprd.distillation.target_transfer import plan_transfers
    from nemo_oprd.run.models import distiller_for

    config = load_config("verify", overrides)
    distiller = distiller_for(config)
    rollouts = read_rollouts(str(config.rollout.replay), VOCABULARY)
    batch = distiller.batch(rollouts, distiller.objective_of(None))
    student_plan = batch.plan
    targets = distiller.targets(batch, student_plan)[0]
    table, budget = student_plan.hidden.table, config.train.tokens_per_microbatch
    teacher_plan = student_plan.for_teacher(distiller.teachers[0].role.layout, len(rollouts), budget)
    rank = dist.get_rank()
    transfers = plan_transfers(
        teacher_plan.hidden, student_plan.hidden, distiller.objective.teachers[0].layers, LAYERS, LAYERS, rank
    )
    mine = [
        ((t.source, rank), [(layer, row) for layer in t.layers for row in t.rows.tolist()])
        for t in transfers
        if t.target == rank
    ]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (mine, targets.bytes_received))
    return {
        "rows": len(table),
        "layers": distiller.objective.layers,
        "planned": [message for messages, _ in everyone for message in messages],
        "received": [received for _, received in everyone],
    }


def check_result(output: Path, expected: dict[str, Any], what: str, tolerance: float = 1e-5) -> None:
    """What verify wrote against `plain_computation.expected_result`: losses, relative to the size of their terms, and
    every gradient."""
    import pytest

    losses, gradients = read_result(output)
    for name in {"loss/total", "rep/loss", "output/loss"} & set(losses):
        assert losses[name] == pytest.approx(expected[name], rel=0, abs=tolerance * expected["scales"][name]), name
    deviations = agreement(gradients, expected["gradients"])
    worst = max(deviations, key=deviations.__getitem__)
    print(f"{what}: largest gradient deviation {deviations[worst]:.1e} at {worst}")
    assert deviations[worst] < tolerance, worst


def read_result(output: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """losses.json and the gradients that verify wrote."""
    from safetensors.torch import load_file

    return json.loads((output / "losses.json").read_text()), load_file(output / "grads.safetensors")
