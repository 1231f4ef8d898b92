"""One sampled response in arrays, as engines return it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Response:
    """Result of sampling one request.

    Attributes:
        ids: int32 [tokens], including the id that ended the response, if one did (`finished`).
        logprobs: `Rollout.logprobs`, float32 [tokens]; None if the engine computes none.
        versions: int32 [spans, 3]: (optimizer steps behind the weights, first token that they sampled, end of these
            tokens); None if the engine has one set of weights.
        routes: `Rollout.expert_routes`, int16 [tokens, layers, K], of all tokens but the last one, which no model
            reads; None if the engine did not record them.
        cut: whether these are the first tokens of a response that may go on.
    """

    ids: np.ndarray
    finished: bool
    logprobs: np.ndarray | None = None
    versions: np.ndarray | None = None
    routes: np.ndarray | None = None
    cut: bool = False

    def columns(self) -> dict[str, np.ndarray]:
        """Returns the response in columns for `Exchange.share`."""
        columns = {"ids": self.ids, "finished": np.array([self.finished]), "cut": np.array([self.cut])}
        recorded = {"logprobs": self.logprobs, "versions": self.versions, "routes": self.routes}
        return columns | {name: array for name, array in recorded.items() if array is not None}

    @staticmethod
    def of(columns: dict[str, np.ndarray]) -> Response:
        """Rebuilds the response from the result of `columns`."""
        plain = {name: bool(columns[name][0]) for name in ("finished", "cut")}
        return Response(**columns | plain)  # type: ignore[arg-type]
