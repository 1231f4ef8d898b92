"""The routers of the student in one update: their losses, their metrics, and routes that are replayed.

For each of the update's n layers with experts, over the T tokens that the update computes on all ranks (prompts
included, padding not), with p_te the router's probability of expert e and z_te its logits:

    load-balancing loss   E * sum_e f_e P_e    f_e = how often expert e is chosen / T    P_e = sum_t p_te / T
    z-loss                sum_t (log sum_e exp z_te)^2 / T

The load-balancing loss is transformers' `load_balancing_loss_func` for one layer (K where the load is even). The total
loss has the mean over the n layers, times `student.router_aux_loss` or `student.router_z_loss`. transformers joins the
tokens of all layers before it computes f and P, so one layer may overload the expert of some number if another layer
avoids the expert of that number; here every layer is balanced by itself.

f_e is constant for the gradient, which is E f_e / (n T) at each p_te. But the gradient of the first microbatch needs
f_e over all microbatches, on all ranks, while pipelined schedules run its backward pass before the others' forward
passes. The gradient is linear in f, so applying f afterwards would need one gradient of the model per expert of each
layer. f of an earlier update belongs to other weights and tokens, and f of one microbatch makes the loss depend on the
packing. So with a load-balancing loss, a forward pass without gradients over the whole update goes first and counts
(`count_choices`). The training pass reuses its routes, so that the f_e are those of the very routes that are trained.
The z-loss needs no such pass.

Shapes: N tokens of this rank in a microbatch, n of them counted, E experts, K experts per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist

from nemo_oprd.batch.layout import Coordinates
from nemo_oprd.batch.packing import Pack
from nemo_oprd.batch.plan import StepPlan
from nemo_oprd.batch.types import Rollout
from nemo_oprd.distillation.gradient_injection import inject_gradient
from nemo_oprd.distillation.objective import StepObjective
from nemo_oprd.megatron.experts import probabilities
from nemo_oprd.megatron.parallel import Role, device, on_device
from nemo_oprd.megatron.router_replay import Routes
from nemo_oprd.models import ModelSpec


@dataclass(frozen=True)
class RouterTerm:
    """The routers' part of an update: layers, counted tokens and loss weights."""

    experts: int
    layers: tuple[int, ...]  # the layers with experts that the losses of the update reach, ascending, 1-based
    lengths: np.ndarray  # int64 [responses], for each response how many of its tokens count, from the first one on
    aux: float  # the factor of the load-balancing loss in the total loss
    z: float  # the factor of the z-loss in the total loss
    replay: bool  # whether tokens visit the experts that their rollouts have recorded

    @staticmethod
    def build(plan: StepPlan, objective: StepObjective, num_responses: int) -> RouterTerm | None:
        """Returns the term of an update with `plan`; None for a student without experts.

        Tokens and layers that are computed only to measure divergences (`logging.output_metrics_every`) do not count,
        so that measuring does not change the training.
        """
        run, experts = objective.run, objective.run.student.experts
        if experts is None:
            return None
        lengths = np.array(plan.hidden.table.needed_tokens(num_responses), dtype=np.int64)
        if plan.output is not None and objective.output is not None and not objective.output.only_watched:
            lengths = np.maximum(lengths, plan.output.table.needed_tokens(num_responses))
        reached = [layer for layer in range(1, objective.reached_depth + 1) if run.student.is_sparse(layer)]
        return RouterTerm(experts.count, tuple(reached), lengths, *run.router_weights, run.replays_routes)

    @property
    def tokens(self) -> int:
        """The counted tokens of the update, T."""
        return int(self.lengths.sum())

    @property
    def share(self) -> float:
        """1 / (T n)."""
        return 1 / (self.tokens * len(self.layers))

    @property
    def sums_shape(self) -> tuple[int, int]:
        """The shape of the sum "routers" of `RouterLosses`."""
        return len(self.layers), 2 * self.experts + len(RouterLosses.SUMS)


class TokenPlaces:
    """The response and position of each of this rank's tokens in a microbatch, int64 [N]; -1 for padding."""

    def __init__(self, pack: Pack, coords: Coordinates) -> None:
        response, position = np.full(pack.total, -1), np.full(pack.total, -1)
        for i, length, offset in zip(pack.sequences, pack.lengths, pack.offsets, strict=False):
            response[offset : offset + length] = i
            position[offset : offset + length] = np.arange(length)
        own = pack.context_slice(coords.context)
        if pack.layout.sequence and pack.layout.tensor > 1:
            own = np.split(own, pack.layout.tensor)[coords.tensor]
        self.response, self.position = response[own], position[own]

    def counted(self, lengths: np.ndarray) -> torch.Tensor:
        """Returns the indices int64 [n] of the tokens that count, with `lengths` as in `RouterTerm`."""
        return torch.from_numpy(np.flatnonzero((self.response >= 0) & (self.position < lengths[self.response])))

    def recorded_routes(self, rollouts: Sequence[Rollout], spec: ModelSpec) -> dict[int, torch.Tensor] | None:
        """Returns layer -> recorded experts int16 [N, K], -1 for tokens without; None if no token has any."""
        assert spec.experts is not None
        routed = [i for i in np.unique(self.response).tolist() if i >= 0 and rollouts[i].expert_routes is not None]
        if not routed:
            return None
        layers = [layer for layer in range(1, spec.num_layers + 1) if spec.is_sparse(layer)]
        routes = np.full((len(layers), len(self.response), spec.experts.per_token), -1, dtype=np.int16)
        for i in routed:
            known = np.asarray(rollouts[i].expert_routes, dtype=np.int16)
            rows = np.flatnonzero((self.response == i) & (self.position < len(known)))
            routes[:, rows] = known[self.position[rows]].transpose(1, 0, 2)
        return dict(zip(layers, on_device(routes), strict=True))


@dataclass
class RouterLosses:
    """The router's losses and metrics in one microbatch; a `RouterObserver`.

    Attributes:
        sums: "routers" -> float64 [layers of the term, 2 * E + len(SUMS)], sums over the rows of each layer: how often
            each expert was chosen, the sum of its probability, and `SUMS`; empty until a layer is measured. In `SUMS`,
            "compared" counts the tokens with recorded experts, "changed" those of them for which the router chooses
            another set of experts.
    """

    term: RouterTerm
    rows: torch.Tensor  # int64 [n], the counted tokens
    recorded: dict[int, torch.Tensor] | None = None  # layer -> recorded experts int16 [N, K], -1 for tokens without
    fractions: dict[int, torch.Tensor] = field(default_factory=dict)  # layer -> f float32 [E], for load balancing
    measured: set[int] = field(default_factory=set)  # the layers whose rows have been measured
    sums: dict[str, torch.Tensor] = field(default_factory=dict)

    SUMS = ("tokens", "entropy", "z", "changed", "compared")

    def at_router(self, layer: int, logits: torch.Tensor) -> torch.Tensor:
        """Attaches the gradient of the losses to the logits [N, E]."""
        term = self.term
        if not torch.is_grad_enabled() or layer not in term.layers or not (term.aux or term.z) or not len(self.rows):
            return logits

        def loss(logits_nE: torch.Tensor, chunk: slice) -> torch.Tensor:
            total = logits_nE.new_zeros(())
            if term.aux:
                weighed = probabilities(logits_nE) * self.fractions[layer]
                total = total + term.aux * term.experts * term.share * weighed.sum()
            if term.z:
                total = total + term.z * term.share * logits_nE.logsumexp(-1).square().sum()
            return total

        return inject_gradient(logits[:, None], self.rows, loss, keep_rows=True)[:, 0]

    @torch.no_grad()
    def routed(self, layer: int, logits: torch.Tensor, experts: torch.Tensor, own: torch.Tensor) -> None:
        """Measures a layer in the first pass of the microbatch."""
        if layer in self.measured or layer not in self.term.layers:
            return
        logits, experts = logits[self.rows].float(), experts[self.rows]
        p = probabilities(logits)
        compared, changed = torch.zeros(2, dtype=torch.float64, device=logits.device)
        if self.recorded is not None:
            recorded = self.recorded[layer][self.rows].long()
            known = recorded[:, 0] >= 0
            differs = (own[self.rows].sort(-1).values != recorded.sort(-1).values).any(-1)
            compared, changed = known.sum().double(), (known & differs).sum().double()
        sums = [
            torch.full((), len(self.rows), dtype=torch.float64, device=logits.device),
            torch.special.entr(p).sum(dtype=torch.float64),
            logits.logsumexp(-1).square().sum(dtype=torch.float64),
            changed,
            compared,
        ]
        parts = [choices(experts, self.term.experts), p.sum(0, dtype=torch.float64), torch.stack(sums)]
        if not self.sums:
            self.sums["routers"] = parts[0].new_zeros(self.term.sums_shape)
        torch.cat(parts, out=self.sums["routers"][self.term.layers.index(layer)])
        self.measured.add(layer)


def choices(experts: torch.Tensor, count: int) -> torch.Tensor:
    """Returns the number of times that each of `count` experts occurs in `experts`, float64 [count]."""
    # bincount would wait for the device
    flat = experts.flatten()
    ones = torch.ones(len(flat), dtype=torch.float64, device=flat.device)
    return ones.new_zeros(count).index_add_(0, flat, ones)


@dataclass(frozen=True)
class RouterMicrobatch:
    """The routers in one microbatch: their routes in both passes, and the observer of the training pass."""

    routes: Routes
    losses: RouterLosses

    @staticmethod
    def build(term: RouterTerm, pack: Pack, rollouts: list[Rollout], role: Role, spec: ModelSpec) -> RouterMicrobatch:
        """Returns the microbatch of `pack` on this rank."""
        places = TokenPlaces(pack, role.member_coords)
        recorded = places.recorded_routes(rollouts, spec)
        losses = RouterLosses(term, on_device(places.counted(term.lengths)), recorded)
        return RouterMicrobatch(Routes(recorded if term.replay else None, losses), losses)


def count_choices(term: RouterTerm, microbatches: list[RouterMicrobatch], role: Role) -> dict[int, torch.Tensor]:
    """Returns layer -> f float32 [E], after a pass without gradients over all microbatches of the update.

    Every rank of the role calls this and gets the layers of all stages.
    """
    counts = torch.zeros(len(term.layers), term.experts, dtype=torch.float64, device=device())
    for microbatch in microbatches:
        for i, layer in enumerate(term.layers):
            kept = microbatch.routes.kept(layer)
            if kept is not None:  # a layer of this stage
                counts[i] += choices(kept[microbatch.losses.rows], term.experts)
    dist.all_reduce(counts, group=role.member_groups.intra_dist_opt)
    return dict(zip(term.layers, (counts / term.tokens).float(), strict=True))
