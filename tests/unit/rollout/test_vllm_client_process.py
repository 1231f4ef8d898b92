"""The client process of a vLLM controller: what it imports, its end, and how responses get to the controller."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from nemo_oprd.rollout.vllm import segments
from nemo_oprd.rollout.vllm.channel import Channel
from nemo_oprd.rollout.vllm.client_process import MODULE, ClientProcess
from nemo_oprd.rollout.vllm.segments import SegmentReader, SegmentWriter


def gone(process: int) -> bool:
    """Whether a process has ended, within some seconds."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            if (Path("/proc") / str(process) / "stat").read_text().rsplit(")", 1)[1].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.02)
    return False


def test_it_imports_neither_torch_nor_megatron() -> None:
    code = f"import sys, {MODULE}; print([m for m in ('torch', 'megatron', 'transformers') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_it_ends_when_its_parent_is_killed() -> None:
    code = (
        "import time; from nemo_oprd.rollout.vllm.client_process import ClientProcess; "
        "print(ClientProcess().pid, flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert not gone_now(child)
        parent.kill()
    assert gone(child)


def gone_now(process: int) -> bool:
    return not (Path("/proc") / str(process)).exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signals_to_the_job_leave_it_to_its_parent(number: signal.Signals) -> None:
    """It ends when it is closed."""
    client = ClientProcess()
    child = client.pid
    assert child is not None
    deadline = time.monotonic() + 20
    while not ignores(child, number) and time.monotonic() < deadline:
        time.sleep(0.05)  # it is starting
    os.kill(child, number)
    time.sleep(0.1)
    assert client._process is not None and client._process.poll() is None
    client.close()
    assert gone(child)


def ignores(process: int, number: signal.Signals) -> bool:
    status = (Path("/proc") / str(process) / "status").read_text()
    mask = int(next(line.split()[1] for line in status.splitlines() if line.startswith("SigIgn")), 16)
    return bool(mask & (1 << (number - 1)))


def test_messages_and_files_arrive_in_order(tmp_path: Path) -> None:
    ours, theirs = (Channel(end) for end in socket.socketpair())
    with (tmp_path / "one").open("w+b") as one, (tmp_path / "two").open("w+b") as two:
        one.write(b"1")
        two.write(b"2")
        one.flush()
        two.flush()
        ours.send({"kind": "a"})
        ours.send({"kind": "b"}, one.fileno())
        ours.send({"kind": "c", "text": "\u00e4" * 9000}, two.fileno())
        ours.close()
    assert theirs.receive() == {"kind": "a"}
    assert theirs.receive() == {"kind": "b"}
    first = theirs.take_file()
    assert theirs.receive() == {"kind": "c", "text": "\u00e4" * 9000}
    assert [os.pread(file, 9, 0) for file in (first, theirs.take_file())] == [b"1", b"2"]
    os.close(first)
    assert theirs.receive() is None
    theirs.close()


def test_responses_are_mapped_and_leave_no_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """In several segments, one of them for a response that is longer than a segment."""
    monkeypatch.setattr(segments, "SEGMENT_BYTES", 64)
    reader, files = SegmentReader(), []
    writer = SegmentWriter(lambda file: files.append(os.dup(file)))
    before = set(os.listdir("/dev/shm"))
    wanted = [np.arange(count, dtype=np.int32) + count for count in (3, 4, 5, 100, 1)]
    places = [writer.write(ids, -ids.astype(np.float32)) for ids in wanted]
    assert [segment for segment, _ in places] == [0, 0, 1, 2, 3]
    for file in files:
        reader.add(file)
    writer.close()
    assert set(os.listdir("/dev/shm")) <= before
    for ids, (segment, offset) in zip(wanted, places, strict=True):
        found, logprobs = reader.response(segment, offset, len(ids))
        assert not found.flags.writeable
        np.testing.assert_array_equal(found, ids)
        np.testing.assert_array_equal(logprobs, -ids.astype(np.float32))
