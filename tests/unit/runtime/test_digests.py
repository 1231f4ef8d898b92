"""Digests of files: those of the bytes that were written, whoever writes them, and every file is read by one rank."""

from __future__ import annotations

import io
import os
from hashlib import sha256
from pathlib import Path
from unittest import mock

import pytest
import torch

from nemo_oprd.runtime import digests
from nemo_oprd.runtime.digests import DigestedFile, find_difference, sha256_of


def test_the_digest_is_that_of_the_file(tmp_path: Path) -> None:
    """Of small and large writes, and of torch.save, which writes an archive."""
    large = os.urandom(digests._PIECE_BYTES + 5)
    tensor = torch.arange(3 << 20)
    with DigestedFile(tmp_path / "file") as file:
        for part in (b"ab", large, b"", memoryview(large)[3:9]):
            assert file.write(part) == len(part)
        before = file.tell()
        torch.save(tensor, file)
        after = file.tell()
        torch.save({"a": 1}, file)
    content = (tmp_path / "file").read_bytes()
    assert content.startswith(b"ab" + large + large[3:9])
    assert file.sha256 == sha256(content).hexdigest() == sha256_of(tmp_path / "file")
    assert torch.equal(torch.load(io.BytesIO(content[before:after])), tensor)


def test_a_file_is_written_in_order(tmp_path: Path) -> None:
    with DigestedFile(tmp_path / "file") as file:
        assert not file.seekable()
        file.write(b"abc")
        with pytest.raises(io.UnsupportedOperation):
            file.seek(0)


def test_a_full_disk_is_an_error() -> None:
    file = DigestedFile("/dev/full")
    with pytest.raises(OSError, match="No space"):
        file.write(bytes(digests._PIECE_BYTES))
    file.close()


def test_each_file_is_read_by_one_rank(tmp_path: Path) -> None:
    names = [f"{number}.distcp" for number in range(7)]
    for number, name in enumerate(names):
        (tmp_path / name).write_bytes(bytes(1000 * number + 1))
    expected = {name: sha256_of(tmp_path / name) for name in names}
    read: list[str] = []

    def reading(file: Path) -> str:
        read.append(file.name)
        return sha256_of(file)

    with mock.patch.object(digests, "sha256_of", reading):
        assert [find_difference(tmp_path, expected, rank, 3) for rank in range(3)] == [None] * 3
    assert sorted(read) == names
    (tmp_path / "6.distcp").write_bytes(bytes(6000) + b"\1")
    found = [find_difference(tmp_path, expected, rank, 3) for rank in range(3)]
    assert found == ["6.distcp has another sha256 than when it was written", None, None]
    (tmp_path / "2.distcp").unlink()
    assert find_difference(tmp_path, expected, 2, 3) == "2.distcp is missing"


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    with mock.patch.object(digests, "sha256_of", side_effect=OSError(5, "Input/output error")):
        assert find_difference(tmp_path, {"a": ""}) == "a can't be read: Input/output error"
