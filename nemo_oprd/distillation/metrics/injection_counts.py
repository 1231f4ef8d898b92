"""Counts of injected gradients: every supervised layer must receive its gradient in every update.

Supervision can fail without an error: a hook inside a recomputed region sees tensors that need no gradient, a detached
tensor stops the backward pass, or a schedule bypasses a layer's forward. After the backward passes of an update, the
injected gradients are therefore counted over all ranks and compared with the number that the batch's plan requires.
"""

from __future__ import annotations

from nemo_oprd.batch.plan import BatchPlan
from nemo_oprd.distillation.hidden_state_loss import LayerSums


class CaptureError(ValueError):
    """A supervised layer, the output loss or a router was not reached, or reached twice, or got no gradient."""


def check_output_passes(count: int, plan: BatchPlan) -> None:
    """Raises CaptureError unless each last-stage rank had one backward pass per microbatch of which it holds rows.

    Args:
        count: backward passes of the output loss over all ranks.
        plan: the rows of the output loss.
    """
    expected = plan.held_microbatches()
    if count != expected:
        raise CaptureError(
            f"the output loss had {count} backward pass(es) in this step, expected {expected}: the last stage's "
            "final norm was bypassed or its output was detached. Check the code that replaces the model's forward; "
            "otherwise the loss would train nothing"
        )


def check_injections(sums: LayerSums, plan: BatchPlan, num_layers: int) -> None:
    """Compares the injections of an update with its plan.

    A gradient must be injected once per microbatch on every rank of the layer's stage that holds rows of it.

    Args:
        sums: over all ranks.
        plan: the rows of the representation loss.

    Raises:
        CaptureError: as `check_layer_counts`; the place is the layer's stage and model chunk.
    """
    expected = plan.held_microbatches()
    stages = {layer: plan.layout.stage_of_layer(layer, num_layers) for layer in sums}
    places = {layer: f"(pipeline stage {stage}, model chunk {chunk})" for layer, (stage, chunk) in stages.items()}
    check_layer_counts(sums, dict.fromkeys(sums, expected), places)


def check_layer_counts(
    sums: LayerSums,
    expected: dict[int, int],
    places: dict[int, str],
    *,
    trains: bool = True,
    settings: tuple[str, str] = ("student.recompute", "loss.representation.kind"),
) -> None:
    """Compares the injections of an update with the expected numbers, and looks for gradients that are zero.

    Where student and teacher agree exactly, a zero gradient is correct.

    Args:
        sums: over all ranks.
        expected: layer -> injections over all ranks.
        places: layer -> where it is, for the message.
        trains: whether the loss has a weight; without one all gradients are zero.
        settings: the user's names of the recompute settings and of the loss, for the messages.

    Raises:
        CaptureError: a number differs or a gradient is zero; names the layer, its place and the suspect settings.
    """
    recompute, kind = settings
    for layer, found in sums.items():
        where, count = f"layer {layer} {places[layer]}", int(found["injections"])
        if count != expected[layer]:
            raise CaptureError(
                f"{where} received its loss gradient {count} time(s) in this step, expected {expected[layer]}: the "
                f"layer's forward was bypassed or its output was detached. Check {recompute} and the code that "
                "replaces the layer's forward (CUDA graphs, custom schedules); otherwise the layer would train nothing"
            )
        if trains and found["squared_gradient"] == 0.0 and found["squared_error"] != 0.0:
            raise CaptureError(
                f"{where} received a gradient of exactly zero although student and teacher differ; expected a "
                f"nonzero gradient: check {kind}, and that the teacher is not the student"
            )
