"""Memory and seconds of sampling: in the trainer's processes, and with servers."""

from __future__ import annotations

from dataclasses import dataclass

from nemo_oprd.commands.plan.gpus import ASSUMED, Gpu
from nemo_oprd.commands.plan.memory import forward_bytes
from nemo_oprd.commands.plan.parameters import model_parameters, stage_parameters
from nemo_oprd.commands.plan.seconds import sampling_seconds, waves
from nemo_oprd.commands.plan.workload import Workload
from nemo_oprd.config.memory_bounds import CACHE_SHARE, cache_bytes_per_token
from nemo_oprd.layout import Layout
from nemo_oprd.rollout.engine_kinds import ENGINES, EngineKind, Groups

# Bytes per id and response while a token is drawn: logits in float32, and probabilities in float64 and their sums.
DRAW_BYTES = 4 + 3 * 8


@dataclass(frozen=True)
class Demand:
    """What is sampled in a step or in an evaluation.

    Attributes:
        responses: number of responses.
        longest, mean: tokens of the longest response that is allowed, and of a response on average.
        key: the configuration key of `longest`, for messages.
    """

    responses: int
    longest: int
    mean: int
    key: str


@dataclass(frozen=True)
class Sampling:
    """How an engine meets a `Demand`.

    Attributes:
        at_a_time: responses that one group of GPUs samples at the same time.
        groups: the groups of GPUs that sample.
        parts: part -> bytes on one GPU.
        seconds: estimated seconds.
        problem: why it cannot be done; None if it can.
    """

    at_a_time: int
    groups: Groups
    waves: int
    parts: dict[str, float]
    seconds: float
    problem: str | None = None


def sample(work: Workload, demand: Demand, ranks: int, gpu: Gpu, left: float) -> Sampling:
    """Sampling with the engine of the configuration.

    Args:
        ranks: of the student.
        left: bytes per GPU that other parts leave.
    """
    kind = ENGINES[work.config.rollout.engine]
    groups = kind.groups(work.config.rollout, ranks)
    if kind.in_process:
        return _in_process(work, demand, groups, gpu, left)
    return _with_servers(work, demand, kind, groups, gpu)


def _in_process(work: Workload, demand: Demand, groups: Groups, gpu: Gpu, left: float) -> Sampling:
    rollout, spec = work.config.rollout, work.student
    each = -(-demand.responses // groups.count)
    length = min(work.prompt + demand.longest, spec.max_positions)
    per_token = cache_bytes_per_token(spec, rollout.tensor, work.value_bytes)
    budget = rollout.max_cache_tokens
    tokens = int(CACHE_SHARE * max(0.0, left) / per_token) if budget == "auto" else int(budget)
    batch = max(1, min(each, rollout.max_batch, tokens // length))
    parts = {
        "KV cache": float(batch * length * per_token),
        "prompts and logits": batch
        * max(
            work.prompt * forward_bytes(spec, Layout(tensor=rollout.tensor, expert=rollout.expert), work.value_bytes),
            float(spec.padded_vocab(rollout.tensor) * DRAW_BYTES),
        ),
    }
    problem = None
    if sum(parts.values()) > left:
        problem = (
            f"{sum(parts.values()) / 1e9:.1f} GB of KV cache and logits for {batch} response(s) of {length:,} tokens "
            f"do not fit into the {max(left, 0) / 1e9:.1f} GB that are left: lower {demand.key}, "
            f"rollout.max_cache_tokens ({budget}) or rollout.max_batch ({rollout.max_batch}), or raise rollout.tensor"
        )
    rounds = waves(each, batch)
    seconds = _seconds(work, gpu, demand, batch, rounds, rollout.tensor, eager=True)
    return Sampling(batch, groups, rounds, parts, seconds, problem)


def rollout_copy(work: Workload) -> float:
    """Bytes of the copy of the student that an engine in the trainer's processes has on one rank."""
    sizes = work.config.rollout
    held = stage_parameters(work.student, Layout(tensor=sizes.tensor, expert=sizes.expert), 0).all_held
    return float(held * work.value_bytes)


def _with_servers(work: Workload, demand: Demand, kind: EngineKind, groups: Groups, gpu: Gpu) -> Sampling:
    spec = work.student
    share = groups.memory * gpu.memory
    weights = model_parameters(spec) * work.value_bytes / groups.gpus
    length = min(work.prompt + demand.longest, spec.max_positions)
    per_token = cache_bytes_per_token(spec, groups.gpus, work.value_bytes)
    cached = max(0.0, share - weights - ASSUMED.reserve) / per_token
    each = -(-demand.responses // groups.count)
    # a server admits responses as their caches grow; on average a cache is half as long as at the end
    batch = max(1, min(each, work.config.rollout.max_batch, int(cached / (work.prompt + demand.mean / 2))))
    problem = None
    if cached < length:
        problem = (
            f"a server's {share / 1e9:.1f} GB ({kind.key}.gpu_memory_utilization={groups.memory}) hold "
            f"{weights / 1e9:.1f} GB of weights and {int(cached):,} cached tokens, but one response has {length:,}: "
            f"raise it, or {kind.key}.tensor"
        )
    parts = {f"{kind.label} server": share} if groups.placement == "colocated" else {}
    rounds = waves(each, batch)
    seconds = _seconds(work, gpu, demand, batch, rounds, groups.gpus, eager=False)
    return Sampling(batch, groups, rounds, parts, seconds, problem)


def _seconds(work: Workload, gpu: Gpu, demand: Demand, batch: int, rounds: int, tensor: int, *, eager: bool) -> float:
    """Seconds of `rounds` rounds of `batch` responses each, on groups of `tensor` GPUs."""
    return sampling_seconds(
        work,
        gpu,
        length=work.prompt + demand.mean,
        new_tokens=demand.longest,
        responses=batch,
        waves=rounds,
        tensor=tensor,
        eager=eager,
    )
