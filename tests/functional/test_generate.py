"""In-process generation against plain Hugging Face forwards without any cache."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from pool import Pools
from tiny_models import save_random_model
from transformers import AutoModelForCausalLM

from nemo_oprd.data.token_ids import TokenIds

MODEL = Path(__file__).parent.parent / "golden" / "student"
EOS = (1, 3)
STEPS = 12


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = np.random.default_rng(3)
    # the last one comes near the model's 64 positions: its response ends earlier than those it is batched with
    lengths = [*rng.integers(1, 20, 11).tolist(), 58]
    return [rng.integers(4, 61, length).tolist() for length in lengths]


def expected(
    prompts: list[list[int]], temperature: float, top_p: float, path: Path = MODEL, known: TokenIds | None = None
) -> list[tuple[list[int], str]]:
    """One full forward per token, and the definition of inverse-CDF sampling written out."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    model.set_experts_implementation("eager")
    results = []
    for i, prompt in enumerate(prompts):
        uniforms = np.random.default_rng([7, 1, 0, i]).random(STEPS)
        ids: list[int] = []
        reason = "length"
        for u in uniforms[: 64 - len(prompt)]:
            with torch.no_grad():
                logits = model(torch.tensor([prompt + ids])).logits[0, -1].numpy()
            if known is not None:
                logits[~np.isin(np.arange(len(logits)), np.flatnonzero(known.mask))] = -np.inf
            if temperature == 0:
                token = int(logits.argmax())
            else:
                p = np.exp((logits - logits.max()) / temperature)
                p /= p.sum()
                if top_p < 1:
                    order = np.argsort(-p)
                    kept = order[: int(np.searchsorted(np.cumsum(p[order]), top_p) + 1)]
                    p = np.where(np.isin(np.arange(len(p)), kept), p, 0) / p[kept].sum()
                token = int(np.searchsorted(np.cumsum(p), u, side="right"))
            ids.append(token)
            if token in EOS:
                reason = "stop"
                break
        results.append((ids, reason))
    return results


@pytest.mark.parametrize(("ranks", "tensor"), [(1, 1), (2, 1), (2, 2), (4, 4)])
@pytest.mark.parametrize(
    ("temperature", "top_p", "known"),
    [(0.0, 1.0, None), (1.0, 1.0, TokenIds(58, ((10, 30), (44, 45)))), (0.7, 0.8, None)],
)
def test_generation_equals_full_forwards(
    pools: Pools,
    prompts: list[list[int]],
    ranks: int,
    tensor: int,
    temperature: float,
    top_p: float,
    known: TokenIds | None,
) -> None:
    """Ragged prompts, several batches, finished sequences leaving early, any layout: the very same tokens.

    Also where some ids may not be sampled.
    """
    got = pools[ranks].run(
        "cases:generate",
        hf_path=str(MODEL),
        tensor=tensor,
        prompts=prompts,
        temperature=temperature,
        top_p=top_p,
        steps=STEPS,
        sampled=known,
    )
    assert [tuple(item) for item in got] == expected(prompts, temperature, top_p, known=known)


@pytest.mark.parametrize(
    ("ranks", "tensor", "expert"),
    [
        (1, 1, 1),
        pytest.param(2, 1, 1, marks=pytest.mark.slow),
        pytest.param(2, 2, 1, marks=pytest.mark.slow),
        (2, 2, 2),
    ],
)
def test_generation_of_a_model_with_experts(
    pools: Pools, prompts: list[list[int]], tmp_path: Path, ranks: int, tensor: int, expert: int
) -> None:
    """Tensor ranks decode the same responses, whether each has all experts or a part of them."""
    save_random_model(tmp_path, "qwen3_moe", torch.float32)
    options = {"tensor": tensor, "expert": expert, "temperature": 0.7, "top_p": 0.8, "steps": STEPS}
    got = pools[ranks].run("cases:generate", hf_path=str(tmp_path), prompts=prompts, **options)
    assert [tuple(item) for item in got] == expected(prompts, 0.7, 0.8, tmp_path)


@pytest.mark.parametrize("ranks", [1, 2])
def test_bf16_logits_are_not_rounded(pools: Pools, ranks: int) -> None:
    """The policy that is sampled is the one whose probabilities the losses compute."""
    hidden = torch.randn(5, 32, generator=torch.Generator().manual_seed(0)).bfloat16() * 8
    got = pools[ranks].run("cases:bf16_logits", hf_path=str(MODEL), hidden=hidden)
    head = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.bfloat16).lm_head.weight.detach()
    exact = hidden.double() @ head.double().T
    assert got.dtype == torch.float32
    assert (got[:, :61] - exact).abs().max() < 1e-5 * exact.abs().max()
    assert (exact.bfloat16() - exact).abs().max() > 1e-3 * exact.abs().max()  # what rounding would do


@pytest.mark.parametrize("asked", [1, pytest.param(2, marks=pytest.mark.slow), 4])
@pytest.mark.parametrize("tensor", [1, 2])
def test_all_ranks_give_up_where_one_does(pools: Pools, prompts: list[list[int]], tensor: int, asked: int) -> None:
    """Asked before every batch and within; tensor ranks stop together, others do their part. It can sample again."""
    *ranks, completed, resumed, keepers = pools[2].run(
        "cases:generate_until_given_up", hf_path=str(MODEL), tensor=tensor, prompts=prompts, asked=asked, rank=1
    )
    assert [given_up for given_up, _ in ranks] == [True, True]
    times = [times for _, times in ranks]
    assert times[1] == asked
    assert times[0] == asked if tensor == 2 else times[0] > 4
    # with one tensor rank the other data-parallel rank completes its half; a batch is complete or sampled again
    assert completed % 3 == 0 and completed < len(prompts)
    assert completed >= (0 if tensor == 2 else len(prompts) // 2)
    assert resumed
    # each response was kept once, by one rank, in the call that sampled it; of tensor ranks the first one keeps
    assert sorted(sum((first + second for first, second in keepers), [])) == list(range(len(prompts)))
    assert tensor == 1 or keepers[1] == ([], [])


def test_who_is_not_given_up_on_samples_to_the_end(pools: Pools, prompts: list[list[int]]) -> None:
    *ranks, _, _, _ = pools[2].run(
        "cases:generate_until_given_up", hf_path=str(MODEL), tensor=2, prompts=prompts, asked=1000, rank=1
    )
    assert [given_up for given_up, _ in ranks] == [False, False]
    # 4 batches of 3: more than once each, for some have more than 4 tokens
    assert ranks[0] == ranks[1]
    assert ranks[0][1] > 4
