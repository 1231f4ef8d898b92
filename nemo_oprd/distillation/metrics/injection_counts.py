"""Counts of injected gradients: every supervised layer must receive its gradient in every update.

Supervision can fail without an error: a hook inside a recomputed region sees tensors that need no gradient, a detached
tensor stops the backward pass, or a schedule bypasses a layer's forward. After the backward passes of an update, the
injected gradients are therefore counted over all ranks and compared with the number that the batch's plan requires.
"""

from __future__ import annotations

from nemo_oprd.batch.plan import BatchPlan


class CaptureError(ValueError):
    """A supervised layer was not reached, reached twice, or received no gradient."""


def expected_injections(plan: BatchPlan, layers: list[int]) -> dict[int, int]:
    """Layer -> how many times its gradient must be injected in one pass, over all ranks.

    The gradient is injected once per microbatch on every rank of the layer's stage that holds rows of the microbatch.
    """
    return dict.fromkeys(layers, plan.held_microbatches())


def check_output_passes(count: int, plans: list[BatchPlan]) -> None:
    """Checks that the output loss had one backward pass per microbatch on every last-stage rank that holds rows of it.

    Args:
        count: backward passes of the output loss over all ranks and groups.
        plans: the output plan of each group of the update.

    Raises:
        CaptureError: the numbers differ.
    """
    expected = sum(plan.held_microbatches() for plan in plans)
    if count != expected:
        raise CaptureError(
            f"the output loss had {count} backward pass(es) in this step, expected {expected}: the last stage's "
            "final norm was bypassed or its output was detached. Check the code that replaces the model's forward; "
            "otherwise the loss would train nothing"
        )


def check_injections(
    counts: dict[int, int],
    squared_norms: dict[int, float],
    plans: list[BatchPlan],
    num_layers: int,
    *,
    identical: set[int],
) -> None:
    """Compares the injections of an update with the plans of its groups.

    Args:
        counts: layer -> injections over all ranks and groups.
        squared_norms: layer -> squared norm of all injected gradients.
        plans: the hidden-state plan of each group.
        num_layers: layers of the student.
        identical: layers at which student and teacher agree exactly, so that a zero gradient is correct.

    Raises:
        CaptureError: names the layer, its stage and the settings that can be the cause.
    """
    expected_per_group = [expected_injections(plan, sorted(counts)) for plan in plans]
    expected = {layer: sum(group[layer] for group in expected_per_group) for layer in counts}
    stages = {layer: plans[0].layout.stage_of_layer(layer, num_layers) for layer in counts}
    places = {layer: f"(pipeline stage {stage}, model chunk {chunk})" for layer, (stage, chunk) in stages.items()}
    check_layer_counts(counts, expected, squared_norms, places, identical=identical)


def check_layer_counts(
    counts: dict[int, int],
    expected: dict[int, int],
    squared_norms: dict[int, float],
    places: dict[int, str],
    *,
    identical: set[int],
    settings: tuple[str, str] = ("student.recompute", "loss.representation.kind"),
) -> None:
    """Compares the injections of an update with the expected numbers, and looks for gradients that are zero.

    Args:
        counts, expected: layer -> injections over all ranks.
        squared_norms: layer -> squared norm of all injected gradients.
        places: layer -> where it is, for the message.
        identical: as for `check_injections`.
        settings: the user's names of the recompute settings and of the loss, for the messages.

    Raises:
        CaptureError: names the layer, its place and the settings that can be the cause.
    """
    recompute, kind = settings
    for layer, count in counts.items():
        where = f"layer {layer} {places[layer]}"
        if count != expected[layer]:
            raise CaptureError(
                f"{where} received its loss gradient {count} time(s) in this step, expected {expected[layer]}: the "
                f"layer's forward was bypassed or its output was detached. Check {recompute} and the code that "
                "replaces the layer's forward (CUDA graphs, custom schedules); otherwise the layer would train nothing"
            )
        if squared_norms[layer] == 0.0 and layer not in identical:
            raise CaptureError(
                f"{where} received a gradient of exactly zero although student and teacher differ; expected a "
                f"nonzero gradient: check {kind}, and that the teacher is not the student"
            )
