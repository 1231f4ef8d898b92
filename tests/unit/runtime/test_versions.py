"""What differs between versions of Megatron-core: as each version has it, and as it is asked for in the other one."""

from __future__ import annotations

import importlib
import io
import logging
import os
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

from checkpoint_tools._convert import TorchDistWriter
from nemo_oprd.megatron import cpu_patches, versions
from nemo_oprd.megatron.weights.torch_dist import open_torch_dist, read_common_state

OLD = versions.CORE < (0, 17)
KEY = "common_state/shard_0_1"


def checkpoint(path: Path, value: Any) -> Path:
    """A checkpoint as Megatron-core 0.19 leaves it: without common.pt, with the common state among the shards."""
    path.mkdir()
    with TorchDistWriter(path) as writer:
        writer.add("__0_0.distcp", "weight", (2, 3), (0, 0), torch.zeros(2, 3))
        writer.add_object("__0_0.distcp", KEY, value)
        writer.complete()
    (path / "common.pt").unlink()
    return path


def test_common_state_in_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read where the installed version reads it, and refused in one line elsewhere."""
    path = checkpoint(tmp_path / "iter_0000003", [{"step": 3, "values": [1.5, None, "text"]}])
    monkeypatch.setattr(versions, "reads_common_state_in_shards", lambda: True)
    assert read_common_state(path, open_torch_dist(path)[1]) == [{"step": 3, "values": [1.5, None, "text"]}]
    monkeypatch.setattr(versions, "reads_common_state_in_shards", lambda: False)
    with pytest.raises(ValueError, match="written by Megatron-core 0.19 or later") as error:
        read_common_state(path, open_torch_dist(path)[1])
    assert str(path) in str(error.value) and version("megatron-core") in str(error.value)
    assert "resume with Python 3.12" in str(error.value) and "\n" not in str(error.value)


def test_the_file_of_older_versions_is_read(tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "iter_0000003", [{"new": 1}])
    torch.save({"old": 2}, path / "common.pt")
    assert read_common_state(path, open_torch_dist(path)[1]) == {"old": 2}


class Program:
    """Pickled, it creates a file when it is opened."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return open, (str(self.file), "w")


def test_a_program_in_the_common_state_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "reads_common_state_in_shards", lambda: True)
    path = checkpoint(tmp_path / "iter_0000003", Program(tmp_path / "pwned"))
    with pytest.raises(ValueError, match=r"__0_0\.distcp can't be read .*copy the checkpoint again"):
        read_common_state(path, open_torch_dist(path)[1])
    assert not (tmp_path / "pwned").exists()


def test_a_checkpoint_without_a_common_state(tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "iter_0000003", [{}])
    _, metadata = open_torch_dist(path)
    del metadata.storage_data[MetadataIndex(KEY)]
    with pytest.raises(ValueError, match=r"common\.pt can't be read"):
        read_common_state(path, metadata)


def test_what_the_installed_version_has() -> None:
    """Each name is the installed version's; the other version's would be an error at the first checkpoint."""
    cpu_patches.import_uncompiled()
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    queue, writer = versions.checkpoint_writer_names()
    assert hasattr(filesystem_async, queue) and hasattr(filesystem_async.FileSystemWriterAsync, writer)
    assert (queue == "_get_write_results_queue") == OLD
    assert versions.reads_common_state_in_shards() == (versions.CORE >= (0, 19))


@pytest.mark.parametrize("given", [None, "0"])
@pytest.mark.parametrize("sees", [False, True])
def test_without_a_gpu_the_compiler_stays_out(monkeypatch: pytest.MonkeyPatch, sees: bool, given: str | None) -> None:
    """Also of a torch that is built with CUDA; it is asked without the driver, which a forked process could not use."""
    asked, decorated, name = [], [], "PYTORCH_NVML_BASED_CUDA_CHECK"
    monkeypatch.delenv(name, raising=False)
    if given is not None:
        monkeypatch.setenv(name, given)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: asked.append(os.environ[name]) or sees)
    monkeypatch.setattr(importlib, "import_module", lambda _: decorated.append(torch.compile))
    compile_ = torch.compile
    cpu_patches.import_uncompiled()
    assert (asked, os.environ.get(name), torch.compile) == (["1"], given, compile_)
    assert (decorated == [compile_]) == sees


def test_modules_that_ask_for_cuda_do_so() -> None:
    """A module of the list that does not name CUDA any more has no place in it."""
    cpu_patches.import_uncompiled()
    for name in cpu_patches.MODULES_ASKING_FOR_CUDA:
        source = Path(str(importlib.import_module(name).__file__)).read_text()
        assert "torch.cuda." in source or '"cuda"' in source or "'cuda'" in source, name


def test_only_the_message_about_deprecation_is_dropped(capsys: pytest.CaptureFixture[str]) -> None:
    versions.quieten_checkpoints()
    versions.quieten_checkpoints()
    logger = logging.getLogger("megatron.core.dist_checkpointing.strategies.common")
    assert len(logger.filters) == 1
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    logger.addHandler(handler)
    try:
        logger.warning("load_common is deprecated and will be removed in a future release.")
        logger.warning("another message")
    finally:
        logger.removeHandler(handler)
    assert stream.getvalue() == "another message\n"
