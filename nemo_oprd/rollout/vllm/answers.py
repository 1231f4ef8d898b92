"""A server's answer to a request -> the ids and log-probabilities of a response, or why it is none of this run.

Answers have some 150 bytes per token, of which a few are used. Compiled code of pydantic makes Python objects of those
alone, which takes a third of the time of `json.loads`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from pydantic import TypeAdapter, ValidationError
from typing_extensions import TypedDict

from nemo_oprd.data.tokenization.token_ids import TokenIds
from nemo_oprd.rollout.response import Response
from nemo_oprd.rollout.vllm.server import ServerDied, ServerRefused

# how far rounding may lift the logarithm of a probability above 0
LOGPROB_ROUNDING = 1e-3
# what vLLM answers instead of NaN, of minus infinity and of a log-probability that it does not know
NO_LOGPROB = -9999.0


class _Token(TypedDict):
    logprob: float


class _Logprobs(TypedDict):
    content: list[_Token]


class _Span(TypedDict):
    version: str | None
    start: int
    end: int


class _Choice(TypedDict):
    token_ids: list[int]
    weight_versions: list[_Span]
    finish_reason: str | None
    logprobs: _Logprobs


class _Answer(TypedDict):
    choices: list[_Choice]


_ANSWER = TypeAdapter(_Answer)


@dataclass
class AnswerCheck:
    """What all responses of a round have in common: the version of the weights, and the ids that may be sampled.

    `may_be_cut`: the round is cut, so that a response may have its first tokens only, or none.
    """

    version: str
    known_ids: TokenIds
    may_be_cut: bool = False

    def read(self, index: int, answer: bytes, most: int, server: str) -> Response:
        """The response in a server's answer to request `index`, which asked for at most `most` tokens.

        It has no ids if the round was cut before its first one.

        Raises:
            ServerDied: the server gave the response up, as one does that somebody ends.
            ServerRefused: it was not sampled from the current weights and the known ids alone, or says too little.
        """
        try:
            (choice,) = _ANSWER.validate_json(answer, strict=True)["choices"]
        except ValueError as error:
            raise ServerRefused(
                f"{server} answered response {index} in another form ({_first_error(error)}); expected ids, their log-"
                "probabilities and the version of the weights: does it run the vLLM of scripts/setup_vllm.sh?"
            ) from error
        ids, spans, reason = choice["token_ids"], choice["weight_versions"], choice["finish_reason"]
        cut = reason == "abort" and self.may_be_cut
        if not cut and reason not in ("stop", "length"):
            raise ServerDied(f"{server} gave response {index} up ({reason})")
        if cut and not ids:
            return Response(np.zeros(0, np.int32), finished=False, cut=True)
        if [(span["version"], span["start"], span["end"]) for span in spans] != [(self.version, 0, len(ids))]:
            found = ", ".join(f"{span['version']} (tokens {span['start']} to {span['end']})" for span in spans)
            raise ServerRefused(
                f"{server} sampled response {index} from the weights {found or 'of no version'}, expected "
                f"{self.version} for all tokens: does somebody else use or update this server?"
            )
        if reason == "length" and len(ids) < most:
            raise ServerRefused(
                f"{server} ended response {index} after {len(ids)} tokens, expected up to {most}: remove "
                "--max-model-len from its flags, or lower rollout.max_new_tokens"
            )
        logprobs = np.array([token["logprob"] for token in choice["logprobs"]["content"]], np.float32)
        return Response(self._ids(index, ids, logprobs, server), reason == "stop", logprobs, cut=cut)

    def _ids(self, index: int, ids: list[int], logprobs: np.ndarray, server: str) -> np.ndarray:
        """The ids as an array, if they and their log-probabilities can be those of a response."""
        outside = self.known_ids.outside(ids)
        if outside or len(logprobs) != len(ids) or not ids:
            raise ServerRefused(
                f"{server} answered response {index} with {len(ids)} ids, {len(logprobs)} log-probabilities and the "
                f"ids {outside[:3]} outside {self.known_ids}; expected ids inside, and a log-probability of each"
            )
        wrong = np.flatnonzero(~((logprobs > NO_LOGPROB) & (logprobs <= LOGPROB_ROUNDING)))  # NaN compares as false
        if len(wrong):
            raise ServerRefused(
                f"{server} answered response {index} with the log-probability {logprobs[wrong[0]]:g} of token "
                f"{wrong[0]}; expected a finite number of at most 0 ({NO_LOGPROB:g} stands for minus infinity or NaN): "
                "look for NaN in the weights or in the server's kernels (rollout.vllm.flags)"
            )
        return np.array(ids, np.int32)


def _first_error(error: ValueError) -> str:
    if not isinstance(error, ValidationError):
        return str(error)
    first = error.errors(include_url=False, include_input=False)[0]
    return f"{'.'.join(map(str, first['loc'])) or 'the answer'}: {first['msg']}"
