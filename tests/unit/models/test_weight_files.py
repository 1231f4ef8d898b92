"""Which files of a directory are a model's weights: those that transformers reads. vLLM may read others."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import vllm_environment
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from nemo_oprd.megatron.weights.hf import HFCheckpoint, refuse_nonfinite
from nemo_oprd.models import read_hf_config
from nemo_oprd.models.served import read_served_spec
from nemo_oprd.models.weight_files import weight_files
from nemo_oprd.runtime.files import read_json

SIZES = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "vocab_size": 32}
SHARD = "model-00001-of-00001.safetensors"
INDEX, NAMED_INDEX = "model.safetensors.index.json", "chosen.safetensors.index.json"
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 98\n"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(tmp_path)
    return tmp_path


def other_weights(directory: Path, name: str) -> None:
    """A file with the model's tensors, of which all numbers are 3."""
    tensors = load_file(directory / "model.safetensors")
    save_file({key: torch.full_like(value, 3) for key, value in tensors.items()}, directory / name, {"format": "pt"})


def add_index(directory: Path, shard: str = SHARD, index: str = INDEX) -> None:
    other_weights(directory, shard)
    names = load_file(directory / shard)
    (directory / index).write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(names, shard)}))


def name_in_config(directory: Path, name: str) -> None:
    content = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**content, "transformers_weights": name}))


LEFT = {
    "one file": (lambda d: None, ["model.safetensors"]),
    "a stale index": (add_index, ["model.safetensors"]),
    "an adapter's weights": (lambda d: other_weights(d, "adapter_model.safetensors"), ["model.safetensors"]),
    "shards": (lambda d: (add_index(d), (d / "model.safetensors").unlink()), [SHARD]),
    "a file beside shards": (
        lambda d: (add_index(d), (d / "model.safetensors").rename(d / "consolidated.safetensors")),
        [SHARD],
    ),
    "a file that config.json names": (
        lambda d: (other_weights(d, "chosen.safetensors"), name_in_config(d, "chosen.safetensors")),
        ["chosen.safetensors"],
    ),
    "an index that config.json names": (
        lambda d: (add_index(d, "chosen-1.safetensors", NAMED_INDEX), name_in_config(d, NAMED_INDEX)),
        ["chosen-1.safetensors"],
    ),
    "an index that config.json names beside another": (
        lambda d: (
            add_index(d, "chosen-1.safetensors", NAMED_INDEX),
            add_index(d),
            (d / "model.safetensors").unlink(),
            name_in_config(d, NAMED_INDEX),
        ),
        ["chosen-1.safetensors"],
    ),
}


@pytest.mark.parametrize("kind", LEFT)
def test_the_weights_are_those_that_transformers_loads(model: Path, kind: str) -> None:
    change, names = LEFT[kind]
    change(model)
    assert [file.name for file in weight_files(model)] == names
    theirs = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).state_dict()
    ours = HFCheckpoint(model)
    for name in ours.keys():  # noqa: SIM118
        assert torch.equal(ours[name], theirs[name]), name


def test_what_is_left_out_is_told_once(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    add_index(model)
    (model / "adapter_config.json").write_text("{}")
    for _ in range(2):
        weight_files(model)
    left, beside = caplog.messages
    assert left == (
        f"{model / 'model.safetensors'} is read, as transformers does; {SHARD} and {INDEX} in the same directory are "
        "left out"
    )
    assert beside == f"{model}: the weights there are read without the adapter beside them (adapter_config.json)"


@pytest.mark.parametrize("weight_map", [None, {}, [SHARD]])
def test_an_index_that_names_no_file_is_refused(model: Path, weight_map: Any) -> None:
    (model / "model.safetensors").unlink()
    (model / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    with pytest.raises(ValueError, match=rf"{INDEX}: weight_map is .*, expected tensor names and files; copy it from"):
        weight_files(model)


def test_servers_must_read_the_same(model: Path) -> None:
    """To vLLM, an index counts before a single file, and without one every file counts."""
    assert read_served_spec(model).num_layers == 1
    add_index(model)
    with pytest.raises(ValueError, match=rf"vLLM loads {SHARD} there, and transformers model.safetensors; .* {INDEX}"):
        read_served_spec(model)
    (model / INDEX).unlink()
    with pytest.raises(ValueError, match=rf"vLLM loads {SHARD}, model.safetensors there, and transformers model.safe"):
        read_served_spec(model)
    (model / SHARD).rename(model / "consolidated.safetensors")
    assert read_served_spec(model).num_layers == 1
    (model / "consolidated.safetensors").unlink()
    (model / "model.safetensors").unlink()
    assert read_served_spec(model).num_layers == 1


# in vLLM's environment: the files that its loader takes of the directories in its arguments
VLLM_READS = """
import json, sys
from pathlib import Path
from vllm.config.load import LoadConfig
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
loader = DefaultModelLoader(LoadConfig(load_format="auto"))
found = [loader._prepare_weights(directory, None, None, True, None)[1] for directory in sys.argv[1:]]
print("found", json.dumps([sorted(Path(file).name for file in files) for files in found]))
"""


@pytest.mark.vllm
@pytest.mark.skipif(vllm_environment.missing() is not None, reason=str(vllm_environment.missing()))
def test_vllm_itself_reads_what_is_said_here(model: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Of each kind of directory: the files that we read, or else a refusal that names those that vLLM reads."""
    root = tmp_path_factory.mktemp("kinds")
    for kind, (change, _) in LEFT.items():
        shutil.copytree(model, root / kind)
        change(root / kind)
    command = [str(vllm_environment.DEFAULT_PYTHON), "-c", VLLM_READS, *(str(root / kind) for kind in LEFT)]
    said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout
    (line,) = (line for line in said.splitlines() if line.startswith("found "))
    for kind, theirs in zip(LEFT, json.loads(line.removeprefix("found ")), strict=True):
        if any(name.startswith("consolidated") for name in theirs):  # Mistral's own format: left to the canary
            continue
        if theirs == [file.name for file in weight_files(root / kind)]:
            read_served_spec(root / kind)
            continue
        with pytest.raises(ValueError, match=f"vLLM loads {', '.join(theirs)} there"):
            read_served_spec(root / kind)


@pytest.mark.parametrize("more", ["config.json", "adapter_model.safetensors", "optimizer.pt", "rng_state.pth"])
def test_an_adapter_is_named(tmp_path: Path, more: str) -> None:
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "some/base"}')
    (tmp_path / more).write_text("{}")
    for read in (read_hf_config, weight_files):
        with pytest.raises(
            ValueError, match=r"holds an adapter \(peft, LoRA\) of 'some/base', and no model.*merge_and"
        ):
            read(tmp_path)


def test_pointers_of_git_lfs_are_named(model: Path) -> None:
    reading: dict[str, Callable[[], Any]] = {
        "model.safetensors": lambda: weight_files(model),
        "config.json": lambda: read_hf_config(model),
        "any.json": lambda: read_json(model / "any.json", "an object", "copy it"),
    }
    for name, read in reading.items():
        (model / name).write_text(POINTER)
        with pytest.raises(ValueError, match=rf"{name}: a pointer of Git LFS.*run `git lfs pull`"):
            read()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_tensor_that_is_not_finite_is_named(dtype: torch.dtype, value: float) -> None:
    tensor = torch.randn(5, 7).to(dtype)
    refuse_nonfinite(tensor, "a.weight", "some/model")
    refuse_nonfinite(tensor[:0], "a.weight", "some/model")
    tensor[2, 3] = tensor[4, 0] = value
    with pytest.raises(ValueError, match=r"some/model: tensor 'a.weight' has 2 value.*such as -?(nan|inf) at \[2, 3\]"):
        refuse_nonfinite(tensor, "a.weight", "some/model")


@pytest.mark.parametrize("key", ["num_hidden_layers", "num_local_experts"])
def test_more_layers_than_any_model_has_are_refused_at_once(model: Path, key: str) -> None:
    content = json.loads((model / "config.json").read_text())
    for changed in ({**content, key: 10**9}, {**content, "text_config": {key: 10**9}}):
        (model / "config.json").write_text(json.dumps(changed))
        for read in (read_hf_config, read_served_spec):
            with pytest.raises(ValueError, match=f"config.json: {key}=1000000000; expected at most 10000"):
                read(model)
