"""The canary: transformers' states layer by layer, what passes, and planted errors with their layer, row and hint."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_oprd.models.canary import (
    CanaryRefused,
    CanaryVerdict,
    ReferenceStates,
    canary_key,
    canary_prompts,
    keep_verdict,
    kept_verdict,
    prove,
    reference_states,
)
from nemo_oprd.models.canary.layer_by_layer import layered_states
from tests.support.canary_models import FAMILIES, SIZES, WINDOW, save_model, whole_model_states

CHUNK = 32
PROMPTS = canary_prompts(SIZES["vocab_size"], WINDOW, CHUNK)
# one with plain layers, one with windows and norms on both sides, two with fused experts, one of Conv1D, one of Mamba
QUICK = ("qwen2", "gemma3_text", "gpt_oss", "qwen3_moe", "gpt2", "falcon_h1")
DTYPES = ("float32", "bfloat16")


def test_prompts_are_ragged_exceed_window_and_chunk_and_never_change() -> None:
    assert [len(ids) for ids in PROMPTS] == [7, 129, 33, 1, 64, 18]
    assert [len(ids) for ids in canary_prompts(50, 300, 128)] == [7, 337, 33, 1, 64, 18]
    assert [len(ids) for ids in canary_prompts(50, None, 512, limit=40)] == [7, 40, 33, 1, 40, 18]
    assert PROMPTS == canary_prompts(SIZES["vocab_size"], WINDOW, CHUNK)
    ids = [id for prompt in PROMPTS for id in prompt]
    assert 0 <= min(ids) < 5 and 123 <= max(ids) < 128
    with pytest.raises(ValueError, match="at most 200 tokens does not exceed the sliding window of 200"):
        canary_prompts(50, 200, 0, limit=200)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", [f if f in QUICK else pytest.param(f, marks=pytest.mark.slow) for f in FAMILIES])
def test_layer_by_layer_equals_the_whole_model_and_holds_one_layer(family: str, dtype: str, tmp_path: Path) -> None:
    save_model(family, tmp_path)
    whole = whole_model_states(tmp_path, PROMPTS, getattr(torch, dtype))
    found = layered_states(tmp_path, PROMPTS, dtype)
    for i, states in enumerate(whole):
        assert torch.equal(found.embeddings[i], states[0])
        for layer in range(1, len(states)):
            assert torch.equal(found.layers[layer][i], states[layer]), f"layer {layer}, prompt {i}"
        assert not torch.equal(found.before_norm[i], states[-1])
    outside = found.peak_bytes - found.largest_layer_bytes
    assert found.total_bytes > outside + 2 * found.largest_layer_bytes
    assert outside < found.largest_layer_bytes or family == "gpt2"  # embeddings, positions and the final norm


def test_the_process_gives_the_same_states(tmp_path: Path) -> None:
    save_model("gemma3_text", tmp_path)
    found, expected = (states(tmp_path, PROMPTS, "float32") for states in (reference_states, layered_states))
    assert found.peak_bytes == expected.peak_bytes and found.dtype == "float32"
    for name, rows in expected.tensors().items():
        torch.testing.assert_close(found.tensors()[name], rows, rtol=1e-5, atol=1e-5)  # other numbers of threads


def test_models_that_transformers_cannot_run_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"transformers cannot compute the canary \(OSError"):
        reference_states(tmp_path, PROMPTS)
    save_model("qwen2", tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ValueError, match="transformers cannot compute the canary"):
        reference_states(tmp_path, PROMPTS)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., ReferenceStates]:
    """States of a family, changed or not, in a precision; each computed once."""
    known: dict[Any, ReferenceStates] = {}

    def states(family: str, dtype: str = "float32", spoil: Callable | None = None, **changed: Any) -> ReferenceStates:
        key = (family, dtype, spoil, tuple(changed.items()))
        if key not in known:
            directory = tmp_path_factory.mktemp(family)
            save_model(family, directory, spoil=spoil, **changed)
            known[key] = layered_states(directory, PROMPTS, dtype)
        return known[key]

    return states


def test_rounding_passes(models: Callable[..., ReferenceStates]) -> None:
    """float64 passes as float32, and bfloat16 as bfloat16, which is far beyond the bound of float32."""
    reference = models("gemma3_text")
    verdict = prove(models("gemma3_text", "float64").layers, reference, "gemma3_text", window=WINDOW)
    assert max(verdict.worst.values()) < 1e-5 and set(verdict.allowed.values()) == {1e-5}
    assert verdict.rows == sum(map(len, PROMPTS)) and "4 layers of gemma3_text equal" in verdict.line
    rounded = models("gemma3_text", "bfloat16")
    with pytest.raises(CanaryRefused, match="in float32"):
        prove(rounded.layers, reference, "gemma3_text", measure=lambda dtype: models("gemma3_text", dtype))
    prove(rounded.layers, reference, "gemma3_text", dtype="bfloat16", measure=lambda _: rounded, window=WINDOW)


def test_own_noise_is_measured_only_when_it_is_needed(models: Callable[..., ReferenceStates]) -> None:
    """A model whose own float32 deviates by 4e-5 is allowed 6e-5, and one layer's noise counts for the deeper ones."""
    reference, measured = models("qwen2"), []

    def measure(dtype: str) -> ReferenceStates:
        measured.append(dtype)
        layers = {layer: [rows * (1 + 4e-5 * (layer == 2)) for rows in states] for layer, states in reference.layers.items()}
        return dataclasses.replace(reference, layers=layers)

    prove({1: [rows * (1 + 9e-6) for rows in reference.layers[1]]}, reference, "qwen2", measure=measure)
    assert not measured
    found = {layer: [rows * (1 + 5e-5) for rows in reference.layers[layer]] for layer in (2, 3)}
    assert prove(found, reference, "qwen2", measure=measure).allowed[3] == pytest.approx(6e-5, rel=1e-2)
    assert measured == ["float64"]
    with pytest.raises(CanaryRefused, match="layer 1 of 4"):
        prove({1: [rows * (1 + 5e-5) for rows in reference.layers[1]]}, reference, "qwen2", measure=measure)


def _permute_heads(model: Any) -> None:
    weight = model.model.layers[2].self_attn.q_proj.weight
    weight.copy_(weight.view(4, -1, weight.shape[1])[[1, 0, 2, 3]].reshape(weight.shape))


def _stale_rank(model: Any) -> None:
    """The second of two tensor ranks has another down projection in layer 2."""
    weight = model.model.layers[1].mlp.down_proj.weight
    weight[:, weight.shape[1] // 2 :] *= 1.01


def _norm_less_one(model: Any) -> None:
    model.model.norm.weight.sub_(1)


def _swap_q_and_gate(model: Any) -> None:
    """Qwen3.5 has queries and gates of each head in one projection."""
    layer = next(each for each in model.model.layers if hasattr(each, "self_attn"))
    weight = layer.self_attn.q_proj.weight
    weight.copy_(weight.view(4, 2, -1, weight.shape[1]).flip(1).reshape(weight.shape))


def _permute_delta_heads(model: Any) -> None:
    layer = model.model.layers[1].linear_attn
    layer.A_log.copy_(layer.A_log[[1, 0, 2, 3]])


def _no_sinks(model: Any) -> None:
    model.model.layers[1].self_attn.sinks.fill_(-1e4)


# family, its settings that differ, what is done to its weights; the first wrong layer and row, and the hint
PLANTED: dict[str, tuple[str, dict[str, Any], Callable | None, int, int, str]] = {
    "rotary base": ("qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e3}}, None, 1, 1, "rotation of"),
    "rotary share": ("glm4", {"partial_rotary_factor": 1.0}, None, 1, 1, "rotation of"),
    "window longer": ("mistral", {"sliding_window": WINDOW + 1}, None, 1, WINDOW, "is longer"),
    "window shorter": ("gemma3_text", {"sliding_window": WINDOW - 1}, None, 1, WINDOW - 1, "is shorter"),
    "no window": ("gpt_oss", {"sliding_window": 512}, None, 1, WINDOW, "is longer, or it has none"),
    "heads permuted": ("qwen3", {}, _permute_heads, 3, 1, "order of their heads"),
    "rank stale": ("llama", {}, _stale_rank, 2, 0, "all of its rows are wrong"),
    "norm less one": ("gemma3_text", {}, _norm_less_one, 4, 0, "same factor per channel"),
    "q and gate": ("qwen3_5_text", {}, _swap_q_and_gate, 4, 0, "all of its rows are wrong"),
    "delta net's heads": ("qwen3_5_text", {}, _permute_delta_heads, 2, 1, "rows before 1 are right"),
    "sinks left out": ("gpt_oss", {}, _no_sinks, 2, 0, "all of its rows are wrong"),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fault", PLANTED)
def test_planted_errors_of_a_model_are_located(
    fault: str, dtype: str, models: Callable[..., ReferenceStates]
) -> None:
    family, changed, spoil, layer, row, hint = PLANTED[fault]
    found = models(family, dtype, spoil, **changed)
    with pytest.raises(CanaryRefused, match=f"canary of {family}: layer {layer} of 4, .*row ") as refused:
        prove(
            found.layers,
            models(family),
            family,
            dtype=dtype,
            measure=lambda dtype: models(family, dtype),
            window=WINDOW if "window" in fault else None,
        )
    assert "\n" not in str(refused.value)
    assert refused.value.layer == layer
    if dtype == "float32":
        assert (refused.value.row, hint in str(refused.value)) == (row, True), refused.value
