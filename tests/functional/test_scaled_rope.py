"""Scaled RoPE through the whole system: states, gradients of `verify`, and generation, against Hugging Face.

The Phi-4 models switch from short to long factors after 12 tokens, the other scaled ones were made for 16 (Llama: 32).
The batches below have sequences on either side.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from convert_layouts import LAYOUTS, save_hf_states
from convert_layouts import ranks as convert_ranks
from layout_cases import read_result
from pool import Pools
from safetensors.torch import load_file
from tiny_models import SIZES, Models

from checkpoint_tools._convert import hf_to_megatron
from nemo_oprd.batch.types import Rollout
from nemo_oprd.config.loading import load_config
from nemo_oprd.distillation.reference import agreement, reference
from nemo_oprd.rollout.replay import write_rollouts

EOS = (1, 3)
STEPS = 8
SWITCH = 12
SAMPLED = ("llama_tied", "phi4_tied", "qwen3_yarn", "qwen3_moe_yarn", "qwen2_longrope")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


def make_rollouts() -> list[Rollout]:
    """Prompts and responses in one pack; with the first 4 tokens supervised, 4 + 4 of 4 + 20 tokens are computed."""
    rng = np.random.default_rng(0)
    sizes = [(4, 20), (3, 6), (10, 2), (5, 8), (14, 9), (2, 45)]
    return [Rollout(*(rng.integers(0, SIZES["vocab_size"], n).tolist() for n in size)) for size in sizes]


TP2_SP = ["student.parallel.tensor=2", "student.parallel.sequence=true"]
# what comes after the first tokens isn't computed then, and decides over the factors of LongRoPE
FIRST = ["loss.representation.positions=first_k", "loss.representation.k=4"]
ALL = ["loss.representation.positions=all"]


@pytest.mark.parametrize(
    ("student", "teacher", "ranks", "settings"),
    [
        ("llama_tied", "llama_untied_bias", 2, [*FIRST, *TP2_SP]),
        ("phi4_tied", "phi4_untied_old", 2, [*FIRST, "student.parallel.context=2", "teacher.parallel.tensor=2"]),
        ("qwen3_yarn", "qwen3_moe_yarn", 2, [*ALL, *TP2_SP, "teacher.parallel.expert=2"]),
        ("qwen3_moe_yarn", "qwen3_yarn", 2, [*ALL, "student.parallel.pipeline=2", "teacher.parallel.context=2"]),
        pytest.param(
            "qwen3_yarn",
            "qwen3_untied",
            4,
            [*ALL, "student.parallel.context=2", *TP2_SP, "teacher.parallel.pipeline=2"],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "qwen2_longrope",
            "mixtral_linear",
            2,
            [*FIRST, "student.parallel.pipeline=2", "student.recompute=full", "teacher.parallel.expert=2"],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "mixtral_linear",
            "qwen2_longrope",
            2,
            [*ALL, *TP2_SP, "student.parallel.expert=2", "teacher.parallel.context=2"],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_gradients(
    models: Models, pools: Pools, tmp_path: Path, student: str, teacher: str, ranks: int, settings: list[str]
) -> None:
    """fp32 against float64 over 4 layers: rounding gives 1e-6; other angles give 1e-2 and more."""
    write_rollouts(tmp_path / "rollouts.jsonl", make_rollouts())
    overrides = [
        f"student.hf_path={models(student)}",
        f"teacher.hf_path={models(teacher)}",
        f"rollout.replay={tmp_path / 'rollouts.jsonl'}",
        f"output={tmp_path / 'out'}",
        *settings,
    ]
    pools[ranks].run("layout_cases:run_verify", overrides=overrides)
    losses, gradients = read_result(tmp_path / "out")
    expected = reference(load_config("verify", overrides), make_rollouts())
    assert losses["loss/total"] == pytest.approx(expected["loss/total"], rel=1e-5)
    worst = agreement(gradients, expected["gradients"])
    print(f"{student} from {teacher}: {max(worst.values()):.1e}")
    assert max(worst.values()) < 1e-5, worst


@pytest.mark.parametrize(
    ("name", "layout"),
    [("qwen3_yarn", "TP2"), ("qwen3_moe_yarn", "EP2"), ("qwen2_longrope", "PP2"), ("mixtral_linear", "TP2xEP2")],
)
def test_states_and_logits_beyond_the_original_length(
    models: Models, pools: Pools, tmp_path: Path, name: str, layout: str
) -> None:
    """fp32 against float64: rounding adds some eps = 1.2e-7 per product over 4 layers; bound of 5e-6 of the values."""
    save_hf_states(models(name), tmp_path / "expected.safetensors", lengths=(16, 17, 64), dtype=torch.float64)
    expected = load_file(tmp_path / "expected.safetensors")
    hf_to_megatron(models(name), tmp_path / "megatron", progress=False)
    deviations = pools[convert_ranks(layout)].run(
        "convert_cases:deviations",
        checkpoint=str(tmp_path / "megatron"),
        hf_path=str(models(name)),
        expected=str(tmp_path / "expected.safetensors"),
        layout=LAYOUTS[layout],
        by_name=False,
    )
    relative = {
        kind: value / max(float(t.abs().max()) for key, t in expected.items() if _kind(key) == kind)
        for kind, value in deviations.items()
    }
    print(f"{name}, {layout}: {max(relative.values()):.1e}")
    assert len(relative) == 1 + SIZES["num_hidden_layers"] and max(relative.values()) < 5e-6, relative


def _kind(key: str) -> str:
    """ "hidden.3" of "hidden.1.3", "logits" of "logits.1"."""
    first, _, *layer = key.split(".")
    return ".".join([first, *layer])


def test_the_factors_matter(models: Models) -> None:
    """Factors give the tiny models visibly different states, so that the tests here can tell them."""
    from transformers import AutoModelForCausalLM

    ids = torch.arange(SWITCH + 8)[None] + 5
    model = AutoModelForCausalLM.from_pretrained(models("phi4_tied"))
    with torch.no_grad():
        whole, alone = (model.model(part).last_hidden_state for part in (ids, ids[:, :SWITCH]))
    assert float((whole[:, :SWITCH] - alone).abs().max()) > 1e-2
    for name in ("qwen3_yarn", "mixtral_linear"):
        model = AutoModelForCausalLM.from_pretrained(models(name))
        plain = {"rope_type": "default", "rope_theta": model.config.rope_parameters["rope_theta"]}
        unscaled = AutoModelForCausalLM.from_pretrained(models(name), rope_parameters=plain)
        with torch.no_grad():
            scaled, other = (m.model(ids).last_hidden_state for m in (model, unscaled))
        assert float((scaled - other).abs().max()) > 1e-2


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
    for name in SAMPLED:
        model = AutoModelForCausalLM.from_pretrained(models(name), dtype=torch.float64)
        model.set_experts_implementation("eager")
        for prompt in prompts:
            ids: list[int] = []
            while len(ids) < min(STEPS, 64 - len(prompt)) and (not ids or ids[-1] not in EOS):
                with torch.no_grad():
                    ids.append(int(model(torch.tensor([prompt + ids])).logits[0, -1].argmax()))
            results.setdefault(name, []).append((ids, "stop" if ids[-1] in EOS else "length"))
    return results


@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("name", SAMPLED)
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


def test_log_probabilities_of_sampling(models: Models, pools: Pools, prompts: list[list[int]]) -> None:
    """With a cache, token by token beyond the original length: what whole sequences have, in float64.

    The absolute error of a log-probability is that of the logits, some 1e-6 of logits of a few units.
    """
    from transformers import AutoModelForCausalLM

    shorter = prompts[:-1]  # the longest one ends before the others
    for name in ("qwen3_yarn", "qwen3_moe_yarn", "qwen2_longrope"):
        model = AutoModelForCausalLM.from_pretrained(models(name), dtype=torch.float64)
        model.set_experts_implementation("eager")
        ids, found = pools[1].run(
            "cases:generate_logprobs", hf_path=str(models(name)), prompts=shorter, steps=STEPS + 8
        )
        for prompt, response, ours in zip(shorter, ids, found, strict=True):
            assert len(ours) == len(response) == STEPS + 8
            # with LongRoPE, states before the last one change with the length of the sequence
            given = range(STEPS + 8) if name == "qwen2_longrope" else [STEPS + 7]
            with torch.no_grad():
                logits = [model(torch.tensor([prompt + response[:t]])).logits[0] for t in given]
            expected = torch.stack([part[-1] for part in logits]) if len(logits) > 1 else logits[0][len(prompt) - 1 :]
            worst = float((torch.from_numpy(ours) - expected.log_softmax(-1)).abs().max())
            assert worst < 1e-5, (name, len(prompt), worst)
