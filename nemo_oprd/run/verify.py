"""`verify`: runs the training step on recorded rollouts without the optimizer; writes losses and gradients.

The same rollouts must give the same two files in every layout, so a user can check a layout before a large run.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from itertools import chain
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from nemo_oprd.batch.types import Rollout
from nemo_oprd.config.schema import Config
from nemo_oprd.distillation.distiller import Distiller
from nemo_oprd.distillation.metrics.step_metrics import StepMetrics
from nemo_oprd.distillation.reference import agreement, reference
from nemo_oprd.distillation.step import StepResult
from nemo_oprd.distillation.step_batch import StepBatch
from nemo_oprd.distillation.trained_projectors import bridge_gradients
from nemo_oprd.run.inputs import read_inputs
from nemo_oprd.run.models import build_distiller
from nemo_oprd.run.resolve import RunSpec
from nemo_oprd.runtime.files import replacing, write_atomically
from nemo_oprd.runtime.output_directories import mark

Accumulate = Callable[..., StepResult]


def verify(spec: RunSpec, accumulate: Accumulate, *, against_reference: bool = False) -> None:
    """Writes `losses.json` and `grads.safetensors` into `config.output` and replaces those of an earlier verify.

    Args:
        accumulate: `train.accumulate_gradients`.
        against_reference: also print the deviations from the plain Hugging Face computation.

    Raises:
        ValueError: the configuration, a model or the rollouts are wrong, or `config.output` holds other files.
    """
    inputs = read_inputs(spec, "verify")
    rollouts = inputs.data.recorded
    assert rollouts is not None
    with closing(build_distiller(inputs.plan)) as distiller:
        _verify(spec.config, distiller, rollouts, accumulate, against_reference=against_reference)
    dist.barrier()


def _verify(
    config: Config, distiller: Distiller, rollouts: list[Rollout], accumulate: Accumulate, *, against_reference: bool
) -> None:
    output = Path(config.output)
    # without watched metrics, so that with sampled_token the teacher sends log-probabilities as in most updates
    batch = distiller.batch(rollouts, distiller.objective_of(0, watch=False))
    metrics = accumulate(distiller, batch, whole_gradients=True).metrics
    if metrics is not None:
        if metrics.nonfinite_reason:
            raise ValueError(
                f"{metrics.nonfinite_reason}; expected finite numbers: look for NaN in the models' weights"
            )
        # all ranks take part in gathering the gradients, and rank 0 keeps them
        student = distiller.student
        stream = chain(student.hf_gradients(), bridge_gradients(student.chunks, student.role, student.objective))
        gradients = {name: tensor.cpu().contiguous() for name, tensor in stream if dist.get_rank() == 0}
        if dist.get_rank() == 0:
            mark(output, "verify")
            (output / "losses.json").unlink(missing_ok=True)  # written last, for these gradients alone
            with replacing(output / "grads.safetensors") as partial:
                save_file(gradients, partial)
            losses = loss_report(metrics, batch, rollouts)
            write_atomically(output / "losses.json", json.dumps(losses, indent=1) + "\n")
            print(json.dumps(losses))
            if against_reference:
                print(compare(config, rollouts, losses, gradients))


def compare(config: Config, rollouts: list[Rollout], losses: dict, gradients: dict[str, torch.Tensor]) -> str:
    """Returns a table of relative deviations from the plain Hugging Face computation.

    It shows per layer the deviation of the loss, and the largest deviation of a parameter's gradient with the name of
    the parameter.
    """
    expected = reference(config, rollouts)
    deviations = agreement(gradients, expected["gradients"])
    blocks: dict[str, list[str]] = {}
    for name in deviations:
        parts = name.split(".")
        blocks.setdefault(f"layer {int(parts[2]) + 1:>3}" if parts[1] == "layers" else "others   ", []).append(name)
    lines = ["", "against the plain Hugging Face computation (float64, one process), relative deviations:"]
    lines.append("           loss     gradient  largest at")
    expected_losses = {
        f"layer {layer:>3}": (str(layer), value) for layer, value in expected["rep/loss_per_layer"].items()
    }
    for block in sorted({*blocks, *expected_losses}):
        layer, value = expected_losses.get(block, ("", None))
        loss = "" if value is None else f"{_relative(losses['rep/loss_per_layer'][layer], value):.1e}"
        worst = max(blocks.get(block, []), key=deviations.__getitem__, default=None)
        lines.append(f"{block}  {loss:<7}  {f'{deviations[worst]:.1e}   {worst}' if worst else 'no gradient'}")
    for name, title in (("output/loss", "output"), ("moe/aux_loss", "balance"), ("moe/z_loss", "z-loss")):
        if name in expected:
            lines.append(f"{title:<9}  {_relative(losses[name], expected[name]):.1e}")
    largest = max(deviations.values())
    lines.append(f"largest gradient deviation over {len(deviations)} parameters: {largest:.1e}")
    return "\n".join(lines)


def _relative(value: float, expected: float) -> float:
    return abs(value / expected - 1) if expected else abs(value)


def loss_report(metrics: StepMetrics, batch: StepBatch, rollouts: list[Rollout]) -> dict:
    """Returns the contents of losses.json."""
    table, term = batch.objective.run.rows(rollouts), batch.routers
    routers = {} if term is None else {"moe/aux_loss": term.aux, "moe/z_loss": term.z}
    losses = ("loss/total", "output/loss", *(name for name, weight in routers.items() if weight), "rep/loss")
    per_layer = {str(layer): loss for layer, loss in metrics.per_layer("loss").items()}
    return {
        **{name: metrics.named[name] for name in losses if name in metrics.named},
        **({"rep/loss_per_layer": per_layer} if per_layer else {}),
        "counts": {
            "responses": table.num_responses,
            "supervised_tokens": len(table),
            "response_tokens": sum(int(rollout.mask.sum()) for rollout in rollouts),
        },
    }
