"""A rank's requests to the teacher's servers, one per sequence, and the answers as rows of the step's plan.

L layers and D hidden size of the teacher, n rows.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from nemo_oprd.batch.plan import StepPlan
from nemo_oprd.batch.types import Rollout
from nemo_oprd.distillation.objective import OutputTerm, TeacherMatch
from nemo_oprd.distillation.target_transfer import RowShard
from nemo_oprd.megatron.parallel import device, on_device
from nemo_oprd.vllm.server_lifecycle import ServerRefused
from nemo_oprd.vllm.teacher_bridge import ServedBridge, number_of_layer
from nemo_oprd.vllm.worker.nemo_oprd_bridge import PROJECTED_ROWS
from nemo_oprd.vllm.worker.nemo_oprd_requests import LOGPROB_COLUMNS, STATE_REQUEST, StateRequest


@dataclass(frozen=True)
class TeacherAnswer:
    """A server's results for one sequence, in host memory.

    Attributes:
        states: the requested layers and rows, [layers, rows, D] in the model's dtype; with a bridge, the projections
            by its maps, float32 [maps, rows, R].
        final: for the final rows, the states after the final norm [n, D], or float32 [n, 2]: log-probability and
            entropy.
    """

    states: torch.Tensor
    final: torch.Tensor


@dataclass(frozen=True)
class TeacherRequest:
    """A request to a server: a sequence, and the rows to compute of it."""

    ids: list[int]
    state_request: StateRequest

    def body(self) -> dict[str, Any]:
        """Returns the HTTP body. The one token that vLLM has to sample is ignored."""
        sampling = {
            "max_tokens": 1,
            "temperature": 0.0,
            "detokenize": False,
            "extra_args": {STATE_REQUEST: self.state_request.text()},
        }
        return {"token_ids": self.ids, "sampling_params": sampling}

    def renamed(self) -> TeacherRequest:
        """Returns the same request with a new name for its answer."""
        return TeacherRequest(self.ids, replace(self.state_request, name=uuid.uuid4().hex))

    def pieces(self, room: int, width: int, dtype: str) -> list[TeacherRequest]:
        """Splits the request if its answer takes more than `room` bytes; else returns the request alone.

        A piece has at least one row; if servers project it, a multiple of PROJECTED_ROWS, or the rest. `joined` joins
        answers.
        """
        asked, (of_states, of_final) = self.state_request, self.state_request.sizes(width, dtype)
        if of_states + of_final <= room:
            return [self]
        rows, final_rows = len(asked.rows), len(asked.final_rows)
        of_states_at_a_time = max(1, room * rows // max(1, of_states))
        if asked.bridge:
            of_states_at_a_time = max(1, of_states_at_a_time // PROJECTED_ROWS) * PROJECTED_ROWS
        found = [
            replace(asked, rows=asked.rows[start : start + of_states_at_a_time], final_rows=[], tokens=None)
            for start in range(0, rows, of_states_at_a_time)
        ]
        final_at_a_time = max(1, room * final_rows // max(1, of_final))
        for start in range(0, final_rows, final_at_a_time):
            part = slice(start, start + final_at_a_time)
            tokens = None if asked.tokens is None else asked.tokens[part]
            found.append(replace(asked, rows=[], final_rows=asked.final_rows[part], tokens=tokens))
        return [TeacherRequest(self.ids, piece).renamed() for piece in found]

    def joined(self, answers: list[TeacherAnswer]) -> TeacherAnswer:
        """Joins the answers to the `pieces`, in order, into the answer to the request."""
        if len(answers) == 1:
            return answers[0]
        final = [answer.final for answer in answers if len(answer.final)] or [answers[0].final]
        return TeacherAnswer(torch.cat([answer.states for answer in answers], dim=1), torch.cat(final))

    def read(self, header: dict[str, Any], values: bytearray, server: str, expected: dict[str, Any]) -> TeacherAnswer:
        """Checks and returns the answer in a file or HTTP body.

        Args:
            expected: the header of a complete answer to this request, see `StateRequest.header`.

        Raises:
            ServerRefused: the server reports an error, `values` is no complete answer to this request, or a value is
                not finite.
        """
        if "error" in header:
            raise ServerRefused(f"{server} could not give the teacher's states: {header['error']}")
        wrong = [
            f"{key}={header.get(key)} instead of {want}" for key, want in expected.items() if header.get(key) != want
        ]
        dtype = getattr(torch, expected["dtype"])
        of_states = torch.float32 if self.state_request.bridge else dtype
        of_final = dtype if self.state_request.tokens is None else torch.float32
        sizes = math.prod(expected["states"]) * of_states.itemsize, math.prod(expected["final"]) * of_final.itemsize
        if wrong or len(values) != sum(sizes):
            raise ServerRefused(
                f"{server} answered something else than was asked: {'; '.join(wrong) or f'{len(values)} bytes'}; "
                f"expected {sum(sizes)} bytes for this sequence and these rows: does somebody else use this server?"
            )
        raw = torch.frombuffer(values, dtype=torch.uint8) if values else torch.empty(0, dtype=torch.uint8)
        states = raw[: sizes[0]].view(of_states).view(expected["states"])
        final = raw[sizes[0] :].view(of_final).view(expected["final"])
        if not bool(states.isfinite().all() and final.isfinite().all()):
            raise ServerRefused(
                f"{server}: states of the teacher are not finite; expected numbers: look for NaN in the teacher's "
                "weights, or take precision=fp32"
            )
        return TeacherAnswer(states, final)


@dataclass(frozen=True)
class SequenceRequest:
    """One sequence of this rank: its request, and the rows of the step's plan that the answer fills.

    Attributes:
        rows, output_rows: table indices of the rows of the representation loss, and of the output loss.
        at, output_at: per row, its index in the answer; two tokens of the student may share a state of the teacher.
    """

    request: TeacherRequest
    rows: np.ndarray
    at: np.ndarray
    output_rows: np.ndarray
    output_at: np.ndarray


def sequence_requests(
    rollouts: list[Rollout],
    plan: StepPlan,
    data: int,
    match: TeacherMatch,
    term: OutputTerm | None,
    bridge: ServedBridge | None,
) -> list[SequenceRequest]:
    """Lists the sequences that data-parallel rank `data` requests, with the tokens that the teacher's `plan` computes.

    Args:
        bridge: the teacher's, if servers apply it.
    """
    layers, wanted = sorted({number_of_layer(layer, match) for layer in match.layers.values()}), []
    if bridge is not None:
        layers = bridge.layers
    for pack in plan.hidden.packs[data]:
        for i, length in zip(pack.sequences, pack.lengths, strict=True):
            table = plan.hidden.table
            rows = table.rows_of([i])
            places, at = np.unique(table.position[rows], return_inverse=True)
            output_rows = final_rows = output_at = np.zeros(0, np.int64)
            tokens: list[int] | None = None
            if plan.output is not None and term is not None:
                output_rows = plan.output.table.rows_of([i])
                final_rows, first, output_at = np.unique(
                    plan.output.table.position[output_rows], return_index=True, return_inverse=True
                )
                if not term.sends_states:
                    tokens = plan.output.table.tokens(rollouts)[output_rows][first].tolist()
            state_request = StateRequest(
                uuid.uuid4().hex,
                layers,
                places.tolist(),
                final_rows.tolist(),
                tokens,
                vocabulary=match.shared.limit,
                gaps=[list(gap) for gap in match.shared.gaps],
                temperature=1.0 if term is None else term.loss.temperature,
                chunk=1 if term is None else term.chunk_tokens,
                bridge="" if bridge is None else bridge.digest,
                rank=0 if bridge is None else bridge.rank,
            )
            ids = rollouts[i].as_read_by_teacher().ids[:length].tolist()
            wanted.append(SequenceRequest(TeacherRequest(ids, state_request), rows, at, output_rows, output_at))
    return wanted


class Shards:
    """The rows of this rank, taken from answers as these arrive, and projected here if no server applies the bridge."""

    def __init__(self, match: TeacherMatch, term: OutputTerm | None, dtype: torch.dtype, last: int) -> None:
        """Begins without rows. `dtype`: the run's; `last`: the student's last layer, the key of the output rows."""
        self._match, self._term, self._dtype, self._last = match, term, dtype, last
        self._rows: list[np.ndarray] = []
        self._values: dict[int, list[torch.Tensor]] = {layer: [] for layer in match.layers}
        self._output_rows: list[np.ndarray] = []
        self._output: list[torch.Tensor] = []

    def take(self, wanted: SequenceRequest, answer: TeacherAnswer) -> None:
        """Takes the rows of one sequence."""
        match, state_request = self._match, wanted.request.state_request
        at = on_device(wanted.at)
        self._rows.append(wanted.rows)
        for number, (student_layer, layer) in enumerate(match.layers.items()):
            place = number if state_request.bridge else state_request.layers.index(number_of_layer(layer, match))
            states = answer.states[place].to(device())
            if match.project is not None and not state_request.bridge:
                states = match.project(student_layer, states)
            self._values[student_layer].append(states.index_select(0, at))
        if self._term is not None:
            self._output_rows.append(wanted.output_rows)
            self._output.append(answer.final.to(device()).index_select(0, on_device(wanted.output_at)))

    def joined(self) -> tuple[RowShard, RowShard | None]:
        """Returns (rows of the representation loss by student layer, rows of the output loss if there is one)."""
        match, dtype = self._match, self._dtype if self._match.project is None else torch.float32
        values = {layer: _joined(parts, match.width, dtype) for layer, parts in self._values.items()}
        hidden = RowShard(_indices(self._rows), values)
        if self._term is None:
            return hidden, None
        width, dtype = match.spec.hidden_size, self._dtype
        if not self._term.sends_states:
            width, dtype = LOGPROB_COLUMNS, torch.float32
        return hidden, RowShard(_indices(self._output_rows), {self._last: _joined(self._output, width, dtype)})


def _joined(parts: list[torch.Tensor], width: int, dtype: torch.dtype) -> torch.Tensor:
    """Joins the parts to [n, width] and frees them."""
    joined = torch.cat(parts) if parts else torch.empty(0, width, dtype=dtype, device=device())
    parts.clear()
    return joined


def _indices(parts: Iterable[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.zeros(0, np.int64), *parts])
