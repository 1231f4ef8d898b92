"""Sampling ahead of the update against a synchronous run on as many GPUs, by the model of `timeline_model.py`.

The synchronous run has servers and trainer on all GPUs, in turn; switching costs nothing. With a lag, servers have some
of the GPUs and the trainer the others, in the proportion that makes the step shortest. Gradients take as many GPU
seconds in both, whatever their number. The seconds per token are those that `nemo-oprd plan` assumes for a model of
1.8 billion parameters on H100s: the weights and the cached keys and values of all responses of a server are read once
per token. Lengths are drawn from a log-normal distribution whose longest responses reach the limit.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.timeline_model import Schedule, Servers, Work, finish_times, predict, seconds_per_step
from nemo_oprd.tools.plan.gpus import ASSUMED, GPUS

GPUS_IN_ALL, LIMIT, PROMPT, SLOTS = 8, 16384, 256, 256
PARAMETERS, CACHE_BYTES = 1.78e9, 28 * 2 * 2 * 128 * 2  # of DeepSeek-R1-Distill-Qwen-1.5B, in bfloat16
MEDIAN, SIGMA = 4096, 1.0  # 8 % of the responses reach the limit
PUSH_S = 0.5
STEPS, SEED = 24, 0
SHARES = (98, 90, 70)
BATCHES = (16, 256, 2048)  # responses of a step
# name -> (lag, segments of a response; None: mode exact; 0: mode stream)
MODES = {
    "exact, lag 1": (1, None),
    "segments, lag 3": (3, 4),
    "segments, lag 4": (4, 4),
    "stream, lag 4": (4, 0),
    "stream, lag 8": (8, 0),
}
GPU_HEAD = (
    "| responses | share of sampling | synchronous | mode | GPUs that sample | step | of synchronous |\n"
    "|---|---|---|---|---|---|---|"
)


def servers(count: int) -> Servers:
    """One server per GPU."""
    rate = GPUS["h100"].bandwidth * ASSUMED.bandwidth
    cache = (PROMPT + MEDIAN) * CACHE_BYTES  # what is cached of a response, on average
    # a prompt is computed at the rate of training; two operations per parameter and token
    known_s = 2 * PARAMETERS / (GPUS["h100"].flops * ASSUMED.compute)
    return Servers(count, SLOTS, 2 * PARAMETERS / rate + ASSUMED.server_token, cache / rate, known_s)


def lengths(responses: int) -> list[list[int]]:
    """Tokens per response of each step."""
    random = np.random.default_rng(SEED)
    drawn = np.exp(np.log(MEDIAN) + SIGMA * random.standard_normal((STEPS, responses)))
    return np.clip(drawn, 64, LIMIT).astype(int).tolist()


def steady(seconds: Sequence[float], lag: int) -> float:
    """Seconds of a step, without the beginning and the end of the pipeline."""
    return statistics.fmean(seconds[max(2, lag) : len(seconds) - max(1, lag)])


def compare() -> list[dict[str, Any]]:
    """One row per batch, share and mode."""
    rows = []
    for responses in BATCHES:
        batches = lengths(responses)
        spans = [max(finish_times([(tokens, PROMPT) for tokens in batch], servers(GPUS_IN_ALL))) for batch in batches]
        sampling = statistics.fmean(spans)
        for share in SHARES:
            gradient = max(0.0, sampling * (100 / share - 1) - PUSH_S)
            together = predict(batches, Work(PUSH_S, gradient), servers(GPUS_IN_ALL), Schedule(STEPS), PROMPT)
            synchronous = steady(seconds_per_step(together), 0)
            for name, (lag, segments) in MODES.items():
                size = LIMIT // segments if segments else None
                schedule = Schedule(STEPS, lag, size, streams=segments == 0)
                found = {
                    sampling_gpus: _split(batches, gradient, sampling_gpus, schedule)
                    for sampling_gpus in range(1, GPUS_IN_ALL)
                }
                best = min(found, key=found.__getitem__)
                row = {"responses": responses, "share": share, "mode": name, "sampling_s": sampling}
                row |= {"gradient_s": gradient, "push_s": PUSH_S, "synchronous_s": synchronous, "servers": best}
                rows.append(row | {"step_s": found[best], "of_synchronous": found[best] / synchronous})
    return rows


def _split(batches: list[list[int]], gradient: float, sampling_gpus: int, schedule: Schedule) -> float:
    """Seconds of a step with `sampling_gpus` GPUs for servers and the rest for the trainer."""
    work = Work(PUSH_S, gradient * GPUS_IN_ALL / (GPUS_IN_ALL - sampling_gpus))
    return steady(seconds_per_step(predict(batches, work, servers(sampling_gpus), schedule, PROMPT)), schedule.lag)


def gpu_line(row: dict[str, Any]) -> str:
    """A line of the table."""
    first = f"| {row['responses']:,} | {row['share']} % | {row['synchronous_s']:.1f} s | {row['mode']} "
    return first + f"| {row['servers']} of {GPUS_IN_ALL} | {row['step_s']:.1f} s | {row['of_synchronous']:.2f} |"
