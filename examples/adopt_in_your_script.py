"""OPRD in your own Megatron training script: what to add to one that trains a stock GPTModel. docs/nemo.md explains it.

oprd = HiddenStateDistillation(adopt(student), adopt(teacher))  # after the models are built and wrapped in DDP
weight_BS = row_weights(rollouts, length, loss)                 # the whole batch; every rank takes its own rows
metrics = accumulate(oprd, student, teacher, batches)           # then the optimizer's step, as in your script
"""

import torch
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.utils import get_model_config

from nemo_oprd.integrations.hidden_states import observed, zero_loss


def forward_step(microbatches, model):
    """Your forward step, with the observer of the microbatch in its packed_seq_params, and without labels."""
    tokens_BS, observer = next(microbatches)
    length = tokens_BS.shape[1] * get_model_config(model).context_parallel_size
    return model(tokens_BS, None, None, packed_seq_params=observed(None, observer, sequence_length=length)), zero_loss


def run_schedule(chunks, microbatches, *, forward_only):
    """Megatron's schedule over (tokens, observer) pairs; every virtual stage reads them from an iterator of its own."""
    iterators, one = [iter(microbatches) for _ in chunks], len(chunks) == 1
    batch_size, length = microbatches[0][0].shape
    chunks[0].config.finalize_model_grads_func = finalize_model_grads
    get_forward_backward_func()(
        forward_step_func=forward_step, data_iterator=iterators[0] if one else iterators,
        model=chunks[0] if one else chunks, num_microbatches=len(microbatches), micro_batch_size=batch_size,
        seq_length=length * chunks[0].config.context_parallel_size, forward_only=forward_only,
    )  # fmt: skip


def accumulate(oprd, student, teacher, batches):
    """Accumulates the gradient of (tokens, weights) pairs, one per microbatch of this rank; returns the metrics."""
    tokens, weights = zip(*batches, strict=True)
    captures = [oprd.capture(weight_BS) for weight_BS in weights]
    with torch.no_grad():
        run_schedule(teacher, list(zip(tokens, captures, strict=True)), forward_only=True)
    losses = [oprd.losses(weight_BS, capture.captured) for weight_BS, capture in zip(weights, captures, strict=True)]
    for chunk in student:
        chunk.zero_grad_buffer()
    run_schedule(student, list(zip(tokens, losses, strict=True)), forward_only=False)
    return oprd.finish()
