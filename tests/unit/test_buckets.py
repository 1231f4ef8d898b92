"""Buckets of a weight update: what is in them, and that their digest depends on the tensors alone."""

from __future__ import annotations

import pytest
import torch

from nemo_oprd.rollout.vllm.transport import buckets
from nemo_oprd.rollout.vllm.worker.nemo_oprd_buckets import ALIGNMENT, Bucket, Digest

TENSORS = {
    "a": torch.arange(5, dtype=torch.float32),
    "b": torch.arange(40, dtype=torch.bfloat16).reshape(8, 5).T,
    "c": torch.ones(3, dtype=torch.bfloat16),
    "d": torch.arange(90, dtype=torch.float32),
    "e": torch.zeros(()),
    "f": torch.full((2, 3), 7.0),
}


def received(size: int) -> tuple[list[int], dict[str, torch.Tensor], str]:
    """(Bytes of each bucket, copies of the tensors, the digest)."""
    sizes, found, digest = [], dict[str, torch.Tensor](), Digest()
    for bucket in buckets(TENSORS.items(), size):
        sizes.append(len(bucket.data))
        digest.add(bucket)
        found |= {name: tensor.clone() for name, tensor in bucket.tensors()}
    return sizes, found, digest.value()


@pytest.mark.parametrize("size", [1, 64, 128, 192, 1024, 1 << 20])
def test_tensors_arrive_in_buckets_of_any_size(size: int) -> None:
    sizes, found, digest = received(size)
    assert all(each % ALIGNMENT == 0 and (each <= size or each <= 384) for each in sizes)
    assert list(found) == list(TENSORS)
    for name, tensor in TENSORS.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)
    assert digest == received(1 << 10)[2]


def test_what_was_in_the_buffer_before_does_not_matter() -> None:
    """Buckets share a buffer that is not cleared; the digest reads the padding."""
    digests = []
    for value in (0, 255):
        bucket, digest = Bucket([], torch.full((1024,), value, dtype=torch.uint8)), Digest()
        for name in ("a", "b", "c"):
            bucket.add(name, TENSORS[name])
        digest.add(bucket.trimmed())
        digests.append(digest.value())
    assert digests[0] == digests[1]
