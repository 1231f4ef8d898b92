"""Megatron-Bridge itself, on CPUs and in an environment of its own (scripts/setup_nemo_bridge.sh).

Its forward pass on an adopted model, checkpoints both ways bit for bit, and its `train_step` with `OPRDForwardStep`
against the golden gradients.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from adopted_golden import EVERYWHERE, check
from golden_runs import EXPECTED, GOLDEN, overrides
from golden_runs import check as check_verify
from megatron_bridge_environment import run
from pool import Pools
from safetensors.torch import load_file

from checkpoint_tools._convert import hf_to_megatron, megatron_to_hf
from nemo_oprd.megatron.weights.megatron_checkpoint import MegatronCheckpoint
from nemo_oprd.models.megatron_bridge_config import RUN_CONFIG, read_run_config

pytestmark = pytest.mark.nemo
CASES = "nemo_bridge_cases.py"
# name -> (sizes, responses per microbatch, case)
LAYOUTS: dict[str, tuple[dict[str, Any], int, str]] = {
    **{f"PP2, {case}": ({"pipeline": 2}, 2, case) for case in EVERYWHERE},
    "TP2 SP": ({"tensor": 2, "sequence": True}, 3, "mse_all_last_k"),
    "DP2": ({"data": 2}, 1, "normalized_sum"),
}
UPDATES = 3


@pytest.fixture(scope="module")
def trained(pools: Pools, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of this project at TP2, with one update and a checkpoint."""
    output = tmp_path_factory.mktemp("run")
    models = [f"student.hf_path={GOLDEN}/student", f"teacher.hf_path={GOLDEN}/teacher"]
    sizes = ["student.parallel.tensor=2", "teacher.parallel.tensor=2"]
    train = ["train.steps=1", "train.save_every=1", "train.lr=1e-2", f"rollout.replay={GOLDEN}/rollouts.jsonl"]
    pools[2].run("cases:run_train", overrides=[*models, *sizes, *train, f"output={output}"])
    return output


@pytest.fixture(scope="module")
def one_rank(megatron_bridge: dict[str, str], trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results of the cases of one rank."""
    root = tmp_path_factory.mktemp("bridge")
    hf_to_megatron(GOLDEN / "student", root / "converted", tensor=2, progress=False)
    ours = {"converted_again": str(root / "converted"), "trained": str(trained / "checkpoints" / "iter_0000001")}
    run(
        megatron_bridge,
        1,
        CASES,
        "one_rank",
        directory=str(root),
        ours=ours,
        run=str(trained / "checkpoints"),
    )
    return root


@pytest.fixture(scope="module")
def two_ranks(megatron_bridge: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results of the cases of two ranks."""
    root = tmp_path_factory.mktemp("train_step")
    cases = [
        {
            "case": case,
            "options": EXPECTED[case]["options"],
            "layout": sizes,
            "size": size,
            "updates": UPDATES,
            "output": str(root / name),
        }
        for name, (sizes, size, case) in LAYOUTS.items()
    ]
    run(megatron_bridge, 2, CASES, "two_ranks", cases=cases)
    return root


def test_forward(one_rank: Path) -> None:
    found = load_file(one_rank / "forward.safetensors")
    names = ("state1", "state2", "state3", "logits")
    for name in names:
        torch.testing.assert_close(found[name], found[f"expected_{name}"], rtol=1e-4, atol=1e-5)


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Bit for bit, with the same names and dtypes."""
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


@pytest.mark.parametrize("given", ["the directory of checkpoints", "the checkpoint", "and hf_path"])
def test_their_checkpoint_is_read(one_rank: Path, given: str) -> None:
    """All tensors; without hf_path, config.json is that of the directory that run_config.yaml names."""
    root = one_rank / "bridge"
    path = root / "iter_0000000" if given == "the checkpoint" else root
    files = {file.name for file in (root / "iter_0000000").iterdir() if file.suffix != ".distcp"}
    # with Megatron-core 0.19, the content of common.pt is among the tensors
    assert files - {"common.pt"} == {".metadata", "metadata.json", RUN_CONFIG, "train_state.pt"}
    checkpoint = MegatronCheckpoint(path, GOLDEN / "student" if given == "and hf_path" else None)
    same({name: checkpoint[name] for name in checkpoint.keys()}, load_file(GOLDEN / "student" / "model.safetensors"))  # noqa: SIM118


def test_their_checkpoint_is_exported(one_rank: Path, tmp_path: Path) -> None:
    megatron_to_hf(one_rank / "bridge", tmp_path / "hf", hf_path=GOLDEN / "student", progress=False)
    same(load_file(tmp_path / "hf" / "model.safetensors"), load_file(GOLDEN / "student" / "model.safetensors"))


def test_their_checkpoint_as_student(one_rank: Path, pools: Pools, tmp_path: Path) -> None:
    """`student.checkpoint=ROOT` gives the golden loss and gradients."""
    case = "mse_all_last_k"
    pools[1].run("cases:run_verify", overrides=[*overrides(case, tmp_path), f"student.checkpoint={one_rank}/bridge"])
    check_verify(tmp_path, case)


def exported(path: Path, target: Path) -> dict[str, torch.Tensor]:
    megatron_to_hf(path, target, progress=False)
    return load_file(target / "model.safetensors")


@pytest.mark.parametrize("name", ["converted_again", "trained", "pretrained"])
def test_our_checkpoint_is_loaded(one_rank: Path, trained: Path, tmp_path: Path, name: str) -> None:
    """By its `load_megatron_model`, and by its loop (`pretrained`); logits show that run_config.yaml is the model's."""
    from transformers import AutoModelForCausalLM

    ours = one_rank / "converted" if name == "converted_again" else trained / "checkpoints" / "iter_0000001"
    found, expected = load_file(one_rank / f"{name}.safetensors"), exported(ours, tmp_path / "hf")
    logits = found.pop("logits")
    same(found, expected)
    changed = any(not torch.equal(expected[key], value) for key, value in golden_weights().items())
    assert changed == (name != "converted_again")
    reference = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(logits, reference(torch.arange(20).view(2, 10) * 3).logits, rtol=1e-4, atol=1e-5)


def golden_weights() -> dict[str, torch.Tensor]:
    return load_file(GOLDEN / "student" / "model.safetensors")


def test_their_fields_are_ours(one_rank: Path, trained: Path) -> None:
    """Every field of the model that we write has the value that Megatron-Bridge itself writes for the same model."""
    theirs = read_run_config(one_rank / "bridge" / "iter_0000000")
    assert theirs is not None
    for directory in (one_rank / "converted", trained / "checkpoints" / "iter_0000001"):
        content = read_run_config(directory)
        assert content is not None
        ours = content["model"]
        # of this process, or chosen by the test
        settings = {"params_dtype", "pipeline_dtype", "seq_length", "_target_", "tensor_model_parallel_size"}
        for field in set(ours) - settings:
            assert field in theirs["model"], field
            assert theirs["model"][field] == ours[field], field


def test_example(one_rank: Path) -> None:
    found = json.loads((one_rank / "example.json").read_text())
    assert found.pop("weight") == pytest.approx(1.0)
    assert found == {
        "provider": True,
        "per token": True,
        "samples": 5 * 8,
        "length": [32, 32],
        "others": [None, None],
        "evaluations": 0,
        "head": [0.0, 0.0],
    }


@pytest.mark.parametrize("name", LAYOUTS)
def test_train_step(two_ranks: Path, name: str) -> None:
    """Metrics and every gradient of the first update; then the loss falls, and the loop's own log has it."""
    lines = json.loads((two_ranks / f"{name}.json").read_text())
    check(LAYOUTS[name][2], (lines[0]["metrics"], load_file(two_ranks / f"{name}.safetensors")))
    losses = [line["metrics"]["rep/loss"] for line in lines]
    assert len(losses) == UPDATES and losses[2] < losses[1] < losses[0], losses
    for line in lines:
        last = line["reduced"][-1]
        assert last["rep/loss"] == pytest.approx(line["metrics"]["rep/loss"], rel=1e-6)
