"""Nothing that a checkpoint, a model or a data file says is run, opened or kept where it shouldn't be."""

from __future__ import annotations

import ast
import io
import json
import os
import pickle
import shutil
import sys
from pathlib import Path

import pytest
import torch
from bad_input_case import GOLDEN
from bad_input_cases.run_directories import SECRET, Malicious
from bad_inputs import ROOT
from megatron.core.dist_checkpointing.strategies.cached_metadata_filesystem_reader import CachedMetadataFileSystemReader
from pool import Pools
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from checkpoint_tools._convert import hf_to_megatron
from nemo_oprd.data.prompts import load_prompts
from nemo_oprd.megatron.weights.torch_dist import open_torch_dist, read_index
from nemo_oprd.rollout.replay import read_rollouts
from nemo_oprd.runtime.exits import users_mistake

SOURCES = sorted([*(ROOT / "nemo_oprd").rglob("*.py"), *(ROOT / "checkpoint_tools").glob("*.py")])
# the one module that may know pickle: it is the restricted reader
MAY_PICKLE = {"torch_dist.py"}
FORBIDDEN_MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
FORBIDDEN_NAMES = {"eval", "exec", "compile", "__import__"}


def offences(tree: ast.AST) -> list[str]:
    """What in a module could run or unpickle what a user's file says."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            found += [f"line {node.lineno}: import {n}" for n in names if n.split(".")[0] in FORBIDDEN_MODULES]
        if not isinstance(node, ast.Call):
            continue
        called, keywords = ast.unparse(node.func), {k.arg: ast.unparse(k.value) for k in node.keywords}
        wrong = (
            called in FORBIDDEN_NAMES
            or (called == "torch.load" and keywords.get("weights_only") != "True")
            or (called in ("yaml.load", "yaml.load_all", "yaml.unsafe_load", "yaml.full_load"))
            or keywords.get("trust_remote_code", "False") != "False"
            or keywords.get("allow_pickle", "False") != "False"
            or keywords.get("shell", "False") != "False"
        )
        if wrong:
            found.append(f"line {node.lineno}: {ast.unparse(node)[:80]}")
    return found


@pytest.mark.parametrize("file", SOURCES, ids=lambda file: file.name)
def test_no_module_runs_what_a_file_says(file: Path) -> None:
    found = offences(ast.parse(file.read_text()))
    if file.name in MAY_PICKLE:
        found = [line for line in found if not line.endswith("import pickle")]
    assert not found


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "from dill import loads",
        "torch.load(f)",
        "torch.load(f, weights_only=False)",
        "yaml.load(f)",
        "eval(x)",
        "exec(x)",
        "A.from_pretrained(p, trust_remote_code=True)",
        "np.load(f, allow_pickle=True)",
        "subprocess.run(x, shell=True)",
    ],
)
def test_the_search_finds_each_kind(code: str) -> None:
    assert offences(ast.parse(code))


def test_the_search_lets_the_safe_forms_pass() -> None:
    assert not offences(ast.parse("torch.load(f, weights_only=True)\nyaml.safe_load(f)\nmodel.eval()\nre.compile(p)"))


@pytest.mark.parametrize("reader", [FileSystemReader, CachedMetadataFileSystemReader])
def test_every_reader_of_an_index_refuses_programs(tmp_path: Path, reader: type) -> None:
    """Ours and Megatron's; a program that hides behind an allowed class, too."""
    witness = tmp_path / "pwned"
    for content in (Malicious(witness), Metadata({"a": Malicious(witness)}, storage_data={})):
        (tmp_path / ".metadata").write_bytes(pickle.dumps(content))
        with pytest.raises(ValueError, match=r"asks for pathlib\.Path\.write_text, which is not part of an index"):
            reader(tmp_path).read_metadata()
    assert not witness.exists()


@pytest.mark.parametrize("function", [os.system, eval, print, torch.load, torch.hub.load, pickle.loads])
def test_no_function_is_in_an_index(tmp_path: Path, function: object) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.dumps(function))
    with pytest.raises(ValueError, match="which is not part of an index"):
        read_index(tmp_path / ".metadata")


@pytest.mark.parametrize("content", [[1], Metadata({}, storage_data=None), torch.Size([1])])
def test_an_index_is_an_index(tmp_path: Path, content: object) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.dumps(content))
    with pytest.raises(ValueError, match="expected an index; copy the checkpoint again"):
        read_index(tmp_path / ".metadata")


def test_an_honest_index_is_read(tmp_path: Path) -> None:
    hf_to_megatron(GOLDEN / "student", tmp_path / "megatron", progress=False)
    _, metadata = open_torch_dist(tmp_path / "megatron")
    assert "embedding.word_embeddings.weight" in metadata.state_dict_metadata


def test_objects_between_the_tensors_are_not_run(tmp_path: Path) -> None:
    """torch's own planner reads them with weights_only=False."""
    witness = tmp_path / "pwned"
    at = MetadataIndex("key")
    item = ReadItem(LoadItemType.BYTE_IO, at, torch.Size([0]), at, torch.Size([0]), torch.Size([0]))
    for value, honest in ((Malicious(witness), False), ([None], True)):
        stream = io.BytesIO()
        torch.save(value, stream)
        stream.seek(0)
        planner = DefaultLoadPlanner(flatten_state_dict=False)
        planner.state_dict = {}
        if honest:
            planner.load_bytes(item, stream)
            assert planner.state_dict == {"key": [None]}
        else:
            with pytest.raises(pickle.UnpicklingError):
                planner.load_bytes(item, stream)
    assert not witness.exists()


_opened: list[str] | None = None


def _watch(event: str, arguments: tuple) -> None:
    if event == "open" and _opened is not None:
        _opened.append(str(arguments[0]))


sys.addaudithook(_watch)


def test_paths_in_data_files_are_not_opened(tmp_path: Path) -> None:
    global _opened
    bait = tmp_path / "bait"
    bait.write_text("{}")
    prompts, rollouts = tmp_path / "prompts.jsonl", tmp_path / "rollouts.jsonl"
    fields = {"data_source": str(bait), "answer": f"file://{bait}", "picture": str(bait), "path": str(bait)}
    prompts.write_text(json.dumps({"prompt": str(bait), **fields}) + "\n")
    rollouts.write_text(json.dumps({"prompt_ids": [1], "response_ids": [2], "response": str(bait), **fields}) + "\n")
    _opened = []
    try:
        assert load_prompts(prompts)[0].data_source == str(bait)
        assert read_rollouts(rollouts, 10)[0].response == str(bait)
        opened = _opened
    finally:
        _opened = None
    assert {str(prompts), str(rollouts)} <= set(opened)
    assert str(bait) not in opened


def test_no_secret_is_in_a_run_directory(pools: Pools, tmp_path: Path) -> None:
    output = tmp_path / "run"
    overrides = [
        f"student.hf_path={GOLDEN / 'student'}",
        f"teacher.hf_path={GOLDEN / 'teacher'}",
        f"rollout.replay={GOLDEN / 'rollouts.jsonl'}",
        f"output={output}",
        "train.steps=1",
        "train.save_every=1",
    ]
    names = ["HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY"]
    pools[1].run("cases:run_train_with_secrets", overrides=overrides, secrets=dict.fromkeys(names, SECRET))
    files = [file for file in output.rglob("*") if file.is_file()]
    assert {"config.yaml", "metrics.jsonl"} <= {file.name for file in files}
    for file in files:
        assert SECRET.encode() not in file.read_bytes(), file


def test_a_disk_that_fills_up_later_is_named() -> None:
    with open("/dev/full", "r+b", buffering=0) as full, pytest.raises(OSError) as error:
        full.write(b"x")
    said = users_mistake(error.value)
    assert said is not None and "No space left on device" in said and "free some space" in said
    # what safetensors and torch say in errors of their own
    for text in ("I/O error: No space left on device (os error 28)", "PytorchStreamWriter failed writing file data/0"):
        said = users_mistake(RuntimeError(text))
        assert said is not None and said.startswith("the disk is full") and "free some space" in said
    assert users_mistake(RuntimeError("a mistake of ours")) is None
    assert users_mistake(ConnectionResetError(104, "Connection reset by peer")) is None


def test_a_file_of_an_earlier_program_is_no_surprise(tmp_path: Path) -> None:
    """A saved model as torch.save made it is refused unread."""
    shutil.copytree(GOLDEN / "student", tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    torch.save(Malicious(tmp_path / "pwned"), tmp_path / "model" / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pytorch_model\.bin is a pickle, which is never opened"):
        hf_to_megatron(tmp_path / "model", tmp_path / "out", progress=False)
    assert not (tmp_path / "pwned").exists()
