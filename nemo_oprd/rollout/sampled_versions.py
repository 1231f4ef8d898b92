"""That nothing of other weights is learned from unnoticed: versions of sampled tokens, and digests of the weights."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from nemo_oprd.batch import weight_spans
from nemo_oprd.batch.types import Rollout


def check_versions(rollouts: list[Rollout], step: int, newest: int, most: int) -> None:
    """Raises ValueError unless every token comes from weights that are at most `most` updates behind `newest`.

    `newest`: the number of optimizer steps behind the weights of now, with which step `step` (from 0) begins.
    """
    for number, rollout in enumerate(rollouts):
        spans, tokens = rollout.weight_versions, len(rollout.response_ids)
        wrong = "no versions; expected one per token" if spans is None else weight_spans.problem(spans, tokens)
        if spans is not None and wrong is None:
            versions, oldest = spans[:, 0].tolist(), max(0, newest - most)
            outside = [version for version in versions if not oldest <= version <= newest]
            wrong = f"the version {outside[0]}; expected {oldest} to {newest} (rollout.max_lag)" if outside else None
        if wrong is not None:
            raise ValueError(
                f"the weights that sampled response {number} of step {step + 1} are not those of the schedule: {wrong}"
                "; does somebody else use or update a server? Resume from the last checkpoint"
            )


def lag_metrics(rollouts: list[Rollout], steps: int) -> dict[str, float]:
    """By how many optimizer steps the weights that sampled the tokens are behind those after `steps` such steps."""
    spans = [rollout.weight_versions for rollout in rollouts if rollout.weight_versions is not None]
    versions = np.concatenate([weight_spans.token_versions(each) for each in spans] or [np.zeros(0, np.int32)])
    if not len(versions):
        return {}
    return {"rollout/lag_mean": float((steps - versions).mean()), "rollout/lag_max": float(steps - versions.min())}


class WeightDigests:
    """The digests of the weights that are known, by the number of optimizer steps behind them."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[str, str]] = {}  # the digest, and who says so

    def note(self, steps: int, digest: str | None, where: str) -> None:
        """Takes up a digest, if there is one; raises ValueError if another one is known of the same weights."""
        if digest is None:
            return
        known, before = self._known.setdefault(steps, (digest, where))
        if known != digest:
            raise ValueError(
                f"{where} has responses of the weights after {steps} updates with the digest {digest}, but by {before} "
                f"these weights have the digest {known}; expected the same weights, because responses of others would "
                "be mixed with this run's: remove that file to sample them anew"
            )

    def of(self, rollouts: Iterable[Rollout]) -> dict[str, str]:
        """The digests of the weights that sampled some responses, by their number as text; of those that are known."""
        spans = [rollout.weight_versions for rollout in rollouts if rollout.weight_versions is not None]
        steps = sorted({int(version) for each in spans for version in each[:, 0]})
        return {str(each): self._known[each][0] for each in steps if each in self._known}
