"""Rehearses a rank with one deliberate mistake: `python rehearsal_plants.py NAME`, the task of `rank.py` on stdin."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from nemo_oprd.tools.rehearse import rank


def nothing() -> None:
    """No mistake."""


def host_tokens() -> None:
    """The token ids of a microbatch stay in host memory."""
    import torch

    from nemo_oprd.megatron import pipeline_schedule

    pipeline_schedule.on_device = torch.from_numpy  # type: ignore[assignment]


def host_positions() -> None:
    """The positions of a microbatch's tokens stay in host memory."""
    import torch

    from nemo_oprd.megatron import pipeline_schedule

    sequences: Any = pipeline_schedule.ObservedSequences

    def on_host(*args: Any, positions: torch.Tensor, **kwargs: Any) -> Any:
        return sequences(*args, positions=torch.zeros(positions.shape, dtype=torch.int64), **kwargs)

    pipeline_schedule.ObservedSequences = on_host  # type: ignore[assignment,misc]


def host_sums() -> None:
    """The sums of the metrics are in host memory when they are reduced over ranks."""
    import torch

    from nemo_oprd.distillation import step

    step.device = lambda: torch.device("cpu")


def host_shards() -> None:
    """What the shards of the vocabulary add to a softmax is summed in host memory."""
    import torch

    from nemo_oprd.losses import vocab_parallel

    dist = vocab_parallel.dist

    class OnHost:
        ReduceOp, all_gather = dist.ReduceOp, staticmethod(dist.all_gather)

        @staticmethod
        def all_reduce(tensor: Any, *args: Any, **kwargs: Any) -> None:
            dist.all_reduce(torch.zeros(tensor.shape), *args, **kwargs)

    vocab_parallel.dist = OnHost  # type: ignore[assignment]


def float32_weight() -> None:
    """One weight is float32 among bfloat16 ones."""
    changed_models(lambda chunk: to_float32(chunk.decoder.layers[0].self_attention.linear_proj))


def item_in_a_layer() -> None:
    """A layer looks at a number of its output."""
    from nemo_oprd.megatron import observed_layer

    forward = observed_layer.ObservedLayer.forward

    def looking(layer: Any, *args: Any, **kwargs: Any) -> Any:
        out = forward(layer, *args, **kwargs)
        assert out[0].flatten()[0].item() != 3.0
        return out

    observed_layer.ObservedLayer.forward = looking  # type: ignore[method-assign]


def wait_in_a_layer() -> None:
    """A layer waits for the device before its attention."""
    import torch

    from nemo_oprd.megatron import attention

    forward = attention.RotatedSelfAttention.forward

    def waiting(*args: Any, **kwargs: Any) -> Any:
        torch.cuda.synchronize()
        return forward(*args, **kwargs)

    attention.RotatedSelfAttention.forward = waiting


def not_contiguous() -> None:
    """The rows of the output loss are summed over tensor ranks in a transposed tensor."""
    from nemo_oprd.distillation import output_head

    dist = output_head.dist

    class Transposing:
        @staticmethod
        def all_reduce(tensor: Any, group: Any) -> None:
            dist.all_reduce(tensor.t(), group=group)

    output_head.dist = Transposing  # type: ignore[assignment]


def teacher_with_gradients() -> None:
    """The teacher's forward pass keeps what a backward pass would need."""
    import torch

    from nemo_oprd.distillation import teacher

    run, targets = teacher.run_schedule, teacher.Teacher.targets.__wrapped__  # type: ignore[attr-defined]

    def learning(chunks: Any, *args: Any, **kwargs: Any) -> None:
        for chunk in chunks:
            chunk.requires_grad_(True)
        with torch.enable_grad():
            run(chunks, *args, **(kwargs | {"forward_only": True}))

    teacher.run_schedule = learning
    teacher.Teacher.targets = targets  # type: ignore[method-assign]


def wide_targets() -> None:
    """The teacher keeps its rows in float32."""
    from nemo_oprd.distillation import target_transfer, teacher

    send = target_transfer.send_targets

    def wide(shard: Any, *args: Any) -> Any:
        found, received = send(shard, *args)
        return {layer: rows.float() for layer, rows in found.items()}, received

    teacher.send_targets = wide


def retained_graph() -> None:
    """The states of the supervised layers are kept, and with them the graph of their microbatch."""
    from nemo_oprd.distillation import hidden_state_loss

    supervise, kept = hidden_state_loss.HiddenStateLoss._supervise, []

    def keeping(loss: Any, layer: int, hidden: Any, **kwargs: Any) -> Any:
        out = supervise(loss, layer, hidden, **kwargs)
        kept.append(out)
        return out

    hidden_state_loss.HiddenStateLoss._supervise = keeping  # type: ignore[method-assign]


def targets_kept() -> None:
    """The targets of a group are kept until the step ends."""
    from nemo_oprd.distillation import step

    start, run = step.GradientAccumulation.__init__, step.GradientAccumulation.forward_backward

    def starting(self: Any, *args: Any, **kwargs: Any) -> None:
        self.targets = []
        start(self, *args, **kwargs)

    def keeping(self: Any, group: Any, targets: Any) -> None:
        self.targets.append(targets)
        run(self, group, targets)

    step.GradientAccumulation.__init__ = starting  # type: ignore[method-assign]
    step.GradientAccumulation.forward_backward = keeping  # type: ignore[method-assign]


def second_copy_of_weights() -> None:
    """Every model keeps a copy of its weights."""
    changed_models(lambda chunk: setattr(chunk, "kept", [p.detach().clone() for p in chunk.parameters()]))


def missing_all_reduce() -> None:
    """This rank leaves out the sum of the output loss's rows over the tensor ranks."""
    from nemo_oprd.distillation import output_head

    class Silent:
        @staticmethod
        def all_reduce(tensor: Any, group: Any) -> None: ...

    output_head.dist = Silent  # type: ignore[assignment]


def swapped_message() -> None:
    """Where this stage should send a gradient to the stage before, it receives a state."""
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    communicate = P2PCommunicator._communicate

    def swapped(self: Any, **message: Any) -> Any:
        gradient = message["tensor_send_prev"]
        if gradient is not None and not message["recv_prev"]:
            message |= {"tensor_send_prev": None, "recv_prev": True, "tensor_shape": tuple(gradient.shape)}
        return communicate(self, **message)

    P2PCommunicator._communicate = swapped


def not_contiguous_send() -> None:
    """The state for the next stage is sent as it lies in memory: transposed."""
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    communicate = P2PCommunicator._communicate

    def transposed(self: Any, **message: Any) -> Any:
        state = message["tensor_send_next"]
        if state is not None:
            message["tensor_send_next"] = state.transpose(0, 2).contiguous().transpose(0, 2)
        return communicate(self, **message)

    P2PCommunicator._communicate = transposed


def changed_models(change: Callable[[Any], None]) -> None:
    """Changes every model chunk after it was built."""
    from nemo_oprd.run import models

    build = models.build_chunks

    def built(*args: Any, **kwargs: Any) -> Any:
        chunks = build(*args, **kwargs)
        for chunk in chunks:
            change(chunk)
        return chunks

    models.build_chunks = built


def to_float32(linear: Any) -> None:
    import torch

    linear.weight = torch.nn.Parameter(linear.weight.detach().float())


if __name__ == "__main__":
    run_steps = rank.run_steps

    def with_mistake(*args: Any) -> None:
        for name in sys.argv[1].split(","):
            globals()[name]()
        run_steps(*args)

    rank.run_steps = with_mistake
    rank.main()
