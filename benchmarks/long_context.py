"""The phase of `gpu_check` that decodes after long and short prompts, at the shape of R1-Distill-Qwen-1.5B."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch

from benchmarks.outcome import Outcome, Settings
from benchmarks.random_pair import read_shape
from benchmarks.real_shape import QUICK, REAL, Meter, configure
from nemo_oprd.layout import Layout
from nemo_oprd.models import read_model_spec
from nemo_oprd.models.megatron.parallel import init_distributed
from nemo_oprd.models.weights.hf import HFCheckpoint
from nemo_oprd.rollout.engine import Request, SamplingParams
from nemo_oprd.rollout.in_process import decoding as generation
from nemo_oprd.rollout.in_process.engine import MegatronEngine

# Tokens after the first one, which is sampled from the prompt's last state
DECODED = 64


def generation_16k(settings: Settings) -> Outcome:
    """Seconds per token and memory of decoding after short and long prompts, as many sequences at a time."""
    size = QUICK if settings.quick else REAL
    source, vocabulary = str(settings.scratch / "student"), read_shape(settings.scratch / "student").vocab_size
    init_distributed()
    tokens = size.long_sequences * (size.long_prompt + DECODED + 1)
    config = configure(settings, size, f"rollout.max_cache_tokens={tokens}")  # all sequences are one batch
    engine = MegatronEngine(config.rollout, read_model_spec(source), Layout(), eos_ids=(), precision=config.precision)
    engine.load(HFCheckpoint(source).__getitem__, source)
    outcome = Outcome({"sequences": size.long_sequences, "decoded_tokens": DECODED})
    for name, context in (("short", size.prompt), ("long", size.long_prompt)):
        prompts = [[(7 * i + t) % vocabulary for t in range(context)] for i in range(size.long_sequences)]
        _generate(engine, prompts)  # the warm-up
        found, responses = _generate(engine, prompts)
        outcome.numbers[name] = {"context": context, **found}
        outcome.lines.append(_line(outcome.numbers[name], size.long_sequences))
        outcome.require(
            all(len(response) == DECODED + 1 for response in responses),
            f"{name}: responses of {sorted({len(response) for response in responses})} tokens, expected {DECODED + 1}",
        )
        different = {token for response in responses for token in response}
        outcome.require(len(different) > 1, f"{name}: every sampled token is the same")
    short, long = outcome.numbers["short"], outcome.numbers["long"]
    outcome.numbers["seconds_ratio"] = long["seconds_per_token"] / short["seconds_per_token"]
    outcome.lines.append(f"a token of each sequence takes {outcome.numbers['seconds_ratio']:.2f} times as long")
    return outcome


def _generate(engine: MegatronEngine, prompts: list[list[int]]) -> tuple[dict[str, Any], list[list[int]]]:
    """(Measurements of the prompts and of the tokens after them, the responses)."""
    meter, prefill = Meter(), generation._Batch.prefill
    with ExitStack() as decoding:

        def prefill_apart(batch: generation._Batch) -> torch.Tensor:
            with meter("prompts"):
                last = prefill(batch)
            decoding.enter_context(meter("tokens"))
            return last

        with mock.patch.object(generation._Batch, "prefill", prefill_apart):
            rollouts = engine.generate(
                [Request(ids) for ids in prompts], SamplingParams(1.0, 1.0, DECODED + 1, (0, 1, 0))
            )
    measured = meter.summary(0)
    seconds = measured["tokens"]["seconds"] or 0.0
    found = {
        **measured,
        "seconds_per_token": seconds / DECODED,
        "tokens_per_s": len(prompts) * DECODED / seconds,
    }
    return found, [rollout.response_ids.tolist() for rollout in rollouts]


def _line(found: dict[str, Any], sequences: int) -> str:
    memory = [
        "" if found[part]["peak_gb"] is None else f", peak {found[part]['peak_gb']:.2f} GB"
        for part in ("prompts", "tokens")
    ]
    return (
        f"{sequences} sequences after {found['context']} tokens: {1e3 * found['seconds_per_token']:.2f} ms per token, "
        f"{found['tokens_per_s']:.0f} tokens/s{memory[1]}; prompts: {found['prompts']['seconds']:.3f} s{memory[0]}"
    )
