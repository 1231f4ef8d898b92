"""The keys of `rollout`, for sampling from the student, and of vLLM servers for student or teacher."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import field
from typing import Literal

from pydantic import model_validator
from pydantic.dataclasses import dataclass

from nemo_oprd.config.teacher_kinds import EngineName
from nemo_oprd.config.types import (
    STRICT,
    CorrectionMode,
    FilePath,
    Free,
    Interpreter,
    Learned,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ProbabilityMass,
    Share,
    Size,
)
from nemo_oprd.losses.output_loss import Correction, check_range

# The keys of all vLLM servers of a run: `rollout.vllm` and `teacher.vllm`.


# flags of vLLM that no server of a run takes, and the reasons
_LISTENS = "a run alone says where its servers listen and who may call them"
_SHOWS = "the configuration is saved with the run, and all users of a machine see the arguments of its programs"
_NOT_FLAGS = dict.fromkeys(
    ("--host", "--port", "--uds", "--grpc", "--grpc-port", "--api-key", "--middleware", "--root-path"), _LISTENS
)
_NOT_FLAGS |= {"--hf-token": _SHOWS, "--config": "a file could hold any other argument"}


def check_flags(flags: Sequence[str | int | float]) -> None:
    """Raises ValueError for flags that would give other users access, or show them a secret.

    vLLM takes `_` for `-`, every unambiguous beginning of a flag for the flag, and what follows `=`, `.` or `+` for a
    part of its value. This function also refuses ambiguous beginnings, which vLLM itself would refuse.
    """
    for flag in map(str, flags):
        name = re.split(r"[=.+]", flag, maxsplit=1)[0].replace("_", "-")
        meant = next(
            (each for each in _NOT_FLAGS if len(name) > 2 and name[:2] == "--" and each.startswith(name)), None
        )
        if meant is not None:
            short = "" if name == meant else f", which vLLM may read as {meant}"
            raise ValueError(
                f"{{key}}.flags holds {name}{short}, but {_NOT_FLAGS[meant]}; expected other arguments of vLLM: remove "
                "it (docs/security.md)"
            )


@dataclass(config=STRICT, frozen=True)
class ServerConfig:
    """vLLM servers that a run starts, watches and ends, or external ones."""

    python: Free[Interpreter | None] = None
    """interpreter of vLLM's environment; null: the project's `.venv-vllm`"""
    endpoints: Free[list[str]] = field(default_factory=list)
    """addresses of servers that somebody else runs

    Without any, the run starts `replicas` servers of `tensor` workers each. `http://HOST:PORT`, `https://HOST:PORT`
    or `unix:///PATH`.
    """
    token_file: Free[FilePath | None] = None
    """file of mode 0600 with the token of the servers at `endpoints` (docs/security.md)

    `nemo-oprd serve --token-file FILE` makes one. Its first line is sent.
    """
    placement: Free[Literal["colocated", "dedicated"]] = "colocated"
    """servers on the student's machines and GPUs, or on the last ranks of the job

    These last replicas * tensor ranks, of several teachers so many for each, hold servers and nothing else.
    """
    replicas: Free[Size | None] = None
    """number of servers; null: all of the student's GPUs, or one

    One without GPUs, and with `placement: dedicated`.
    """
    tensor: Free[Size] = 1
    """workers (tensor-parallel ranks) of a server"""
    gpu_memory_utilization: Free[Literal["auto"] | Share] = "auto"
    """fraction of a GPU's memory that a server takes; auto: 0.4 beside the student, 0.9 of a GPU of its own

    Servers of several teachers beside the student divide the 0.4 of auto.
    """
    flags: Learned[list[str | int | float]] = field(default_factory=list)
    """further arguments of a server"""
    start_timeout: Free[PositiveFloat] = 900.0
    """seconds until a server must be ready"""
    request_timeout: Free[PositiveFloat] = 7200.0
    """seconds until a request must be answered"""
    max_restarts: Free[NonNegativeInt] = 10
    """restarts of one server before the run ends"""

    @model_validator(mode="after")
    def _check(self) -> ServerConfig:
        check_flags(self.flags)
        if self.endpoints and (self.replicas is not None or self.placement == "dedicated"):
            raise ValueError(  # {key}: rollout.vllm or teacher.vllm
                f"{{key}}.endpoints={self.endpoints} with replicas={self.replicas} and placement="
                f"{self.placement}: expected either servers that are there or servers that this run starts; leave one "
                "of the two out"
            )
        return self

    @property
    def memory_share(self) -> float:
        """Returns the fraction of a GPU's memory that a server takes."""
        if self.gpu_memory_utilization != "auto":
            return self.gpu_memory_utilization
        return 0.4 if self.placement == "colocated" else 0.9


@dataclass(config=STRICT, frozen=True)
class TeacherServerConfig(ServerConfig):
    """The servers of `teacher.engine=vllm` (docs/teacher_placement.md)."""

    check_every: Free[NonNegativeInt] = 50
    """steps after which every server shows its states of the canary again; 0: at starts only (docs/canary.md)"""
    ahead_gib: Free[NonNegativeFloat] = 0.0
    """GiB of shared memory on a machine for states that are asked for as responses finish; 0: none"""


@dataclass(config=STRICT, frozen=True)
class VllmConfig(ServerConfig):
    """The servers of `rollout.engine=vllm` (docs/vllm.md)."""

    transport: Free[Literal["auto", "file", "group", "ipc"]] = "auto"
    """how weights reach a server

    By files in shared memory, a process group, or GPU memory of the same GPU; auto: what the placement allows.
    """
    check_tokens: Free[NonNegativeInt] = 1024
    """most sampled tokens per step whose log-probabilities are compared; 0: none

    At most 16 of a response, so 1024 tokens are of 64 responses; other responses in every step.
    """
    repeat: Free[Literal["responses", "step"]] = "responses"
    """what is sampled again after a server died: its responses, or the whole step

    With the whole step nothing of a batch depends on when the server died.
    """


@dataclass(config=STRICT, frozen=True)
class RolloutConfig:
    """The keys of sampling from the student."""

    engine: Learned[EngineName] = "megatron"
    """in-process decoder, or vLLM servers (docs/vllm.md)"""
    temperature: Learned[NonNegativeFloat] = 1.0
    """of sampling; 0 is greedy"""
    top_p: Learned[ProbabilityMass] = 1.0
    """probability mass from which is sampled"""
    max_new_tokens: Learned[PositiveInt] = 1024
    """most tokens of a response"""
    stop_after: Learned[Literal["supervised"] | None] = None
    """supervised: a response ends where no later token can be supervised; null: where the student ends it

    Needs `loss.representation.positions=first_k` and no output-space term. Evaluations sample whole responses even so.
    """
    max_lag: Learned[NonNegativeInt] = 0
    """steps by which sampling may be ahead of the updates

    The responses of step s (from 0) come from the weights after max(0, s - max_lag) steps, whatever the clock says.
    With 1 the servers sample the next responses while an update is computed; more adds staleness, and no overlap
    unless long responses go on over updates (`mode`).
    """
    mode: Learned[Literal["exact", "segments", "stream"]] = "exact"
    """exact: a response is sampled from one student; segments, stream: long ones go on over updates (docs/vllm.md)

    With segments a step takes its own responses, and the same ones in every run. With stream it takes the oldest that
    are complete, so it depends on the clock which these are.
    """
    segment_tokens: Learned[PositiveInt | None] = None
    """with mode=segments, the tokens of a response from one student; at least max_new_tokens / (max_lag + 1)"""
    per_prompt: Learned[PositiveInt] = 1
    """responses per prompt"""
    replay: Learned[FilePath | None] = None
    """file of recorded rollouts to use instead of sampling"""
    save: Free[bool] = False
    """write the rollouts of every step to OUTPUT/rollouts"""
    tensor: Free[PositiveInt] = 1
    """tensor-parallel size of the in-process engine"""
    expert: Free[PositiveInt] = 1
    """expert-parallel size of the in-process engine, a divisor of rollout.tensor"""
    max_batch: Free[PositiveInt] = 256
    """responses that one data-parallel rank, or one vLLM server, works on at a time"""
    max_cache_tokens: Free[Literal["auto"] | PositiveInt] = 524288
    """tokens in the in-process engine's KV cache, per data-parallel rank; auto: what fits"""
    correction: Learned[CorrectionMode] = "off"
    """weigh the tokens of sampled_token by the ratio of the trainer's to the engine's probability

    For an engine that computes slightly other probabilities than the trainer (docs/losses.md). `truncate` moves a ratio
    outside `correction_range` to the nearer bound, `mask` gives such a token the weight 0.
    """
    correction_range: Learned[tuple[float, float]] = (0.0, 2.0)
    """bounds [low, high] of that ratio"""
    vllm: VllmConfig = field(default_factory=VllmConfig)

    @property
    def tokens_per_segment(self) -> int:
        """Returns `segment_tokens`, which `mode=segments` requires and no other mode has."""
        assert self.segment_tokens is not None
        return self.segment_tokens

    @property
    def early_steps(self) -> int:
        """Returns the most steps by which a response's sampling may precede the response's step."""
        return self.max_lag // 2 if self.mode == "stream" else self.max_lag

    @property
    def token_correction(self) -> Correction | None:
        """Returns the conversion of the tokens' ratios to weights; None: every token has the weight 1."""
        return None if self.correction == "off" else Correction(self.correction, *self.correction_range)

    @model_validator(mode="after")
    def _check(self) -> RolloutConfig:
        if self.tensor % self.expert:
            raise ValueError(
                f"rollout.expert={self.expert} does not divide rollout.tensor={self.tensor}; expected a divisor, "
                "because only ranks that decode the same responses can share experts: choose another size"
            )
        check_range(*self.correction_range)
        return self
