"""The part `decode`: the in-process engine at the shape of the 1.5B, its prompts and its tokens measured apart."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from benchmarks.gpu_parts.kernels import kernel_profile
from benchmarks.gpu_parts.measure import Measured, Meter
from benchmarks.gpu_parts.outcome import Outcome, Settings
from benchmarks.gpu_parts.real_shape import QUICK, REAL, configure, prepare, reader
from nemo_oprd.batch.layout import Layout
from nemo_oprd.megatron.parallel import init_distributed
from nemo_oprd.models import read_model_spec
from nemo_oprd.rollout import decoding
from nemo_oprd.rollout.engine import Request, SamplingParams
from nemo_oprd.rollout.in_process_engine import MegatronEngine


@dataclass(frozen=True)
class Case:
    """`sequences` prompts of `context` tokens, and `new` tokens of each, the first one sampled from the prompt."""

    sequences: int
    context: int
    new: int


CASES = {
    "64 x 256": Case(64, 128, 256),
    "256 x 128": Case(256, 128, 128),
    "4 x 16k": Case(4, 16384, 64),
    "16 x 8k": Case(16, 8192, 64),
    "32 x 16k": Case(32, 16384, 32),
}
TINY_CASES = {"64 x 256": Case(4, 8, 8), "4 x 16k": Case(2, 256, 8)}
WARMUP_TOKENS, PROFILED_TOKENS = 9, 33


def decode(settings: Settings, outcome: Outcome) -> None:
    """Seconds per token and memory of batches of short and of long contexts; without an end, so all are full."""
    cases, batch = (TINY_CASES, QUICK) if settings.quick else (CASES, REAL)
    prepare(settings.scratch, batch)
    init_distributed()
    tokens = max(case.sequences * (case.context + case.new) for case in cases.values())
    most = max(case.sequences for case in cases.values())
    config = configure(settings.scratch, batch, f"rollout.max_cache_tokens={2 * tokens}", f"rollout.max_batch={most}")
    source = str(settings.scratch / "student")
    spec = read_model_spec(source)
    engine = MegatronEngine(config.rollout, spec, Layout(), eos_ids=(), precision=config.precision)
    engine.load(reader(spec, 0), source)
    for name, case in cases.items():
        _generate(engine, case, WARMUP_TOKENS)
        found, responses = _generate(engine, case, case.new)
        _report(outcome, name, case, found, responses)
    first = next(iter(cases.values()))
    kernel_profile(outcome, lambda: _generate(engine, first, PROFILED_TOKENS))


def _generate(engine: MegatronEngine, case: Case, new: int) -> tuple[dict[str, Measured], list[list[int]]]:
    """(The prompts and the tokens after the first one, measured; the responses)."""
    meter, prefill, vocabulary = Meter(), decoding._Batch.prefill, engine.spec.vocab_size
    requests = [Request([(7 * i + t) % vocabulary for t in range(case.context)]) for i in range(case.sequences)]
    with ExitStack() as later:

        def prefill_apart(batch: Any) -> torch.Tensor:
            with meter("prompts"):
                last = prefill(batch)
            later.enter_context(meter("tokens"))
            return last

        with mock.patch.object(decoding._Batch, "prefill", prefill_apart):
            rollouts = engine.generate(requests, SamplingParams(1.0, 1.0, new, (0, 1, 0)))
    found = {part: meter.of(part) for part in ("prompts", "tokens")}
    return found, [rollout.response_ids.tolist() for rollout in rollouts]


def _report(outcome: Outcome, name: str, case: Case, found: dict[str, Measured], responses: list[list[int]]) -> None:
    per_token = found["tokens"].seconds / (case.new - 1)
    rate = case.sequences / per_token
    outcome.numbers[name] = {
        **vars(case),
        "prompt_seconds": found["prompts"].seconds,
        "ms_per_token": 1e3 * per_token,
        "tokens_per_s": rate,
    }
    outcome.row(f"{name}: prompts", seconds=found["prompts"].seconds, peak=found["prompts"].peak)
    text = f"{1e3 * per_token:.2f} ms per token, {rate:.0f} tokens/s"
    outcome.row(f"{name}: tokens", seconds=found["tokens"].seconds, peak=found["tokens"].peak, note=text)
    lengths = sorted({len(response) for response in responses})
    outcome.require(lengths == [case.new], f"{name}: responses of {lengths} tokens, expected {case.new}")
    different = {token for response in responses for token in response}
    outcome.require(len(different) > 1, f"{name}: every sampled token is the same")
