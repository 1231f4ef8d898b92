"""`nemo-oprd capture` with a stand-in server: files, manifest, and states that are not the model's."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from layout_cases import VOCABULARY, Workbench
from pool import Pools, WorkerError
from safetensors.torch import load_file
from served_teachers import ServedTeachers
from transformers import AutoModelForCausalLM

from nemo_oprd.rollout.replay import read_rollouts
from nemo_oprd.run.capture import parse_layers


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Workbench:
    return Workbench(tmp_path_factory.mktemp("capture"))


def arguments(bench: Workbench, served: ServedTeachers, output: Path, *more: str) -> list[str]:
    model, prompts = bench.root / "qwen3" / "teacher", bench.root / "rollouts.jsonl"
    common = ["--model", str(model), "--prompts", str(prompts), "--output", str(output), "--dtype", "float32"]
    return [*common, "--python", str(served.bench() / "python"), *more]


def test_files_and_manifest(pools: Pools, bench: Workbench, served_teachers: ServedTeachers, tmp_path: Path) -> None:
    output = tmp_path / "out"
    given = arguments(bench, served_teachers, output, "--layers", "8,2,final")
    for _ in range(2):  # the second time replaces the first, and knows the verdict
        pools[1].run("capture_cases:run", arguments=given, cache=str(tmp_path / "cache"))
    manifest = json.loads((output / "manifest.json").read_text())
    rollouts = read_rollouts(bench.root / "rollouts.jsonl", VOCABULARY)
    assert manifest["layers"] == [2, 8, "final"] and manifest["dtype"] == "float32"
    assert max(manifest["canary"]["worst"].values()) < 1e-5 and len(manifest["canary"]["worst"]) == 8
    assert [each["rows"] for each in manifest["sequences"]] == [rollout.length for rollout in rollouts]
    model = AutoModelForCausalLM.from_pretrained(bench.root / "qwen3" / "teacher", dtype=torch.float32)
    before: list[torch.Tensor] = []
    model.model.norm.register_forward_pre_hook(lambda _, inputs: before.append(inputs[0][0]))
    for each, rollout in zip(manifest["sequences"], rollouts, strict=True):
        found = load_file(output / each["file"])
        assert found["token_ids"].tolist() == rollout.ids.tolist()
        assert each["ids_sha256"] == hashlib.sha256(found["token_ids"].numpy().tobytes()).hexdigest()
        with torch.no_grad():
            states = model.model(found["token_ids"][None], output_hidden_states=True, use_cache=False).hidden_states
        expected = torch.stack([states[2][0], before.pop(), states[-1][0]], dim=1)
        torch.testing.assert_close(found["hidden_states"], expected, rtol=1e-4, atol=1e-4)


def test_a_server_of_another_model_writes_nothing(
    pools: Pools, bench: Workbench, served_teachers: ServedTeachers, tmp_path: Path
) -> None:
    model = bench.root / "qwen3" / "teacher"
    served_teachers.instead[str(model)] = served_teachers.changed_copy(
        model, lambda tensors: tensors["model.layers.4.mlp.down_proj.weight"].mul_(1.01)
    )
    output = tmp_path / "out"
    given = arguments(bench, served_teachers, output)
    try:
        with pytest.raises(WorkerError, match="layer 5 of 8, prompt 0, row 0 is the first wrong one"):
            pools[1].run("capture_cases:run", arguments=given, cache=str(tmp_path / "cache"))
    finally:
        served_teachers.instead.clear()
    assert not (output / "manifest.json").exists() and not list((output / "hidden_states").iterdir())


def test_layers_that_are_not_there_are_refused() -> None:
    assert parse_layers("all", 3) == [1, 2, 3, "final"]
    for text in ("0", "4", "1,1", "", "last", "1-3"):
        with pytest.raises(ValueError, match=r"--layers .*expected all, or different ones of 1 to 3 and final"):
            parse_layers(text, 3)
