"""The numbers of small tensors on the device that the host itself has put there: lengths, indices, masks, counters.

A rehearsal has no data, yet much of what a step reads back from the device was made on the host a moment before. Such
tensors keep a real twin in host memory, on which small operations are carried out, too. A read of the device then
returns the number that a run would return, and `nonzero` the right number of rows. An operation with anything that has
no twin ends the twins of what it writes.

The values of other ranks are not known. After a reduction or a broadcast the twin is what this rank gave.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakIdRef, WeakTensorKeyDictionary

# Larger tensors have no twin: they hold weights, states and gradients.
LARGEST = 1 << 17
# The limit for integers and booleans: indices and masks, such as which of many experts a token visits.
LARGEST_OF_INTEGERS = 1 << 24
_NO_NUMBERS = ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted")
# after these every rank has what this rank gave, as far as it is known here
_AGREED = ("allreduce_", "broadcast_", "allreduce_coalesced_")


class HostValues:
    """Twins of tensors on the device; `get(tensor)` is real, in host memory, of equal shape and dtype."""

    def __init__(self) -> None:
        self._twins: Any = WeakTensorKeyDictionary()
        self._of_storage: dict[int, list[WeakIdRef]] = defaultdict(list)

    def get(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Returns the twin of a tensor, which for a real tensor in host memory is itself; None if there is none."""
        if tensor.device.type != "cuda" and type(tensor) is torch.Tensor:
            return tensor
        found: torch.Tensor | None = self._twins.get(tensor)
        return found

    def are_equal(self, one: torch.Tensor, other: torch.Tensor) -> bool | None:
        """Returns whether two tensors have equal numbers; None if those of one are not known."""
        twins = self.get(one), self.get(other)
        if twins[0] is None or twins[1] is None:
            return None
        with _disable_current_modes():
            return torch.equal(twins[0], twins[1])

    def follow(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Repeats an operation on the twins of its arguments, and keeps the results as twins of `out`."""
        written = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        mutates = func._schema.is_mutable
        if not written or any(map(_is_large, written)):
            self._end_if(mutates, written)
            return
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        twins = {id(leaf): self.get(leaf) for leaf in leaves}
        name = func.overloadpacket.__name__
        is_known = name not in _NO_NUMBERS and torch.Tag.nondeterministic_seeded not in func.tags
        if not is_known or any(twin is None or _is_large(twin) for twin in twins.values()):
            self._end_if(mutates, written)
            return

        def on_host(leaf: Any) -> Any:
            if isinstance(leaf, torch.Tensor):
                return twins[id(leaf)]
            return torch.device("cpu") if isinstance(leaf, torch.device) else leaf

        with _disable_current_modes():
            real = func(*tree_map(on_host, args), **tree_map(on_host, kwargs))
        made = [leaf for leaf in tree_leaves(real) if isinstance(leaf, torch.Tensor)]
        for tensor, twin in zip(written, made, strict=True):
            self.put(tensor, twin)

    def put(self, tensor: torch.Tensor, twin: torch.Tensor) -> None:
        """Gives a tensor on the device a twin."""
        if tensor.device.type == "cuda" and tensor.shape == twin.shape:
            if tensor not in self._twins:
                self._of_storage[tensor.untyped_storage()._cdata].append(WeakIdRef(tensor))
            self._twins[tensor] = twin

    def collective(self, name: str, tensors: list[torch.Tensor]) -> None:
        """Ends the twins of a collective's tensors, except for reductions, broadcasts and sends, which keep them."""
        if name not in _AGREED and name != "send":
            self._end_if(True, tensors)

    def freed(self, storage: int) -> None:
        """Ends the twins in the storage with this address, which was freed."""
        self._of_storage.pop(storage, None)

    def _end_if(self, mutates: bool, tensors: list[torch.Tensor]) -> None:
        """Ends the twins of tensors that were written to, and of all tensors in their memory."""
        if not mutates:
            return
        for tensor in tensors:
            for reference in self._of_storage.pop(tensor.untyped_storage()._cdata, []):
                alive = reference()
                if alive is not None:
                    self._twins.pop(alive, None)


def _is_large(tensor: torch.Tensor) -> bool:
    return tensor.numel() > (LARGEST if tensor.is_floating_point() else LARGEST_OF_INTEGERS)


# Chooses the experts of a rehearsal's tokens: the router has no numbers, so `--experts-load` gives the load.
#
# Megatron's dispatchers read on the host how many tokens each expert of this rank gets, from its own tokens and from
# those of other ranks. Both are consistent over ranks: every rank chooses by the same rule, and the others of an
# exchange are assumed to have as many tokens as this one.


# how tokens spread over the experts -> (tokens, experts, experts per token) -> the first expert of each token [N, 1]
LOADS: dict[str, Callable[[int, int, int], torch.Tensor]] = {
    # every expert has as many visits as any other
    "balanced": lambda tokens, experts, per_token: torch.arange(tokens).unsqueeze(1) * per_token % experts,
    # all tokens visit the first experts, which are on one rank
    "one-rank": lambda tokens, experts, per_token: torch.zeros(tokens, 1, dtype=torch.int64),
}


@cache
def visits(load: str, tokens: int, experts: int, per_token: int) -> torch.Tensor:
    """Returns which experts each token visits: bool [tokens, experts], in host memory."""
    chosen = (LOADS[load](tokens, experts, per_token) + torch.arange(per_token)) % experts
    return torch.zeros(tokens, experts, dtype=torch.bool).scatter_(1, chosen, True)


def install(load: str, known: HostValues) -> None:
    """Changes the routers and the dispatchers for the whole process."""
    from megatron.core.transformer.moe import token_dispatcher

    from nemo_oprd.distillation.metrics.step_metrics import RouterMetrics
    from nemo_oprd.megatron import experts

    routing, gather = experts.Router.routing, token_dispatcher.gather_from_sequence_parallel_region

    def routed(router: Any, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        weights, where = routing(router, *args, **kwargs)
        with _disable_current_modes():
            twin = visits(load, len(where), where.shape[1], router.topk)
        known.put(where, twin)
        return weights, where

    def gathered(part: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        twin = known.get(part)
        whole: torch.Tensor = gather(part, *args, **kwargs)
        if twin is not None and len(part):
            with _disable_current_modes():
                every = twin.repeat(len(whole) // len(part), *(1 for _ in part.shape[1:]))
            known.put(whole, every)
        return whole

    # made of sums over all ranks, which no single rank knows
    RouterMetrics.from_sums = staticmethod(lambda sums, term: RouterMetrics(0.0, {}))  # type: ignore[method-assign]
    experts.Router.routing = routed  # type: ignore[method-assign,assignment]
    token_dispatcher.gather_from_sequence_parallel_region = gathered
    experts.gather_from_sequence_parallel_region = gathered  # type: ignore[attr-defined]
