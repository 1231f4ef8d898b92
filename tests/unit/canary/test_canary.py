"""The canary: transformers' states layer by layer, what passes, and planted errors with their layer, row and hint."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Gemma3TextConfig

from nemo_oprd.canary import (
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
from nemo_oprd.canary.layer_by_layer import layered_states
from nemo_oprd.canary.prompts import sliding_window
from nemo_oprd.models.served import read_served_spec
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
    assert canary_prompts(SIZES["vocab_size"], WINDOW, CHUNK) == PROMPTS
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
    with pytest.raises(
        ValueError, match=r"transformers cannot compute the canary \(ValueError: .*config.json: no such file"
    ):
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
        key = (family, dtype, spoil, repr(changed))
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
    """A model whose own float32 deviates by 4e-5 is allowed 1.2e-4, and one layer's noise counts for deeper ones."""
    reference, measured = models("qwen2"), []

    def measure(dtype: str) -> ReferenceStates:
        measured.append(dtype)
        noisy = [rows * (1 + 4e-5) for rows in reference.layers[2]]
        return dataclasses.replace(reference, layers={**reference.layers, 2: noisy})

    prove({1: [rows * (1 + 9e-6) for rows in reference.layers[1]]}, reference, "qwen2", measure=measure)
    assert not measured
    found = {layer: [rows * (1 + 5e-5) for rows in reference.layers[layer]] for layer in (2, 3)}
    assert prove(found, reference, "qwen2", measure=measure).allowed[3] == pytest.approx(1.2e-4, rel=1e-2)
    assert measured == ["float64"]
    with pytest.raises(CanaryRefused, match="layer 1 of 4"):
        prove({1: [rows * (1 + 5e-5) for rows in reference.layers[1]]}, reference, "qwen2", measure=measure)


def _permute_heads(model: Any) -> None:
    weight = model.model.layers[2].self_attn.q_proj.weight
    weight.copy_(weight.view(4, -1, weight.shape[1])[[1, 0, 2, 3]].reshape(weight.shape))


def _stale_rank(model: Any) -> None:
    """The second of two tensor ranks has another down projection in layer 2."""
    weight = model.model.layers[1].mlp.down_proj.weight
    weight[:, weight.shape[1] // 2 :] *= 1.5


def _norm_less_one(model: Any) -> None:
    model.model.norm.weight.sub_(1)


def _swap_q_and_gate(model: Any) -> None:
    """Qwen3.5 has queries and gates of each head in one projection."""
    layer = next(each for each in model.model.layers if hasattr(each, "self_attn"))
    weight = layer.self_attn.q_proj.weight
    weight.copy_(weight.view(4, 2, -1, weight.shape[1]).flip(1).reshape(weight.shape))


def _permute_delta_heads(model: Any) -> None:
    weight = model.model.layers[1].linear_attn.in_proj_z.weight
    weight.copy_(weight.view(4, -1, weight.shape[1])[[1, 0, 2, 3]].reshape(weight.shape))


def _no_sinks(model: Any) -> None:
    model.model.layers[1].self_attn.sinks.fill_(-1e4)


OTHER_BASE = {"rope_parameters": {"rope_type": "default", "rope_theta": 5e3}}
ALL_ROWS = "of its rows are wrong, from row 0 on: a weight"
# family, its settings that differ, what is done to its weights; the first wrong layer and row, and the hint
PLANTED: dict[str, tuple[str, dict[str, Any], Callable | None, int, int, str]] = {
    "rotary base": ("qwen2", OTHER_BASE, None, 1, 1, "rotation (base"),
    "rotary share": ("glm4", {"partial_rotary_factor": 1.0}, None, 1, 1, "rotation (base"),
    "window longer": ("mistral", {"sliding_window": WINDOW + 1}, None, 1, WINDOW, "is longer"),
    "window shorter": ("gemma3_text", {"sliding_window": WINDOW - 1}, None, 1, WINDOW - 1, "is shorter"),
    "no window": ("gpt_oss", {"sliding_window": 512}, None, 1, WINDOW, "is longer, or it has none"),
    "heads permuted": ("qwen3", {}, _permute_heads, 3, 1, "head order"),
    "rank stale": ("llama", {}, _stale_rank, 2, 0, ALL_ROWS),
    "norm less one": ("gemma3_text", {}, _norm_less_one, 4, 0, "same factor per channel"),
    "q and gate": ("qwen3_5_text", {}, _swap_q_and_gate, 4, 0, ALL_ROWS),
    "delta net's heads": ("qwen3_5_text", {}, _permute_delta_heads, 2, 0, ALL_ROWS),
    "sinks left out": ("gpt_oss", {}, _no_sinks, 2, 0, ALL_ROWS),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fault", PLANTED)
def test_planted_errors_of_a_model_are_located(fault: str, dtype: str, models: Callable[..., ReferenceStates]) -> None:
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


def _changed(reference: ReferenceStates, layer: int, rows: slice) -> list[torch.Tensor]:
    """A layer whose given rows are wrong, in the prompts that have them."""
    states = [state.clone() for state in reference.layers[layer]]
    for state in states:
        state[rows] *= -1
    return states


# what the engine returns for its layers, by layer; the first wrong layer, prompt and row, and the hint
WRONG_STATES: dict[str, tuple[Callable[[ReferenceStates], dict[int, Any]], int, int, int, str]] = {
    "one layer early": (
        lambda r: {1: r.embeddings, 2: r.layers[1], 3: r.layers[2]},
        1,
        0,
        0,
        "it is transformers' state of the embeddings, so layers are counted off by one",
    ),
    "one layer late": (lambda r: {2: r.layers[3], 3: r.before_norm}, 2, 0, 0, "transformers' state of layer 3"),
    "the last one early": (lambda r: {4: r.layers[3]}, 4, 0, 0, "transformers' state of layer 3"),
    "before the norm": (lambda r: {3: r.layers[3], 4: r.before_norm}, 4, 0, 0, "the state before the final norm"),
    "not finite": (
        lambda r: {2: [rows.where(rows != rows[0, 0], torch.nan) for rows in r.layers[2]]},
        2,
        0,
        0,
        "not finite",
    ),
    "after a chunk": (lambda r: {1: _changed(r, 1, slice(CHUNK, None))}, 1, 1, CHUNK, "chunk of 32 tokens"),
    "some rows": (lambda r: {3: _changed(r, 3, slice(11, 12))}, 3, 1, 11, "rows before 11 are right in every prompt"),
    "a row lost": (lambda r: {2: [r.layers[2][0][1:], *r.layers[2][1:]]}, 2, 0, 0, "the engine lost rows"),
    "a prompt lost": (lambda r: {2: r.layers[2][:-1]}, 2, 0, 0, "the engine lost rows"),
    "more layers": (lambda r: {5: r.layers[4]}, 1, 0, 0, "layers [5] came back; expected some of layers 1 to 4"),
}


@pytest.mark.parametrize("fault", WRONG_STATES)
def test_wrong_states_are_located(fault: str, models: Callable[..., ReferenceStates]) -> None:
    wrong, layer, prompt, row, hint = WRONG_STATES[fault]
    reference = models("qwen2")
    with pytest.raises(CanaryRefused) as refused:
        prove(wrong(reference), reference, "qwen2", chunk=CHUNK, measure=lambda dtype: models("qwen2", dtype))
    assert (refused.value.layer, refused.value.prompt, refused.value.row) == (layer, prompt, row)
    assert hint in str(refused.value) and "\n" not in str(refused.value)


def test_few_rows_beyond_the_window_are_seen_in_bfloat16(models: Callable[..., ReferenceStates]) -> None:
    """Here a tenth of the rows is beyond it, so the median of all rows shows nothing."""
    window = 100
    reference, rounded = models("qwen2"), models("qwen2", "bfloat16")
    found = {2: [rows.clone() for rows in rounded.layers[2]]}
    found[2][1][window:] += 0.2 * reference.layers[2][1][window:].roll(1, dims=0)
    arguments = {"dtype": "bfloat16", "measure": lambda _: rounded}
    prove(found, reference, "qwen2", **arguments)
    with pytest.raises(CanaryRefused, match="layer's median row beyond the sliding window by") as refused:
        prove(found, reference, "qwen2", **arguments, window=window)
    assert (refused.value.layer, refused.value.prompt, refused.value.row) == (2, 1, window)


@pytest.mark.parametrize(
    ("prompt", "rows", "what"),
    [
        (0, slice(None), "median row of prompt 0"),
        (2, slice(None), "median row of prompt 2"),
        (3, slice(None), "median row of prompt 3"),
        (1, slice(CHUNK, 2 * CHUNK), f"median row of the chunk from row {CHUNK}"),
        (1, slice(4 * CHUNK, None), f"median row of the chunk from row {4 * CHUNK}"),
        (None, slice(1), "median first row of the prompts"),
    ],
)
def test_few_rows_are_seen_in_bfloat16(
    prompt: int | None, rows: slice, what: str, models: Callable[..., ReferenceStates]
) -> None:
    """A wrong prompt, a wrong chunk and wrong first rows, none of which moves the median of all rows."""
    reference, rounded = models("qwen2"), models("qwen2", "bfloat16")
    found = {2: [states.clone() for states in rounded.layers[2]]}
    draw = torch.Generator().manual_seed(1)
    for i, states in enumerate(found[2]):
        if prompt == i or (prompt is None and len(states) > 1):
            states[rows] = 10 * torch.randn(states[rows].shape, generator=draw)
    arguments = {"dtype": "bfloat16", "measure": lambda _: rounded, "chunk": CHUNK}
    prove(rounded.layers, reference, "qwen2", **arguments)
    with pytest.raises(CanaryRefused, match=f"layer's {what} by") as refused:
        prove(found, reference, "qwen2", **arguments)
    assert (refused.value.layer, refused.value.row) == (2, rows.start or 0)
    assert prompt in (None, refused.value.prompt)


def test_verdicts_are_kept_by_weights_and_all_that_computes(
    models: Callable[..., ReferenceStates], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    save_model("qwen2", tmp_path / "model")
    same = {"prompts": PROMPTS, "layout": "TP2", "dtype": "float32", "engine": "megatron"}
    key = canary_key(tmp_path / "model", **same)
    assert kept_verdict(key) is None
    reference = models("qwen2")
    verdict = prove(reference.layers, reference, "qwen2")
    keep_verdict(key, verdict)
    assert kept_verdict(key) == verdict and isinstance(verdict, CanaryVerdict)
    others = {"prompts": PROMPTS[:1], "layout": "TP1", "dtype": "bfloat16", "engine": "vllm 0.32.0"}
    keys = {canary_key(tmp_path / "model", **{**same, name: value}) for name, value in others.items()}
    save_model("qwen2", tmp_path / "model", spoil=_norm_less_one)
    keys |= {canary_key(tmp_path / "model", **same)}
    weights = next((tmp_path / "model").glob("*.safetensors"))
    stamp = weights.stat().st_mtime_ns
    before = canary_key(tmp_path / "model", **same)
    os.utime(weights, ns=(stamp, stamp + 10**9))
    assert canary_key(tmp_path / "model", **same) != before, (
        "a tensor may have changed between the fingerprint's pieces"
    )
    assert len(keys) == 5 and key not in keys
    (tmp_path / "cache" / "nemo_oprd" / "canary" / f"{key}.json").write_text('{"family": "qwen2"}')
    assert kept_verdict(key) is None


def test_what_a_config_leaves_out_has_transformers_defaults(tmp_path: Path) -> None:
    """Published configs of models with several parts name few sizes; a window that is not named may be in use."""
    config = {
        "model_type": "gemma3",
        "torch_dtype": "bfloat16",
        "text_config": {"model_type": "gemma3_text", "hidden_size": 64, "num_hidden_layers": 7},
        "vision_config": {"model_type": "siglip_vision_model"},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    spec, complete = read_served_spec(tmp_path), Gemma3TextConfig(hidden_size=64, num_hidden_layers=7)
    assert (spec.num_layers, spec.hidden_size, spec.dtype) == (7, 64, "bfloat16")
    assert (spec.vocab_size, spec.max_positions) == (complete.vocab_size, complete.max_position_embeddings)
    assert spec.tied_embeddings == complete.tie_word_embeddings
    assert sliding_window(spec.hf_config) == complete.sliding_window
    assert sliding_window({"model_type": "mistral"}) == 4096 and sliding_window({"model_type": "qwen2"}) is None
    unknown = {"model_type": "nobody's", "sliding_window": 8}
    assert sliding_window(unknown) == 8
