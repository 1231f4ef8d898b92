"""Weights in buckets: every bit arrives, and a digest of both sides sees one that does not."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nemo_oprd.vllm.transport import SharedFolder, buckets
from nemo_oprd.vllm.worker import nemo_oprd_buckets
from nemo_oprd.vllm.worker.nemo_oprd_buckets import ALIGNMENT, Bucket, Digest, padded_bytes

Weights = dict[str, torch.Tensor]


def random_bits(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Any bits, NaNs of many kinds among them."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.Size(shape).numel() * dtype.itemsize
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator).view(dtype).view(shape)


def weights() -> Weights:
    """Odd sizes, no elements, no dimensions, views of other tensors, and one larger than the small buckets."""
    found = {
        "float32": random_bits(7, 5, dtype=torch.float32, seed=1),
        "bfloat16": random_bits(3, 11, dtype=torch.bfloat16, seed=2),
        "one number": random_bits(1, dtype=torch.bfloat16, seed=3),
        "no dimension": random_bits(1, dtype=torch.float32, seed=4)[0],
        "empty": torch.zeros(0, 4),
        "large": random_bits(40, 33, dtype=torch.float32, seed=5),
        "bytes": random_bits(13, dtype=torch.uint8, seed=6),
    }
    whole = random_bits(10, 6, dtype=torch.bfloat16, seed=7)
    return found | {"transposed": whole.T, "columns": whole[:, 1:4], "expanded": whole[:1].expand(5, 6)}


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    parts = [part.contiguous().reshape(-1).view(torch.uint8) for part in (one, other)]
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(*parts)


def digest_of(tensors: Weights, size: int = 1 << 16) -> str:
    digest = Digest()
    for bucket in buckets(tensors.items(), size):
        digest.add(bucket)
    return digest.value()


@pytest.mark.parametrize("size", [1, ALIGNMENT, 200, 1000, 1 << 20])
def test_every_bit_arrives(size: int) -> None:
    """The worker's side has the description as JSON and the bytes from a file."""
    sent, received, total = weights(), Weights(), 0
    folder = SharedFolder()
    try:
        for bucket in buckets(sent.items(), size):
            assert len(bucket.data) == bucket.used
            # a tensor that is larger than a bucket travels alone; one without elements fits everywhere
            assert bucket.used <= size or sum(entry.size > 0 for entry in bucket.entries) == 1
            path = folder.write(bucket)
            data = torch.from_file(str(path), size=len(bucket.data), dtype=torch.uint8)
            arrived = Bucket.of(json.loads(json.dumps(bucket.describe())), data)
            path.unlink()  # the bytes stay readable where the file is mapped
            assert all(entry.start % ALIGNMENT == 0 for entry in arrived.entries)
            received |= dict(arrived.tensors())
            total += bucket.used
    finally:
        folder.close()
    assert not folder.path.exists()
    assert list(received) == list(sent)
    assert all(same_bits(sent[name], received[name]) for name in sent)
    assert total == sum(map(padded_bytes, sent.values()))


def test_no_bucket_of_nothing() -> None:
    assert list(buckets([])) == []


def test_a_small_shared_memory_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = SharedFolder()
    try:
        path = folder.path / "bucket_1"
        path.symlink_to("/dev/full")
        bucket = next(iter(buckets({"a": torch.ones(1 << 16)}.items(), 1)))
        with pytest.raises(ValueError, match=r"262,144 bytes of weights don't fit .*: enlarge /dev/shm"):
            folder.write(bucket)
        assert not path.is_symlink()
    finally:
        folder.close()


def test_the_digest_is_that_of_the_tensors() -> None:
    """Neither their order nor the buckets they travel in count."""
    expected = digest_of(weights())
    assert len(expected) == 32
    for seed in range(3):
        shuffled = list(weights().items())
        random.Random(seed).shuffle(shuffled)
        assert digest_of(dict(shuffled), size=[1, 300, 5000][seed]) == expected


def test_steps_of_a_digest_make_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    """The positions of words go on from step to step."""
    expected = digest_of(weights())
    monkeypatch.setattr(nemo_oprd_buckets, "_DIGEST_WORDS_CPU", 100)
    assert digest_of(weights()) == expected


def test_what_was_in_the_buffer_before_does_not_matter() -> None:
    """Buckets share a buffer that is not cleared; the digest reads the padding."""
    digests = []
    for content in (0, 255):
        bucket, digest = Bucket([], torch.full((1 << 16,), content, dtype=torch.uint8)), Digest()
        for name, tensor in weights().items():
            bucket.add(name, tensor)
        digest.add(bucket.trimmed())
        digests.append(digest.value())
    assert digests[0] == digests[1] == digest_of(weights())


def test_the_digest_by_its_definition() -> None:
    """Both sums modulo 2^64 in Python's integers, of words that are negative, too."""
    tensor = random_bits(3, 7, dtype=torch.bfloat16, seed=8)  # 42 bytes: the last word is half padding
    raw = bytes(tensor.reshape(-1).view(torch.uint8).tolist())
    raw += bytes(-len(raw) % 4)
    words = [int.from_bytes(raw[i : i + 4], "little", signed=True) for i in range(0, len(raw), 4)]
    digest = Digest()
    digest.add(next(iter(buckets({"a": tensor}.items()))))
    sums = sum(words), sum((i + 1) * word for i, word in enumerate(words))
    assert digest.tensors == {"a": ("bfloat16", (3, 7), *sums)}


def flipped(tensor: torch.Tensor, bit: int) -> torch.Tensor:
    changed = tensor.contiguous().clone()
    changed.view(-1).view(torch.uint8)[bit // 8] ^= 1 << bit % 8
    return changed


@pytest.mark.parametrize("name", ["float32", "bfloat16", "one number", "bytes", "transposed"])
def test_one_flipped_bit_is_seen(name: str) -> None:
    tensor = weights()[name]
    bits = 8 * tensor.numel() * tensor.element_size()
    expected = digest_of({name: tensor})
    assert all(digest_of({name: flipped(tensor, bit)}) != expected for bit in {*range(0, bits, 29), bits - 1})


def test_exchanged_words_are_seen() -> None:
    """The plain sum alone would not see them."""
    tensor = torch.arange(40, dtype=torch.float32)
    for one, other in ((0, 1), (3, 39), (16, 17)):
        changed = tensor.clone()
        changed[[one, other]] = tensor[[other, one]]
        assert digest_of({"a": changed}) != digest_of({"a": tensor})


@pytest.mark.parametrize(
    "changed",
    [
        {"c": torch.ones(4, 6), "b": torch.zeros(3)},
        {"a": torch.ones(6, 4), "b": torch.zeros(3)},
        {"a": torch.ones(4, 6).view(torch.int32), "b": torch.zeros(3)},
        {"a": torch.ones(4, 6), "b": torch.zeros(3, dtype=torch.float16)},
        {"a": torch.zeros(3), "b": torch.ones(4, 6)},
        {"a": torch.ones(4, 6)},
        {"a": torch.ones(4, 6), "b": torch.zeros(3), "c": torch.zeros(0)},
    ],
    ids=["name", "shape", "dtype", "dtype of zeros", "exchanged", "missing", "more"],
)
def test_names_dtypes_and_shapes_are_seen(changed: Weights) -> None:
    assert digest_of(changed) != digest_of({"a": torch.ones(4, 6), "b": torch.zeros(3)})


@pytest.mark.parametrize("size", [1, 1 << 16])
def test_a_tensor_that_comes_twice_is_refused(size: int) -> None:
    twice = [("a", torch.ones(3)), ("b", torch.ones(3)), ("a", torch.ones(3))]
    digest, sent = Digest(), list(buckets(twice, size))
    for bucket in sent[:-1]:
        digest.add(bucket)
    with pytest.raises(ValueError, match="the tensor a came twice"):
        digest.add(sent[-1])


def test_the_workers_module_needs_torch_alone(tmp_path: Path) -> None:
    """vLLM's environment has nothing of this project's."""
    folder = Path(nemo_oprd_buckets.__file__).parent
    program = "import sys, nemo_oprd_buckets as b\n"
    program += "print(sorted({'nemo_oprd', 'megatron', 'httpx2', 'pydantic'} & set(sys.modules)), b.__file__)"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ended = subprocess.run(
        [sys.executable, "-c", program],
        env={**environment, "PYTHONPATH": str(folder)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert ended.stdout == f"[] {folder / 'nemo_oprd_buckets.py'}\n"
