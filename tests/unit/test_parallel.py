"""Which GPU a rank takes."""

from __future__ import annotations

import re

import pytest

from nemo_oprd.megatron.parallel import device_index


@pytest.mark.parametrize(
    ("local_rank", "count", "index"), [(0, 1, 0), (5, 1, 0), (0, 8, 0), (7, 8, 7)], ids=lambda number: str(number)
)
def test_a_rank_takes_its_own_gpu_or_the_only_one_it_sees(local_rank: int, count: int, index: int) -> None:
    assert device_index(local_rank, count) == index


@pytest.mark.parametrize(("visible", "named"), [("0,1", "0,1"), (None, "not set")])
def test_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch, visible: str | None, named: str) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    expected = f"LOCAL_RANK=2, but this process sees 2 GPUs (CUDA_VISIBLE_DEVICES={named}); expected one GPU per rank: "
    with pytest.raises(ValueError, match=re.escape(expected) + "start as many ranks per machine as it has GPUs"):
        device_index(2, 2)
