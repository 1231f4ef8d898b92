"""Memory and seconds of sampling: in the trainer's processes, and with servers."""

from __future__ import annotations

from dataclasses import dataclass, replace

from nemo_oprd.batch.layout import Layout
from nemo_oprd.config.memory_bounds import CACHE_SHARE, UNCACHED_TOKENS, cache_bytes_per_token, state_bytes
from nemo_oprd.run.engine_kinds import ENGINES, EngineKind, Groups
from nemo_oprd.tools.plan.gpus import ASSUMED, Gpu, in_bytes
from nemo_oprd.tools.plan.memory import forward_bytes
from nemo_oprd.tools.plan.operations import layers_flops
from nemo_oprd.tools.plan.parameters import all_attention_flops, model_parameters, stage_parameters
from nemo_oprd.tools.plan.workload import Workload

# Bytes per id and response while a token is drawn: logits in float32, and probabilities in float64 and their sums.
DRAW_BYTES = 4 + 3 * 8
# Operations of the in-process engine per token and layer; counted at 28 layers (`benchmarks.decode_cost`).
DECODE_OPERATIONS = 86


@dataclass(frozen=True)
class Demand:
    """The responses of a step or of an evaluation.

    Attributes:
        responses: number of responses.
        longest, mean: tokens of the longest allowed response, and of a response on average.
        key: the configuration key of `longest`, for messages.
    """

    responses: int
    longest: int
    mean: int
    key: str


@dataclass(frozen=True)
class SamplingCost:
    """The cost of a `Demand` with an engine.

    Attributes:
        at_a_time, waves: responses that one group of GPUs samples at the same time, and the number of such batches.
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


def sample(work: Workload, demand: Demand, ranks: int, gpu: Gpu, left: float, *, goes_on: bool = False) -> SamplingCost:
    """Returns the cost of sampling with the engine of the configuration.

    Args:
        ranks: the student's ranks.
        left: bytes per GPU that other parts leave.
        goes_on: whether servers sample long responses over several updates, as `rollout.mode` says.
    """
    rollout = work.config.rollout
    kind = ENGINES[rollout.engine]
    groups = kind.groups(rollout, ranks)
    if kind.in_process:
        batch, parts, problem = _in_process(work, demand, groups, left)
        goes_on = False
    else:
        under_way = _under_way(work, demand) if goes_on else demand
        batch, parts, problem = _with_servers(work, under_way, kind, groups, gpu)
    token = _token_seconds(work, gpu, demand, batch, groups)
    if goes_on and rollout.mode == "stream":
        # each decoding step yields a token of every response under way, and one of the longest is due by the lag
        tokens = max(_per_group(demand, groups) * demand.mean / batch, demand.longest / (rollout.max_lag + 1))
        return SamplingCost(batch, groups, 1, parts, tokens * token, problem)
    segmented = goes_on and rollout.mode == "segments"
    waves = -(-_per_group(_under_way(work, demand) if segmented else demand, groups) // batch)
    longest = min(demand.longest, rollout.tokens_per_segment) if segmented else demand.longest
    return SamplingCost(batch, groups, waves, parts, waves * longest * token, problem)


def _under_way(work: Workload, demand: Demand) -> Demand:
    """Returns `demand` times the number of steps whose responses servers sample at the same time (`rollout.mode`)."""
    rollout, parts = work.config.rollout, 1
    if rollout.mode == "segments":  # responses of mean length
        parts = -(-demand.mean // rollout.tokens_per_segment)
    elif rollout.mode == "stream":
        parts = rollout.early_steps + 1
    return replace(demand, responses=demand.responses * parts)


def _per_group(demand: Demand, groups: Groups) -> int:
    return -(-demand.responses // groups.count)


def _in_process(
    work: Workload, demand: Demand, groups: Groups, left: float
) -> tuple[int, dict[str, float], str | None]:
    """Returns `SamplingCost`'s (at_a_time, parts, problem) for the in-process engine."""
    rollout, spec = work.config.rollout, work.student
    length = min(work.prompt + demand.longest, spec.max_positions)
    layout = Layout(tensor=rollout.tensor, expert=rollout.expert)
    forward, draw = forward_bytes(spec, layout, work.value_bytes), float(spec.padded_vocab(rollout.tensor) * DRAW_BYTES)
    budget = rollout.max_cache_tokens
    if spec.family.own:
        per_token = cache_bytes_per_token(spec, rollout.tensor, work.value_bytes)
        tokens = int(CACHE_SHARE * max(0.0, left) / per_token) if budget == "auto" else int(budget)
    else:
        tokens = UNCACHED_TOKENS if budget == "auto" else int(budget)
    batch = max(1, min(_per_group(demand, groups), rollout.max_batch, tokens // length))
    if spec.family.own:
        cached = float(batch * length * per_token)
        parts = {"KV cache": cached, "prompts and logits": batch * max(work.prompt * forward, draw)}
    else:
        parts = {"forward passes of whole sequences": batch * max(length * forward, draw)}
    problem = None
    if sum(parts.values()) > left:
        problem = (
            f"{in_bytes(sum(parts.values()))} of {' and '.join(parts)} for {batch} response(s) of {length:,} tokens "
            f"do not fit into the {in_bytes(max(left, 0))} that are left: lower {demand.key}, "
            f"rollout.max_cache_tokens ({budget}) or rollout.max_batch ({rollout.max_batch}), or raise rollout.tensor"
        )
    return batch, parts, problem


def rollout_copy(work: Workload) -> float:
    """Returns the bytes of the copy of the student that an engine in the trainer's processes has on one rank."""
    sizes = work.config.rollout
    held = stage_parameters(work.student, Layout(tensor=sizes.tensor, expert=sizes.expert), 0).all_held
    return float(held * work.value_bytes)


def _with_servers(
    work: Workload, demand: Demand, kind: EngineKind, groups: Groups, gpu: Gpu
) -> tuple[int, dict[str, float], str | None]:
    """Returns `SamplingCost`'s (at_a_time, parts, problem) for servers."""
    spec = work.student
    share = groups.memory * gpu.memory
    weights = model_parameters(spec) * work.value_bytes / groups.gpus
    length = min(work.prompt + demand.longest, spec.max_positions)
    per_token = cache_bytes_per_token(spec, groups.gpus, work.value_bytes)
    fixed = state_bytes(spec, groups.gpus, work.value_bytes, length)
    room = max(0.0, share - weights - ASSUMED.reserve)
    # a server admits responses as their caches grow; on average a cache is half as long as at the end
    admitted = int(room / ((work.prompt + demand.mean / 2) * per_token + fixed))
    batch = max(1, min(_per_group(demand, groups), work.config.rollout.max_batch, admitted))
    problem = None
    if room < length * per_token + fixed:
        cached = int(max(0.0, room - fixed) / per_token)
        problem = (
            f"a server's {in_bytes(share)} ({kind.key}.gpu_memory_utilization={groups.memory}) hold "
            f"{in_bytes(weights)} of weights and {cached:,} cached tokens, but one response has {length:,}: "
            f"raise it, or {kind.key}.tensor"
        )
    return batch, {f"{kind.label} server": share} if groups.placement == "colocated" else {}, problem


def _token_seconds(work: Workload, gpu: Gpu, demand: Demand, batch: int, groups: Groups) -> float:
    """Returns the seconds of a decoding step of `batch` responses at a time on one group of GPUs.

    It takes as long as reading weights and caches, and with servers `ASSUMED.server_token` more; in the trainer's
    processes at least as long as starting its operations or, without a cache, computing whole sequences again.
    """
    spec, e = work.student, work.value_bytes
    weights = model_parameters(spec) * e / groups.gpus
    half = (work.prompt + demand.mean) / 2
    cache = batch * (half * cache_bytes_per_token(spec, groups.gpus, e) + state_bytes(spec, groups.gpus, e, int(half)))
    token = (weights + cache) / (gpu.bandwidth * ASSUMED.bandwidth)
    if ENGINES[work.config.rollout.engine].in_process and not spec.family.own:
        again = batch * half * (layers_flops(spec, spec.num_layers) + all_attention_flops(spec, spec.num_layers, half))
        token = max(token, again / groups.gpus / (gpu.flops * ASSUMED.compute))
    elif ENGINES[work.config.rollout.engine].in_process:
        token = max(token, spec.num_layers * DECODE_OPERATIONS * ASSUMED.launch)
    else:
        token += ASSUMED.server_token
    return token
