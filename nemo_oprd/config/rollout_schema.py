"""The keys of `rollout`: how the student samples, and the servers of an external engine; see `schema.py`."""

from __future__ import annotations

from dataclasses import field
from typing import Literal

from pydantic import model_validator
from pydantic.dataclasses import dataclass

from nemo_oprd.config.types import (
    STRICT,
    CorrectionMode,
    FilePath,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ProbabilityMass,
    Share,
    Size,
)


@dataclass(config=STRICT)
class VllmConfig:
    """The servers of `rollout.engine=vllm` (docs/vllm.md).

    `python` is the interpreter of vLLM's environment (null: that of scripts/setup_vllm.sh). `endpoints` are addresses
    of servers that somebody else runs; without any, the run starts `replicas` servers of `tensor` workers each. With
    `placement: colocated` they are on the student's machines and GPUs (null replicas: all of the student's GPUs, one
    server without GPUs); with `dedicated` the last replicas * tensor ranks of the job hold servers and nothing else
    (null: one server). `gpu_memory_utilization` is the fraction of a GPU's memory that a server takes. `flags` are
    further arguments of the server.

    `transport` is how weights reach a server: by files in shared memory, a process group, or GPU memory of the same GPU
    (auto: what the placement allows). `check_tokens` response tokens per step are compared with the trainer's own
    log-probabilities (0: none). `start_timeout` and `request_timeout` are in seconds. A server of this run may be
    restarted `max_restarts` times. After a server died, `repeat: responses` samples its unfinished responses again, and
    `repeat: step` all responses of the step, so that nothing of a batch depends on when the server died.
    """

    python: FilePath | None = None
    endpoints: list[str] = field(default_factory=list)
    placement: Literal["colocated", "dedicated"] = "colocated"
    replicas: Size | None = None
    tensor: Size = 1
    gpu_memory_utilization: Share = 0.4
    flags: list[str | int | float] = field(default_factory=list)
    transport: Literal["auto", "file", "group", "ipc"] = "auto"
    check_tokens: NonNegativeInt = 1024
    start_timeout: PositiveFloat = 900.0
    request_timeout: PositiveFloat = 7200.0
    max_restarts: NonNegativeInt = 10
    repeat: Literal["responses", "step"] = "responses"

    @model_validator(mode="after")
    def _check(self) -> VllmConfig:
        if self.endpoints and (self.replicas is not None or self.placement == "dedicated"):
            raise ValueError(
                f"rollout.vllm.endpoints={self.endpoints} with replicas={self.replicas} and placement="
                f"{self.placement}: expected either servers that are there or servers that this run starts; leave one "
                "of the two out"
            )
        return self


@dataclass(config=STRICT)
class RolloutConfig:
    """How the student samples.

    `tensor` is the tensor-parallel size of the in-process engine. `expert` divides it: the experts of a layer are split
    over so many of the same ranks, which decode the same responses. `max_batch` and `max_cache_tokens` are the largest
    number of sequences, and of tokens in the KV cache, that one data-parallel rank of the engine holds at a time.
    `max_batch` is also the number of responses that one vLLM server works on at a time. `max_cache_tokens: auto` takes
    what memory allows (`nemo_oprd/rollout/in_process/cache_budget.py`).

    `correction` belongs to sampled_token and to an engine that computes slightly other probabilities than the trainer.
    It weighs every token by the ratio of the trainer's probability to the engine's (docs/losses.md): `truncate` moves a
    ratio outside `correction_range` to the nearer bound, `mask` gives such a token the weight 0, `off` weighs nothing.
    """

    engine: Literal["megatron", "vllm"] = "megatron"
    temperature: NonNegativeFloat = 1.0
    top_p: ProbabilityMass = 1.0
    max_new_tokens: PositiveInt = 1024
    per_prompt: PositiveInt = 1
    replay: FilePath | None = None
    save: bool = False
    tensor: PositiveInt = 1
    expert: PositiveInt = 1
    max_batch: PositiveInt = 256
    max_cache_tokens: Literal["auto"] | PositiveInt = 524288
    correction: CorrectionMode = "off"
    correction_range: tuple[float, float] = (0.0, 2.0)
    vllm: VllmConfig = field(default_factory=VllmConfig)

    @model_validator(mode="after")
    def _check(self) -> RolloutConfig:
        if self.tensor % self.expert:
            raise ValueError(
                f"rollout.expert={self.expert} does not divide rollout.tensor={self.tensor}; expected a divisor, "
                "because only ranks that decode the same responses can share experts: choose another size"
            )
        low, high = self.correction_range
        if not (0 <= low <= 1 <= high and low < high):
            raise ValueError(
                f"rollout.correction_range=[{low}, {high}]: expected [low, high] with 0 <= low <= 1 <= high and low "
                "below high; choose e.g. [0, 2]"
            )
        return self
