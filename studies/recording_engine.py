"""`nemo-oprd` with an in-process engine that records log-probabilities, so that `rollout.correction` can use them.

    python -m studies.recording_engine train --config-name ...

The engine itself records none: it is the trainer's own model, so without a lag there is nothing to correct. A study of
lagged samples needs them, and no servers.
"""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import torch

from nemo_oprd.batch.types import Rollout
from nemo_oprd.config.teacher_kinds import RECORDS, Records
from nemo_oprd.rollout import in_process_engine
from nemo_oprd.rollout.decoding import _Batch
from nemo_oprd.rollout.engine import Request
from nemo_oprd.rollout.response import Response

_sample, _responses, _rollout = _Batch.sample, _Batch.responses, in_process_engine._rollout


def sample(batch: _Batch, last: torch.Tensor, t: int, temperature: float, top_p: float) -> torch.Tensor:
    """Replaces `_Batch.sample`; keeps the log-probabilities of the tokens beside the batch's ids."""
    token = _sample(batch, last, t, temperature, top_p)
    log_p = (batch.columns.of(batch.model.logits(last)[0]).float() / temperature).log_softmax(-1)
    kept = vars(batch).setdefault("logprobs", torch.zeros(batch.sampled.shape, device=token.device))
    kept[batch.alive, t] = log_p.gather(1, token[:, None])[:, 0]
    return token


def responses(batch: _Batch) -> list[Response]:
    """Replaces `_Batch.responses`."""
    kept = vars(batch)["logprobs"].cpu().numpy()
    return [replace(one, logprobs=kept[i, : len(one.ids)]) for i, one in enumerate(_responses(batch))]


def rollout(request: Request, response: Response, step: int) -> Rollout:
    """Replaces the function that makes a `Rollout` of a response."""
    return replace(_rollout(request, response, step), logprobs=response.logprobs)


def main() -> None:
    """Command line."""
    from nemo_oprd.cli import main as command

    with (
        mock.patch.multiple(_Batch, sample=sample, responses=responses),
        mock.patch.object(in_process_engine, "_rollout", rollout),
        mock.patch.dict(RECORDS, {"megatron": Records()}),
    ):
        command()


if __name__ == "__main__":
    main()
