"""What a training step measures about the terms of its loss: summed on every rank, added up over ranks, then named."""

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
from nemo_oprd.distillation.objective import StepObjective
from nemo_oprd.distillation.output_head import OutputHeadLoss

# what the output-space term measures per row (`OutputRows`) -> its name in metrics.jsonl, "" if it goes into another
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
}


@dataclass
class MetricSums:
    """Sums over supervised rows in one flat tensor, so that one all-reduce adds them up over ranks.

    `sums` float64: per layer those of `HiddenStateLoss.SUMS`, the squared norm of the injected gradient and the number
    of injections; then the position profile [2, PROFILE_BINS]; then what the output-space term measured: backward
    passes, weighted loss, and per metric its sum and its number of rows; then each response's share of the total
    loss, by hidden states and by distributions.
    """

    sums: torch.Tensor
    layers: list[int]
    num_responses: int

    COLUMNS = (*HiddenStateLoss.SUMS, "squared_gradient", "injections")
    OUTPUT = 2 + 2 * len(OUTPUT_METRICS)

    @staticmethod
    def zeros(layers: list[int], num_responses: int, device: torch.device) -> MetricSums:
        """Nothing measured yet."""
        size = len(layers) * len(MetricSums.COLUMNS) + 2 * PROFILE_BINS + MetricSums.OUTPUT + 2 * num_responses
        return MetricSums(torch.zeros(size, dtype=torch.float64, device=device), sorted(layers), num_responses)

    def _parts(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        sizes = [len(self.layers) * len(self.COLUMNS), 2 * PROFILE_BINS, self.OUTPUT, 2 * self.num_responses]
        table, profile, output, responses = self.sums.split(sizes)
        shaped = table.view(len(self.layers), len(self.COLUMNS)), profile.view(2, PROFILE_BINS)
        return *shaped, output, responses.view(2, self.num_responses)

    @property
    def table(self) -> torch.Tensor:
        """[layers, COLUMNS], a view."""
        return self._parts()[0]

    @property
    def profile(self) -> torch.Tensor:
        """[2, PROFILE_BINS], a view: cosines of the deepest layer by place from the response's start, and its end."""
        return self._parts()[1]

    @property
    def per_response(self) -> torch.Tensor:
        """[2, responses], a view: shares of the total loss, of the representation and of the output term."""
        return self._parts()[3]

    @property
    def output(self) -> torch.Tensor:
        """[OUTPUT], a view."""
        return self._parts()[2]

    def add(self, observer: HiddenStateLoss) -> None:
        """Adds one microbatch of this rank."""
        for i, layer in enumerate(self.layers):
            if layer in observer.measured:
                self.table[i, :-2] += observer.measured[layer]
            if observer.measure and layer in observer.injected:
                self.table[i, -2] += observer.injected[layer]
            self.table[i, -1] += observer.injections[layer]
        if observer.profile is not None:
            self.profile.add_(observer.profile)
        if observer.per_response is not None:
            self.per_response[0].add_(observer.per_response)

    def add_output(self, term: OutputHeadLoss, *, counts: bool) -> None:
        """Adds the output-space term of one microbatch; `counts` on one of its tensor ranks, which agree."""
        self.output[0] += term.backward_passes
        if term.sums is None or not counts:
            return
        self.output[1] += term.sums.loss
        if term.scale:
            self.per_response[1].index_add_(0, term.response, term.scale * term.sums.per_row)
        for i, name in enumerate(OUTPUT_METRICS):
            if name in term.sums.metrics:
                self.output[2 + 2 * i] += term.sums.metrics[name]
                self.output[3 + 2 * i] += term.sums.rows

    def output_means(self) -> dict[str, float]:
        """Means over rows of what the output-space term measured."""
        pairs = self.output[2:].view(-1, 2).tolist()
        return {name: total / rows for name, (total, rows) in zip(OUTPUT_METRICS, pairs, strict=True) if rows}

    def reduced(self, group: dist.ProcessGroup) -> MetricSums:
        """Added up over the ranks of `group`, on the CPU."""
        dist.all_reduce(self.sums, group=group)
        return MetricSums(self.sums.cpu(), self.layers, self.num_responses)

    def column(self, name: str) -> dict[int, float]:
        """Layer -> one of the sums."""
        return dict(zip(self.layers, self.table[:, self.COLUMNS.index(name)].tolist(), strict=True))


@dataclass
class StepMetrics:
    """What one forward/backward measured, the same on every student rank.

    `cosine_first_k` and `cosine_last_k` map k to the mean cosine of the deepest supervised layer over the first (last)
    k tokens of every response (the paper's position figure); they hold those k of which every token was supervised.
    `rep_loss_per_teacher` and `output_loss_per_teacher` are means over each teacher's own rows, by their weights.
    `trained_losses` are the terms that have a weight in this step, by their names in metrics.jsonl, without it.
    `loss_per_response` are the responses' shares of the total loss.
    `position_gap` is 1 - that cosine per profile bin (`row_bins`).
    `nonfinite_reason` says where a loss or gradient is not finite, None if all are.
    """

    loss: float
    weights: dict[str, float]
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

    @staticmethod
    def from_sums(
        tally: MetricSums, plan: StepPlan, waves: list[StepPlan], objective: StepObjective, targets_bytes: int
    ) -> StepMetrics:
        """Means and norms from the sums of all ranks.

        Args:
            plan: of the whole batch.
            waves: the parts in which it went through.
            targets_bytes: of teacher states that this rank held at a time, at most.
        """
        table, positions, term = plan.hidden.table, objective.run.positions, objective.output
        count = len(table)
        output_loss = None if term is None or term.only_watched else float(tally.output[1])
        target, error, gradient = (tally.column(c) for c in ("squared_target", "squared_error", "squared_gradient"))
        all_gradients = sum(gradient.values())
        per_layer = tally.column("loss")
        weights = objective.layer_weights
        rep_loss = sum(weights[layer] * loss for layer, loss in per_layer.items()) / (sum(weights.values()) or 1.0)
        trained, term_weights = {}, {}
        if per_layer and objective.weight:
            trained["rep/loss"], term_weights["rep/loss"] = rep_loss, objective.weight
        if term is not None and output_loss is not None and term.weight:
            trained["output/loss"], term_weights["output/loss"] = output_loss, term.weight
        of_output = None if plan.output is None else plan.output.table
        first, last = (
            _cumulative(sums, numbers) if per_layer and positions in ("all", complete) else {}
            for sums, numbers, complete in zip(
                tally.profile.numpy(), (table.from_start, table.from_end), ("first_k", "last_k"), strict=True
            )
        )
        return StepMetrics(
            # what has no weight may be infinite
            loss=sum(weight * trained[name] for name, weight in term_weights.items()),
            weights=_weights(objective),
            output_loss=output_loss,
            output_means=tally.output_means(),
            reports_pg_loss=term is not None and (term.loss.kind == "sampled_token" or term.only_watched),
            rep_loss=rep_loss,
            rep_loss_per_layer=per_layer,
            rep_loss_per_teacher=_loss_per_teacher(tally.per_response[0], table, plan, term_weights.get("rep/loss")),
            output_loss_per_teacher=_loss_per_teacher(
                tally.per_response[1], of_output, plan, term_weights.get("output/loss")
            ),
            trained_losses=trained,
            cosine_per_layer={layer: value / count for layer, value in tally.column("cosine").items()},
            relative_error_per_layer={layer: _ratio(error[layer], target[layer]) ** 0.5 for layer in error},
            norm_ratio_per_layer={layer: value / count for layer, value in tally.column("norm_ratio").items()},
            gradient_norm_per_layer={layer: value**0.5 for layer, value in gradient.items()},
            gradient_share_per_layer={layer: _ratio(value, all_gradients) for layer, value in gradient.items()},
            position_gap=_gap_per_bin(tally, table, positions) if per_layer else {},
            cosine_first_k=first,
            cosine_last_k=last,
            loss_per_response=tally.per_response.sum(0).tolist(),
            identical_layers=[layer for layer, value in error.items() if value == 0.0],
            targets_bytes=targets_bytes,
            nonfinite_reason=_nonfinite_reason(tally, [wave.hidden for wave in waves], trained, gradient),
        )

    def metrics(self) -> dict[str, float]:
        """Metric names as in metrics.jsonl (docs/runs.md)."""
        named = {"loss/total": self.loss, **self.weights}
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
        return {**named, **self._output_metrics()}

    def _output_metrics(self) -> dict[str, float]:
        named = {OUTPUT_METRICS[name]: value for name, value in self.output_means.items()}
        if {"student_logprob", "teacher_logprob"} <= set(self.output_means):
            estimate = self.output_means["student_logprob"] - self.output_means["teacher_logprob"]
            named["output/kl_estimate"] = estimate
            if self.reports_pg_loss:
                named["actor/pg_loss"] = estimate if self.output_loss is None else self.output_loss
        return {
            **({} if self.output_loss is None else {"output/loss": self.output_loss}),
            **{name: value for name, value in named.items() if name},
        }


def _loss_per_teacher(
    shares: torch.Tensor, table: TokenTable | None, plan: StepPlan, weight: float | None
) -> dict[int, float]:
    """Of one term, from the responses' shares of the total; nothing where the term has no weight or no rows."""
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


def _weights(objective: StepObjective) -> dict[str, float]:
    """The weights of the terms, where they change."""
    if not objective.run.scheduled:
        return {}
    named = {"loss/weight_representation": objective.weight} if objective.run.layers else {}
    return named if objective.run.output is None else {**named, "loss/weight_output": objective.output_weight}


def _nonfinite_reason(
    tally: MetricSums, waves: list[BatchPlan], trained: dict[str, float], gradient: dict[int, float]
) -> str | None:
    """Where a term that is trained on, or its gradient, is not finite."""
    found, responses = [], set()
    if not math.isfinite(trained.get("output/loss", 0.0)):
        found.append(f"the output-space loss is {trained['output/loss']}")
        responses |= _not_finite(tally.per_response[1])
    loss = tally.column("loss") if "rep/loss" in trained else {}
    layers = [layer for layer in loss if not math.isfinite(loss[layer] + gradient[layer])]
    if layers:
        others = f" (and {len(layers) - 1} others)" if len(layers) > 1 else ""
        first = layers[0]
        found.append(f"loss {loss[first]} and gradient norm {gradient[first] ** 0.5} at layer {first}{others}")
        responses |= _not_finite(tally.per_response[0])
    if not found:
        return None
    return ", ".join([*found, *(_place(response, waves) for response in sorted(responses)[:3])])


def _not_finite(shares: torch.Tensor) -> set[int]:
    return set((~torch.isfinite(shares)).nonzero()[:, 0].tolist())


def _place(response: int, waves: list[BatchPlan]) -> str:
    for number, wave in enumerate(waves):
        for data, packs in enumerate(wave.packs):
            for m, pack in enumerate(packs):
                if response in pack.sequences:
                    earlier = sum(len(before.packs[data]) for before in waves[:number])
                    return f"response {response} in microbatch {earlier + m} of data-parallel rank {data}"
    raise AssertionError(f"response {response} is in no microbatch")


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _gap_per_bin(tally: MetricSums, table: TokenTable, positions: str) -> dict[int, float]:
    """Profile bin -> 1 - mean cosine of the deepest supervised layer, for the bins that have rows."""
    sums = tally.profile[1 if positions == "last_k" else 0].tolist()
    counts = np.bincount(row_bins(table, positions), minlength=PROFILE_BINS).tolist()
    return {j: 1 - total / count for j, (total, count) in enumerate(zip(sums, counts, strict=True)) if count}


def _cumulative(sums: np.ndarray, numbers: np.ndarray) -> dict[int, float]:
    """k = 1, 2, 4, ... -> mean over the rows whose number (0-based) is below k, up to the first k that takes all."""
    counts = np.bincount(profile_bins(numbers), minlength=PROFILE_BINS)
    means = np.cumsum(sums) / np.maximum(1, np.cumsum(counts))
    return {1 << j: float(means[j]) for j in range(int(profile_bins(numbers).max()) + 1)}
