"""A role's parallel layout: the coordinates of each rank, and the pipeline stage that owns each layer.

This module is index arithmetic without processes, tensors or Megatron, so that layouts can be tested by themselves.
Order of ranks within a role, fastest first: tensor, context, data, pipeline (Megatron's "tp-cp-dp-pp").
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Coordinates:
    """A rank's indices in the parallel dimensions of its role's layout."""

    tensor: int
    context: int
    data: int
    pipeline: int


@dataclass(frozen=True)
class Layout:
    """The parallel sizes of a role on `tensor * context * data * pipeline` consecutive ranks from `first_rank` on.

    `virtual_pipeline` is the number of model chunks per pipeline rank, `sequence` switches sequence parallelism on.
    `first_stage_layers` and `last_stage_layers` are the numbers of layers on the first and on the last pipeline rank;
    None: `layers_per_stage` chooses them.

    Experts are split over the `tensor * context * data` ranks of a pipeline stage in another way: every expert over
    `expert_tensor` ranks, the experts of a layer over `expert` such groups, and the remaining ranks hold copies. Order
    of ranks, fastest first: expert tensor, expert, copy. `dispatcher` is the method that sends tokens to experts.
    """

    tensor: int = 1
    context: int = 1
    data: int = 1
    pipeline: int = 1
    virtual_pipeline: int = 1
    sequence: bool = False
    first_rank: int = 0
    first_stage_layers: int | None = None
    last_stage_layers: int | None = None
    expert: int = 1
    expert_tensor: int = 1
    dispatcher: str = "alltoall"

    @property
    def size(self) -> int:
        """Number of ranks of the role."""
        return self.tensor * self.context * self.data * self.pipeline

    @property
    def expert_copies(self) -> int:
        """Number of ranks that hold the same experts (Megatron's expert data-parallel size)."""
        return self.tensor * self.context * self.data // (self.expert * self.expert_tensor)

    @property
    def ranks(self) -> range:
        """The global ranks of the role."""
        return range(self.first_rank, self.first_rank + self.size)

    def coordinates(self, rank: int) -> Coordinates:
        """Returns the coordinates of a global rank of this role."""
        assert rank in self.ranks
        rest, tensor = divmod(rank - self.first_rank, self.tensor)
        rest, context = divmod(rest, self.context)
        pipeline, data = divmod(rest, self.data)
        return Coordinates(tensor, context, data, pipeline)

    def rank(self, coords: Coordinates) -> int:
        """Returns the global rank with the coordinates `coords`; the inverse of `coordinates`."""
        inner = (coords.pipeline * self.data + coords.data) * self.context + coords.context
        return self.first_rank + inner * self.tensor + coords.tensor

    def layers_per_stage(self, num_layers: int) -> list[int]:
        """Returns the number of layers on each pipeline rank.

        Stages without a given number get equal ones. If neither end has a number and the layers are not divisible, only
        the inner stages get equal numbers, because Megatron supports no other split; the first and the last stage
        divide the remaining layers, and the last stage, which also holds the head, gets the smaller part.

        Raises:
            ValueError: the layers cannot be split over the stages.
        """
        first, last = self.first_stage_layers, self.last_stage_layers
        if first is None and last is None and num_layers % self.pipeline:
            first, last = self._balanced_ends(num_layers)
        counts: list[int | None] = [None] * self.pipeline
        if first is not None:
            counts[0] = first
        if last is not None:
            counts[-1] = last
        rest = num_layers - sum(count for count in counts if count is not None)
        open_stages = counts.count(None)
        if rest < 0 or (open_stages and rest % open_stages) or (not open_stages and rest):
            raise ValueError(
                f"{num_layers} layers cannot be split over pipeline={self.pipeline} stages with "
                f"first_stage_layers={self.first_stage_layers}, last_stage_layers={self.last_stage_layers}; choose a "
                "pipeline size that divides the layers, or other first_stage_layers/last_stage_layers"
            )
        filled = [rest // open_stages if count is None else count for count in counts]
        if min(filled) < 1:
            raise ValueError(
                f"pipeline={self.pipeline} is more than the model's {num_layers} layers; expected a layer on each "
                f"stage: choose at most {num_layers}"
            )
        if any(count % self.virtual_pipeline for count in filled):
            raise ValueError(
                f"virtual_pipeline={self.virtual_pipeline} does not divide the {filled} layers of each pipeline rank; "
                "choose a common divisor"
            )
        return filled

    def _balanced_ends(self, num_layers: int) -> tuple[int, int]:
        middle = (num_layers + self.pipeline // 2) // self.pipeline
        while middle > 1 and num_layers - middle * (self.pipeline - 2) < 2:
            middle -= 1
        rest = num_layers - middle * (self.pipeline - 2)
        return rest - rest // 2, rest // 2

    def stage_of_layer(self, layer: int, num_layers: int) -> tuple[int, int]:
        """Returns (pipeline rank, model chunk) that owns layer `layer` (1-based)."""
        counts = self.layers_per_stage(num_layers)
        first = 1
        for chunk in range(self.virtual_pipeline):
            for pipeline, count in enumerate(counts):
                size = count // self.virtual_pipeline
                if first <= layer < first + size:
                    return pipeline, chunk
                first += size
        raise ValueError(f"layer {layer} is not in 1..{num_layers}")

    def owned_layers(self, pipeline: int, num_layers: int) -> list[int]:
        """Returns the layers (1-based) of one pipeline rank, ascending."""
        owned: list[int] = []
        first = 1
        counts = self.layers_per_stage(num_layers)
        for _ in range(self.virtual_pipeline):
            for stage, count in enumerate(counts):
                size = count // self.virtual_pipeline
                if stage == pipeline:
                    owned.extend(range(first, first + size))
                first += size
        return owned

    def describe(self) -> str:
        """Returns a short text such as "TP2 PP2 VPP2 DP1 +SP"."""
        parts = [f"TP{self.tensor}"]
        for name, size in (("CP", self.context), ("PP", self.pipeline), ("VPP", self.virtual_pipeline)):
            if size > 1:
                parts.append(f"{name}{size}")
        parts.append(f"DP{self.data}")
        for name, size in (("EP", self.expert), ("ETP", self.expert_tensor)):
            if size > 1:
                parts.append(f"{name}{size}")
        return " ".join(parts) + (" +SP" if self.sequence else "")
