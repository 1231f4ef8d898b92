"""The keys of `rollout`: how the student samples, and the servers of an external engine; see `schema.py`."""

from __future__ import annotations

from dataclasses import field
from typing import Literal

from pydantic import model_validator
from pydantic.dataclasses import dataclass

from nemo_oprd.config.engine_records import EngineName
from nemo_oprd.config.server_schema import ServerConfig
from nemo_oprd.config.types import (
    STRICT,
    CorrectionMode,
    FilePath,
    Free,
    Learned,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    ProbabilityMass,
)
from nemo_oprd.losses.correction import Correction, check_range


@dataclass(config=STRICT)
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


@dataclass(config=STRICT)
class RolloutConfig:
    """How the student samples."""

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
        """`segment_tokens` with `mode=segments`."""
        assert self.segment_tokens is not None
        return self.segment_tokens

    @property
    def ahead(self) -> int:
        """By how many steps responses are sampled before the step that takes the oldest of them."""
        return self.max_lag // 2 if self.mode == "stream" else self.max_lag

    @property
    def token_correction(self) -> Correction | None:
        """How the tokens' ratios become weights; None: every token has the weight 1."""
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
