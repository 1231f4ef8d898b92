"""Routing as in transformers, ties included; routes that are kept; what a config with experts says; refusals."""

from __future__ import annotations

import copy
import types
from typing import Any

import pytest
import torch
from family_configs import MIXTRAL, QWEN3, QWEN3_MOE

from nemo_oprd.batch.layout import Layout
from nemo_oprd.megatron.experts import Router, route
from nemo_oprd.megatron.model_config import transformer_config
from nemo_oprd.megatron.refusals import refuse_untrainable
from nemo_oprd.megatron.router_replay import Routes
from nemo_oprd.models import parse_model_spec
from nemo_oprd.models.architecture import Experts
from nemo_oprd.models.families import fused_name
from nemo_oprd.run.checks import check_dispatcher, check_experts_train
from nemo_oprd.tools.plan.parameters import model_parameters


def rule(count: int, per_token: int, *, normalized: bool = True, **others: Any) -> Experts:
    return Experts(count, per_token, 16, normalized, (True,), **others)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("normalized", [True, False])
def test_routing_is_that_of_qwen3_moe(dtype: torch.dtype, normalized: bool) -> None:
    """Against transformers' router: the same experts and weights to the bit, also where probabilities are equal."""
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

    theirs = Qwen3MoeTopKRouter(
        Qwen3MoeConfig(num_experts=8, num_experts_per_tok=3, hidden_size=16, norm_topk_prob=normalized)
    )
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(8, 16, generator=generator)
    weight[5] = weight[2]  # two experts that always tie
    theirs.weight.data = weight.to(dtype)
    hidden = torch.randn(200, 16, generator=generator).to(dtype)
    # coarse values, so that more logits are equal, and in bf16 more probabilities
    hidden[:100] = hidden[:100].round()
    with torch.no_grad():
        logits, expected, experts = theirs(hidden)
    weights, chosen = route(logits, rule(8, 3, normalized=normalized))
    assert torch.equal(chosen, experts)
    assert torch.equal(weights, expected)
    tied = ((experts == 2).any(-1) ^ (experts == 5).any(-1)).sum()
    assert tied > 0, "no token shows how a tie is broken"


def test_routing_is_that_of_mixtral() -> None:
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter

    theirs = MixtralTopKRouter(MixtralConfig(num_local_experts=8, num_experts_per_tok=2, hidden_size=16))
    theirs.weight.data.normal_()
    with torch.no_grad():
        logits, expected, experts = theirs(torch.randn(50, 16))
    weights, chosen = route(logits, rule(8, 2))
    assert torch.equal(chosen, experts) and torch.equal(weights, expected)


def test_routing_is_that_of_gpt_oss() -> None:
    from transformers import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter

    theirs = GptOssTopKRouter(GptOssConfig(num_local_experts=8, num_experts_per_tok=3, hidden_size=16))
    for parameter in theirs.parameters():
        parameter.data.normal_()
    with torch.no_grad():
        logits, expected, experts = theirs(torch.randn(50, 16))
    weights, chosen = route(logits, rule(8, 3, score="softmax_of_chosen"))
    assert torch.equal(chosen, experts) and torch.equal(weights, expected)


@pytest.mark.parametrize(("groups", "chosen_groups", "normalized"), [(1, 1, True), (4, 2, True), (4, 1, False)])
def test_routing_is_that_of_deepseek_v3(groups: int, chosen_groups: int, normalized: bool) -> None:
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

    sizes = {"n_routed_experts": 8, "num_experts_per_tok": 2, "hidden_size": 16, "routed_scaling_factor": 2.5}
    config = DeepseekV3Config(**sizes, n_group=groups, topk_group=chosen_groups, norm_topk_prob=normalized)
    theirs = DeepseekV3TopkRouter(config)
    theirs.weight.data.normal_()
    theirs.e_score_correction_bias.normal_(0, 0.3)  # some sums become negative
    with torch.no_grad():
        logits, expected, experts = theirs(torch.randn(50, 16))
    grouped = {"groups": groups, "chosen_groups": chosen_groups, "scale": 2.5, "score": "sigmoid"}
    bias = theirs.e_score_correction_bias
    weights, chosen = route(logits, rule(8, 2, normalized=normalized, **grouped), bias=bias)
    (chosen, order), (experts, theirs_order) = chosen.sort(-1), experts.sort(-1)
    assert torch.equal(chosen, experts)
    torch.testing.assert_close(weights.gather(1, order), expected.gather(1, theirs_order), rtol=2e-7, atol=0)
    without = route(logits, rule(8, 2, normalized=normalized, score="sigmoid"))[1].sort(-1)[0]
    assert not torch.equal(without, experts), "neither groups nor the bias show"


def router() -> Any:
    """A router without Megatron's construction: `routing` needs these attributes only."""
    made = types.SimpleNamespace(rule=rule(3, 1), layer_number=4, routes=Routes())
    made.routing = types.MethodType(Router.routing, made)
    return made


def test_a_layer_that_is_computed_again_keeps_its_routes() -> None:
    """The second pass of a microbatch computes slightly other logits, and a tie falls to the other expert."""
    first = torch.tensor([[[1.0, 1.0 + 1e-7, 0.0]], [[0.0, 3.0, 1.0]]])
    again = torch.tensor([[[1.0 + 1e-7, 1.0, 0.0]], [[0.0, 3.0, 1.0]]])
    keeping = router()
    with torch.no_grad():  # as Megatron computes a layer that it will compute again
        _, before = keeping.routing(first)
    assert before.tolist() == [[False, True, False], [False, True, False]]
    _, after = keeping.routing(again)
    assert torch.equal(before, after)
    # forgotten after that; another layer, another microbatch and a layer that is computed once choose for themselves
    _, changed = keeping.routing(again)
    assert not torch.equal(before, changed)
    with torch.no_grad():
        keeping.routing(first)
    keeping.layer_number = 5
    assert torch.equal(keeping.routing(again)[1], changed)
    keeping.layer_number, keeping.routes = 4, Routes()
    assert torch.equal(keeping.routing(again)[1], changed)
    keeping.routes = None
    with torch.no_grad():
        keeping.routing(first)
    assert torch.equal(keeping.routing(again)[1], changed)


def test_kept_routes_have_the_weights_of_the_new_logits() -> None:
    logits = torch.randn(6, 5, requires_grad=True)
    experts = torch.tensor([[0, 3]] * 6)
    weights, chosen = route(logits, rule(5, 2), choose=lambda most_probable: experts)
    assert torch.equal(chosen, experts)
    expected = torch.softmax(logits[:, [0, 3]], -1)
    assert torch.allclose(weights, expected)
    assert torch.autograd.grad(weights[:, 0].sum(), logits)[0][:, [0, 3]].abs().min() > 0


def test_which_layers_have_experts() -> None:
    spec = parse_model_spec({**QWEN3_MOE, "num_hidden_layers": 6, "decoder_sparse_step": 2, "mlp_only_layers": [3]})
    assert [spec.is_sparse(layer) for layer in range(1, 7)] == [False, True, False, False, False, True]
    assert spec.experts is not None and (spec.experts.normalized, spec.experts.ffn_size) == (True, 24)
    assert parse_model_spec({**QWEN3_MOE, "decoder_sparse_step": 100}).experts is None
    mixtral = parse_model_spec(MIXTRAL)
    assert mixtral.experts is not None and all(mixtral.experts.sparse) and mixtral.experts.ffn_size == 64


def test_parameters_are_counted() -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    for config in (QWEN3_MOE, MIXTRAL):
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**copy.deepcopy(config)))
        assert model_parameters(parse_model_spec(config)) == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("config", "change", "message"),
    [
        (QWEN3_MOE, {"num_experts_per_tok": 9}, "num_experts_per_tok=9 is more than the model's 4 experts"),
        (QWEN3_MOE, {"num_experts": None}, "'num_experts' is missing"),
        (QWEN3_MOE, {"mlp_only_layers": 3}, "mlp_only_layers=3"),
        (QWEN3_MOE, {"decoder_sparse_step": 0}, "decoder_sparse_step=0"),
        (MIXTRAL, {"sliding_window": 100}, "sliding_window=100 is shorter"),
        (MIXTRAL, {"sliding_window": "4096"}, "sliding_window='4096'; expected a positive number"),
        (MIXTRAL, {"sliding_window": 100, "max_position_embeddings": None}, "'max_position_embeddings' is missing"),
        (MIXTRAL, {"router_jitter_noise": 0.1}, "router_jitter_noise=0.1"),
    ],
)
def test_refusals(config: dict, change: dict, message: str) -> None:
    with pytest.raises(ValueError) as error:
        parse_model_spec({**config, **change}, "dir/config.json")
    assert message in str(error.value) and "expected" in str(error.value)


def test_sizes_that_do_not_fit() -> None:
    spec = parse_model_spec(QWEN3_MOE)
    with pytest.raises(ValueError, match=r"student.parallel.expert=3 does not divide the model's 4 experts; choose"):
        spec.check_expert_parallel(3, 1, "student.parallel")
    with pytest.raises(ValueError, match=r"expert_tensor=5 does not divide the experts' feed-forward size 24"):
        spec.check_expert_parallel(1, 5, "student.parallel")
    with pytest.raises(ValueError, match=r"expert=2, but the qwen3 model has no experts"):
        parse_model_spec(QWEN3).check_expert_parallel(2, 1, "teacher.parallel")
    with pytest.raises(ValueError, match=r"expert_tensor=2, but the qwen3 model has no experts"):
        parse_model_spec(QWEN3).check_expert_parallel(1, 2, "teacher.parallel")
    with pytest.raises(ValueError, match=r"sequence=false: a student with experts needs sequence parallelism"):
        check_experts_train(spec, Layout(tensor=2))
    check_experts_train(spec, Layout(tensor=2, sequence=True))
    check_experts_train(parse_model_spec(QWEN3), Layout(tensor=2))


def test_names_of_tensors_that_transformers_fuses() -> None:
    assert fused_name("model.layers.3.mlp.experts.17.up_proj.weight") == (
        "model.layers.3.mlp.experts.gate_up_proj",
        17,
        1,
    )
    assert fused_name("model.layers.0.block_sparse_moe.experts.2.w2.weight") == (
        "model.layers.0.mlp.experts.down_proj", 2, None,
    )  # fmt: skip
    assert fused_name("model.layers.0.block_sparse_moe.gate.weight") == ("model.layers.0.mlp.gate.weight", None, None)
    assert fused_name("model.layers.0.mlp.up_proj.weight") == ("model.layers.0.mlp.up_proj.weight", None, None)


@pytest.mark.parametrize(
    "losses", [{"moe_aux_loss_coeff": 1e-3}, {"moe_aux_loss_coeff": [0.0, 1e-3]}, {"moe_z_loss_coeff": 1e-3}]
)
def test_adopted_routers_have_no_losses_of_their_own(losses: dict) -> None:
    plain = {"calculate_per_token_loss": True, "fp16": False, "moe_aux_loss_coeff": 0.0, "moe_z_loss_coeff": None}
    refuse_untrainable(types.SimpleNamespace(**plain, num_moe_experts=4))
    with pytest.raises(ValueError, match=r"routers' losses are multiplied by the number of tokens.*set them to 0"):
        refuse_untrainable(types.SimpleNamespace(**{**plain, **losses}, num_moe_experts=4))
    refuse_untrainable(types.SimpleNamespace(**{**plain, **losses}, num_moe_experts=None))


@pytest.mark.parametrize(
    ("sizes", "kind"),
    [({}, "alltoall"), ({"dispatcher": "deepep"}, "flex"), ({"dispatcher": "deepep", "expert": 1}, "alltoall")],
)
def test_deepep_is_megatrons_flexible_dispatcher(sizes: dict[str, Any], kind: str) -> None:
    """Where tokens travel; what it computes needs GPUs. Without the package it is refused before anything starts."""
    layout = Layout(**{"expert": 2, "data": 2, **sizes})
    role = types.SimpleNamespace(layout=layout, name="student")
    config = transformer_config(parse_model_spec(QWEN3_MOE), role, torch.float32)  # type: ignore[arg-type]
    assert config.moe_token_dispatcher_type == kind
    assert config.moe_flex_dispatcher_backend == "deepep"
    if layout.dispatcher == "deepep":
        with pytest.raises(ValueError, match="role=deepep needs the package deep_ep"):
            check_dispatcher(layout, "role")


def test_a_float32_router_keeps_its_input_in_bf16() -> None:
    """Logits are to the bit those of a product of float32 copies, which it does not keep; gradients agree in bf16."""
    generator = torch.Generator().manual_seed(1)
    input, weight = (
        torch.randn(shape, generator=generator).bfloat16().requires_grad_() for shape in ((6, 2, 8), (4, 8))
    )
    gradient = torch.randn(6, 2, 4, generator=generator)
    made: Any = types.SimpleNamespace(config=types.SimpleNamespace(moe_router_dtype="fp32"), weight=weight)
    kept: list[torch.dtype] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t.dtype), t)[1], lambda t: t):
        logits = Router.gating(made, input)
    assert set(kept) == {torch.bfloat16}
    found = torch.autograd.grad(logits, (input, weight), gradient)
    plain = torch.nn.functional.linear(input.float(), weight.float())
    assert torch.equal(logits, plain)
    for ours, theirs in zip(found, torch.autograd.grad(plain, (input, weight), gradient), strict=True):
        assert ours.dtype == torch.bfloat16
        torch.testing.assert_close(ours, theirs, rtol=2**-7, atol=1e-6)  # one rounding to bf16, sums in another order
