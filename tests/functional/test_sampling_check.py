"""The trainer's log-probabilities of sampled tokens at several layouts, against Hugging Face models in float64."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from layout_cases import VOCABULARY, Case, make_rollouts, save_model
from pool import Pools
from safetensors.torch import load_file, save_file

from nemo_oprd.batch.types import Rollout
from nemo_oprd.data.token_ids import TokenIds
from nemo_oprd.rollout.replay import write_rollouts

COUNT = 1024
LIKELY, GAPS = 40, TokenIds(90, ((0, 1), (39, 44), (70, 72)))
# float32 against float64: rounding gives 2e-6
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untied and a tied model."""
    root = tmp_path_factory.mktemp("sampling_check")
    for family in ("qwen3", "qwen2"):
        save_model(root / family, family, seed=1)
    save_model(root / "likely" / "qwen3", "qwen3", seed=1)
    file = root / "likely" / "qwen3" / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"][LIKELY] *= 20  # with most of the probability wherever its logit is above 0
    save_file(tensors, file, metadata={"format": "pt"})
    return root


def settings(root: Path, family: str, case: Case, *overrides: str) -> list[str]:
    models = [f"{role}.hf_path={root / family}" for role in ("student", "teacher")]
    return [*models, f"rollout.replay={root / 'rollouts.jsonl'}", "output=unused", *case.overrides, *overrides]


def expected(
    path: Path, rollouts: list[Rollout], response: np.ndarray, token: np.ndarray, top_p: float, known: TokenIds
) -> np.ndarray:
    """One forward per response at temperature 0.8, and the definition of the nucleus written out."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, attn_implementation="eager")
    found = np.zeros(len(response))
    for number in np.unique(response):
        rollout = rollouts[number]
        with torch.no_grad():
            logits = model(torch.tensor([rollout.ids.tolist()])).logits[0, :, : known.limit] / 0.8
        logits[:, ~known.mask] = -torch.inf
        for row in np.flatnonzero(response == number):
            probability = logits[len(rollout.prompt_ids) + token[row] - 1].softmax(0).numpy()
            order, chosen = np.argsort(-probability), rollout.response_ids[token[row]]
            kept = order[: int(np.searchsorted(np.cumsum(probability[order]), top_p) + 1)]
            mass = probability[[*{*kept.tolist(), chosen}]].sum() if top_p < 1 else 1.0
            found[row] = np.log(probability[chosen] / mass)
    return found


@pytest.mark.parametrize(
    ("case", "top_p", "known"),
    [
        (Case("dp1", tokens=120), 0.9, None),
        (Case("tp2 sp"), 0.7, None),
        (Case("tp2 sp", tokens=120), 1.0, None),
        # two tensor ranks hold 128 rows of the head each: the second one has padding alone
        (Case("tp2"), 0.9, GAPS),
        (Case("pp2", tokens=120), 1.0, GAPS),
        (Case("pp2 vpp2", tokens=120), 1.0, None),
        (Case("cp2", tokens=120), 0.8, None),
        (Case("dp2", tokens=120), 0.8, None),
        (Case("pp2", objective="qwen2-tied"), 0.9, None),
        (Case("tp2", objective="qwen2-tied", tokens=120), 0.8, None),
    ],
    ids=str,
)
def test_against_plain_models(root: Path, pools: Pools, case: Case, top_p: float, known: TokenIds | None) -> None:
    """With gaps, an id in one of them is the likeliest at many positions, and does not count."""
    root = root if known is None else root / "likely"
    family, ids = case.objective.split("-")[0], known or TokenIds(VOCABULARY)
    sampled = np.flatnonzero(ids.mask)
    rollouts = [Rollout(r.prompt_ids, sampled[r.response_ids % len(sampled)]) for r in make_rollouts()]
    write_rollouts(root / "rollouts.jsonl", rollouts)
    overrides = settings(root, family, case, "rollout.temperature=0.8", f"rollout.top_p={top_p}")
    arguments = {"overrides": overrides, "count": COUNT, "sampled": known}
    response, token, found = pools[case.ranks].run("sampling_check_cases:student_logprobs", **arguments)
    counts = [min(16, len(r.response_ids)) for r in rollouts]  # of 15 responses, one of which is empty
    assert np.bincount(response, minlength=len(counts)).tolist() == counts
    deviation = abs(found - expected(root / family, rollouts, response, token, top_p, ids)).max()
    print(f"{case}: {deviation:.1e}")
    assert deviation < TOLERANCE


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_check(root: Path, pools: Pools, ranks: int) -> None:
    """An engine that samples as the trainer says passes; one with another temperature or top_p does not."""
    write_rollouts(root / "rollouts.jsonl", make_rollouts())
    overrides = settings(root, "qwen3", Case(f"tp{ranks}"), "rollout.vllm.check_tokens=300")
    checked = sum(min(16, len(rollout.response_ids)) for rollout in make_rollouts())
    assert checked < 300

    def check(**change: float) -> tuple[dict[str, float], str | None]:
        settings = {f"rollout.{key}": value for key, value in change.items()}
        return pools[ranks].run("sampling_check_cases:check", overrides=overrides, change=settings)

    metrics, message = check()
    assert message is None
    assert metrics["rollout/logprob_gap_max"] < TOLERANCE
    for change in ({"temperature": 1.05}, {"top_p": 0.98}):
        metrics, message = check(**change)
        assert message is not None and message.startswith("the engine does not sample from the student: ")
        assert f"nats per token over {checked} tokens" in message
