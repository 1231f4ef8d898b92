"""The guard: no layer that was asked for may silently train nothing.

A capture can fail without any error: a hook inside a recomputed region sees tensors without gradient, a detached tensor
ends the way back, a schedule may bypass a layer's forward. So after every backward pass the injections that really
happened are counted over all ranks and compared with what the batch's plan says must have happened.
"""

from __future__ import annotations

from nemo_oprd.batch.plan import BatchPlan


class CaptureError(ValueError):
    """A supervised layer was not reached, reached twice, or received no gradient."""


def expected_injections(plan: BatchPlan, layers: list[int], num_layers: int) -> dict[int, int]:
    """How often each layer's gradient must be injected in one pass, over all ranks: once per rank and microbatch that
    holds rows of it."""
    per_stage = [0] * plan.layout.pipeline
    for rank in plan.layout.ranks:
        at = plan.layout.coordinates(rank)
        per_stage[at.pipeline] += sum(len(held.row) > 0 for held in plan.local_rows(at))
    return {layer: per_stage[plan.layout.stage_of_layer(layer, num_layers)[0]] for layer in layers}


def check_output_passes(count: int, plans: list[BatchPlan]) -> None:
    """Raises CaptureError unless the output-space term ran once per rank and microbatch that has rows of it."""
    expected = 0
    for plan in plans:
        ranks = (plan.layout.coordinates(rank) for rank in plan.layout.ranks)
        last = (at for at in ranks if at.pipeline == plan.layout.pipeline - 1)
        expected += sum(len(held.row) > 0 for at in last for held in plan.local_rows(at))
    if count != expected:
        raise CaptureError(
            f"the output-space term went back {count} time(s) in this step, expected {expected}: the last stage's "
            "final norm was bypassed or its output detached. Check what replaces the model's forward; without this the "
            "term would train nothing"
        )


def check_injections(
    counts: dict[int, int],
    squared_norms: dict[int, float],
    plans: list[BatchPlan],
    num_layers: int,
    *,
    identical: set[int],
) -> None:
    """Compares what happened with the plan of every wave of the step.

    Args:
        counts: layer -> injections over all ranks and waves.
        squared_norms: layer -> squared norm of all injected gradients.
        identical: layers on which student and teacher agree exactly, so that a zero gradient is right.

    Raises:
        CaptureError: names the layer, its stage and the settings that can be at fault.
    """
    per_wave = [expected_injections(plan, sorted(counts), num_layers) for plan in plans]
    for layer, count in counts.items():
        expected = sum(wave[layer] for wave in per_wave)
        stage, chunk = plans[0].layout.stage_of_layer(layer, num_layers)
        where = f"layer {layer} (pipeline stage {stage}, model chunk {chunk})"
        if count != expected:
            raise CaptureError(
                f"{where} received its loss gradient {count} time(s) in this step, expected {expected}: the "
                "layer's forward was bypassed or its output detached. Check student.recompute and what replaces "
                "the layer's forward (CUDA graphs, custom schedules); without this the layer would train nothing."
            )
        if squared_norms[layer] == 0.0 and layer not in identical:
            raise CaptureError(
                f"{where} received a gradient of exactly zero although student and teacher differ; check "
                "loss.representation.kind and that the teacher's states are those of another model"
            )
