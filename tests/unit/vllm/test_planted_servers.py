"""The proof of a teacher's servers: states, projections and heads that are wrong as servers have them wrong.

A server is a function here, which computes by transformers, perhaps with another model than the one of the canary.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_oprd.bridge.covariance import LayerPair
from nemo_oprd.bridge.maps import Bridge, LayerBridge, ModelIdentity
from nemo_oprd.canary.layer_by_layer import layered_states
from nemo_oprd.models.served import read_served_spec
from nemo_oprd.vllm import teacher_canary as proofs
from nemo_oprd.vllm.teacher_bridge import ServedBridge
from nemo_oprd.vllm.teacher_canary import Canary, RequestsStates
from nemo_oprd.vllm.teacher_requests import TeacherAnswer, TeacherRequest
from tests.support.canary_models import WINDOW, save_model
from tests.support.planted_models import edit_json, edit_tensors
from tests.support.served_states import states_of

DEPTH, RANK = 4, 3
DESCRIBED = {"tensor": 2, "chunk": 64, "version": "none"}
# family -> what makes its head more than a matrix
HEADS: dict[str, dict[str, Any]] = {
    "gemma2": {"final_logit_softcapping": 3.0},
    "granite": {"logits_scaling": 4.0},
    "phimoe": {"lm_head_bias": True},
    "qwen2": {"tie_word_embeddings": True},
}


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Transformers computes in this process, and verdicts are kept in a cache of the test's own."""
    monkeypatch.setattr(proofs, "reference_states", layered_states)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def server(directory: Path, dtype: str = "float32", reads: Callable[[list[int]], list[int]] = list) -> RequestsStates:
    """A server of the model in `directory`, which reads other layers than it is asked for, if `reads` says so."""

    def answer(request: TeacherRequest) -> TeacherAnswer:
        state_request = replace(request.state_request, layers=reads(request.state_request.layers))
        return TeacherAnswer(*states_of(str(directory), dtype, request.ids, state_request))

    return lambda requests: [answer(request) for request in requests]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Path]]:
    """The directory of a model of a family."""
    made: dict[str, Path] = {}

    def saved(family: str, **settings: Any) -> Path:
        if family not in made:
            made[family] = tmp_path_factory.mktemp(family)
            save_model(family, made[family], **settings)
        return made[family]

    return saved


def copied(source: Path, target: Path, change: Callable[[dict[str, torch.Tensor]], None] | None, **config: Any) -> Path:
    """A copy in one file with other weights, and other keys of config.json."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(source, target)
    tensors = {name: tensor for file in target.glob("*.safetensors") for name, tensor in load_file(file).items()}
    for file in (*target.glob("*.safetensors"), *target.glob("*.index.json")):
        file.unlink()
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    if change is not None:
        edit_tensors(target, change)
    edit_json(target / "config.json", **config)
    return target


def stale_rank(tensors: dict[str, torch.Tensor]) -> None:
    """The second of two tensor ranks has other columns of a projection."""
    weight = tensors["model.layers.1.mlp.down_proj.weight"]
    weight[:, weight.shape[1] // 2 :] *= 1.01


OTHER_BASE = {"rope_parameters": {"rope_type": "default", "rope_theta": 9e3}}
# family, the server's config, its weights, the layers that it reads; the first wrong layer and row, and what is said
PLANTED: dict[str, tuple[str, dict[str, Any], Any, Any, int, int, str]] = {
    "one layer late": (
        "qwen3", {}, None, lambda layers: [min(layer + 1, DEPTH) for layer in layers], 1, 0,
        "transformers' state of layer 2, so layers are counted off by one",
    ),
    "one layer early": (
        "qwen3", {}, None, lambda layers: [layer - 1 if 1 < layer < DEPTH else layer for layer in layers], 2, 0,
        "transformers' state of layer 1, so layers are counted off by one",
    ),
    "before the norm": (
        "qwen3", {}, None, lambda layers: [min(layer, DEPTH) for layer in layers], DEPTH, 0,
        "the state before the final norm",
    ),
    "after the norm": (
        "qwen3", {}, None, lambda layers: [DEPTH + 1 if layer == DEPTH else layer for layer in layers], DEPTH, 0,
        "before its final norm",
    ),
    "window longer": ("mistral", {"sliding_window": WINDOW + 1}, None, None, 1, WINDOW, "is longer"),
    "window shorter": ("mistral", {"sliding_window": WINDOW - 1}, None, None, 1, WINDOW - 1, "is shorter"),
    "rotated wrongly": ("qwen3", OTHER_BASE, None, None, 1, 1, "rotation (base"),
    "one tensor rank stale": ("qwen3", {}, stale_rank, None, 2, 0, "of its rows are wrong, from row 0 on: a weight"),
}  # fmt: skip


@pytest.mark.parametrize("fault", PLANTED)
def test_a_wrong_server_is_refused(fault: str, model: Callable[..., Path], tmp_path: Path) -> None:
    family, config, weights, reads, layer, row, said = PLANTED[fault]
    right = model(family)
    canary = Canary(read_served_spec(right), right, "float32", None)
    wrong = copied(right, tmp_path / "wrong", weights, **config) if config or weights else right
    place, again = rf"layer {layer} of {DEPTH}, prompt \d, row {row} is the first", fault == "rotated wrongly"
    for _ in range(1 + again):  # what was refused is not kept
        with pytest.raises(ValueError, match=place) as refused:
            canary.prove(server(wrong, reads=reads or list), DESCRIBED)
        assert said in str(refused.value) and "\n" not in str(refused.value)
    if again:
        assert "4 layers of" in canary.prove(server(right), DESCRIBED)
        assert "were compared before" in canary.prove(server(right), DESCRIBED)


def _no_bias(tensors: dict[str, torch.Tensor]) -> None:
    tensors["lm_head.bias"].zero_()


def _stale_head(tensors: dict[str, torch.Tensor]) -> None:
    """As it was a few updates ago."""
    old = tensors["model.embed_tokens.weight"]
    tensors["lm_head.weight"] = old + 0.05 * old.std() * torch.randn(
        old.shape, generator=torch.Generator().manual_seed(0)
    )


# family -> how a server gets its head wrong: weights, keys of config.json
WRONG_HEADS: dict[str, tuple[Any, dict[str, Any]]] = {
    "gemma2": (None, {"final_logit_softcapping": None}),
    "granite": (None, {"logits_scaling": 1.0}),
    "phimoe": (_no_bias, {}),
    "qwen2": (_stale_head, {"tie_word_embeddings": False}),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", WRONG_HEADS)
def test_a_head_that_is_not_transformers_is_refused(
    family: str, dtype: str, model: Callable[..., Path], tmp_path: Path
) -> None:
    """Where log-probabilities are taken from the server; its states are right."""
    right, (weights, config) = model(family, **HEADS[family]), WRONG_HEADS[family]
    wrong = copied(right, tmp_path / "wrong", weights, **config)
    canary = Canary(read_served_spec(right), right, dtype, None, logprobs=True)
    differs = rf"canary of {family}: the (log-probability|entropy) by the server's head differs from transformers'"
    with pytest.raises(ValueError, match=differs):
        canary.prove(server(wrong, dtype), DESCRIBED)
    assert f"layers of {family} equal" in canary.prove(server(right, dtype), DESCRIBED)
    with pytest.raises(ValueError, match=differs):  # also after the right one has passed
        canary.prove(server(wrong, dtype), DESCRIBED)
    unread = Canary(read_served_spec(right), right, dtype, None)
    assert "equal transformers'" in unread.prove(server(wrong, dtype), DESCRIBED), "nothing reads this head"


def test_a_server_that_projects_otherwise_is_refused(model: Callable[..., Path]) -> None:
    """By another basis, or with the precision of TF32."""
    right = model("qwen3")
    spec = read_served_spec(right)
    draw = torch.Generator().manual_seed(1)
    width = spec.hidden_size
    maps = {
        LayerPair(student, teacher): LayerBridge(
            torch.randn(width, generator=draw), torch.randn(RANK, width, generator=draw)
        )
        for student, teacher in ((1, 2), (2, 4))
    }
    identities = (ModelIdentity("qwen2", 2, width), ModelIdentity("qwen3", DEPTH, width))
    bridge = ServedBridge(Bridge(RANK, maps, *identities), (1, 2), [2, DEPTH + 1])
    canary = Canary(spec, right, "float32", None, bridge)

    def projecting(spoil: Callable[[torch.Tensor], torch.Tensor]) -> RequestsStates:
        def answer(request: TeacherRequest) -> TeacherAnswer:
            states, final = states_of(str(right), "float32", request.ids, request.state_request)
            if request.state_request.bridge:
                assert request.state_request.bridge == bridge.digest
                states = torch.stack([
                    (rows - each.teacher_mean) @ spoil(each.teacher_basis).T  # type: ignore[arg-type, operator]
                    for rows, each in zip(states, maps.values(), strict=True)
                ])  # fmt: skip
            return TeacherAnswer(states, final)

        return lambda requests: [answer(request) for request in requests]

    assert "4 layers of qwen3 equal" in canary.prove(projecting(lambda basis: basis), DESCRIBED)
    for spoil in (lambda basis: basis.flip(0), lambda basis: basis * (1 + 1e-4)):
        with pytest.raises(ValueError, match="projects states for student layer 1 by something else than the bridge"):
            canary.prove(projecting(spoil), DESCRIBED)
