"""What workers run for test_forward_step.py: `OPRDForwardStep` in Megatron's own schedule on stock models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from adopt_cases import LENGTH, gathered_gradients
from stock_models import GOLDEN, megatron_groups, stock_model, wrapped

from nemo_oprd.batch.layout import Layout


class StockProvider:
    """A stock golden model behind the methods of Megatron-Bridge's providers that `OPRDForwardStep` calls."""

    virtual_pipeline_model_parallel_size = None
    use_cpu_initialization = True

    def __init__(self, name: str, layout: Layout) -> None:
        self.hf_model_id = str(GOLDEN / name)
        self._name, self._layout = name, layout
        self._hooks: list[Callable[[Sequence[Any]], Sequence[Any]]] = []

    def register_pre_wrap_hook(self, hook: Callable[[Sequence[Any]], Sequence[Any]]) -> None:
        self._hooks.append(hook)

    def finalize(self) -> None:
        """Nothing to complete."""

    def provide_distributed_model(self, *, wrap_with_ddp: bool = True, **_: Any) -> list[Any]:
        chunks: Any = stock_model(self._name, self._layout)
        for hook in self._hooks:
            chunks = hook(chunks)
        return wrapped(chunks) if wrap_with_ddp else chunks


def golden_gradients(
    options: dict[str, Any], layout: dict[str, Any], size: int, fault: str | None = None
) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """Metrics and HF gradients of the second of two updates.

    Args:
        size: responses per microbatch.
        fault: "unobserved": layers of the last rank run without their observed forward.
    """
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
    from megatron.core.transformer.transformer_layer import TransformerLayer

    from nemo_oprd.integrations.forward_step import OPRDForwardStep
    from nemo_oprd.integrations.hidden_states import RepresentationLossConfig
    from nemo_oprd.integrations.recorded_rollouts import RolloutDataset
    from nemo_oprd.rollout.replay import read_rollouts

    sizes, loss = Layout(**layout), RepresentationLossConfig(**options)
    with megatron_groups(sizes):
        student = StockProvider("student", sizes)
        step = OPRDForwardStep(student, StockProvider("teacher", sizes), loss)
        chunks = student.provide_distributed_model()
        if fault and dist.get_rank() == dist.get_world_size() - 1:
            for layer in chunks[0].module.decoder.layers:
                layer.forward = lambda *, of=layer, packed_seq_params, **kwargs: TransformerLayer.forward(of, **kwargs)
        rollouts = read_rollouts(GOLDEN / "rollouts.jsonl", 61)
        dataset = RolloutDataset(rollouts, LENGTH, len(rollouts), 2 * len(rollouts), loss)
        mine = range(sizes.coordinates(dist.get_rank()).data, len(dataset), sizes.data)
        batches = torch.utils.data.DataLoader(
            dataset, batch_sampler=[[*mine[i : i + size]] for i in range(0, len(mine), size)]
        )
        iterator, per_update = iter(batches), len(mine) // size // 2
        config = chunks[0].config
        config.finalize_model_grads_func = finalize_model_grads
        for _ in range(2):
            chunks[0].zero_grad_buffer()
            reported = get_forward_backward_func()(
                forward_step_func=partial(step, None), data_iterator=iterator, model=chunks[0],
                num_microbatches=per_update, micro_batch_size=size, seq_length=LENGTH, forward_only=False,
            )  # fmt: skip
            assert config.finalize_model_grads_func is finalize_model_grads
            for line in reported:  # on the last stage
                assert float(line["rep/loss"]) == torch.tensor(step.metrics["rep/loss"]).float()
        return step.metrics, gathered_gradients([chunk.module for chunk in chunks], sizes)


def evaluation() -> None:
    """The step in a forward pass without gradients."""
    from nemo_oprd.integrations.forward_step import OPRDForwardStep

    with megatron_groups(Layout()):
        student = StockProvider("student", Layout())
        step = OPRDForwardStep(student, StockProvider("teacher", Layout()))
        (model,) = student.provide_distributed_model()
        with torch.no_grad():
            step(None, iter([]), model)


def another_provider() -> None:
    """The step with a model that was not built by the provider it was given."""
    from nemo_oprd.integrations.forward_step import OPRDForwardStep

    with megatron_groups(Layout()):
        model = StockProvider("student", Layout()).provide_distributed_model()[0]
        step = OPRDForwardStep(StockProvider("student", Layout()), StockProvider("teacher", Layout()))
        step(None, iter([]), model)
