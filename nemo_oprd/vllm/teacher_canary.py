"""Check that a teacher's server computes transformers' states, and that the trainer's head is the teacher's.

Every server computes the canary at every start, after every restart and every `teacher.vllm.check_every` steps. Only
the comparison with transformers is skipped if exactly the same bytes have passed it before (`nemo_oprd/canary`,
docs/canary.md).
"""

from __future__ import annotations

import functools
import hashlib
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nemo_oprd.canary import CanaryVerdict, canary_key, canary_prompts, keep_verdict, kept_verdict, prove
from nemo_oprd.canary.prompts import sliding_window
from nemo_oprd.canary.reference import HEAD_ROWS, reference_states, why_unavailable
from nemo_oprd.canary.verdict import head_rows, prove_head
from nemo_oprd.losses.vocab_parallel import OutputHead, VocabShard
from nemo_oprd.models import ModelSpec
from nemo_oprd.vllm.teacher_bridge import ServedBridge
from nemo_oprd.vllm.teacher_requests import TeacherAnswer, TeacherRequest
from nemo_oprd.vllm.worker.nemo_oprd_requests import StateRequest

# tolerance of a log-probability, by the precision of states and head
_HEAD_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.25}
# sends requests to a server and returns its answers
RequestsStates = Callable[[list[TeacherRequest]], list[TeacherAnswer]]
# layer -> a tensor [T, D] per prompt; layer L before the final norm, and the state after it as layer L + 1
States = dict[int, list[torch.Tensor]]


@dataclass
class Canary:
    """The check of one teacher's servers on this machine.

    Attributes:
        dtype: the servers' precision.
        head: reads the LM head that the trainer applies to final states; None: it applies none.
        bridge: the maps that the servers apply to the run's states; the canary requests states in full width, too.
        logprobs: whether the run takes log-probabilities and entropies from the servers' own head.
    """

    spec: ModelSpec
    directory: Path
    dtype: str
    head: Callable[[], OutputHead] | None
    bridge: ServedBridge | None = None
    logprobs: bool = False
    verdict: CanaryVerdict | None = None  # of the last check

    def prove(self, request_states: RequestsStates, described: dict[str, Any]) -> str:
        """Checks a server; returns a line that names the comparisons, and stores the result in `verdict`.

        Args:
            described: the server's own description.

        Raises:
            ValueError: the states are not the model's, the head is not, or transformers does not run the model.
        """
        prompts = self.prompts(described)
        if self.head is not None:
            self._check_head(request_states, prompts[0])
        states = self._states(request_states, prompts)
        if self.bridge is not None:
            self._check_bridge(self.bridge, request_states, prompts[0], states)
        heads = self._heads(request_states, prompts) if self.logprobs else []
        key = self._key(described, states, heads)
        if (kept := kept_verdict(key)) is not None:
            self.verdict = kept
            return f"{kept.line} (the same states were compared before)"
        if (why := why_unavailable()) is not None:
            raise ValueError(f"teacher.engine=vllm needs transformers' states to compare with: {why}: install it")
        verdict = self.verdict = self._compared(states, heads, prompts, described)
        try:
            keep_verdict(key, verdict)
        except OSError as error:
            return f"{verdict.line} (not kept for the next start: {error})"
        return verdict.line

    def prompts(self, described: dict[str, Any]) -> list[list[int]]:
        """Makes ragged prompts, the longest beyond the window and the server's chunk, within `max_positions`."""
        spec = self.spec
        return canary_prompts(spec.vocab_size, sliding_window(spec.hf_config), described["chunk"], spec.max_positions)

    def _key(self, described: dict[str, Any], states: States, heads: list[torch.Tensor]) -> str:
        """Returns the key of a verdict. It covers all results, so a verdict holds for equal states and heads only."""
        seen = hashlib.blake2b(digest_size=16)
        for rows in (*(rows for _, prompts in sorted(states.items()) for rows in prompts), *heads):
            seen.update(rows.contiguous().view(torch.uint8).numpy().data)
        layout, prompts = f"vllm tensor {described['tensor']}", self.prompts(described)
        engine = f"{described['version']} chunk {described['chunk']} states {seen.hexdigest()} head {bool(heads)}"
        return canary_key(self.directory, prompts=prompts, layout=layout, dtype=self.dtype, engine=engine)

    def _states(self, request_states: RequestsStates, prompts: list[list[int]]) -> States:
        """Requests the server's states of all rows of the prompts."""
        layers = [*range(1, self.spec.num_layers + 2)]
        answers = request_states(
            [TeacherRequest(ids, StateRequest(uuid.uuid4().hex, layers, [*range(len(ids))], [])) for ids in prompts]
        )
        return {layer: [answer.states[at] for answer in answers] for at, layer in enumerate(layers)}

    def _heads(self, request_states: RequestsStates, prompts: list[list[int]]) -> list[torch.Tensor]:
        """Requests the next token's log-probability and the entropy in the last rows of each prompt: float32 [n, 2]."""
        requests = []
        for ids in prompts:
            rows = head_rows(len(ids))
            tokens, vocabulary = [ids[row + 1] for row in rows], self.spec.vocab_size
            requests.append(
                TeacherRequest(ids, StateRequest(uuid.uuid4().hex, [], [], rows, tokens, vocabulary, chunk=HEAD_ROWS))
            )
        return [answer.final for answer in request_states(requests)]

    def _check_bridge(
        self, bridge: ServedBridge, request_states: RequestsStates, ids: list[int], states: States
    ) -> None:
        """Compares the servers' projections with those of this process from the same states."""
        wanted = StateRequest(
            uuid.uuid4().hex, bridge.layers, [*range(len(ids))], [], bridge=bridge.digest, rank=bridge.rank
        )
        (answer,) = request_states([TeacherRequest(ids, wanted)])
        bridge.check_projection(answer.states, [states[layer][0] for layer in bridge.layers], str(self.directory))

    def _compared(
        self, states: States, heads: list[torch.Tensor], prompts: list[list[int]], described: dict[str, Any]
    ) -> CanaryVerdict:
        spec, depth, found = self.spec, self.spec.num_layers, dict(states)
        before_norm, found[depth] = found[depth], found.pop(depth + 1)
        measure = functools.cache(lambda dtype: reference_states(self.directory, prompts, dtype, head=bool(heads)))
        engine: dict[str, Any] = {"window": sliding_window(spec.hf_config), "chunk": described["chunk"]}
        verdict = prove(found, measure("float32"), spec.model_type, dtype=self.dtype, measure=measure, **engine)
        prove(
            {depth: before_norm},
            measure("float32").without_norm(),
            f"{spec.model_type} before its final norm",
            dtype=self.dtype,
            measure=lambda dtype: measure(dtype).without_norm(),
            **engine,
        )
        if heads:
            prove_head(heads, spec.model_type, dtype=self.dtype, measure=measure)
        return verdict

    def _check_head(self, request_states: RequestsStates, ids: list[int]) -> None:
        """Compares log-probabilities by the trainer's head with those by the server's, with scale, bias and caps."""
        assert self.head is not None
        rows, vocabulary = [*range(len(ids) - 1)], self.spec.vocab_size
        states, own = (
            answer.final
            for answer in request_states(
                [
                    TeacherRequest(ids, StateRequest(uuid.uuid4().hex, [], [], rows)),
                    TeacherRequest(
                        ids, StateRequest(uuid.uuid4().hex, [], [], rows, ids[1:], vocabulary, chunk=len(rows))
                    ),
                ]
            )
        )
        head = self.head().to(torch.float32)
        logits = head.logits(states.to(torch.float32), VocabShard(0, len(head.weight), vocabulary))
        ours = logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
        gap = float((ours - own[:, 0]).abs().max())
        if not gap < _HEAD_TOLERANCE[self.dtype]:
            raise ValueError(
                f"{self.directory}: log-probabilities by the teacher's LM head in its files differ from the server's "
                f"by {gap:.1e}; expected at most {_HEAD_TOLERANCE[self.dtype]:g}, with {head.terms}: "
                "take loss.output.kind=sampled_token, for which the server applies the head, and "
                "logging.output_metrics_every=0"
            )
