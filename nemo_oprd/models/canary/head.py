"""Comparison of an engine's log-probabilities and entropies with those by transformers' own head.

A head has a matrix, perhaps tied to the embeddings, and in many families a bias, a scale or a cap of the logits. All of
them are in the comparison, because transformers computes its side by the model's own forward.
"""

from __future__ import annotations

import torch

from nemo_oprd.models.canary.reference import HEAD_ROWS
from nemo_oprd.models.canary.verdict import OWN_DEVIATIONS, Measure

# of a log-probability or an entropy in float32, in nats
FLOAT32_LOGPROB = 1e-3
_COLUMNS = ("log-probability", "entropy")


def head_rows(length: int) -> list[int]:
    """The rows of a prompt of `length` tokens that are compared, see `ReferenceStates.heads`."""
    return [*range(max(0, length - HEAD_ROWS), length - 1)]


def prove_head(found: list[torch.Tensor], family: str, *, dtype: str, measure: Measure) -> None:
    """Compares.

    Args:
        found: per prompt [n, 2], of `head_rows` the log-probability of the next token and the entropy.
        family: the model's type, for messages.
        dtype: the engine's precision: "float32" or "bfloat16".
        measure: returns transformers' numbers, in a precision.

    Raises:
        ValueError: in float32 a number deviates by more than 1e-3, in bfloat16 the median by more than 1.5 times that
            of transformers' bfloat16 from its float32.
    """
    reference = measure("float32").heads
    off = [(a.to("cpu", torch.float32) - b).abs().nan_to_num(torch.inf) for a, b in zip(found, reference, strict=True)]
    joined, allowed, what = torch.cat(off), [FLOAT32_LOGPROB] * len(_COLUMNS), "largest deviation"
    deviation = joined.amax(0)
    if dtype == "bfloat16":
        own = torch.cat([(a - b).abs() for a, b in zip(measure("bfloat16").heads, reference, strict=True)])
        deviation, what = joined.median(0).values, "median deviation"
        allowed = [OWN_DEVIATIONS * each for each in own.median(0).values.tolist()]
    for column, name in enumerate(_COLUMNS):
        if not float(deviation[column]) <= allowed[column]:
            worst = [float(rows[:, column].max()) if len(rows) else 0.0 for rows in off]
            prompt = worst.index(max(worst))
            before_last = len(off[prompt]) - int(off[prompt][:, column].argmax())
            raise ValueError(
                f"canary of {family}: the {name} by the server's head differs from transformers': {what} "
                f"{float(deviation[column]):.1e}, most in prompt {prompt}, {before_last} rows before its last one; "
                f"expected at most {allowed[column]:.1e} in {dtype}, although hidden states are right: the head is "
                "another one, or its bias, scale or cap of logits is left out"
            )
