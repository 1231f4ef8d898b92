"""How often a vocabulary's worth of arithmetic is done per supervised row: counted, against what the losses need."""

from __future__ import annotations

from dataclasses import replace

import pytest
from pool import Pools

from studies.objective_flops import RESPONSES, Count
from studies.toy_arms import OPD
from tests.support.random_pair import Shape

SHAPE = Shape(2, 32, 64, 4, 2, 128, 512)
# passes through the head, by the teacher and by the student: one forward and two backward, none of them twice; whole
# distributions of the teacher are made where the student's are
PASSES = {
    "hidden states": ((), (0, 0)),
    "sampled token": ((*OPD, "loss.output.kind=sampled_token"), (1, 3)),
    "top-16": ((*OPD, "loss.output.kind=top_k", "loss.output.k=16"), (0, 4)),
    "full vocabulary, chunks of 7": ((*OPD, "loss.output.kind=full_vocab", "loss.output.chunk_tokens=7"), (0, 4)),
    "both": (("loss.output.weight=1", "loss.output.kind=sampled_token"), (1, 3)),
}


@pytest.mark.parametrize("objective", PASSES)
def test_passes_through_the_head(pools: Pools, objective: str) -> None:
    settings, passes = PASSES[objective]
    counts: list[Count] = [
        pools[1].run("studies.objective_flops:count", shape=replace(SHAPE, vocab_size=ids), settings=settings)
        for ids in (128, 256)
    ]
    one = 2 * SHAPE.hidden_size * (256 - 128) * sum(RESPONSES)
    differences = (counts[1].teacher - counts[0].teacher, counts[1].update - counts[0].update)
    assert differences == tuple(number * one for number in passes)
    assert counts[0].update > 2 * counts[0].teacher > 0  # the body: one forward pass, and two as much again backward
