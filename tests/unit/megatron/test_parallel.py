"""Which GPU a rank takes, and what is set where there is one."""

from __future__ import annotations

import re

import pytest
import torch

from nemo_oprd.megatron.parallel import device_index, init_distributed


@pytest.mark.parametrize(
    ("local_rank", "count", "index"), [(0, 1, 0), (5, 1, 0), (0, 8, 0), (7, 8, 7)], ids=lambda number: str(number)
)
def test_a_rank_takes_its_own_gpu_or_the_only_one_it_sees(
    monkeypatch: pytest.MonkeyPatch, local_rank: int, count: int, index: int
) -> None:
    monkeypatch.setenv("SLURM_PROCID", "5")
    assert device_index(local_rank, count) == index


@pytest.mark.parametrize(("visible", "named"), [("0,1", "0,1"), (None, "not set")])
def test_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch, visible: str | None, named: str) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    expected = f"LOCAL_RANK=2, but this process sees 2 GPUs (CUDA_VISIBLE_DEVICES={named}); expected one GPU per rank: "
    with pytest.raises(ValueError, match=re.escape(expected) + "start one rank per GPU"):
        device_index(2, 2)


def test_two_ranks_on_one_gpu_are_refused_where_all_see_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_PROCID", raising=False)
    assert device_index(0, 1) == 0
    with pytest.raises(ValueError, match="LOCAL_RANK=1, but this process sees 1 GPUs"):
        device_index(1, 1)


def test_on_cuda_float32_is_float32_and_cudnn_attends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is set where CUDA is, in a process without it."""
    chosen: list[int] = []
    init_distributed()  # the process group, on the CPU
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    monkeypatch.setattr("torch.cuda.set_device", chosen.append)
    before = torch.backends.cuda.cudnn_sdp_enabled(), torch.get_float32_matmul_precision()
    torch.backends.cuda.enable_cudnn_sdp(True)
    torch.set_float32_matmul_precision("high")  # as NVIDIA's containers have it
    try:
        init_distributed()
        assert chosen == [3]
        assert not torch.backends.cuda.cudnn_sdp_enabled()
        assert torch.get_float32_matmul_precision() == "highest"
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before[0])
        torch.set_float32_matmul_precision(before[1])
