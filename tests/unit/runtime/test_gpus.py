"""Where a launcher promises GPUs and torch sees none, a command ends with one line; and which GPUs a job may have.

The CUDA build that sees no GPU is a stand-in: this torch with `torch.version.cuda` set, whose `torch.cuda.init` raises
what the CUDA build raises beside an old driver.
"""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from nemo_oprd.cli import main
from nemo_oprd.runtime import gpus, rendezvous

ROOT = Path(__file__).parents[3]
OLD_DRIVER = (
    "The NVIDIA driver on your system is too old (found version 12040). Please update your GPU driver by downloading "
    "and installing a new version from the URL: http://www.nvidia.com/Download/index.aspx Alternatively, go to: "
    "https://pytorch.org to install a PyTorch version that has been compiled with your version of the CUDA driver."
)
PROMISES = ("SLURM_GPUS_ON_NODE", "CUDA_VISIBLE_DEVICES", gpus.CPU_VARIABLE)


@pytest.fixture
def blind(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """This process with such a torch, to which nobody has promised a GPU."""

    def init() -> None:
        raise RuntimeError(OLD_DRIVER)

    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setattr("torch.cuda.init", init)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for name in PROMISES:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@pytest.mark.parametrize(
    ("name", "value"),
    [("SLURM_GPUS_ON_NODE", "8"), ("CUDA_VISIBLE_DEVICES", "0,1"), ("CUDA_VISIBLE_DEVICES", "GPU-1a")],
)
def test_a_promise_that_torch_does_not_keep(blind: pytest.MonkeyPatch, name: str, value: str) -> None:
    blind.setenv(name, value)
    with pytest.raises(ValueError) as caught:
        gpus.check_promise()
    said = str(caught.value)
    assert said.startswith(
        f"{name}={value}, but torch {torch.__version__} sees no GPU: The NVIDIA driver on your system "
    )
    assert "is too old (found version 12040); expected" in said and "NEMO_OPRD_CPU=1" in said
    blind.setenv(gpus.CPU_VARIABLE, "1")
    gpus.check_promise()
    blind.setenv(gpus.CPU_VARIABLE, "yes")
    with pytest.raises(ValueError, match="NEMO_OPRD_CPU='yes'; expected 1"):
        gpus.check_promise()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("SLURM_GPUS_ON_NODE", "0"),
        ("SLURM_GPUS_ON_NODE", ""),
        ("CUDA_VISIBLE_DEVICES", ""),
        ("CUDA_VISIBLE_DEVICES", "-1"),
        ("CUDA_VISIBLE_DEVICES", "NoDevFiles"),
    ],
)
def test_no_promise(blind: pytest.MonkeyPatch, name: str, value: str) -> None:
    gpus.check_promise()
    blind.setenv(name, value)
    gpus.check_promise()


def test_a_torch_without_cuda_is_refused_in_a_job_with_gpus_only(blind: pytest.MonkeyPatch) -> None:
    blind.setattr("torch.version.cuda", None)
    blind.setenv("CUDA_VISIBLE_DEVICES", "0")
    gpus.check_promise()
    blind.setenv("SLURM_GPUS_ON_NODE", "4")
    with pytest.raises(
        ValueError, match=r"SLURM_GPUS_ON_NODE=4, but .* sees no GPU, because it is a build without CUDA;"
    ):
        gpus.check_promise()


def test_a_promise_that_is_kept(blind: pytest.MonkeyPatch) -> None:
    blind.setenv("SLURM_GPUS_ON_NODE", "8")
    blind.setattr("torch.cuda.is_available", lambda: True)
    gpus.check_promise()


def test_nothing_is_imported_where_nothing_is_promised() -> None:
    code = "import sys; from nemo_oprd.runtime import gpus; gpus.check_promise(); assert 'torch' not in sys.modules"
    environment = {name: value for name, value in os.environ.items() if name not in PROMISES}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, cwd=ROOT)


PAIR = {
    "model_type": "qwen2", "hidden_act": "silu", "rms_norm_eps": 1e-6, "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64,
    "max_position_embeddings": 512, "tie_word_embeddings": True, "rope_theta": 10000.0,
}  # fmt: skip
COMMANDS = {
    "train": ["train", "--config-name", "quickstart"],
    "evaluate": ["evaluate", "--config-name", "quickstart"],
    "fit-bridge": ["fit-bridge", "--config-name", "quickstart"],
    "doctor": ["doctor", "--config-name", "quickstart"],
    "verify": ["verify", "--config-name", "verify"],
    "compare": ["compare", "--teacher", "t", "--prompts", "p", "--output", "o"],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_ends_with_one_line(
    blind: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    """Exit code 2, before a model is read: the models have a config.json and nothing else."""
    arguments = list(COMMANDS[command])
    if command == "compare":
        arguments.append(f"student={tmp_path}")
    else:
        for role in ("student", "teacher"):
            (tmp_path / role).mkdir()
            (tmp_path / role / "config.json").write_text(json.dumps(PAIR))
            arguments += [f"{role}.hf_path={tmp_path / role}", f"{role}.checkpoint=null", f"{role}.parallel.tensor=1"]
        file = tmp_path / "prompts.jsonl"
        file.write_text(json.dumps({"prompt": "1+1", "answer": "2"}) + "\n")
        prompts = [f"data.train={file}", f"data.validation={{one: {file}}}"]
        arguments += [f"rollout.replay={file}"] if command == "verify" else prompts
        arguments.append(f"output={tmp_path / 'run'}")
    blind.setenv("SLURM_GPUS_ON_NODE", "8")
    blind.setenv("RANK", "0")
    blind.setenv("WORLD_SIZE", "1")
    with pytest.raises(SystemExit) as ended:
        main(arguments, alone=False)
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: SLURM_GPUS_ON_NODE=8, but torch ") and "too old (found version 12040)" in line
    assert not (tmp_path / "run").exists()


def _device(monkeypatch: pytest.MonkeyPatch, name: str, capability: tuple[int, int]) -> None:
    monkeypatch.setattr("torch.cuda.get_device_name", lambda index: name)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda index: capability)


@pytest.mark.parametrize(
    ("name", "capability", "ranks", "said"),
    [
        ("Tesla V100-SXM2-32GB", (7, 0), 1, "the GPU Tesla V100-SXM2-32GB has compute capability 7.0; expected 8.0"),
        ("Tesla T4", (7, 5), 1, "compute capability 7.5; expected 8.0"),
        ("NVIDIA H100 80GB HBM3 MIG 3g.40gb", (9, 0), 2, "2 ranks on slices of GPUs (NVIDIA H100 80GB HBM3 MIG"),
        ("NVIDIA H100 80GB HBM3 MIG 3g.40gb", (9, 0), 1, None),
        ("NVIDIA A100-SXM4-40GB", (8, 0), 8, None),
        ("NVIDIA H100 80GB HBM3", (9, 0), 8, None),
    ],
)  # fmt: skip
def test_devices(
    monkeypatch: pytest.MonkeyPatch, name: str, capability: tuple[int, int], ranks: int, said: str | None
) -> None:
    _device(monkeypatch, name, capability)
    if said is None:
        gpus.check_device(0, ranks)
        return
    with pytest.raises(ValueError) as caught:
        gpus.check_device(0, ranks)
    assert said in str(caught.value)


class _Joined(Exception):  # noqa: N818 - not a failure
    """The rank would now connect to the others."""


@pytest.mark.parametrize("devices", [["GPU-a", "GPU-a"], ["GPU-a", "GPU-b"]])
def test_two_ranks_on_one_gpu(monkeypatch: pytest.MonkeyPatch, devices: list[str]) -> None:
    """Both ranks are told, before NCCL is: the first one's line is the one that a job shows."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    raised: dict[int, Exception] = {}

    def identity(index: int) -> str:
        return devices[index]

    def connect(*_: Any, **__: Any) -> None:
        raise _Joined

    monkeypatch.setattr(rendezvous, "_open_store", lambda *_: store.clone())
    monkeypatch.setattr(gpus, "identity", identity)
    monkeypatch.setattr("torch.cuda.set_device", lambda index: None)
    monkeypatch.setattr(dist, "init_process_group", connect)
    jobs = [rendezvous.Job(rank, 2, "127.0.0.1", 1) for rank in range(2)]
    monkeypatch.setattr(rendezvous.Job, "here", lambda: jobs[int(threading.current_thread().name)])

    def join(rank: int) -> None:
        try:
            rendezvous.join("nccl", datetime.timedelta(seconds=30), rank)
        except (ValueError, _Joined) as error:
            raised[rank] = error

    threads = [threading.Thread(target=join, args=(rank,), name=str(rank)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if len(set(devices)) == 2:
        assert all(isinstance(error, _Joined) for error in raised.values()) and len(raised) == 2
        return
    first, second = (str(raised[rank]) for rank in range(2))
    assert first == second and "have the same GPU (GPU-a); expected one GPU per rank" in first
    assert {"rank 0", "rank 1"} <= {first[: len("rank 0")], first[first.index(" and ") + 5 :][: len("rank 0")]}


def test_the_identity_of_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda index: SimpleNamespace(uuid=f"uuid of {index}"))
    assert gpus.identity(3) == "uuid of 3"
