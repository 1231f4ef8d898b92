"""Families with scaled RoPE through the whole system: gradients of `verify`, and generation, against Hugging Face.

The Phi-4 models switch from short to long factors after 12 tokens, the batches below have sequences on either side.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from layout_cases import read_result
from pool import Pools
from tiny_models import SIZES, Models

from nemo_oprd.batch.types import Rollout
from nemo_oprd.config.loading import load_config
from nemo_oprd.rollout.replay import write_rollouts
from nemo_oprd.verification.reference import agreement, reference

EOS = (1, 3)
STEPS = 8
SWITCH = 12


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


def make_rollouts() -> list[Rollout]:
    """Prompts and responses in one pack; with the first 4 tokens supervised, 4 + 4 of 4 + 20 tokens are computed."""
    rng = np.random.default_rng(0)
    sizes = [(4, 20), (3, 6), (10, 2), (5, 8), (14, 9), (2, 45)]
    return [Rollout(*(rng.integers(0, SIZES["vocab_size"], n).tolist() for n in size)) for size in sizes]


@pytest.mark.parametrize(
    ("student", "teacher", "layout"),
    [
        ("llama_tied", "llama_untied_bias", ["student.parallel.tensor=2", "student.parallel.sequence=true"]),
        ("phi4_tied", "phi4_untied_old", ["student.parallel.context=2", "teacher.parallel.tensor=2"]),
    ],
)
def test_gradients(models: Models, pools: Pools, tmp_path: Path, student: str, teacher: str, layout: list[str]) -> None:
    """Only the first tokens are supervised: what comes after them isn't computed, and decides over the factors."""
    write_rollouts(tmp_path / "rollouts.jsonl", make_rollouts())
    settings = [
        f"student.hf_path={models(student)}",
        f"teacher.hf_path={models(teacher)}",
        f"rollout.replay={tmp_path / 'rollouts.jsonl'}",
        "loss.representation.positions=first_k",
        "loss.representation.k=4",
        f"output={tmp_path / 'out'}",
    ]
    pools[2].run("layout_cases:run_verify", overrides=[*settings, *layout])
    losses, gradients = read_result(tmp_path / "out")
    expected = reference(load_config("verify", settings), make_rollouts())
    assert losses["loss/total"] == pytest.approx(expected["loss/total"], rel=1e-5)
    worst = agreement(gradients, expected["gradients"])
    assert max(worst.values()) < 1e-5, worst


def test_the_factors_matter(models: Models) -> None:
    """Short and long factors give the tiny model visibly different states, so that the tests here can tell them."""
    from transformers import AutoModelForCausalLM

    ids = torch.arange(SWITCH + 8)[None] + 5
    model = AutoModelForCausalLM.from_pretrained(models("phi4_tied"))
    with torch.no_grad():
        whole, alone = (model.model(part).last_hidden_state for part in (ids, ids[:, :SWITCH]))
    assert float((whole[:, :SWITCH] - alone).abs().max()) > 1e-2


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = np.random.default_rng(3)
    # those of 5 to 12 tokens grow beyond the short factors, two of them at the same step
    return [rng.integers(4, SIZES["vocab_size"], n).tolist() for n in (2, 5, 8, 8, 11, 12, 13, 20, 60)]


@pytest.fixture(scope="module")
def greedy(models: Models, prompts: list[list[int]]) -> dict[str, list[tuple[list[int], str]]]:
    """One full forward of Hugging Face's model per token."""
    from transformers import AutoModelForCausalLM

    results: dict[str, list[tuple[list[int], str]]] = {}
    for name in ("llama_tied", "phi4_tied"):
        model = AutoModelForCausalLM.from_pretrained(models(name), dtype=torch.float64)
        for prompt in prompts:
            ids: list[int] = []
            while len(ids) < min(STEPS, 64 - len(prompt)) and (not ids or ids[-1] not in EOS):
                with torch.no_grad():
                    ids.append(int(model(torch.tensor([prompt + ids])).logits[0, -1].argmax()))
            results.setdefault(name, []).append((ids, "stop" if ids[-1] in EOS else "length"))
    return results


@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("name", ["llama_tied", "phi4_tied"])
def test_generation(
    models: Models,
    pools: Pools,
    prompts: list[list[int]],
    greedy: dict[str, list[tuple[list[int], str]]],
    name: str,
    tensor: int,
) -> None:
    """Ragged batches with a cache, sequences growing beyond the short factors: the very same tokens."""
    got = pools[tensor].run(
        "cases:generate",
        hf_path=str(models(name)),
        tensor=tensor,
        prompts=prompts,
        temperature=0.0,
        top_p=1.0,
        steps=STEPS,
    )
    assert [tuple(item) for item in got] == greedy[name]
