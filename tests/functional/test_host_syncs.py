"""The host waits for the device a fixed number of times: not for every token, layer or row."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from host_syncs import HostSyncs
from pool import Pools

from nemo_oprd.rollout.decoding import ASK_EVERY
from tests.support.random_pair import Shape, save_random_model, save_random_rollouts

SMALL, DEEP = Shape(2, 32, 48, 4, 2, 300, 512), Shape(5, 32, 48, 4, 2, 300, 512)
SETTINGS = {
    "hidden states": (1, []),
    "recomputed": (1, ["student.recompute=full"]),
    "sampled token": (1, ["loss.output.kind=sampled_token", "loss.output.weight=1"]),
    "top-8": (1, ["loss.output.kind=top_k", "loss.output.k=8", "loss.output.weight=1"]),
    "watched": (1, ["logging.output_metrics_every=1"]),
    "TP2 with SP": (2, ["student.parallel.tensor=2", "student.parallel.sequence=true"]),
    "PP2": (2, ["student.parallel.pipeline=2"]),
    "CP2": (2, ["student.parallel.context=2"]),
}


def pair(place: Path, shape: Shape, responses: list[int]) -> list[str]:
    """Overrides for a random pair and its recorded rollouts."""
    for seed, role in enumerate(("student", "teacher")):
        save_random_model(place / role, shape, seed=seed, std=0.1, dtype=torch.float32)
    save_random_rollouts(place / "rollouts.jsonl", shape, prompt=8, responses=responses)
    return [
        *(f"{role}.hf_path={place / role}" for role in ("student", "teacher")),
        f"rollout.replay={place / 'rollouts.jsonl'}",
        "loss.representation.positions=all",
        "train.tokens_per_microbatch=4096",
        "output=unused",
    ]


# torch's AdamW, which Megatron takes without Transformer Engine and Apex, reads a step counter per parameter: a number
# in host memory, for parameters on a GPU, too
ADAMW = "self.optimizer.step()"


# the others take the same paths of the code
SLOW = ("recomputed", "sampled token", "watched", "PP2")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in SETTINGS])
def test_an_update_waits_as_often_for_more_layers_rows_and_tokens(pools: Pools, tmp_path: Path, name: str) -> None:
    ranks, settings = SETTINGS[name]
    small = pair(tmp_path / "small", SMALL, [20, 30, 25, 22])
    large = pair(tmp_path / "large", DEEP, [90, 110, 25, 95])  # in the same number of microbatches
    target = "host_syncs:syncs_of_a_step"
    few, many = (pools[ranks].run(target, overrides=[*each, *settings]) for each in (small, large))
    assert few, "the counter sees the norm of the gradient, at least"
    grown = {where: (few.get(where, 0), count) for where, count in many.items() if count > few.get(where, 0)}
    assert not {where for where in grown if ADAMW not in where}, grown


@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_sampling_asks_every_32_tokens(pools: Pools, tmp_path: Path, top_p: float) -> None:
    source = str(tmp_path / "model")
    save_random_model(Path(source), SMALL, seed=0, std=0.1, dtype=torch.float32)
    prompts = [[1, 2, 3], [4, 5], [6]]

    def count(new_tokens: int) -> dict[str, int]:
        return pools[1].run(
            "host_syncs:syncs_of_sampling", hf_path=source, prompts=prompts, new_tokens=new_tokens, top_p=top_p
        )

    few, many = count(2 * ASK_EVERY + 1), count(5 * ASK_EVERY + 1)
    grown = {where: count - few.get(where, 0) for where, count in many.items() if count > few.get(where, 0)}
    assert len(grown) == 1, grown
    assert next(iter(grown)).startswith("tolist at decoding.py"), grown
    assert set(grown.values()) == {3}


def test_the_counter_sees_what_waits() -> None:
    """Every kind of operation by which the host learns something of the device, with its place."""
    values = torch.tensor([1.0, 0.0, 2.0])
    mask = values > 0
    for waits in (
        lambda: values[0].item(),
        lambda: bool(mask.all()),
        lambda: int(values.sum()),
        lambda: values.tolist(),
        lambda: values.numpy(),
        lambda: mask.nonzero(),
        lambda: values[mask],
        lambda: values.index_put((mask,), values.new_zeros(())),
        lambda: values.masked_select(mask),
        lambda: values.unique(),
    ):
        with HostSyncs() as syncs:
            waits()
        assert syncs.counts.total() >= 1
    with HostSyncs() as syncs:
        values.index_select(0, torch.tensor([0, 2, 1])) + torch.where(mask, values, 0.0).cumsum(0)
    assert not syncs.counts
