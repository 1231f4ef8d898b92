"""Files of rollouts that are written aside: the same bytes as `write_rollouts`, errors at the next call."""

from __future__ import annotations

import ast
import io
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from default_signals import default_signals

from nemo_oprd.batch.types import Rollout
from nemo_oprd.rollout.replay import write_rollouts
from nemo_oprd.run import rollout_lines, step_recorder
from nemo_oprd.run.step_recorder import RolloutFile, RolloutFiles
from nemo_oprd.runtime import background


def rollouts(count: int = 3, length: int = 50) -> list[Rollout]:
    draw, made = np.random.default_rng(0), []
    for i in range(count):
        logprobs = -draw.exponential(size=length).astype(np.float32)
        routes = draw.integers(0, 9, (length + 1, 3, 2)).astype(np.int16)
        made.append(
            Rollout(
                draw.integers(0, 99, 2), draw.integers(0, 99, length), draw.random(length) < 0.5, f"p\n{i}", None,
                "d", "4", "stop", [1], [2, 3], draw.integers(-1, 2, length), logprobs, [[7, 0, length]],
                routes if i else None,
            )
        )  # fmt: skip
    return [*made, Rollout([], [5], prompt="ü"), Rollout([5], [], [], logprobs=[])]  # type: ignore[arg-type]


def text(ids: Any) -> str:
    return "".join(chr(0x100 + i) for i in ids)


def children(of: int | None = None) -> list[int]:
    """Processes that a process (None: this one) has started and not waited for."""
    found: list[int] = []
    for task in Path(f"/proc/{of or os.getpid()}/task").iterdir():
        with suppress(FileNotFoundError):  # a thread that has ended meanwhile
            found += map(int, (task / "children").read_text().split())
    return sorted(found)


def test_the_same_bytes_as_written_in_the_way(tmp_path: Path) -> None:
    made = rollouts()
    share = [float("nan"), -1.5, 2.0, 0.0, 0.1]
    write_rollouts(tmp_path / "a.jsonl", made)
    with_text = [replace(each, response=text(each.response_ids)) for each in made]
    write_rollouts(tmp_path / "b.jsonl", with_text, loss_share=share)
    before = children()
    for decode, name, columns in ((None, "a", {}), (text, "b", {"loss_share": share})):
        files = RolloutFiles(decode)
        files.write([RolloutFile(tmp_path / "new" / f"{name}.jsonl", made, columns)])
        files.finish()
        assert (tmp_path / "new" / f"{name}.jsonl").read_bytes() == (tmp_path / f"{name}.jsonl").read_bytes()
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["a.jsonl", "b.jsonl"]
    assert children() == before


def test_the_run_goes_on_meanwhile_and_waits_at_the_end(tmp_path: Path) -> None:
    release = threading.Event()
    files = RolloutFiles(lambda ids: (release.wait(60) and "") or "")
    try:
        files.write([RolloutFile(tmp_path / name, rollouts()) for name in ("a.jsonl", "b.jsonl")])
        assert not (tmp_path / "a.jsonl").exists()
    finally:
        release.set()
    files.finish()
    assert [(tmp_path / name).read_bytes().count(b"\n") for name in ("a.jsonl", "b.jsonl")] == [5, 5]


def test_a_full_disk_is_told_at_the_next_step(tmp_path: Path) -> None:
    (tmp_path / ".partial_a.jsonl").symlink_to("/dev/full")
    files, before = RolloutFiles(None), children()
    files.write([RolloutFile(tmp_path / "a.jsonl", rollouts(count=40, length=5000))])
    with pytest.raises(OSError, match="No space left") as raised:
        files.write([RolloutFile(tmp_path / "b.jsonl", rollouts())])
    assert raised.value.filename == str(tmp_path / "a.jsonl")
    assert not [*tmp_path.iterdir()] and children() == before


def test_a_writer_that_dies_is_told(tmp_path: Path) -> None:
    before = children()
    files = RolloutFiles(lambda _: os.kill(({*children()} - {*before}).pop(), signal.SIGKILL) or "")  # type: ignore[func-returns-value]
    files.write([RolloutFile(tmp_path / "a.jsonl", rollouts())])
    with pytest.raises(RuntimeError, match=r"a.jsonl could not be written, its writer ended with -9: it was killed"):
        files.finish()
    assert not [*tmp_path.iterdir()]


def test_an_error_beside_another_one_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / ".partial_a.jsonl").symlink_to("/dev/full")
    files = RolloutFiles(None)
    files.write([RolloutFile(tmp_path / "a.jsonl", rollouts())])
    files.finish(failed=True)
    assert background.leave(60)
    assert "files of rollouts: [Errno 28] No space left on device" in caplog.text


def test_signals_to_the_job_do_not_end_the_writer(tmp_path: Path) -> None:
    """A scheduler sends them to every process of the job."""
    started, sent = subprocess.Popen, []

    def start(*arguments: Any, **settings: Any) -> subprocess.Popen:
        process = started(*arguments, preexec_fn=default_signals, **settings)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            process.send_signal(number)
            sent.append(number)
        return process

    files = RolloutFiles(None)
    with mock.patch.object(step_recorder.subprocess, "Popen", start):
        files.write([RolloutFile(tmp_path / "a.jsonl", rollouts())])
        files.finish()
    assert len(sent) == 3 and (tmp_path / "a.jsonl").read_bytes().count(b"\n") == 5


def test_the_writer_ends_with_the_run(tmp_path: Path) -> None:
    """A run that is killed leaves no process, and no file but a partial one."""
    program = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from nemo_oprd.batch.types import Rollout\n"
        "from nemo_oprd.run.step_recorder import RolloutFile, RolloutFiles\n"
        "files = RolloutFiles(lambda _: print('writing', flush=True) or time.sleep(60))\n"
        "files.write([RolloutFile(Path(sys.argv[1]) / 'a.jsonl', [Rollout([1], [2])])])\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None and run.stdout.readline() == "writing\n"
        writers = children(run.pid)
        run.kill()
    deadline = time.monotonic() + 30
    while any(Path(f"/proc/{pid}/cmdline").exists() and _is_writer(pid) for pid in writers):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert writers and [path.name for path in tmp_path.iterdir()] == [".partial_a.jsonl"]


def _is_writer(pid: int) -> bool:
    try:
        return b"rollout_lines" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def test_the_writer_imports_the_standard_library_alone() -> None:
    tree = ast.parse(Path(str(rollout_lines.__file__)).read_text())
    modules = {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    modules |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert modules <= sys.stdlib_module_names


def test_a_rollout_that_breaks_off_is_an_error() -> None:
    with pytest.raises(EOFError):
        rollout_lines.write_lines(io.BytesIO(b'[{"a": null}, {"a": ["i", [3]]}]\n1234'), io.BytesIO())
