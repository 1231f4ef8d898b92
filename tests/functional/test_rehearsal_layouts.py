"""`nemo-oprd rehearse` over layouts of small models: no mistakes, ranks that meet, and the bytes that `plan` says."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from nemo_oprd.tools.rehearse import KNOWN_WAITS
from nemo_oprd.tools.rehearse.shim import COMPILERS
from tests.support.rehearsal_server import Rehearsals, Rehearsed

SMALL = {
    "model_type": "qwen2",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 1024,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
}
WIDE = {**SMALL, "hidden_size": 384, "num_attention_heads": 12}
MODELS = {
    "small": SMALL,
    "tied": {**SMALL, "model_type": "qwen3", "head_dim": 32, "tie_word_embeddings": True},
    "wide": {**WIDE, "num_hidden_layers": 6},
    "phi3": {**WIDE, "model_type": "phi3", "vocab_size": 2048},
    "experts": {
        **SMALL,
        "model_type": "qwen3_moe",
        "head_dim": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 512,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
}
PROMPT, RESPONSE = 64, 448
# of one response each; a rank has two or four
MICROBATCHES = [f"train.tokens_per_microbatch={PROMPT + RESPONSE}", "train.prompts_per_step=4", "rollout.per_prompt=1"]
SP, TP4 = "student.parallel.sequence=true", "student.parallel.tensor=4"
TP2, PP2, CP2, VPP2, EP2 = (
    f"student.parallel.{name}=2" for name in ("tensor", "pipeline", "context", "virtual_pipeline", "expert")
)
TEACHER_TP2, TEACHER_PP2, TEACHER_EP2 = (f"teacher.parallel.{name}=2" for name in ("tensor", "pipeline", "expert"))
ALLGATHER = "teacher.parallel.dispatcher=allgather"
FULL = "student.recompute=full"
EXPERTS = ("student.hf_path=models/experts", "teacher.hf_path=models/experts")
TIED = ("student.hf_path=models/tied", "teacher.hf_path=models/tied")
TO_BRIDGE = ("loss.representation.kind=normalized_mse", "loss.representation.dim_reduction=sum", "bridge.rank=8")
BRIDGE = ("teacher.hf_path=models/wide", "bridge.path=bridges/none", *TO_BRIDGE)
OWN_TEACHER = "teacher.hf_path=null"
PRIVILEGED = "teacher.prompt='{prompt} The answer is {answer}.'"


def output(kind: str) -> tuple[str, ...]:
    return f"loss.output.kind={kind}", "loss.output.weight=1", "loss.output.chunk_tokens=256"


@dataclass(frozen=True)
class Case:
    """A layout of `oprd_1p5b` with small models.

    Attributes:
        load: how tokens spread over experts.
        only: the ranks that are rehearsed; None: those of interest.
    """

    ranks: int
    settings: tuple[str, ...] = ()
    load: str = "balanced"
    only: tuple[int, ...] | None = None


# only with --all: by default, test_rehearsal.py rehearses one layout
CASES = {
    "EP2 TP2 SP, experts of one rank": Case(
        2,
        (*EXPERTS, EP2, TP2, SP, TEACHER_EP2, FULL, "train.prompts_per_step=2", ALLGATHER),
        load="one-rank",
        only=(0, 1),
    ),
    "DP2": Case(2),
    "PP2, 2 chunks, tied, whole vocabulary": Case(2, (PP2, VPP2, *TIED, *output("full_vocab"))),
    "CP2, bridge to a wider teacher in PP2, offloaded, groups": Case(
        2, (CP2, *BRIDGE, TEACHER_PP2, "teacher.offload=true", "teacher.resident_microbatches=1")
    ),
    "TP2 SP": Case(2, (TP2, SP, TEACHER_TP2, "teacher.parallel.sequence=true")),
    # the last tensor rank has all supervised rows, so that this one has no targets
    "TP4 SP, the second tensor rank": Case(
        8, (TP4, SP, PP2, TEACHER_TP2, FULL, "train.prompts_per_step=8"), only=(1, 5)
    ),
    "TP2, full": Case(2, (TP2, FULL)),
    "TP2 SP, selective": Case(2, (TP2, SP, "student.recompute=selective")),
    "block": Case(1, (FULL, "student.recompute_method=block", "student.recompute_num_layers=2")),
    "two layers at a time": Case(1, (FULL, "student.recompute_num_layers=2")),
    "PP2 of 3 and 1 layers": Case(2, (PP2, "student.parallel.first_stage_layers=3", FULL)),
    "PP2, 2 chunks, teacher PP2, DP2": Case(4, (PP2, VPP2, TEACHER_PP2)),
    "CP2 TP2 SP": Case(4, (CP2, TP2, SP, "teacher.parallel.context=2")),
    "dedicated": Case(2, ("teacher.placement=dedicated",)),
    "PP2, 2 chunks, dedicated TP2 SP": Case(
        4,
        (PP2, VPP2, TEACHER_TP2, "teacher.parallel.sequence=true", "teacher.placement=dedicated", "teacher.ranks=2"),
    ),
    "offloaded": Case(2, ("teacher.offload=true",)),
    "groups, PP2": Case(4, (PP2, "teacher.resident_microbatches=1")),
    "optimizer not sharded": Case(2, ("train.distributed_optimizer=false",)),
    "float32": Case(2, ("precision=fp32",)),
    **{f"{kind}, TP2 SP": Case(2, (TP2, SP, *output(kind))) for kind in ("full_vocab", "top_k", "jsd")},
    "sampled_token, TP2 SP": Case(2, (TP2, SP, *output("sampled_token"))),
    "sampled_token, PP2": Case(2, (PP2, *output("sampled_token"))),
    "top_k alone, PP2 TP2": Case(
        4,
        (PP2, TP2, TEACHER_TP2, *output("top_k"), "loss.representation.layers=none", "loss.representation.weight=0"),
    ),
    "tied, PP2": Case(2, (PP2, *TIED)),
    "bridge, TP2 SP": Case(2, (*BRIDGE, TP2, SP)),
    "bridge of full width, PP2": Case(
        2, ("teacher.hf_path=models/wide", "bridge.path=full_width", "bridge.train=true", PP2)
    ),
    "trained bridge, PP2": Case(2, (*BRIDGE, "bridge.train=true", PP2)),
    "teacher of another tokenizer": Case(
        2,
        (
            "teacher.hf_path=models/phi3",
            "teacher.reads=text",
            "bridge.path=bridges/none",
            *TO_BRIDGE,
            "logging.output_metrics_every=0",
        ),
    ),
    "two teachers": Case(
        2,
        (
            OWN_TEACHER,
            "teachers=[{name: a, hf_path: models/small, data_sources: [x]}, "
            "{name: b, hf_path: models/small, data_sources: [y]}]",
            "teacher.offload=true",
        ),
    ),
    "moving average": Case(2, (OWN_TEACHER, "teacher.weights=ema", PRIVILEGED, *output("full_vocab"))),
    "student as its teacher": Case(2, (OWN_TEACHER, "teacher.weights=student", PRIVILEGED, *output("full_vocab"))),
    "first layers only, PP2": Case(2, (PP2, "loss.representation.layers=[1,2]", "logging.output_metrics_every=0")),
    "experts": Case(1, EXPERTS),
    "EP2": Case(2, (*EXPERTS, EP2, TEACHER_EP2)),
    "EP2, full": Case(2, (*EXPERTS, EP2, TEACHER_EP2, FULL)),
    "EP2, experts of one rank": Case(2, (*EXPERTS, EP2, TEACHER_EP2), load="one-rank", only=(0, 1)),
    "EP4 TP2 SP": Case(4, (*EXPERTS, "student.parallel.expert=4", TP2, SP, TEACHER_EP2, FULL)),
    "PP2 EP2": Case(4, (*EXPERTS, PP2, EP2, "teacher.parallel.expert=4")),
    "EP2 of ETP2": Case(4, (*EXPERTS, EP2, TP2, SP, "student.parallel.expert_tensor=2", TEACHER_EP2)),
    "allgather": Case(2, (*EXPERTS, EP2, "student.parallel.dispatcher=allgather", TEACHER_EP2)),
    "losses of routers": Case(
        2,
        (*EXPERTS, EP2, TEACHER_EP2, "student.router_aux_loss=0.001", "student.router_z_loss=0.001"),
    ),
}
TOLERANCE = 0.05

pytestmark = pytest.mark.skipif(
    not any(map(shutil.which, COMPILERS)), reason=f"no C++ compiler ({', '.join(COMPILERS)}) is on PATH"
)


@pytest.fixture(scope="module")
def rehearsals(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rehearsals]:
    """In a folder with the models."""
    place = tmp_path_factory.mktemp("layouts")
    for name, shape in MODELS.items():
        (place / "models" / name).mkdir(parents=True)
        (place / "models" / name / "config.json").write_text(json.dumps(shape))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        with Rehearsals() as started:
            yield started


def rehearsed(rehearsals: Rehearsals, case: Case) -> Rehearsed:
    settings = [
        *("student.hf_path=models/small", "teacher.hf_path=models/small", "student.recompute=none"),
        *("loss.representation.k=100", *MICROBATCHES, *case.settings),
    ]
    return rehearsals.layout(
        "oprd_1p5b", settings, case.ranks, prompt=PROMPT, response=RESPONSE, only=case.only, load=case.load
    )


def errors(found: Rehearsed) -> dict[tuple[str, str], float]:
    """(Kind of rank, phase) -> how far the plan is off; of the fullest rank of a kind."""
    fullest: dict[tuple[str, str], dict[str, Any]] = {}
    for one in found.reports:
        # every rank takes part in the transfer of targets, which is a part of the phase "teacher"
        for name in ("teacher", "update", "optimizer") if "student" in one["role"] else ("teacher",):
            phase = one["phases"][name]
            key = one["role"], name
            if phase["measured_bytes"] > fullest.get(key, {"measured_bytes": 0})["measured_bytes"]:
                fullest[key] = phase
    return {key: phase["planned_bytes"] / phase["measured_bytes"] - 1 for key, phase in fullest.items()}


# where this project waits, once per step
OWN_WAITS = {file for file, _ in KNOWN_WAITS if file.startswith("nemo_oprd/")}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_layout_is_rehearsed(rehearsals: Rehearsals, name: str) -> None:
    found = rehearsed(rehearsals, CASES[name])
    assert (found.mistakes, found.disagreements) == ([], [])
    waits = [wait for one in found.reports for wait in one["waits"] if not wait["below"]]
    own = [wait for wait in waits if wait["file"].startswith("nemo_oprd/")]
    assert {wait["file"] for wait in own} <= OWN_WAITS and {wait["count"] for wait in own} == {1}, own
    if CASES[name].load == "balanced":  # as the plan takes them to be
        assert {key: error for key, error in errors(found).items() if abs(error) > TOLERANCE} == {}


@pytest.mark.slow
def test_all_tokens_to_the_experts_of_one_rank(rehearsals: Rehearsals) -> None:
    """The rank with these experts holds more than where tokens spread evenly, the other one less."""
    even = rehearsed(rehearsals, Case(2, (*EXPERTS, EP2, TEACHER_EP2, FULL), only=(0,)))
    uneven = rehearsed(rehearsals, Case(2, (*EXPERTS, EP2, TEACHER_EP2, FULL), load="one-rank", only=(0, 1)))
    assert (uneven.mistakes, uneven.disagreements) == ([], [])
    full, empty = (one["phases"]["update"]["measured_bytes"] for one in uneven.reports)
    assert empty < even.reports[0]["phases"]["update"]["measured_bytes"] < full
