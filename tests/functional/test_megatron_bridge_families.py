"""Families that only Megatron-Bridge has, in this project's loop (`provider=bridge`), on CPUs with the real package.

- Losses and every gradient of `verify` against plain Hugging Face models in float64, which run here, in another version
  of transformers, at layouts where both roles differ.
- A run that is resumed at another layout ends with the weights of an uninterrupted one.
- Conversion both ways bit for bit, with checkpoints of this project and of Megatron-Bridge.
- Recipes: what they set of layout and training is this project's, and another model is refused.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from golden_runs import EXPECTED, GOLDEN
from megatron_bridge_environment import run
from megatron_bridge_family_cases import COMMON, FAMILIES
from safetensors.torch import load_file

from nemo_oprd.config.loading import load_config
from nemo_oprd.distillation.reference import agreement, reference
from nemo_oprd.rollout.replay import read_rollouts

pytestmark = pytest.mark.nemo
# fp32 against float64 over four layers, as in test_layouts.py
TOLERANCE = 1e-5
CASES = "megatron_bridge_family_cases.py"
FULL_RECOMPUTE = ("student.recompute=full", "student.recompute_method=uniform", "student.recompute_num_layers=1")
# name -> settings, on two ranks
LAYOUTS: dict[str, tuple[str, ...]] = {
    "TP2 SP, teacher PP2": (
        "student.parallel.tensor=2", "student.parallel.sequence=true", "teacher.parallel.pipeline=2",
        "loss.output.kind=sampled_token", "loss.output.weight=0.5",
    ),
    "PP2, teacher CP2": (
        "student.parallel.pipeline=2", "student.parallel.first_stage_layers=2", "teacher.parallel.context=2",
        "loss.output.kind=full_vocab", "loss.output.weight=0.5", "loss.representation.kind=normalized_mse",
    ),
    "CP2, teacher TP2": (
        "student.parallel.context=2", "teacher.parallel.tensor=2", "loss.representation.layers=[1,2]", *FULL_RECOMPUTE,
    ),
    "DP2, small microbatches": ("train.tokens_per_microbatch=16", "loss.representation.kind=cosine"),
}  # fmt: skip
RUNS = {f"{family}, {layout}": (family, layout) for family in FAMILIES for layout in LAYOUTS}


@pytest.fixture(scope="module")
def models(megatron_bridge: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """FAMILY/{student,teacher}, written by Megatron-Bridge's version of transformers."""
    root = tmp_path_factory.mktemp("families")
    run(megatron_bridge, 0, CASES, "make_models", directory=str(root), families=list(FAMILIES))
    return root


def settings(models: Path, family: str, output: Path, provider: str = "bridge") -> list[str]:
    roles = [f"{role}.hf_path={models / family / role}" for role in ("student", "teacher")]
    providers = [f"student.provider={provider}", "teacher.provider=bridge"]
    return [*roles, *providers, f"rollout.replay={GOLDEN}/rollouts.jsonl", f"output={output}"]


def place(name: str) -> str:
    """A run's name without characters that the configuration's grammar reads."""
    return name.replace(",", "").replace(" ", "-")


@pytest.fixture(scope="module")
def verified(megatron_bridge: dict[str, str], models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results of `verify` with all settings, in one start of the two ranks, because importing takes the longest."""
    root = tmp_path_factory.mktemp("verified")
    runs = {
        name: [*settings(models, family, root / place(name)), *LAYOUTS[layout]]
        for name, (family, layout) in RUNS.items()
    }
    run(megatron_bridge, 2, CASES, "verify", runs=runs)
    return root


@pytest.mark.parametrize("name", RUNS)
def test_gradients(models: Path, verified: Path, tmp_path: Path, name: str) -> None:
    family, layout = RUNS[name]
    check(verified / place(name), [*settings(models, family, tmp_path), *LAYOUTS[layout]])


def test_gradients_through_a_bridge(megatron_bridge: dict[str, str], models: Path, tmp_path: Path) -> None:
    """A student that Megatron-Bridge builds, and a wider teacher that this project builds."""
    roles = [f"student.hf_path={models}/gemma/student", f"teacher.hf_path={GOLDEN}/teacher", "student.provider=bridge"]
    common = [*roles, "student.parallel.tensor=2", f"rollout.replay={GOLDEN}/rollouts.jsonl"]
    bridge = f"bridge.path={tmp_path / 'bridge'}"
    fit = [*common, bridge, f"output={tmp_path / 'bridge'}", "bridge.rank=4"]
    overrides = [*common, bridge, "teacher.parallel.pipeline=2", f"output={tmp_path / 'out'}"]
    run(megatron_bridge, 2, CASES, "fit_and_verify", fit=fit, runs={"bridge": overrides})
    check(tmp_path / "out", overrides)


def check(found: Path, overrides: list[str]) -> None:
    """Compares what `verify` wrote with plain Hugging Face models in float64."""
    config = load_config("verify", overrides)
    expected = reference(config, read_rollouts(GOLDEN / "rollouts.jsonl", COMMON["vocab_size"]))
    losses = json.loads((found / "losses.json").read_text())
    for key in ("rep/loss", "output/loss"):
        if key in expected:
            assert losses[key] == pytest.approx(expected[key], rel=TOLERANCE), key
    deviations = agreement(load_file(found / "grads.safetensors"), expected["gradients"])
    worst = max(deviations, key=deviations.__getitem__)
    assert deviations[worst] < TOLERANCE, f"{worst}: {deviations[worst]:.1e}"


@pytest.fixture(scope="module")
def trained(megatron_bridge: dict[str, str], models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """FAMILY-whole: four updates at TP2. FAMILY-parts: two updates at TP2, then two more at PP2."""
    root = tmp_path_factory.mktemp("trained")
    sizes = {
        "tensor": ("student.parallel.tensor=2", "student.parallel.sequence=true"),
        "pipeline": ("student.parallel.pipeline=2", "student.parallel.first_stage_layers=2"),
    }

    def one(family: str, kind: str, layout: str, steps: int) -> list[str]:
        train = [f"train.steps={steps}", "train.schedule=constant", "train.warmup_fraction=0", "train.save_every=2"]
        train += ["train.lr=1e-2", "train.adam_eps=1e-2", "loss.output.kind=full_vocab", "loss.output.weight=0.5"]
        train.append("logging.tensorboard=false")
        return [*settings(models, family, root / f"{family}-{kind}"), *sizes[layout], *train]

    runs = []
    for family in ("gemma", "nemotron"):
        runs += [
            one(family, "whole", "tensor", 4),
            one(family, "parts", "tensor", 2),
            one(family, "parts", "pipeline", 4),
        ]
    run(megatron_bridge, 2, CASES, "train", runs=runs)
    return root


@pytest.mark.parametrize("family", ["gemma", "nemotron"])
def test_training_resumes_at_another_layout(models: Path, trained: Path, family: str) -> None:
    from transformers import AutoModelForCausalLM

    whole, parts = (load_file(trained / f"{family}-{kind}" / "hf" / "model.safetensors") for kind in ("whole", "parts"))
    before = load_file(models / family / "student" / "model.safetensors")
    assert set(whole) == set(parts) == set(before)
    for name, tensor in whole.items():
        torch.testing.assert_close(parts[name], tensor, rtol=1e-4, atol=1e-5, msg=name)
        assert not torch.equal(tensor, before[name]), name
    lines = [json.loads(line) for line in (trained / f"{family}-whole" / "metrics.jsonl").read_text().splitlines()]
    losses = [line["rep/loss"] for line in lines]
    assert len(losses) == 4 and losses[3] < losses[0], losses
    AutoModelForCausalLM.from_pretrained(trained / f"{family}-whole" / "hf")


@pytest.fixture(scope="module")
def converted(megatron_bridge: dict[str, str], models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("converted")
    run(megatron_bridge, 1, CASES, "convert", models=str(models), directory=str(root))
    return root


@pytest.mark.parametrize("family", FAMILIES)
def test_conversion(models: Path, converted: Path, family: str) -> None:
    from transformers import AutoModelForCausalLM

    source = models / family / "student"
    expected = load_file(source / "model.safetensors")
    for found in (converted / family / "back" / "model.safetensors", converted / family / "theirs.safetensors"):
        tensors = load_file(found)
        assert set(tensors) == set(expected)
        for name, tensor in expected.items():
            assert torch.equal(tensors[name], tensor), f"{found}: {name}"
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.arange(20).view(2, 10) * 3).logits
    found_logits = load_file(converted / family / "loaded.safetensors")["logits"]
    torch.testing.assert_close(found_logits, logits, rtol=1e-4, atol=1e-4)


MODULE = "megatron_bridge_family_cases"
# case -> (settings, what is said); the models are those of gemma
REFUSED = {
    "another model": ([f"student.provider={MODULE}:another_model"], "ffn_hidden_size=64, but"),
    "another RoPE": ([f"student.provider={MODULE}:another_rope"], "rotary_base=77.0, but"),
    "another rotation": ([f"student.provider={MODULE}:another_rotation"], "rotary_interleaved=True, but"),
    "another residual": (
        [f"student.provider={MODULE}:another_residual"],
        "apply_residual_connection_post_layernorm=True, but",
    ),
    "adapters": ([f"student.provider={MODULE}:adapters"], "a recipe with peft=object"),
    "not on the Hub": ([f"student.provider={MODULE}:not_on_the_hub"], "not_on_the_hub failed ("),
    "no provider": ([f"student.provider={MODULE}:nothing"], "returns a NoneType; expected"),
    "no function": ([f"student.provider={MODULE}:recipes"], "did you mean 'recipe'?"),
    "a teacher's": (
        [f"teacher.provider={MODULE}:another_model"],
        f"teacher.provider={MODULE}:another_model: ffn",
    ),
    "one role only": (["teacher.provider=own"], "provider=own for a gemma model"),
}
# case -> (family, changes of the student's config.json, what is said)
WRONG_CONFIGS: dict[str, tuple[str, dict[str, Any], str]] = {
    "sliding window": ("mistral", {"sliding_window": 16}, "has sliding-window attention; expected a dense decoder"),
    "activation": ("mistral", {"hidden_act": "gelu"}, "transformers' activation is GELUActivation, Megatron-Bridge's"),
    "scaled RoPE": ("nemotron", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, "RoPE type 'linear'"),
    "two models": ("mistral", {"model_type": "granite"}, "['MistralForCausalLM'] is not GraniteForCausalLM"),
    "a family of several RoPEs": (
        # 0.3 has no description of it
        "gemma", {"model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"]},
        "cannot describe the model|expected full_attention and sliding_attention only",
    ),
    "no bridge": ("gemma", {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}, "has no bridge for the model"),
    "text for a size": ("gemma", {"num_hidden_layers": "3"}, "expected"),
}  # fmt: skip


@pytest.fixture(scope="module")
def refused(megatron_bridge: dict[str, str], models: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The message of every case."""
    root = tmp_path_factory.mktemp("refused")
    cases = {name: [*settings(models, "gemma", root / "out"), *more] for name, (more, _) in REFUSED.items()}
    for name, (family, changes, _) in WRONG_CONFIGS.items():
        config = json.loads((models / family / "student" / "config.json").read_text())
        (root / place(name)).mkdir()
        (root / place(name) / "config.json").write_text(json.dumps({**config, **changes}))
        cases[name] = [*settings(models, family, root / "out"), f"student.hf_path={root / place(name)}"]
    run(megatron_bridge, 1, CASES, "refusals", cases=cases, output=str(root / "found.json"))
    return json.loads((root / "found.json").read_text())


@pytest.mark.parametrize("name", [*REFUSED, *WRONG_CONFIGS])
def test_refusals(refused: dict[str, str], name: str) -> None:
    says = REFUSED[name][1] if name in REFUSED else WRONG_CONFIGS[name][2]
    message = refused[name]
    assert any(part in message for part in says.split("|")), message
    assert "expected" in message and "\n" not in message, message
    if name in WRONG_CONFIGS:
        assert "config.json: " in message, message


def test_every_field_of_a_provider_is_accounted_for(megatron_bridge: dict[str, str], tmp_path: Path) -> None:
    """A field that a new Megatron-Bridge adds must be put into a table of provider_fields.py on purpose."""
    run(megatron_bridge, 0, CASES, "provider_fields", output=str(tmp_path / "fields.json"))
    found: dict[str, str | None] = json.loads((tmp_path / "fields.json").read_text())
    assert len(found) > 200 and [name for name, kind in found.items() if kind is None] == []


def test_a_recipe_of_an_own_family(megatron_bridge: dict[str, str], tmp_path: Path) -> None:
    """The golden pair (qwen3), built by a recipe whose settings of layout and training this project replaces."""
    case = "mse_all_last_k"
    options = [f"loss.representation.{k}={v}" for k, v in EXPECTED[case]["options"].items()]
    roles = [f"{role}.hf_path={GOLDEN / role}" for role in ("student", "teacher")]
    overrides = [
        *roles, *options, "student.provider=megatron_bridge_family_cases:recipe", "student.parallel.tensor=2",
        f"rollout.replay={GOLDEN}/rollouts.jsonl", f"output={tmp_path / 'out'}",
    ]  # fmt: skip
    run(megatron_bridge, 2, CASES, "verify", runs={"golden": overrides})
    deviations = agreement(
        load_file(tmp_path / "out" / "grads.safetensors"), load_file(GOLDEN / f"grads_{case}.safetensors")
    )
    assert max(deviations.values()) < TOLERANCE, deviations
