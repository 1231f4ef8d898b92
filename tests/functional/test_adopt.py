"""Stock Megatron-core models, built without this project, adopted and trained by the functions of
`examples/adopt_in_your_script.py`: losses and every gradient against the golden cases.

Local layers read ordinary batches. Megatron's local norm and attention reject sequence and context parallelism, so
these layouts are run with its Transformer Engine layers, built of the stand-in (te_stand_in/), on packed sequences.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from adopted_golden import EVERYWHERE, check
from golden_runs import EXPECTED, TOLERANCE
from pool import Pools, WorkerError
from stock_models import GOLDEN

from nemo_oprd.batch.types import Rollout
from nemo_oprd.integrations.hidden_states import RepresentationLossConfig, observed, row_weights

ROOT = Path(__file__).parent.parent.parent
TE = "transformer_engine"
ADOPTED = "adopt_cases:golden_gradients"
CASES = [case for case in EXPECTED if not case.startswith(("opd", "composite", "bridge"))]
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
BLOCK = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1}
# name -> (ranks, sizes, further arguments of `golden_gradients`)
LOCAL_LAYOUTS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "one rank": (1, {}, {}),
    "one rank, block recompute": (1, {}, {"recompute": BLOCK}),
    "PP2": (2, {"pipeline": 2}, {}),
    "PP2, full recompute": (2, {"pipeline": 2}, {"recompute": FULL, "size": 2}),
    "PP2 VPP2": (2, {"pipeline": 2, "virtual_pipeline": 2}, {}),
    "PP2 VPP2, full recompute": (2, {"pipeline": 2, "virtual_pipeline": 2}, {"recompute": FULL, "size": 1}),
    "TP2": (2, {"tensor": 2}, {}),
    "DP2": (2, {"data": 2}, {"size": 1}),
}
TE_LAYOUTS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "TP2 SP": (2, {"tensor": 2, "sequence": True}, {}),
    "TP2 SP, full recompute": (2, {"tensor": 2, "sequence": True}, {"recompute": FULL, "size": 2}),
    "CP2": (2, {"context": 2}, {"size": 2}),
    "CP2, full recompute": (2, {"context": 2}, {"recompute": FULL}),
    "TP2 SP PP2": (4, {"tensor": 2, "sequence": True, "pipeline": 2}, {}),
    "PP2 CP2": (4, {"context": 2, "pipeline": 2}, {}),
}


def in_default_run(layout: str, case: str) -> bool:
    """Whether the default run takes a case at a layout of local layers: each case once, each layout at least once."""
    layouts = list(LOCAL_LAYOUTS)
    return layouts[CASES.index(case) % len(layouts)] == layout


def local_parameters() -> list[Any]:
    """What the default run takes, and all layouts of local layers with `EVERYWHERE`, marked `slow`."""
    return [
        pytest.param(layout, case, marks=[] if in_default_run(layout, case) else pytest.mark.slow)
        for layout in LOCAL_LAYOUTS
        for case in CASES
        if case in EVERYWHERE or in_default_run(layout, case)
    ]


@pytest.mark.parametrize(("layout", "case"), local_parameters())
def test_golden(pools: Pools, layout: str, case: str) -> None:
    ranks, sizes, further = LOCAL_LAYOUTS[layout]
    options = EXPECTED[case]["options"]
    check(case, pools[ranks].run(ADOPTED, options=options, layout=sizes, **further))


def test_the_default_run_takes_every_case_and_every_layout() -> None:
    assert len(CASES) == 13
    assert {layout for layout in LOCAL_LAYOUTS for case in CASES if in_default_run(layout, case)} == set(LOCAL_LAYOUTS)
    assert set(EVERYWHERE) < set(CASES)


@pytest.mark.slow
@pytest.mark.parametrize("case", EVERYWHERE)
@pytest.mark.parametrize("layout", TE_LAYOUTS)
def test_golden_with_sequence_and_context_parallelism(run_with_te: Callable[..., Any], layout: str, case: str) -> None:
    ranks, sizes, further = TE_LAYOUTS[layout]
    options = EXPECTED[case]["options"]
    check(case, run_with_te(ranks, TE, ADOPTED, backend=TE, options=options, layout=sizes, **further))


@pytest.mark.parametrize("layout", ["PP2", "PP2 VPP2", "PP2 VPP2, full recompute"])
def test_layers_below_the_deepest_supervised_one_need_not_run(pools: Pools, layout: str) -> None:
    """`depth` leaves out the third layer, in VPP2 the only one of its stage; the case supervises the second."""
    ranks, sizes, further = LOCAL_LAYOUTS[layout]
    options = EXPECTED["mse_even"]["options"]
    found = pools[ranks].run(ADOPTED, options=options, layout=sizes, depth=2, **further)
    check("mse_even", found)


@pytest.mark.parametrize(
    ("layout", "fault"),
    [
        ("PP2", "bypassed"),
        pytest.param("PP2", "unobserved", marks=pytest.mark.slow),
        pytest.param("PP2 VPP2", "bypassed", marks=pytest.mark.slow),
        ("PP2 VPP2", "unobserved"),
        ("DP2", "bypassed"),
        pytest.param("DP2", "unobserved", marks=pytest.mark.slow),
    ],
)
def test_a_dropped_injection_stops_the_update(pools: Pools, layout: str, fault: str) -> None:
    """The last rank does not inject: its layers run as stock ones, or its forward step passes no observer."""
    ranks, sizes, further = LOCAL_LAYOUTS[layout]
    arguments = {"options": EXPECTED["no_final_norm"]["options"], "layout": sizes, "fault": fault, **further}
    with pytest.raises(WorkerError) as error:
        pools[ranks].run(ADOPTED, **arguments)
    assert re.search(
        r"CaptureError: layer \d of the adopted student received its loss gradient \d time", str(error.value)
    )


def test_a_dropped_injection_shows_in_the_gradients(pools: Pools, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison above is not blind: without the check, the same fault fails it."""
    arguments = {"options": EXPECTED["no_final_norm"]["options"], "layout": {"pipeline": 2}, "unchecked": True}
    check("no_final_norm", pools[2].run(ADOPTED, **arguments))
    broken = pools[2].run(ADOPTED, fault="bypassed", **arguments)
    with pytest.raises(AssertionError):
        check("no_final_norm", broken)


def test_training_with_megatrons_optimizer(pools: Pools) -> None:
    losses = pools[2].run("adopt_cases:losses_of_training", layout={"pipeline": 2}, steps=6)
    assert losses[0] == pytest.approx(EXPECTED["mse_all_last_k"]["rep/loss"], rel=TOLERANCE)
    assert all(later < earlier for earlier, later in itertools.pairwise(losses)), losses
    assert losses[-1] < 0.8 * losses[0]


def test_wrappers(pools: Pools) -> None:
    """bf16 in `Float16Module` in DDP; the loss is that of float32 to the precision of bf16."""
    metrics, classes = pools[1].run("adopt_cases:bf16_metrics")
    assert classes == [
        "DistributedDataParallel",
        "Float16Module",
        "GPTModel",
        "ObservedTransformerBlock",
        "ObservedTransformerLayer",
    ]
    assert metrics["rep/loss"] == pytest.approx(EXPECTED["mse_all_last_k"]["rep/loss"], rel=0.02)


def test_a_model_without_an_observer_computes_the_same(pools: Pools) -> None:
    stock, adopted, unobserved = pools[1].run("adopt_cases:logits_before_and_after")
    assert torch.equal(stock, adopted) and torch.equal(stock, unobserved)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_slow": 0.5}
OWN_SCALES = {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3, "truncate": False}


@pytest.mark.parametrize(
    ("scaling", "other", "message"),
    [
        ({"rope_type": "linear", "factor": 4.0}, None, "rotary_base=50000 with 8 freq.*, type 'default' and 8 freq"),
        (YARN, {**YARN, "beta_slow": 0.05}, r"and cosines times 1.139 is not .* type 'yarn' .factor 4."),
        (OWN_SCALES, {**OWN_SCALES, "mscale": 0.8}, r"and cosines times 0.9295 is not .* and cosines times 0.9413"),
    ],
    ids=["linear", "YaRN", "YaRN with scales of its own"],
)
def test_scaled_rope_of_stock_models(pools: Pools, scaling: dict, other: dict | None, message: str) -> None:
    """What Megatron-Bridge's fields make of a config is what Hugging Face makes of it, to the rounding of float32."""
    from transformers import AutoModelForCausalLM

    logits, refusal = pools[1].run("adopt_cases:scaled_rope", scaling=scaling, other=other)
    assert re.search(message, refusal), refusal
    rope = {"rope_theta": 50000.0, **scaling}
    model = AutoModelForCausalLM.from_pretrained(GOLDEN / "student", rope_parameters=rope, dtype=torch.float64)
    plain = AutoModelForCausalLM.from_pretrained(GOLDEN / "student", dtype=torch.float64)
    with torch.no_grad():
        expected, unscaled = (m(torch.arange(60)[None]).logits for m in (model, plain))
    size = float(expected.abs().max())
    assert float((logits[..., : expected.shape[-1]] - expected).abs().max()) < 5e-6 * size
    assert float((unscaled - expected).abs().max()) > 1e-2 * size


def test_targets_keep_no_graph(pools: Pools) -> None:
    assert pools[1].run("adopt_cases:targets_need_gradients") == [False] * 3


# what -> (attributes of the config, pattern of the message)
REFUSALS: dict[str, tuple[str, dict[str, Any], str]] = {
    "CUDA graphs": ("adopt", {"cuda_graph_impl": "local"}, "cuda_graph_impl=local: .*expected cuda_graph_impl=none"),
    "overlapped experts": (
        "adopt",
        {"overlap_moe_expert_parallel_comm": True},
        "overlap_moe_expert_parallel_comm=True: .*expected overlap_moe_expert_parallel_comm=False",
    ),
    "a schedule plan": ("schedule_plan", {}, "overlap_moe_expert_parallel_comm=True .a schedule plan. bypasses"),
    "multi-token prediction": ("adopt", {"mtp_num_layers": 1}, "mtp_num_layers=1: .*build the model with"),
    "fp16": ("adopt", {"fp16": True}, "fp16=True: .*expected fp16=False: train in bf16"),
    "means per microbatch": (
        "adopt",
        {"calculate_per_token_loss": False},
        "calculate_per_token_loss=False: .*expected calculate_per_token_loss=True: set it before DDP",
    ),
    "outputs that are freed while gloo sends them": (
        "adopt",
        {"overlap_p2p_comm": True, "deallocate_pipeline_outputs": True},
        "overlap_p2p_comm=True with deallocate_pipeline_outputs=True and no CUDA: .*set deallocate_pipeline",
    ),
    "another layer": ("layer", {}, "layer . of model chunk 0 is a Identity; expected a TransformerLayer"),
    "another model": ("adopt_other_model", {}, "is a ColumnParallelLinear without a TransformerBlock.*GPTModel"),
    "a model of this project": (
        "adopt_own_model",
        {},
        "chunk 0 was built by nemo_oprd.*expected a stock GPTModel",
    ),
    "a model that is no list": ("adopt_module", {}, "was given a GPTModel; expected a list of model chunks: pass"),
    "another RoPE base": ("rope_base", {}, "rotary_base=10000 with .*rope_theta=50000, type 'default'.*build"),
    "another RoPE scaling": ("rope_scaling", {}, "rotary_base=50000 with .*type 'llama3' .factor 8.*build"),
    "no RoPE": ("rope_position_embedding", {}, "position_embedding_type=learned_absolute cannot .*leave out hf_config"),
    "a model that is not adopted": (
        "unadopted",
        {},
        r"layer 1 of the student is a TransformerLayer.*call adopt\(student",
    ),
    "a schedule of the weight": ("schedule", {}, "weight is a schedule.*expected a loss that stays the same"),
    "another width": ("width", {}, "student has width 48 and the teacher 32; expected equal widths"),
    "a loss scale": ("loss_scale", {}, "grad_scale_func multiplies losses by 128: .*expected 1: set loss_scale=None"),
    "missing states": ("missing_states", {}, r"for student layer 1: none, expected \[4, 32\]: run the teacher"),
    "states of other rows": ("other_states", {}, r"layer 1: shape \[3, 32\], expected \[4, 32\]: run the teacher"),
    "weights of another shape": ("weight_shape", {}, r"weights of shape \[4\]; expected \[B, S\]"),
    "an update without rows": ("empty_update", {}, "layer 1: no rank has a supervised token of it; expected"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals(pools: Pools, name: str) -> None:
    what, changes, pattern = REFUSALS[name]
    message = pools[1].run("adopt_refusals:refusal", what=what, **changes)
    assert re.search(pattern, message) and "\n" not in message, message


def test_gradients_that_ddp_rescales_are_refused(pools: Pools) -> None:
    """The config may say otherwise by the time of `adopt`: DDP has read it when it wrapped the model."""
    with pytest.raises(AssertionError, match="DDP multiplies gradients by 0.5, because calculate"):
        pools[2].run("adopt_refusals:rescaled_by_ddp")
    with pytest.raises(AssertionError, match="average_in_collective=True: .*expected False"):
        pools[2].run("adopt_refusals:rescaled_by_ddp", average_in_collective=True)


def test_a_frozen_teacher_may_have_what_only_training_forbids(pools: Pools) -> None:
    settings = {"fp16": True, "calculate_per_token_loss": False}
    assert pools[1].run("adopt_refusals:refusal", what="adopt", trained=False, **settings) == ""
    assert "fp16" in pools[1].run("adopt_refusals:refusal", what="adopt", fp16=True)


def test_a_target_on_another_stage_is_refused(pools: Pools) -> None:
    with pytest.raises(
        WorkerError, match=r"student layer 2 is on this rank, and teacher layer 2, its target, is on an"
    ):
        pools[2].run("adopt_refusals:target_on_another_stage")


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"context": 2}, "Context parallelism is only supported by TEDotProductAttention"),
        ({"tensor": 2, "sequence": True}, "sequence parallel not supported by torch"),
    ],
)
def test_megatron_builds_no_such_local_layers(pools: Pools, sizes: dict[str, Any], message: str) -> None:
    """The reason why these layouts are tested with other layers, as docs/nemo.md says."""
    with pytest.raises(WorkerError, match=message):
        pools[2].run("adopt_refusals:build_local", layout=sizes)


def test_observed_needs_a_length() -> None:
    with pytest.raises(ValueError, match="neither packed_seq_params nor sequence_length; expected one of them"):
        observed(None, None)


def test_observed_keeps_what_a_subclass_adds() -> None:
    from megatron.core.packed_seq_params import PackedSeqParams

    packed = PackedSeqParams(qkv_format="thd", max_seqlen_q=7, max_seqlen_kv=8)
    packed.total_tokens = 9  # type: ignore[attr-defined]
    sequences = observed(packed, None, depth=2)
    assert (sequences.qkv_format, sequences.max_seqlen_q, sequences.max_seqlen_kv) == ("thd", 7, 8)
    assert sequences.total_tokens == 9 and sequences.depth == 2 and sequences.packed  # type: ignore[attr-defined]


def test_row_weights() -> None:
    rollouts = [Rollout([5, 6], [7, 8, 9], [1, 0, 1]), Rollout([5], [7])]
    loss = RepresentationLossConfig(positions="all")
    assert row_weights(rollouts, 6, loss).tolist() == [[0, 0, 0.25, 0, 0.25, 0], [0, 0.5, 0, 0, 0, 0]]
    loss = RepresentationLossConfig(k=1, position="predicting", aggregation="token_mean")
    assert row_weights(rollouts, 5, loss).tolist() == [[0, 0, 0, 0.5, 0], [0.5, 0, 0, 0, 0]]
    with pytest.raises(ValueError, match="response 0 has 5 tokens with its prompt; expected at most length=4"):
        row_weights(rollouts, 4, loss)
    with pytest.raises(ValueError, match="response 0 has ids of its own for the teacher; expected"):
        row_weights([Rollout([5], [7], teacher_prompt_ids=[5])], 4, loss)


def test_the_page_shows_the_example() -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "nemo.md").read_text(), flags=re.DOTALL)
    example = (ROOT / "examples" / "adopt_in_your_script.py").read_text()
    assert example in blocks
    assert len(example.splitlines()) <= 45
