"""What a real vLLM samples, against transformers and the in-process engine; run by test_vllm.py in a process per model.

python vllm_agreement.py MODEL TENSOR DIRECTORY
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from vllm_environment import make_model

from nemo_oprd.batch.layout import Layout
from nemo_oprd.batch.types import Rollout
from nemo_oprd.config.loading import load_config
from nemo_oprd.data.token_ids import TokenIds
from nemo_oprd.megatron.parallel import init_distributed, seed_everything
from nemo_oprd.models import read_model_spec
from nemo_oprd.rollout.engine import GenerationCancelled, Request, RolloutEngine, SamplingParams
from nemo_oprd.run.engine_kinds import make_engine

UPDATES = 3
EOS = (7, 11)
# of 300 ids; the model finds PLANTED, which is in a gap, the likeliest at many positions
KNOWN, PLANTED = TokenIds(290, ((40, 41), (100, 103))), 101
NEW_TOKENS = 40


def prompts(count: int) -> list[list[int]]:
    """Prompts of 3 to 50 ids; some share their first 32, which a prefix cache keeps."""
    rng = np.random.default_rng(5)
    common = rng.integers(0, KNOWN.limit, 32).tolist()
    return [[*(common if i % 2 else []), *rng.integers(0, KNOWN.limit, 3 + i % 17).tolist()] for i in range(count)]


def over_known(logits: torch.Tensor) -> torch.Tensor:
    """Logits [..., V] -> those of the ids up to the last that may be sampled; the others get minus infinity."""
    return logits[..., : KNOWN.limit].masked_fill(torch.from_numpy(~KNOWN.mask), -torch.inf)


def chi_square(seen: np.ndarray, expected: np.ndarray) -> float:
    """The probability of counts at least as far from the expected ones."""
    statistic = ((seen - expected) ** 2 / expected).sum()
    half = torch.tensor([(len(seen) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


class Comparison:
    """The engines and the transformers model of one case; `results` is what the test reads."""

    def __init__(self, name: str, tensor: int, directory: Path) -> None:
        self.model, self.now = make_model(name, directory / "model"), directory / "now"
        with torch.no_grad():
            self.model.get_output_embeddings().weight[PLANTED] *= 8  # then p > 0.5 at a fifth of the positions and more
        self.results: dict[str, Any] = {"greedy": [], "logprob_gap": [], "left_out": []}
        spec = read_model_spec(directory / "model")

        def engine(kind: str) -> RolloutEngine:
            overrides = [
                f"output={directory}", f"rollout.engine={kind}", f"rollout.vllm.tensor={tensor}",
                "student.checkpoint=null", f"student.hf_path={directory / 'model'}",
                "teacher.checkpoint=null", f"teacher.hf_path={directory / 'model'}",
            ]  # fmt: skip
            config = load_config("quickstart", overrides)
            return make_engine(config, spec, directory / "model", Layout(), EOS, KNOWN)

        init_distributed()
        seed_everything(0)
        self.vllm, self.in_process = engine("vllm"), engine("megatron")

    def stream(self) -> list[tuple[str, torch.Tensor]]:
        """The model's tensors by their names in a checkpoint: no copy of a tied head, and each expert by itself."""
        self.model.save_pretrained(self.now)
        return sorted(load_file(self.now / "model.safetensors").items())

    @torch.no_grad()
    def change_weights(self, seed: int) -> None:
        torch.manual_seed(seed)
        for parameter in self.model.parameters():
            parameter.add_(0.03 * torch.randn_like(parameter))

    @torch.no_grad()
    def transformers_greedy(self, prompt: list[int]) -> list[int]:
        """Greedy ids by one forward pass per token: no cache, no generation settings."""
        ids = list(prompt)
        while len(ids) < len(prompt) + NEW_TOKENS and not (len(ids) > len(prompt) and ids[-1] in EOS):
            logits = self.model(torch.tensor([ids])).logits[0, -1]
            ids.append(int(over_known(logits).argmax()))
        return ids[len(prompt) :]

    @torch.no_grad()
    def transformers_logprobs(self, rollout: Rollout, temperature: float) -> torch.Tensor:
        """Log-probabilities of a response's ids in the distribution over the known ids."""
        ids, start = torch.tensor(rollout.ids).long(), len(rollout.prompt_ids)
        whole = self.model(ids[None]).logits[0, start - 1 : -1]
        self.results["left_out"] += whole.softmax(-1)[:, PLANTED].tolist()
        logits = over_known(whole)
        return torch.log_softmax(logits / (temperature or 1.0), -1).gather(1, ids[start:, None])[:, 0]

    def compare(self, update: int) -> None:
        """Greedy ids of all three, and log-probabilities of greedy and sampled responses."""
        stream = self.stream()
        self.vllm.update_weights(lambda: stream, update)
        self.in_process.update_weights(lambda: stream, update)
        requests = [Request(ids) for ids in prompts(12)]
        greedy = SamplingParams(0.0, 1.0, NEW_TOKENS, (0, update))
        rollouts, ours = self.vllm.generate(requests, greedy), self.in_process.generate(requests, greedy)
        ids = [rollout.response_ids.tolist() for rollout in rollouts]
        self.results["greedy"].append(
            {
                "transformers": ids == [self.transformers_greedy(request.prompt_ids) for request in requests],
                "in_process": ids == [rollout.response_ids.tolist() for rollout in ours],
                "reasons": [r.finish_reason for r in rollouts] == [r.finish_reason for r in ours],
                "versions": sorted({rollout.weight_versions[:, 0].item() for rollout in rollouts}),
                "distinct": len({tuple(one) for one in ids}),
            }
        )
        sampled = self.vllm.generate(requests, SamplingParams(0.7, 1.0, NEW_TOKENS, (1, update)))
        for temperature, group in ((0.0, rollouts), (0.7, sampled)):
            gap = max(
                float((self.transformers_logprobs(r, temperature) - torch.tensor(r.logprobs)).abs().max())
                for r in group
            )
            self.results["logprob_gap"].append(gap)

    @torch.no_grad()
    def sampled_distribution(self) -> None:
        """First ids of many responses to one prompt against exact probabilities, with a temperature and a nucleus."""
        prompt, count = prompts(1)[0], 1500
        temperature, top_p = 0.9, 0.9
        logits = over_known(self.model(torch.tensor([prompt])).logits[0, -1]).double()
        probability = torch.softmax(logits / temperature, -1)
        ordered, order = probability.sort(descending=True)
        kept = order[ordered.cumsum(0) - ordered < top_p]
        exact = (probability[kept] / probability[kept].sum()).numpy()
        requests = [Request(prompt)] * count
        rollouts = self.vllm.generate(requests, SamplingParams(temperature, top_p, 1, (2, 3)))
        drawn = np.array([rollout.response_ids[0] for rollout in rollouts])
        observed = np.array([(drawn == int(i)).sum() for i in kept])
        common = exact * count >= 5  # the test needs expected counts; rare ids are taken together
        pairs = [(observed[common], exact[common] * count)]
        if not common.all():
            pairs.append((observed[~common].sum(keepdims=True), exact[~common].sum(keepdims=True) * count))
        seen, expected = (np.concatenate(part) for part in zip(*pairs, strict=True))
        logprob = dict(zip(kept.tolist(), np.log(exact), strict=True))
        self.results["sampling"] = {
            "p_value": chi_square(seen, expected),
            "cells": len(seen),
            "outside": int(count - observed.sum()),
            "logprob_gap": max(abs(logprob[r.response_ids[0]] - r.logprobs[0]) for r in rollouts),
        }
        again = self.vllm.generate(requests[:50], SamplingParams(temperature, top_p, 1, (2, 3)))
        self.results["sampling"]["repeatable"] = [r.response_ids.tolist() for r in again] == [
            r.response_ids.tolist() for r in rollouts[:50]
        ]

    def cancellation(self) -> None:
        """A cancelled call keeps complete responses; going on with them gives what an uninterrupted call gives."""
        requests = [Request(ids) for ids in prompts(64)]
        sampling = SamplingParams(1.0, 1.0, NEW_TOKENS, (3, 4))
        whole = self.vllm.generate(requests, sampling)
        done = {i: whole[i] for i in range(0, 64, 3)}
        rest = self.vllm.generate(requests, sampling, None, done)
        cancelled: int | None = 0
        patience = 1.0
        while cancelled == 0 and patience < 100:  # how long the first responses take depends on the machine
            end = time.monotonic() + patience
            try:
                self.vllm.generate(requests * 20, sampling, lambda end=end: time.monotonic() > end)
                cancelled = None
            except GenerationCancelled as stopped:
                cancelled = len(stopped.completed)
            patience *= 2
        after = self.vllm.generate(requests[:4], sampling)
        self.results["cancelled"] = {
            "completed": cancelled,
            "of": len(requests) * 20,
            "same_with_done": [r.response_ids.tolist() for r in rest] == [r.response_ids.tolist() for r in whole],
            "same_after": [r.response_ids.tolist() for r in after] == [r.response_ids.tolist() for r in whole[:4]],
        }


def main() -> None:
    name, tensor, directory = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    comparison = Comparison(name, tensor, directory)
    try:
        for update in range(1 + UPDATES):
            comparison.change_weights(update)
            comparison.compare(update)
        if name == "qwen2_tied":
            comparison.sampled_distribution()
            comparison.cancellation()
    finally:
        comparison.vllm.close()
    (directory / "results.json").write_text(json.dumps(comparison.results))


if __name__ == "__main__":
    main()
