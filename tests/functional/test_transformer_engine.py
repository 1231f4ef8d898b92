"""Transformer Engine's layers as far as that goes without a GPU: Megatron's TE layer spec, built of a stand-in for the
package with the interfaces of the pinned version (te_stand_in/), must compute, train, save and load like local layers.

Not proven here: that the real package's kernels run and agree. That needs a GPU.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from convert_layouts import LAYOUTS, ranks, save_hf_states
from golden_runs import BASE, TOLERANCE, check, overrides, weights
from reference_adamw import one_golden_step
from safetensors.torch import load_file
from tiny_models import SIZES, Models, assert_same_tensors

from checkpoint_tools._convert import hf_to_megatron, megatron_to_hf
from nemo_oprd.config.loading import load_config
from nemo_oprd.distillation.reference import agreement, reference
from nemo_oprd.rollout.replay import read_rollouts

HERE = Path(__file__).parent
TE, LOCAL = "transformer_engine", "local"


@pytest.fixture
def run(run_with_te: Callable[..., Any]) -> Callable[..., Any]:
    return run_with_te


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


def test_stand_in_has_the_interfaces_of_the_pinned_version(run: Callable[..., Any]) -> None:
    """Transformer Engine 2.11 beside Megatron-core 0.16, 2.20 beside a later one."""
    recorded = json.loads((HERE / "te_signatures.json").read_text())
    assert list(recorded) == ["2.11.0", "2.20.2"]
    version = "2.11.0" if metadata.version("megatron-core").startswith("0.16.") else "2.20.2"
    assert run(1, TE, "te_cases:signatures") == {version: recorded[version]}


def test_megatron_takes_the_stand_in_for_transformer_engine(run: Callable[..., Any]) -> None:
    """Every module of Megatron-core that asks for it: one whose import of a name fails goes on silently without."""
    names = ["extensions.transformer_engine", "tensor_parallel.random", "transformer.moe.experts", "transformer.mlp"]
    modules = [f"megatron.core.{name}" for name in names]
    assert run(1, TE, "te_cases:modules_that_found_it", modules=modules) == dict.fromkeys(modules, True)


def test_layers_are_built_of_it(run: Callable[..., Any], models: Models) -> None:
    found = run(1, TE, "te_cases:module_classes", hf_path=str(models("qwen3_untied")))
    assert found == {
        "": "nemo_oprd.ObservedLayer",
        "qkv": "megatron.TELayerNormColumnParallelLinear",
        "attention": "megatron.TEDotProductAttention",
        "proj": "megatron.TERowParallelLinear",
        "q norm": "transformer_engine.RMSNorm",
        "k norm": "transformer_engine.RMSNorm",
        "fc1": "megatron.TELayerNormColumnParallelLinear",
        "fc2": "megatron.TERowParallelLinear",
        "final norm": "transformer_engine.RMSNorm",
    }
    found = run(1, LOCAL, "te_cases:module_classes", hf_path=str(models("qwen3_untied")))
    assert not any("transformer_engine" in name or ".TE" in name for name in found.values()), found


GOLDEN_RUNS = [
    ("mse_all_last_k", []),
    ("normalized_mean", ["student.recompute=full"]),
    ("no_final_norm", ["student.recompute=selective"]),
    ("mse_all_last_k", ["student.parallel.tensor=2"]),
    ("mse_all_last_k", ["student.parallel.tensor=2", "student.parallel.sequence=true", "student.recompute=full"]),
    ("predicting", ["student.parallel.tensor=2", "student.parallel.sequence=true", "teacher.parallel.tensor=2"]),
    ("mse_all_positions", ["student.parallel.pipeline=2", "student.recompute=full"]),
    ("mse_list_1_3", ["student.parallel.pipeline=2", "teacher.parallel.tensor=2"]),
    ("mse_all_last_k", ["student.parallel.context=2"]),
]


@pytest.mark.parametrize(("case", "settings"), GOLDEN_RUNS, ids=lambda value: value if isinstance(value, str) else "-")
def test_golden(run: Callable[..., Any], tmp_path: Path, case: str, settings: list[str]) -> None:
    size = 2 if any("parallel" in setting for setting in settings) else 1
    output = tmp_path / "out"
    run(size, TE, "cases:run_verify", overrides=overrides(case, output) + settings)
    check(output, case)


def test_products_add_to_the_gradient_buffer_themselves(run: Callable[..., Any], tmp_path: Path) -> None:
    """The four products of every layer, once per microbatch; the golden cases above show that the sums are right."""
    found = run(1, TE, "te_cases:products_with_accumulation", overrides=overrides("mse_all_last_k", tmp_path / "out"))
    assert found["products"] == 4 * found["layers"] * found["microbatches"]
    assert found["kernels"] == {
        "layers": "Transformer Engine",
        "norm": "Transformer Engine",
        "weight gradients": "Transformer Engine",
        "AdamW": "torch.AdamW (fused)",
    }


# biases on q, k, v; biases on the projections; tied heads on another stage
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("qwen2_tied", ["student.parallel.tensor=2"]),
        ("qwen2_tied", ["student.parallel.pipeline=2", "student.recompute=full"]),
        ("qwen2_tied", ["student.parallel.context=2", "student.recompute=selective"]),
        ("qwen3_tied_bias", ["student.parallel.tensor=2", "student.parallel.sequence=true"]),
    ],
)
def test_gradients_of_models_with_biases(
    run: Callable[..., Any], models: Models, tmp_path: Path, name: str, settings: list[str]
) -> None:
    config = [
        f"student.hf_path={models(name)}",
        f"teacher.hf_path={models('qwen2_untied')}",
        f"rollout.replay={HERE.parent / 'golden/rollouts.jsonl'}",
        f"output={tmp_path / 'out'}",
        "loss.representation.k=4",
        *settings,
    ]
    run(2, TE, "cases:run_verify", overrides=config)
    loaded = load_config("verify", config)
    expected = reference(loaded, read_rollouts(loaded.rollout.replay, SIZES["vocab_size"]))
    losses = json.loads((tmp_path / "out/losses.json").read_text())
    assert losses["rep/loss"] == pytest.approx(expected["rep/loss"], rel=TOLERANCE)
    deviations = agreement(load_file(tmp_path / "out/grads.safetensors"), expected["gradients"])
    assert any("bias" in name for name in deviations)
    assert max(deviations.values()) < TOLERANCE, deviations


@pytest.mark.parametrize("name", ["qwen2_tied", "qwen3_tied_bias"])
def test_names_shapes_and_marks_are_those_of_local_layers(run: Callable[..., Any], models: Models, name: str) -> None:
    layout = {"tensor": 2, "sequence": True}
    te, local = (
        run(2, layers, "te_cases:parameters", hf_path=str(models(name)), layout=layout) for layers in (TE, LOCAL)
    )
    assert {rule: described[1:] for rule, described in te.items()} == {
        rule: described[1:] for rule, described in local.items()
    }
    renamed = {rule: described[0] for rule, described in te.items() if described[0] != rule}
    assert renamed == {
        f"decoder.layers.{i}.{ours}": f"decoder.layers.{i}.{theirs}"
        for i in range(SIZES["num_hidden_layers"])
        for ours, theirs in (
            ("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight"),
            ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"),
        )
    }


@pytest.mark.parametrize(
    ("name", "layout", "by_name"),
    [("qwen3_untied", "TP1", True), ("qwen3_tied_bias", "TP2", False), ("qwen2_tied", "PP2", False)],
)
def test_hidden_states_and_logits_are_those_of_hf(
    run: Callable[..., Any], models: Models, tmp_path: Path, name: str, layout: str, by_name: bool
) -> None:
    """From a checkpoint that `hf_to_megatron` wrote, read by Megatron's own loader or by ours."""
    save_hf_states(models(name), tmp_path / "expected.safetensors")
    hf_to_megatron(models(name), tmp_path / "megatron", progress=False)
    deviations = run(
        ranks(layout),
        TE,
        "convert_cases:deviations",
        checkpoint=str(tmp_path / "megatron"),
        hf_path=str(models(name)),
        expected=str(tmp_path / "expected.safetensors"),
        layout=LAYOUTS[layout],
        by_name=by_name,
    )
    assert len(deviations) == SIZES["num_hidden_layers"] + 1
    assert max(deviations.values()) < 1e-5, deviations


# the default run has each direction once, and each model
@pytest.mark.parametrize(
    ("name", "saved", "loaded"),
    [
        ("qwen3_tied_bias", LOCAL, TE),
        ("qwen2_untied", TE, LOCAL),
        ("qwen3_tied_bias", TE, TE),
        pytest.param("qwen2_untied", LOCAL, TE, marks=pytest.mark.slow),
        pytest.param("qwen3_tied_bias", TE, LOCAL, marks=pytest.mark.slow),
        pytest.param("qwen2_untied", TE, TE, marks=pytest.mark.slow),
    ],
)
def test_checkpoints_load_in_either_kind_of_layer(
    run: Callable[..., Any], models: Models, tmp_path: Path, name: str, saved: str, loaded: str
) -> None:
    source = str(models(name))
    checkpoint = str(tmp_path / "checkpoint")
    run(
        2,
        saved,
        "convert_cases:save_with_megatron",
        checkpoint=checkpoint,
        hf_path=source,
        layout={"tensor": 2},
    )
    differing = run(
        2,
        loaded,
        "convert_cases:differing_after_load",
        checkpoint=checkpoint,
        hf_path=source,
        layout={"pipeline": 2},
        dtype="float32",
    )
    assert differing == []
    (tmp_path / "checkpoint/hf").mkdir()
    (tmp_path / "checkpoint/hf/config.json").write_bytes((models(name) / "config.json").read_bytes())
    megatron_to_hf(tmp_path / "checkpoint", tmp_path / "hf", dtype="float32", progress=False)
    assert_same_tensors(models(name), tmp_path / "hf")
    assert torch.float32 == load_file(tmp_path / "hf/model.safetensors")["model.norm.weight"].dtype


@pytest.mark.parametrize("name", ["qwen3_untied", "qwen2_tied"])
def test_megatrons_own_te_model_loads_a_converted_checkpoint(
    run: Callable[..., Any], models: Models, tmp_path: Path, name: str
) -> None:
    """Its loader is strict about the (empty) extra states of Transformer Engine's norms, which local layers lack."""
    hf_to_megatron(models(name), tmp_path / "megatron", progress=False)
    assert not run(
        2,
        TE,
        "te_cases:load_into_megatrons_own_model",
        checkpoint=str(tmp_path / "megatron"),
        hf_path=str(models(name)),
    )


def test_one_step_is_one_adamw_step(run: Callable[..., Any], tmp_path: Path) -> None:
    """Which ranks' gradients are added, and what counts for the norm that clips them, depends on the parameters' marks.

    reference_adamw.py gives the settings.
    """
    sizes = ["student.parallel.tensor=2", "student.parallel.sequence=true"]
    settings = [*BASE, "train.clip_grad=0.5", "train.steps=1", f"output={tmp_path / 'run'}", *sizes]
    run(2, TE, "cases:run_train", overrides=settings)
    expected, norm = one_golden_step(0.5)
    got = weights(tmp_path / "run/hf")
    for name, value in expected.items():
        torch.testing.assert_close(got[name].double(), value, rtol=1e-6, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
    line = json.loads((tmp_path / "run/metrics.jsonl").read_text())
    assert line["actor/grad_norm"] == pytest.approx(norm, rel=1e-5)


@pytest.mark.parametrize(("first", "then"), [(LOCAL, TE), pytest.param(TE, LOCAL, marks=pytest.mark.slow)])
def test_a_run_goes_on_with_the_other_kind_of_layer(
    run: Callable[..., Any], tmp_path: Path, first: str, then: str
) -> None:
    """Model and optimizer state, at another layout."""
    shared = [*BASE, "train.save_every=1"]
    tensor, pipeline = ["student.parallel.tensor=2"], ["student.parallel.pipeline=2"]
    for output, layers, steps, sizes in (
        ("whole", first, 2, tensor),
        ("parts", first, 1, tensor),
        ("parts", then, 2, pipeline),
    ):
        settings = [*shared, *sizes, f"train.steps={steps}", f"output={tmp_path / output}"]
        if (tmp_path / output / "hf").exists():
            shutil.rmtree(tmp_path / output / "hf")
        run(2, layers, "cases:run_train", overrides=settings)
    expected, got = weights(tmp_path / "whole/hf"), weights(tmp_path / "parts/hf")
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, rtol=1e-5, atol=2e-5)


def test_sampling_from_a_student_of_these_layers(run: Callable[..., Any], models: Models) -> None:
    """Generation is local layers with our cache, also where Transformer Engine is: the refit translates the names."""
    from transformers import AutoModelForCausalLM

    prompts, steps = [[5, 8, 13], [2, 7]], 6
    got = run(2, TE, "te_cases:sample_after_refit", hf_path=str(models("qwen3_untied")), prompts=prompts, steps=steps)
    model = AutoModelForCausalLM.from_pretrained(models("qwen3_untied"), dtype=torch.float32)
    for prompt, response in zip(prompts, got, strict=True):
        ids = list(prompt)
        for _ in range(steps):
            with torch.no_grad():
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        assert response == ids[len(prompt) :]


def test_a_gpu_without_transformer_engine_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    from nemo_oprd.megatron.model import LAYERS_VARIABLE, lacks_transformer_engine

    monkeypatch.delenv(LAYERS_VARIABLE, raising=False)
    assert lacks_transformer_engine(torch.bfloat16) is None  # on a CPU there is nothing to miss
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    said = lacks_transformer_engine(torch.bfloat16)
    assert said is not None and "scripts/setup_gpu.sh" in said and "\n" not in said
    assert lacks_transformer_engine(torch.float32) is None
    monkeypatch.setenv(LAYERS_VARIABLE, LOCAL)
    assert lacks_transformer_engine(torch.bfloat16) is None


def test_backend_can_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, without Transformer Engine and without CUDA."""
    from nemo_oprd.megatron.model import LAYERS_VARIABLE, layer_backend

    monkeypatch.delenv(LAYERS_VARIABLE, raising=False)
    assert layer_backend(torch.bfloat16) == LOCAL
    monkeypatch.setenv(LAYERS_VARIABLE, "te")
    with pytest.raises(ValueError, match=r"NEMO_OPRD_LAYERS='te'; expected 'local' or 'transformer_engine'"):
        layer_backend(torch.bfloat16)
    monkeypatch.setenv(LAYERS_VARIABLE, TE)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"not installed; install it with .* or set NEMO_OPRD_LAYERS=local"):
        layer_backend(torch.bfloat16)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    assert layer_backend(torch.bfloat16) == TE
    monkeypatch.delenv(LAYERS_VARIABLE)
    assert layer_backend(torch.bfloat16) == LOCAL
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert layer_backend(torch.bfloat16) == TE
    assert layer_backend(torch.float32) == LOCAL  # its matrix products would be in TF32
    monkeypatch.setenv(LAYERS_VARIABLE, TE)
    assert layer_backend(torch.float32) == TE
    monkeypatch.setenv(LAYERS_VARIABLE, LOCAL)
    assert layer_backend(torch.bfloat16) == LOCAL
