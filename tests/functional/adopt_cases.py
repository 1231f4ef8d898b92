"""What workers run for test_adopt.py: adopted stock models, trained by the example's functions on the golden pair."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from stock_models import GOLDEN, megatron_groups, stock_model, wrapped

from nemo_oprd.batch.layout import Layout

# padding to a multiple of 4 lets two context ranks and two sequence-parallel ranks divide a sequence
LENGTH = 28


def golden_batches(layout: Layout, loss: Any, size: int, *, packed: bool) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(Tokens, weights) of this rank's microbatches of `size` responses; packed ones are [1, size * S]."""
    from megatron.core import parallel_state

    from nemo_oprd.integrations.hidden_states import row_weights
    from nemo_oprd.megatron.versions import batch_on_this_cp_rank
    from nemo_oprd.rollout.replay import read_rollouts

    rollouts = read_rollouts(str(GOLDEN / "rollouts.jsonl"), 61)
    weight = row_weights(rollouts, LENGTH, loss)
    tokens = torch.zeros(len(rollouts), LENGTH, dtype=torch.int64)
    for i, rollout in enumerate(rollouts):
        tokens[i, : rollout.length] = torch.tensor(rollout.ids)
    data = layout.coordinates(dist.get_rank()).data
    batch = {"tokens": tokens[data :: layout.data], "weight": weight[data :: layout.data]}
    batch = batch_on_this_cp_rank(batch, parallel_state.get_context_parallel_group())
    shape = (1, -1) if packed else (size, -1)
    return [
        (t.reshape(shape), w.reshape(shape))
        for t, w in zip(batch["tokens"].split(size), batch["weight"].split(size), strict=True)
    ]


def packed_forward_step(size: int) -> Callable[[Any, Any], Any]:
    """A forward step of packed microbatches of `size` sequences, for attention that reads cumulative lengths."""
    from megatron.core.packed_seq_params import PackedSeqParams

    from nemo_oprd.integrations.hidden_states import observed, zero_loss

    def forward_step(microbatches: Iterator[Any], model: Any) -> Any:
        tokens, observer = next(microbatches)
        bounds = torch.arange(0, (size + 1) * LENGTH, LENGTH, dtype=torch.int32)
        packed = PackedSeqParams(
            qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds, max_seqlen_q=LENGTH, max_seqlen_kv=LENGTH
        )
        return model(tokens, None, None, packed_seq_params=observed(packed, observer)), zero_loss

    return forward_step


def gathered_gradients(chunks: list[Any], layout: Layout) -> dict[str, torch.Tensor]:
    """HF name -> whole gradient, of the ranks with data and context coordinate 0."""
    from nemo_oprd.megatron.param_names import mappings_by_name, named_parameters
    from nemo_oprd.models import read_model_spec

    spec = read_model_spec(GOLDEN / "student")
    mine = {name: parameter.main_grad for name, parameter in named_parameters(chunks).items()}
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    places = [layout.coordinates(rank) for rank in range(layout.size)]
    firsts = [held for held, place in zip(everyone, places, strict=True) if place.data == place.context == 0]
    found = {}
    for name, mapping in mappings_by_name(spec).items():
        shards = [held[name] for held in firsts if name in held]
        assert len(shards) == layout.tensor, name
        whole = shards[0] if mapping.form.axis is None else mapping.form.unshard(shards, spec)
        found.update(zip(mapping.hf, mapping.form.split_to_hf(whole, spec), strict=True))
    return found


def golden_gradients(
    options: dict[str, Any],
    layout: dict[str, Any],
    *,
    backend: str = "local",
    size: int = 3,
    recompute: dict[str, Any] | None = None,
    depth: int | None = None,
    fault: str | None = None,
    unchecked: bool = False,
) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """Metrics and HF gradients of adopted stock models by the example's `accumulate`.

    Args:
        size: responses per microbatch.
        depth: the deepest layer that runs.
        fault: what is broken on the last pipeline rank: "bypassed" (layers run without their observed forward),
            "unobserved" (the forward step passes no observer).
        unchecked: leaves out the check of `finish`.
    """
    from examples import adopt_in_your_script as example
    from nemo_oprd.integrations.hidden_states import HiddenStateDistillation, RepresentationLossConfig, adopt, observed

    sizes, loss = Layout(**layout), RepresentationLossConfig(**options)
    packed = backend == "transformer_engine"
    step = packed_forward_step(size) if packed else example.forward_step
    with (
        megatron_groups(sizes),
        mock.patch.object(example, "forward_step", step),
        mock.patch.object(example, "observed", partial(observed, depth=depth)),
    ):
        student = wrapped(stock_model("student", sizes, backend, **(recompute or {})))
        teacher = stock_model("teacher", sizes, backend)
        for chunk in teacher:
            chunk.requires_grad_(False).eval()
        adopt(student, hf_config=GOLDEN / "student")
        adopt(teacher, hf_config=GOLDEN / "teacher")
        oprd = HiddenStateDistillation(student, teacher, loss)
        _break(fault, student, example)
        if unchecked:
            oprd._check = lambda *_: None  # type: ignore[method-assign]
        batches = golden_batches(sizes, loss, size, packed=packed)
        # twice, because the second update must not see anything of the first
        example.accumulate(oprd, student, teacher, batches)
        metrics = example.accumulate(oprd, student, teacher, batches)
        return metrics, gathered_gradients([chunk.module for chunk in student], sizes)


def _break(fault: str | None, student: list[Any], example: Any) -> None:
    if fault is None or dist.get_rank() != dist.get_world_size() - 1:
        return
    if fault == "bypassed":
        from megatron.core.transformer.transformer_layer import TransformerLayer

        for chunk in student:
            for layer in chunk.module.decoder.layers:
                # as code would that replaces a layer's forward after the model was adopted
                layer.forward = lambda *, of=layer, packed_seq_params, **kwargs: TransformerLayer.forward(of, **kwargs)
    else:
        whole = example.forward_step

        def forward_step(microbatches: Iterator[Any], model: Any) -> Any:
            tokens, observer = next(microbatches)
            trained = any(parameter.requires_grad for parameter in model.parameters())
            return whole(iter([(tokens, None if trained else observer)]), model)

        example.forward_step = forward_step


def losses_of_training(layout: dict[str, Any], steps: int) -> list[float]:
    """`rep/loss` before every update of a run with Megatron's AdamW, as docs/nemo.md shows the loop."""
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    from examples import adopt_in_your_script as example
    from nemo_oprd.integrations.hidden_states import HiddenStateDistillation, RepresentationLossConfig, adopt

    sizes, loss = Layout(**layout), RepresentationLossConfig(k=4)
    with megatron_groups(sizes):
        student, teacher = wrapped(stock_model("student", sizes)), stock_model("teacher", sizes)
        for chunk in teacher:
            chunk.requires_grad_(False)
        oprd = HiddenStateDistillation(adopt(student), adopt(teacher), loss)
        config = OptimizerConfig(optimizer="adam", lr=1e-2, weight_decay=0.0, params_dtype=torch.float32)
        optimizer = get_megatron_optimizer(config, student, use_gloo_process_groups=False)
        student[0].config.grad_scale_func = optimizer.scale_loss
        batches = golden_batches(sizes, loss, 3, packed=False)
        losses = []
        for _ in range(steps):
            optimizer.zero_grad()
            losses.append(example.accumulate(oprd, student, teacher, batches)["rep/loss"])
            optimizer.step()
        return losses


def bf16_metrics() -> tuple[dict[str, float], list[str]]:
    """Metrics of a model in `Float16Module` and DDP, and the names of its classes from the outside in."""
    from megatron.core.transformer.module import Float16Module

    from examples import adopt_in_your_script as example
    from nemo_oprd.integrations.hidden_states import HiddenStateDistillation, RepresentationLossConfig, adopt

    layout, loss, settings = Layout(), RepresentationLossConfig(k=4), {"bf16": True, "params_dtype": torch.bfloat16}
    with megatron_groups(layout):
        models = [stock_model(name, layout, **settings)[0] for name in ("student", "teacher")]
        student, teacher = (Float16Module(model.config, model) for model in models)
        teacher.requires_grad_(False)
        adopted = adopt(wrapped([student]))
        oprd = HiddenStateDistillation(adopted, adopt([teacher]), loss)
        batches = golden_batches(layout, loss, 3, packed=False)
        metrics = example.accumulate(oprd, adopted, [teacher], batches)
        inner = [adopted[0], adopted[0].module, models[0], models[0].decoder, models[0].decoder.layers[0]]
        return metrics, [type(module).__name__ for module in inner]


def logits_before_and_after() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits of a stock model, of the adopted model without an observer, and with one that observes nothing."""
    from nemo_oprd.integrations.hidden_states import adopt, observed

    with megatron_groups(Layout()), torch.no_grad():
        (model,) = stock_model("student", Layout())
        tokens = torch.arange(20).view(2, 10)
        stock = model(tokens, None, None)
        adopt(adopt([model]))
        names = [type(layer).__name__ for layer in model.decoder.layers]
        assert names == ["ObservedTransformerLayer"] * 3, names
        unobserved = observed(None, None, sequence_length=10)
        return stock, model(tokens, None, None), model(tokens, None, None, packed_seq_params=unobserved)


def scaled_rope(scaling: dict[str, Any], other: dict[str, Any]) -> tuple[torch.Tensor, str]:
    """Logits [1, 60, V] of an adopted stock model with this rope_scaling, and the refusal of another one."""
    from nemo_oprd.integrations.hidden_states import adopt
    from nemo_oprd.megatron.refusals import check_rope

    hf_config = json.loads((GOLDEN / "student" / "config.json").read_text())
    with megatron_groups(Layout()), torch.no_grad():
        (model,) = adopt(
            stock_model("student", Layout(), scaling=scaling), hf_config=hf_config | {"rope_scaling": scaling}
        )
        try:
            check_rope(model, hf_config | {"rope_scaling": other})
            message = ""
        except ValueError as error:
            message = str(error)
        return model(torch.arange(60)[None], None, None), message


def targets_need_gradients() -> list[bool]:
    """Whether captured states require gradients, after a forward pass of a trainable model with gradients enabled."""
    from nemo_oprd.integrations.hidden_states import HiddenStateDistillation, adopt, observed

    with megatron_groups(Layout()):
        (model,) = adopt(stock_model("student", Layout()))
        capture = HiddenStateDistillation([model], [model]).capture(torch.ones(1, 10))
        model(torch.arange(10)[None], None, None, packed_seq_params=observed(None, capture, sequence_length=10))
        return [capture.captured[layer].requires_grad for layer in (1, 2, 3)]
