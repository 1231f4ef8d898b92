"""Files that appear whole or not at all, and JSON that is read or refused with one line."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from nemo_oprd.runtime import files
from nemo_oprd.runtime.files import (
    parse_json,
    partial_path,
    read_json,
    replacing,
    replacing_directory,
    write_atomically,
)


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def test_a_file_is_replaced_at_the_end_only(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("old")
    with replacing(path) as partial:
        partial.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert names(tmp_path) == {"metrics.jsonl"}


@pytest.mark.parametrize("error", [ValueError("a bad record"), KeyboardInterrupt()])
def test_a_body_that_raises_leaves_the_old_file(tmp_path: Path, error: BaseException) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("old")

    def write() -> None:
        with replacing(path) as partial:
            partial.write_text("ne")
            raise error

    with pytest.raises(type(error)):
        write()
    assert path.read_text() == "old"
    assert names(tmp_path) == {"metrics.jsonl"}


def test_a_partial_file_of_a_killed_process_is_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "best.json"
    partial_path(path).write_text("a long rest of a killed process")
    write_atomically(path, "gr\u00fcn\n")
    assert path.read_bytes() == "gr\u00fcn\n".encode()
    assert names(tmp_path) == {"best.json"}


@pytest.mark.parametrize("durable", [True, False])
def test_content_is_flushed_before_the_name_changes_and_the_name_afterwards(tmp_path: Path, durable: bool) -> None:
    """Otherwise a loss of power could leave the new name without content, or the old name."""
    path, seen = tmp_path / "state.json", []

    def flush(flushed: Path) -> None:
        seen.append((flushed, path.exists()))

    with mock.patch.object(files, "flush", flush), replacing(path, durable=durable) as partial:
        partial.write_text("x")
    assert seen == ([(partial_path(path), False), (tmp_path, True)] if durable else [])


def test_a_directory_is_replaced_at_the_end_only_and_flushed_at_any_depth(tmp_path: Path) -> None:
    path = tmp_path / "hf"
    path.mkdir()
    (path / "old").write_text("old")
    leftover = partial_path(path)
    leftover.mkdir()
    (leftover / "shard").write_text("of a killed process")
    flushed: list[str] = []
    record = mock.patch.object(files, "flush", lambda p: flushed.append(str(p.relative_to(tmp_path))))
    with record, replacing_directory(path) as partial:
        assert names(partial) == set()
        (partial / "below").mkdir()
        (partial / "below" / "new").write_text("new")
        assert names(path) == {"old"}
    assert names(path) == {"below"}
    assert names(tmp_path) == {"hf"}
    assert set(flushed) == {".partial_hf/below/new", ".partial_hf/below", ".partial_hf", "."}
    assert flushed[-1] == "."


def test_a_directory_that_must_not_be_overwritten_stays(tmp_path: Path) -> None:
    """Another process may have finished the same directory first; an empty one is replaced."""
    target = tmp_path / "model"
    with replacing_directory(target, overwrite=False) as partial:
        (partial / "mine").write_text("1")
        target.mkdir()
    assert [file.name for file in target.iterdir()] == ["mine"]
    with pytest.raises(OSError, match="not empty"), replacing_directory(target, overwrite=False) as partial:
        (partial / "theirs").write_text("2")
    assert [file.name for file in target.iterdir()] == ["mine"] and [*tmp_path.iterdir()] == [target]


def test_a_directory_whose_body_raises_is_left_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "hf"
    path.mkdir()
    (path / "old").write_text("old")

    def write() -> None:
        with replacing_directory(path) as partial:
            (partial / "new").write_text("new")
            raise ValueError("a missing tensor")

    with pytest.raises(ValueError, match="a missing tensor"):
        write()
    assert names(path) == {"old"}
    assert names(tmp_path) == {"hf"}


@pytest.mark.parametrize("writer", [replacing, replacing_directory])
@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), RuntimeError("PytorchStreamWriter failed writing")]
)
def test_a_full_disk_is_named_after_the_file(tmp_path: Path, writer: Any, error: Exception) -> None:
    with pytest.raises(OSError, match="No space left") as caught, writer(tmp_path / "hf"):
        raise error
    assert caught.value.filename == str(tmp_path / "hf")


def test_an_object_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"a": ["gr\u00fcn"]}', encoding="utf-8")
    assert read_json(tmp_path / "a.json", "an object", "copy it again") == {"a": ["gr\u00fcn"]}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "no such file"),
        (b"", r"not valid JSON \(Expecting value"),
        (b'{"a": ', r"not valid JSON \(Expecting value"),
        (b'{"a": "\xff"}', r"not valid JSON \('utf-8' codec"),
        (b"[" * 100_000, r"not valid JSON \(maximum recursion depth"),
        (b"[1]", "holds a list"),
        (b"null", "holds a NoneType"),
    ],
)
def test_everything_else_is_refused_with_one_line(tmp_path: Path, content: bytes | None, reason: str) -> None:
    file = tmp_path / "a.json"
    if content is not None:
        file.write_bytes(content)
    message = rf"a\.json: {reason}.* expected an object with rank[:;] copy it again$"
    with pytest.raises(ValueError, match=message) as caught:
        read_json(file, "an object with rank", "copy it again")
    assert "\n" not in str(caught.value)


def test_a_line_is_named_by_its_number() -> None:
    assert parse_json(b"[1]", "x.jsonl, line 2", "a row", "remove the line") == [1]
    with pytest.raises(ValueError, match=r"x\.jsonl, line 2: not valid JSON \(.*\); expected a row: remove the line"):
        parse_json("{", "x.jsonl, line 2", "a row", "remove the line")


def test_the_module_imports_nothing_heavy() -> None:
    code = "import sys, nemo_oprd.runtime.files; assert not {'torch', 'numpy', 'transformers'} & set(sys.modules)"
    ended = subprocess.run([sys.executable, "-c", code], env=dict(os.environ), capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


def test_what_is_no_file_is_not_read(tmp_path: Path) -> None:
    """Reading a pipe would wait for a writer, and reading /dev/zero would never end."""
    os.mkfifo(tmp_path / "config.json")
    (tmp_path / "link.json").symlink_to("nowhere")
    for name, what in (("config.json", r"is a named pipe \(FIFO\)"), ("link.json", "is a link to nowhere, which does")):
        with pytest.raises(ValueError, match=rf"{name}: {what}"):
            read_json(tmp_path / name, "an object", "copy it again")
    with pytest.raises(ValueError, match="/dev/zero: is a device; expected an object: copy it again"):
        read_json(Path("/dev/zero"), "an object", "copy it again")
