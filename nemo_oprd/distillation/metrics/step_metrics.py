"""The metrics of one update: sums on every rank, one all-reduce over ranks, then means under their metric names."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from nemo_oprd.batch.plan import BatchPlan, StepPlan
from nemo_oprd.batch.position_bins import PROFILE_BINS, profile_bins, row_bins
from nemo_oprd.batch.token_table import TokenTable
from nemo_oprd.distillation.hidden_state_loss import HiddenStateLoss
from nemo_oprd.distillation.metrics.router_metrics import RouterMetrics
from nemo_oprd.distillation.metrics.token_metrics import NAMES, REPRESENTATION, TokenMetrics, TokenSlots, output_values
from nemo_oprd.distillation.objective import StepObjective
from nemo_oprd.distillation.output_head import OutputHeadLoss
from nemo_oprd.distillation.router_losses import RouterLosses, RouterTerm

# key of `OutputSums.metrics` -> name in metrics.jsonl; "" for a value that is only part of another metric
OUTPUT_METRICS = {
    "student_logprob": "",
    "teacher_logprob": "",
    "student_entropy": "actor/entropy",
    "teacher_entropy": "teacher/entropy",
    "reverse_kl": "output/reverse_kl",
    "overlap": "val-topk/overlap_ratio",
    "student_mass": "val-topk/student_mass",
    "teacher_mass": "val-topk/teacher_mass",
    "empty_support": "val-topk/empty_support",
    "ratio": "actor/ratio",
    "clipped": "actor/clipped",
    "correction": "rollout/correction_mean",
    "correction_squared": "",
    "correction_outside": "rollout/correction_outside",
}


@dataclass
class MetricSums:
    """Sums over supervised rows in one flat tensor, so that one all-reduce adds them up over ranks.

    `sums` is float64 and holds in this order:
    - per layer: the sums `HiddenStateLoss.SUMS`, the squared norm of the injected gradient, the number of injections;
    - the position profile [2, PROFILE_BINS];
    - of the output loss: the number of backward passes, the weighted loss, and per metric its sum and its row count;
    - each response's contribution to the total loss, by the representation loss and by the output loss;
    - if values are kept per token, their sums [len(NAMES), slots + 1];
    - for a student with experts, the sums `RouterLosses.measured` of each of the layers `routers.layers`.
    """

    sums: torch.Tensor
    layers: list[int]
    num_responses: int
    slots: TokenSlots | None = None
    routers: RouterTerm | None = None

    COLUMNS = (*HiddenStateLoss.SUMS, "squared_gradient", "injections")
    OUTPUT = 2 + 2 * len(OUTPUT_METRICS)

    @staticmethod
    def zeros(
        layers: list[int],
        num_responses: int,
        device: torch.device,
        slots: TokenSlots | None = None,
        routers: RouterTerm | None = None,
    ) -> MetricSums:
        """All sums 0."""
        sums = MetricSums(torch.zeros(0), sorted(layers), num_responses, slots, routers)
        sums.sums = torch.zeros(sum(sums._sizes()), dtype=torch.float64, device=device)
        return sums

    def _sizes(self) -> list[int]:
        kept = 0 if self.slots is None else len(NAMES) * (self.slots.count + 1)
        routers = 0 if self.routers is None else len(self.routers.layers) * self._router_columns
        table = len(self.layers) * len(self.COLUMNS)
        return [table, 2 * PROFILE_BINS, self.OUTPUT, 2 * self.num_responses, kept, routers]

    @property
    def _router_columns(self) -> int:
        return 0 if self.routers is None else 2 * self.routers.experts + len(RouterLosses.SUMS)

    def _parts(self) -> tuple[torch.Tensor, ...]:
        table, profile, output, responses, tokens, routers = self.sums.split(self._sizes())
        shaped = table.view(len(self.layers), len(self.COLUMNS)), profile.view(2, PROFILE_BINS)
        shaped_routers = routers.view(-1, self._router_columns) if len(routers) else routers
        return *shaped, output, responses.view(2, self.num_responses), tokens.view(len(NAMES), -1), shaped_routers

    @property
    def table(self) -> torch.Tensor:
        """[layers, COLUMNS], a view."""
        return self._parts()[0]

    @property
    def profile(self) -> torch.Tensor:
        """[2, PROFILE_BINS], a view: sums of the deepest layer's cosines by position from a response's start, end."""
        return self._parts()[1]

    @property
    def response_losses(self) -> torch.Tensor:
        """[2, responses], a view: contributions to the total loss, of the representation and of the output loss."""
        return self._parts()[3]

    @property
    def tokens(self) -> torch.Tensor:
        """[len(NAMES), slots + 1], a view: values per token; [len(NAMES), 0] if none are kept."""
        return self._parts()[4]

    @property
    def output(self) -> torch.Tensor:
        """[OUTPUT], a view: backward passes, weighted loss, (sum, rows) per metric."""
        return self._parts()[2]

    def add_routers(self, losses: RouterLosses) -> None:
        """Adds what one microbatch of this rank has measured of the routers."""
        assert self.routers is not None
        for i, layer in enumerate(self.routers.layers):
            if layer in losses.measured:
                self._parts()[5][i] += losses.measured[layer]

    def router_metrics(self) -> RouterMetrics | None:
        """The metrics of the routers from the sums of all ranks; None where no layer with experts is reached."""
        if self.routers is None or not self.routers.layers:
            return None
        return RouterMetrics.from_sums(self._parts()[5], self.routers)

    def add(self, observer: HiddenStateLoss) -> None:
        """Adds one microbatch of this rank."""
        for i, layer in enumerate(self.layers):
            if layer in observer.measured:
                self.table[i, :-2] += observer.measured[layer]
            if observer.counts_rows and layer in observer.injected:
                self.table[i, -2] += observer.injected[layer]
            self.table[i, -1] += observer.injections[layer]
        if observer.profile is not None:
            self.profile.add_(observer.profile)
        if observer.response_losses is not None:
            self.response_losses[0].add_(observer.response_losses)
        if observer.token_sums is not None:
            self.tokens[: len(observer.token_sums)].add_(observer.token_sums)

    def add_output(self, loss: OutputHeadLoss, *, counts_rows: bool) -> None:
        """Adds the output loss of one microbatch.

        Args:
            loss: after its backward pass.
            counts_rows: whether this rank adds the rows to the metrics. All tensor ranks have the same sums, so one of
                them does.
        """
        self.output[0] += loss.backward_passes
        if loss.sums is None or not counts_rows:
            return
        self.output[1] += loss.sums.loss
        if loss.scale:
            self.response_losses[1].index_add_(0, loss.response, loss.scale * loss.sums.per_row)
        for i, name in enumerate(OUTPUT_METRICS):
            if name in loss.sums.metrics:
                self.output[2 + 2 * i] += loss.sums.metrics[name]
                self.output[3 + 2 * i] += loss.sums.rows
        if loss.token_slots is not None:
            for name, values in output_values(loss.sums.kept).items():
                self.tokens[NAMES.index(name)].index_add_(0, loss.token_slots, values.double())

    def output_means(self) -> dict[str, float]:
        """Metric of the output loss -> its mean over rows."""
        pairs = self.output[2:].view(-1, 2).tolist()
        return {name: total / rows for name, (total, rows) in zip(OUTPUT_METRICS, pairs, strict=True) if rows}

    def reduced(self, group: dist.ProcessGroup) -> MetricSums:
        """The sums over all ranks of `group`, on the CPU. Every rank of `group` calls this."""
        dist.all_reduce(self.sums, group=group)
        return MetricSums(self.sums.cpu(), self.layers, self.num_responses, self.slots, self.routers)

    def token_metrics(self, plan: StepPlan) -> TokenMetrics | None:
        """The values per token from the sums of all ranks; None if none are kept."""
        if self.slots is None:
            return None
        means = self.output_means()
        measured = set(REPRESENTATION if self.layers else ())
        measured |= {"kl"} if "reverse_kl" in means else set()
        measured |= {"log_ratio"} if "teacher_logprob" in means else set()
        output = None if plan.output is None else plan.output.table
        return TokenMetrics.from_sums(self.tokens, self.slots, plan.hidden.table, output, measured)

    def column(self, name: str) -> dict[int, float]:
        """Layer -> its sum `name`, one of `COLUMNS`."""
        return dict(zip(self.layers, self.table[:, self.COLUMNS.index(name)].tolist(), strict=True))


@dataclass
class StepMetrics:
    """The metrics of one update's forward and backward passes, the same on every student rank.

    Attributes:
        loss: the total loss.
        weight_metrics: the metrics of loss weights that change over the updates, by their names in metrics.jsonl.
        output_means: metric of the output loss -> its mean over rows.
        reports_pg_loss: whether `actor/pg_loss` is reported.
        rep_loss_per_teacher, output_loss_per_teacher: weighted means over each teacher's rows.
        trained_losses: the losses whose weight is not 0 in this update, by their names in metrics.jsonl, before the
            weight is applied.
        position_gap: profile bin (`row_bins`) -> 1 - mean cosine of the deepest supervised layer.
        cosine_first_k, cosine_last_k: k -> mean cosine of the deepest supervised layer over the first (last) k tokens
            of every response (the paper's position figure), for the k of which all tokens were supervised.
        loss_per_response: the responses' contributions to the total loss.
        identical_layers: supervised layers at which student and teacher agree exactly.
        targets_bytes: the most bytes of targets that this rank held at a time.
        nonfinite_reason: where a loss or a gradient is not finite; None if all are finite.
        tokens: values per token of some responses; None if none are kept.
        routers: the metrics of the student's routers; None for a student without experts.
    """

    loss: float
    weight_metrics: dict[str, float]
    output_loss: float | None
    output_means: dict[str, float]
    reports_pg_loss: bool
    rep_loss: float
    rep_loss_per_layer: dict[int, float]
    rep_loss_per_teacher: dict[int, float]
    output_loss_per_teacher: dict[int, float]
    trained_losses: dict[str, float]
    cosine_per_layer: dict[int, float]
    relative_error_per_layer: dict[int, float]
    norm_ratio_per_layer: dict[int, float]
    gradient_norm_per_layer: dict[int, float]
    gradient_share_per_layer: dict[int, float]
    position_gap: dict[int, float]
    cosine_first_k: dict[int, float]
    cosine_last_k: dict[int, float]
    loss_per_response: list[float]
    identical_layers: list[int]
    targets_bytes: int
    nonfinite_reason: str | None
    tokens: TokenMetrics | None
    routers: RouterMetrics | None

    @staticmethod
    def from_sums(
        sums: MetricSums, plan: StepPlan, groups: list[StepPlan], objective: StepObjective, targets_bytes: int
    ) -> StepMetrics:
        """Means and norms from the sums of all ranks.

        Args:
            plan: the plan of the whole batch.
            groups: the plans of its groups of microbatches.
            objective: the objective of the update.
            targets_bytes: the most bytes of targets that this rank held at a time.
        """
        table, positions, term = plan.hidden.table, objective.run.positions, objective.output
        count = len(table)
        output_loss = None if term is None or term.only_watched else float(sums.output[1])
        target, error, gradient = (sums.column(c) for c in ("squared_target", "squared_error", "squared_gradient"))
        all_gradients = sum(gradient.values())
        per_layer = sums.column("loss")
        weights = objective.layer_weights
        rep_loss = sum(weights[layer] * loss for layer, loss in per_layer.items()) / (sum(weights.values()) or 1.0)
        trained, term_weights = {}, {}
        if per_layer and objective.weight:
            trained["rep/loss"], term_weights["rep/loss"] = rep_loss, objective.weight
        if term is not None and output_loss is not None and term.weight:
            trained["output/loss"], term_weights["output/loss"] = output_loss, term.weight
        routers = sums.router_metrics()
        output_table = None if plan.output is None else plan.output.table
        first, last = (
            _cumulative(profile, numbers) if per_layer and positions in ("all", complete) else {}
            for profile, numbers, complete in zip(
                sums.profile.numpy(), (table.from_start, table.from_end), ("first_k", "last_k"), strict=True
            )
        )
        return StepMetrics(
            # a loss of weight 0 may be infinite, so it is not multiplied
            loss=sum(weight * trained[name] for name, weight in term_weights.items())
            + (0.0 if routers is None else routers.loss),
            weight_metrics=_scheduled_weights(objective),
            output_loss=output_loss,
            output_means=sums.output_means(),
            reports_pg_loss=term is not None and (term.loss.kind == "sampled_token" or term.only_watched),
            rep_loss=rep_loss,
            rep_loss_per_layer=per_layer,
            rep_loss_per_teacher=_loss_per_teacher(sums.response_losses[0], table, plan, term_weights.get("rep/loss")),
            output_loss_per_teacher=_loss_per_teacher(
                sums.response_losses[1], output_table, plan, term_weights.get("output/loss")
            ),
            trained_losses=trained,
            cosine_per_layer={layer: value / count for layer, value in sums.column("cosine").items()},
            relative_error_per_layer={layer: _ratio(error[layer], target[layer]) ** 0.5 for layer in error},
            norm_ratio_per_layer={layer: value / count for layer, value in sums.column("norm_ratio").items()},
            gradient_norm_per_layer={layer: value**0.5 for layer, value in gradient.items()},
            gradient_share_per_layer={layer: _ratio(value, all_gradients) for layer, value in gradient.items()},
            position_gap=_gap_per_bin(sums, table, positions) if per_layer else {},
            cosine_first_k=first,
            cosine_last_k=last,
            loss_per_response=sums.response_losses.sum(0).tolist(),
            identical_layers=[layer for layer, value in error.items() if value == 0.0],
            targets_bytes=targets_bytes,
            nonfinite_reason=_nonfinite_reason(sums, [group.hidden for group in groups], trained, gradient)
            or (None if routers is None else routers.nonfinite_reason),
            tokens=sums.token_metrics(plan),
            routers=routers,
        )

    def metrics(self) -> dict[str, float]:
        """The metrics by their names in metrics.jsonl (docs/runs.md)."""
        named = {"loss/total": self.loss, **self.weight_metrics}
        if cosines := self.cosine_per_layer.values():
            named |= {"rep/loss": self.rep_loss, "rep/cosine_similarity": sum(cosines) / len(cosines)}
        for name, values in (
            ("loss_layer", self.rep_loss_per_layer),
            ("cosine_similarity_layer", self.cosine_per_layer),
            ("relative_error_layer", self.relative_error_per_layer),
            ("norm_ratio_layer", self.norm_ratio_per_layer),
            ("gradient_norm_layer", self.gradient_norm_per_layer),
            ("gradient_share_layer", self.gradient_share_per_layer),
            ("cosine_first_k", self.cosine_first_k),
            ("cosine_last_k", self.cosine_last_k),
        ):
            named.update({f"rep/{name}/{key}": value for key, value in values.items()})
        return {**named, **self._output_metrics(), **({} if self.routers is None else self.routers.named)}

    def _output_metrics(self) -> dict[str, float]:
        named = {OUTPUT_METRICS[name]: value for name, value in self.output_means.items()}
        if {"student_logprob", "teacher_logprob"} <= set(self.output_means):
            estimate = self.output_means["student_logprob"] - self.output_means["teacher_logprob"]
            named["output/kl_estimate"] = estimate
            if self.reports_pg_loss:
                named["actor/pg_loss"] = estimate if self.output_loss is None else self.output_loss
        if "correction" in self.output_means:
            mean, mean_square = self.output_means["correction"], self.output_means["correction_squared"]
            named["rollout/effective_sample_size"] = _ratio(mean**2, mean_square)
        return {
            **({} if self.output_loss is None else {"output/loss": self.output_loss}),
            **{name: value for name, value in named.items() if name},
        }


def _loss_per_teacher(
    shares: torch.Tensor, table: TokenTable | None, plan: StepPlan, weight: float | None
) -> dict[int, float]:
    """Teacher's number -> mean of one loss over the teacher's rows; empty if the loss has no weight or no rows.

    Args:
        shares: [responses], the responses' contributions of this loss to the total loss.
        table: the rows of this loss.
        weight: the weight of this loss.
    """
    if table is None or not weight:
        return {}
    teacher_of = np.zeros(len(shares), dtype=np.int64)
    for packs in plan.hidden.packs:
        for teacher, pack in zip(plan.taught_by, packs, strict=True):
            teacher_of[list(pack.sequences)] = teacher
    owner = teacher_of[table.response]
    losses = {}
    for teacher in np.unique(owner).tolist():
        rows = owner == teacher
        share = float(shares[torch.from_numpy(np.unique(table.response[rows]))].sum())
        losses[teacher] = share / (weight * float(table.weight[rows].sum()))
    return losses


def _scheduled_weights(objective: StepObjective) -> dict[str, float]:
    """The weights of the losses by metric name, if any of them changes over the updates."""
    if not objective.run.scheduled:
        return {}
    named = {"loss/weight_representation": objective.weight} if objective.run.layers else {}
    return named if objective.run.output is None else {**named, "loss/weight_output": objective.output_weight}


def _nonfinite_reason(
    sums: MetricSums, groups: list[BatchPlan], trained: dict[str, float], gradient: dict[int, float]
) -> str | None:
    """The trained losses and gradients that are not finite, and their first responses; None if all are finite."""
    reasons, responses = [], set()
    if not math.isfinite(trained.get("output/loss", 0.0)):
        reasons.append(f"the output-space loss is {trained['output/loss']}")
        responses |= _nonfinite_responses(sums.response_losses[1])
    loss = sums.column("loss") if "rep/loss" in trained else {}
    layers = [layer for layer in loss if not math.isfinite(loss[layer] + gradient[layer])]
    if layers:
        others = f" (and {len(layers) - 1} others)" if len(layers) > 1 else ""
        first = layers[0]
        reasons.append(f"loss {loss[first]} and gradient norm {gradient[first] ** 0.5} at layer {first}{others}")
        responses |= _nonfinite_responses(sums.response_losses[0])
    if not reasons:
        return None
    return ", ".join([*reasons, *(_place(response, groups) for response in sorted(responses)[:3])])


def _nonfinite_responses(shares: torch.Tensor) -> set[int]:
    return set((~torch.isfinite(shares)).nonzero()[:, 0].tolist())


def _place(response: int, groups: list[BatchPlan]) -> str:
    for number, group in enumerate(groups):
        for data, packs in enumerate(group.packs):
            for m, pack in enumerate(packs):
                if response in pack.sequences:
                    earlier = sum(len(before.packs[data]) for before in groups[:number])
                    return f"response {response} in microbatch {earlier + m} of data-parallel rank {data}"
    raise AssertionError(f"response {response} is in no microbatch")


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _gap_per_bin(sums: MetricSums, table: TokenTable, positions: str) -> dict[int, float]:
    """Profile bin -> 1 - mean cosine of the deepest supervised layer, for the bins that have rows."""
    cosines = sums.profile[1 if positions == "last_k" else 0].tolist()
    counts = np.bincount(row_bins(table, positions), minlength=PROFILE_BINS).tolist()
    return {j: 1 - total / count for j, (total, count) in enumerate(zip(cosines, counts, strict=True)) if count}


def _cumulative(profile: np.ndarray, numbers: np.ndarray) -> dict[int, float]:
    """k = 1, 2, 4, ... -> mean over the rows with a 0-based number below k, up to the first k that covers all."""
    counts = np.bincount(profile_bins(numbers), minlength=PROFILE_BINS)
    means = np.cumsum(profile) / np.maximum(1, np.cumsum(counts))
    return {1 << j: float(means[j]) for j in range(int(profile_bins(numbers).max()) + 1)}
