"""Checks of the losses on the rehearsed rank: injected gradients, whose sums over all ranks are not known, and targets.

A target has the run's precision, or float32 behind a bridge; one with more bits costs memory and nothing else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from nemo_oprd.batch.plan import BatchPlan
from nemo_oprd.distillation import distiller as distiller_module
from nemo_oprd.distillation import hidden_state_loss
from nemo_oprd.distillation import step as step_module
from nemo_oprd.distillation.metrics.injection_counts import CaptureError
from nemo_oprd.megatron.parallel import Role
from nemo_oprd.tools.rehearse.recorder import BETWEEN_GROUPS, Recorder


class Injections:
    """Takes the place of `check_injections` for the layers of this rank."""

    def __init__(self) -> None:
        self.role: Role | None = None
        self.is_repeated = False  # whether a step went before, with which everything that stays was allocated
        self._counts: Counter[int] = Counter()
        self._layer = 0

    def install(self, recorder: Recorder) -> None:
        """Changes the modules of the losses."""
        supervise, inject = hidden_state_loss.HiddenStateLoss._supervise, hidden_state_loss.inject_gradient

        def of_layer(loss: Any, layer: int, *args: Any, **kwargs: Any) -> torch.Tensor:
            self._layer = layer
            return supervise(loss, layer, *args, **kwargs)

        def counted(*args: Any, on_injected: Callable[[torch.Tensor], None], **kwargs: Any) -> torch.Tensor:
            layer = self._layer

            def count(squared: torch.Tensor) -> None:
                self._counts[layer] += 1
                on_injected(squared)

            return inject(*args, on_injected=count, **kwargs)

        hidden_state_loss.HiddenStateLoss._supervise = of_layer  # type: ignore[method-assign,assignment]
        hidden_state_loss.inject_gradient = counted  # type: ignore[assignment]
        step_module.check_injections = self.check  # type: ignore[assignment]
        step_module.check_output_passes = lambda *_: None  # a sum over ranks, too
        targets = distiller_module.Distiller.targets

        def checked(distiller: Any, batch: Any, group: Any) -> Any:
            if self.is_repeated:
                recorder.settled(BETWEEN_GROUPS)
            sent = targets(distiller, batch, group)
            for number, of_teacher in sent.items():
                is_projected = batch.objective.run.teachers[number].project is not None
                expected = torch.float32 if is_projected else distiller.teachers[number].dtype
                for layer, target in of_teacher.hidden.items():
                    if target.dtype != expected:
                        found, wanted = (str(dtype).removeprefix("torch.") for dtype in (target.dtype, expected))
                        text = f"the targets of layer {layer} are {found}, expected {wanted}"
                        recorder.mistake("target-dtype", text, recorder.memory.allocated_at(target))
            return sent

        distiller_module.Distiller.targets = checked  # type: ignore[method-assign,assignment]

    def check(self, sums: Any, plan: BatchPlan, num_layers: int) -> None:
        """Raises CaptureError unless each layer of this rank got its gradient once per microbatch with rows."""
        assert self.role is not None
        coords = self.role.member_coords
        expected = sum(1 for local in plan.local_rows(coords) if len(local.table_index))
        owned = set(self.role.layout.owned_layers(coords.pipeline, num_layers)) & set(sums)
        found, self._counts = self._counts, Counter()
        for layer in sorted(owned | set(found)):
            if found[layer] != (expected if layer in owned else 0):
                raise CaptureError(
                    f"layer {layer} received its loss gradient {found[layer]} time(s) in this step on this rank, "
                    f"expected {expected if layer in owned else 0}: the layer's forward was bypassed or its output was "
                    "detached"
                )
