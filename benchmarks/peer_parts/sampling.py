"""Sampling for `benchmarks.peers`: the in-process engine, or transformers' `generate`, from the same weights.

Sampled ids can't agree, so what is compared is their number: every response has the length that was asked for.
"""

from __future__ import annotations

from pathlib import Path

import torch

from benchmarks.peer_parts.cases import OURS, PROMPT
from benchmarks.peer_parts.process import WARM_UPS, Measurement
from benchmarks.rollout import prompts_of
from benchmarks.rollout_models import open_sampler
from nemo_oprd.models import read_model_spec


def main() -> None:
    """Opens the engine and measures its samples."""
    measured = Measurement()
    spec = measured.spec
    torch.set_num_threads(spec["threads"])
    source = Path(spec["student"])
    sampler = open_sampler("megatron" if spec["product"] == OURS else "transformers", source, Path.cwd())
    vocabulary = read_model_spec(source).vocab_size
    responses, tokens = len(spec["responses"]), spec["responses"][0]
    measured.ready()
    for turn in range(WARM_UPS + spec["updates"]):
        prompts = prompts_of(turn, responses, PROMPT, vocabulary)
        with measured.update():
            ids = sampler.sample(prompts, tokens, seed=turn)
        measured.losses.append(sum(len(each) for each in ids))
        measured.norms.append(len(ids))
    sampler.close()
    measured.finish(parameters=0, version=torch.__version__)


if __name__ == "__main__":
    main()
