"""The hidden-state loss in another program's training loop: its observers, and the metrics and check of an update.

The loop has its own batches. It must add one tensor to them, the weights of the supervised tokens, and slice, pad and
pack it exactly as the token ids. Every rank then finds its rows of a microbatch, whatever the layout, without a plan of
the whole batch. The teacher is a second adopted model with the student's layout; its states never leave the rank.

Such a loop imports only this module: `adopt` makes the layers of stock Megatron-core models pass their outputs
to an observer, `observed` attaches a microbatch's observer to its `packed_seq_params`, and `HiddenStateDistillation`
makes the observers. docs/nemo.md and `examples/adopt_in_your_script.py` show how the parts fit together.

B sequences of a microbatch (1 for packs), S their tokens, n supervised tokens of a microbatch on this rank, D width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from nemo_oprd.batch.token_table import make_rows
from nemo_oprd.batch.types import Rollout
from nemo_oprd.config.schema import RepresentationLossConfig
from nemo_oprd.distillation.capture import HiddenStateCapture
from nemo_oprd.distillation.hidden_state_loss import (
    LAYER_METRICS,
    LAYER_SUMS,
    HiddenStateLoss,
    LayerSums,
    LayerTarget,
    layer_sums,
    mean_loss,
)
from nemo_oprd.distillation.metrics.injection_counts import CaptureError, check_layer_counts
from nemo_oprd.distillation.metrics.step_metrics import NamedSums
from nemo_oprd.losses.layer_mapping import check_norms_match, layer_pairs, supervised_layers, weights_of_layers
from nemo_oprd.losses.registry import resolve_row_loss
from nemo_oprd.megatron.adopt import adopt, observed, unwrapped
from nemo_oprd.megatron.observed_layer import ObservedLayer
from nemo_oprd.megatron.pipeline_schedule import zero_loss
from nemo_oprd.megatron.refusals import refuse_loss_scale, refuse_unservable, refuse_untrainable

__all__ = ["HiddenStateDistillation", "RepresentationLossConfig", "adopt", "observed", "row_weights", "zero_loss"]


def row_weights(rollouts: list[Rollout], length: int, loss: RepresentationLossConfig) -> torch.Tensor:
    """Computes the weights of the supervised tokens of a whole batch, float32 [responses, length], 0 for other tokens.

    Row i belongs to the tokens `prompt_ids + response_ids` of response i, padded to `length`. `loss.positions`, `k`,
    `position` and `aggregation` say which tokens are supervised and how they are weighted. The weights sum to 1 over
    the batch: compute them for the batch of all data-parallel ranks, and take from the result what a rank reads.

    Raises:
        ValueError: a response is longer than `length`, the teacher reads other ids than the student, or as
            `batch.token_table.make_rows`.
    """
    for i, rollout in enumerate(rollouts):
        if rollout.length > length:
            raise ValueError(
                f"response {i} has {rollout.length} tokens with its prompt; expected at most length={length}: pad all "
                "sequences to the longest one"
            )
        if rollout.teacher_prompt_ids is not None or rollout.teacher_response_ids is not None:
            raise ValueError(
                f"response {i} has ids of its own for the teacher; expected a teacher that reads the student's ids, "
                "because both models read one batch here: use nemo-oprd train for other tokenizers and prompts"
            )
    table = make_rows(
        rollouts, positions=loss.positions, k=loss.k, position=loss.position, aggregation=loss.aggregation
    )
    weight_BS, places = torch.zeros(len(rollouts), length), (table.response, table.position)
    weight_BS[tuple(map(torch.from_numpy, places))] = torch.from_numpy(table.weight).float()
    return weight_BS


class HiddenStateDistillation:
    """Observers for the microbatches of an adopted student and an adopted teacher, and the metrics of an update.

    An update on this rank, with one weight tensor per microbatch:

        captures = [oprd.capture(weight_BS) for weight_BS in weights]
        forward passes of the teacher, each with observed(packed_seq_params, capture)
        losses = [oprd.losses(weight_BS, capture.captured) for ...]
        forward and backward passes of the student, each with observed(packed_seq_params, loss)
        metrics = oprd.finish()

    A weight tensor [B, S] covers the tokens that Megatron's `tokens` hold on this rank: its context-parallel part, but
    no smaller part under sequence parallelism.

    Attributes:
        layers: the supervised student layers of this rank.
    """

    def __init__(
        self,
        student: Sequence[torch.nn.Module],
        teacher: Sequence[torch.nn.Module],
        loss: RepresentationLossConfig | None = None,
    ) -> None:
        """Finds the layers of this rank.

        Args:
            student, teacher: this rank's chunks of the adopted models, which have the same parallel layout.
            loss: the hidden-state term, by default the paper's (docs/losses.md).

        Raises:
            ValueError: a model is not adopted or cannot be trained, the loss changes over the updates, the models
                cannot be compared, or a matched teacher layer is on another rank.
        """
        self._loss = loss = RepresentationLossConfig() if loss is None else loss
        if isinstance(loss.weight, list) or loss.adaptive.layers or loss.adaptive.positions:
            raise ValueError(
                "loss.representation.weight is a schedule, or loss.representation.adaptive is on; expected a loss that "
                "stays the same: make one HiddenStateDistillation per stage, each with a constant weight"
            )
        self._chunks, self._teacher = _adopted(student, "student"), _adopted(teacher, "teacher")
        self._config = self._chunks[0].config
        refuse_unservable(self._config)
        refuse_untrainable(self._config)
        depth, teacher_config = self._config.num_layers, self._teacher[0].config
        if self._config.hidden_size != teacher_config.hidden_size:
            raise ValueError(
                f"the student has width {self._config.hidden_size} and the teacher {teacher_config.hidden_size}; "
                "expected equal widths: use nemo-oprd train with a bridge"
            )
        supervised = supervised_layers(loss.layers, depth)
        self._pairs = layer_pairs(supervised, depth, teacher_config.num_layers, loss.layer_map)
        if loss.final_norm:
            check_norms_match(self._pairs, depth, teacher_config.num_layers)
        self._weights = weights_of_layers(loss.layer_weights, loss.layers, depth)
        self._final = depth if loss.final_norm and depth in self._pairs else None
        self._teacher_final = None if self._final is None else teacher_config.num_layers
        self._row_loss = resolve_row_loss(loss.kind, loss.kind_args, loss.dim_reduction, self._config.hidden_size)
        owned = _states(self._chunks, self._final)
        self.layers = [layer for layer in supervised if layer in owned]
        self._check_same_stages()
        self._observers: list[HiddenStateLoss] = []
        self._checked_loss_scale = False

    def _check_same_stages(self) -> None:
        available = _states(self._teacher, self._teacher_final)
        for layer in self.layers:
            if self._pairs[layer] not in available:
                raise ValueError(
                    f"student layer {layer} is on this rank, and teacher layer {self._pairs[layer]}, its target, is on "
                    f"another pipeline stage (here are {sorted(available)}); expected both on one rank: split the "
                    "teacher's layers over the stages like the student's, or choose another loss.layer_map"
                )

    @property
    def _tensor_group(self) -> dist.ProcessGroup:
        return self._chunks[0].decoder.tp_group

    def _rows(self, weight_BS: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns (int64 [n]: indices of this rank's rows in its hidden state [S, B, D], float32 [n]: the weights)."""
        if weight_BS.dim() != 2:
            raise ValueError(
                f"weights of shape {list(weight_BS.shape)}; expected [B, S] like the microbatch's token ids: pass one "
                "weight per token, for packed sequences [1, S]"
            )
        weight = weight_BS.float().t()
        if self._config.sequence_parallel:
            size = self._tensor_group.size()
            if len(weight) % size:
                raise ValueError(
                    f"weights of {len(weight)} tokens under sequence parallelism over {size} tensor ranks; expected a "
                    f"multiple of {size}: pad tokens and weights alike"
                )
            weight = weight.chunk(size)[self._tensor_group.rank()]
        rows = weight.flatten().nonzero()[:, 0]
        return rows, weight.flatten()[rows]

    def capture(self, weight_BS: torch.Tensor) -> HiddenStateCapture:
        """Makes the observer of the teacher's forward pass over one microbatch; `captured` then holds the targets.

        Raises:
            ValueError: the weights are not [B, S], or the tensor ranks can't divide S under sequence parallelism.
        """
        keys: dict[int, list[int]] = {}
        for layer in self.layers:
            keys.setdefault(self._pairs[layer], []).append(layer)
        return HiddenStateCapture(self._rows(weight_BS)[0], keys, self._teacher_final)

    def losses(self, weight_BS: torch.Tensor, states: Mapping[int, torch.Tensor]) -> HiddenStateLoss:
        """Makes the observer of the student's forward pass over one microbatch; it injects the gradients in backward.

        Args:
            weight_BS: [B, S], the weights of the microbatch's tokens.
            states: student layer -> the teacher's states [n, D] of the same rows, such as `capture(...).captured`.

        Raises:
            ValueError: states are missing or of another shape, or the optimizer scales losses.
        """
        rows, weight = self._rows(weight_BS)
        if not self._checked_loss_scale:  # here, because Megatron sets it after it has made the optimizer
            refuse_loss_scale(self._config, weight.device)
            self._checked_loss_scale = True
        for layer in self.layers:
            found = None if layer not in states else list(states[layer].shape)
            if found != [len(rows), self._config.hidden_size]:
                raise ValueError(
                    f"teacher states for student layer {layer}: {'none' if found is None else f'shape {found}'}, "
                    f"expected [{len(rows)}, {self._config.hidden_size}]: run the teacher on the same tokens, with "
                    "observed(packed_seq_params, capture)"
                )
        total, nowhere = sum(self._weights.values()), torch.zeros_like(rows)
        of_term = float(self._loss.weight)  # type: ignore[arg-type]
        scales = {layer: of_term * self._weights[layer] / total for layer in self.layers}
        targets = {layer: LayerTarget(rows, weight, nowhere, states[layer], scales[layer]) for layer in self.layers}
        # without sequence parallelism every tensor rank holds the same rows, and one of them counts
        counts_rows = bool(self._config.sequence_parallel) or self._tensor_group.rank() == 0
        dim_reduction, layers = self._loss.dim_reduction, sorted(self._weights)
        observer = HiddenStateLoss(
            targets, self._row_loss, dim_reduction, layers, 1, self._final, counts_rows=counts_rows
        )
        self._observers.append(observer)
        return observer

    def finish(self, group: dist.ProcessGroup | None = None) -> dict[str, float]:
        """Sums the metrics over all ranks, and checks every layer's gradient of every microbatch.

        Args:
            group: the ranks of the student; None: all ranks. Each of them calls this after the backward passes.

        Returns:
            Metrics by their names in docs/runs.md, equal on all ranks: `loss/total`, `rep/loss`, and per layer
            `rep/loss_layer`, `rep/cosine_similarity_layer` and `rep/gradient_norm_layer`.

        Raises:
            CaptureError: a layer did not receive its gradient once per microbatch and rank with rows, or received
                zeros although the models differ there.
        """
        observers, self._observers = self._observers, []
        layers = sorted(self._weights)
        place = next(self._chunks[0].parameters()).device
        count = len(layers)
        local = NamedSums({"layers": (count, len(LAYER_SUMS)), "injections": (count,), "rows": (count,)}, place)
        injections, rows = torch.zeros(2, count, dtype=torch.float64)  # as planned
        for observer in observers:
            local.add({name: found for name, found in observer.sums.items() if name == "layers"})
            for layer, target in observer.targets.items():
                injections[layers.index(layer)] += len(target.rows) > 0 and target.scale > 0
                rows[layers.index(layer)] += len(target.rows) * observer.counts_rows
        local.add({"injections": injections.to(place), "rows": rows.to(place)})
        reduced = local.reduced(group)
        sums = layer_sums(reduced["layers"], layers)
        self._check(sums, dict(zip(layers, map(int, reduced["injections"].tolist()), strict=True)))
        return self._metrics(sums, dict(zip(layers, reduced["rows"].tolist(), strict=True)))

    def _check(self, sums: LayerSums, expected: dict[int, int]) -> None:
        missing = [layer for layer, count in expected.items() if count == 0]
        if missing and self._loss.weight:
            raise CaptureError(
                f"layer {missing[0]}: no rank has a supervised token of it; expected at least one in every update: "
                "give `losses` every microbatch on every pipeline stage, with weights that are not all 0"
            )
        check_layer_counts(
            sums,
            expected,
            dict.fromkeys(sums, "of the adopted student"),
            trains=bool(self._loss.weight),
            settings=("that every stage's forward gets observed(packed_seq_params, losses)", "the loss's kind"),
        )

    def _metrics(self, sums: LayerSums, rows: dict[int, float]) -> dict[str, float]:
        mean = mean_loss(sums, self._weights)
        named = {"loss/total": float(self._loss.weight) * mean, "rep/loss": mean}  # type: ignore[arg-type]
        for layer, found in sums.items():
            for name in ("loss", "cosine_similarity", "gradient_norm"):
                value = LAYER_METRICS[name].value
                assert value is not None
                named[f"rep/{name}_layer/{layer}"] = value({**found, "rows": max(rows[layer], 1.0)})
        return named


def _adopted(chunks: Sequence[torch.nn.Module], role: str) -> list[Any]:
    """Returns the models inside their wrappers. Raises ValueError unless all their layers are observed."""
    models = [unwrapped(chunk) for chunk in chunks]
    for model in models:
        for layer in model.decoder.layers:
            if not isinstance(layer, ObservedLayer):
                raise ValueError(
                    f"layer {layer.layer_number} of the {role} is a {type(layer).__name__}, which is not observed; "
                    f"expected adopted models: call adopt({role}) first"
                )
    return models


def _states(models: list[Any], final: int | None) -> set[int]:
    """Returns the layers whose states these chunks have; layer `final` is taken after the final norm."""
    states = {layer.layer_number for model in models for layer in model.decoder.layers} - {final}
    if final is not None and any(model.decoder.final_layernorm is not None for model in models):
        states.add(final)
    return states
