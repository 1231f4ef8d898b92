"""The client process of a vLLM controller: what it imports, its end, and how responses get to the controller."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from default_signals import default_signals

from nemo_oprd.vllm import channel
from nemo_oprd.vllm.channel import Channel, SegmentReader, SegmentWriter
from nemo_oprd.vllm.client_main import ToldRound
from nemo_oprd.vllm.client_process import MODULE, ClientProcess


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
        "import time; from nemo_oprd.vllm.client_process import ClientProcess; "
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
    with mock.patch.object(subprocess, "Popen", partial(subprocess.Popen, preexec_fn=default_signals)):
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


class OneTurn:
    """In place of a channel and of a client: notes messages, and answers every request in the next turn."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []

    def send(self, message: dict[str, Any], file: int | None = None) -> None:
        self.sent.append(message)

    async def post(self, *_: Any, **__: Any) -> bytes:
        await asyncio.sleep(0)
        spans, logprobs = [{"version": "1-a", "start": 0, "end": 1}], {"content": [{"logprob": -1.0}]}
        choice = {"token_ids": [1], "weight_versions": spans, "logprobs": logprobs, "finish_reason": "stop"}
        return json.dumps({"choices": [choice]}).encode()

    async def watch(self, _: Any) -> str:
        await asyncio.Event().wait()
        return "never"


def test_what_arises_in_one_turn_goes_in_one_message() -> None:
    """Claims in the order of the servers; claims that get less than they ask for are the last ones."""
    fake, body = OneTurn(), {"sampling_params": {"max_tokens": 4}}
    servers = [{"number": number, "in_flight": 8} for number in range(2)]
    limits = {"version": "1-a", "known_ids": {"limit": 9, "gaps": ()}, "timeout_s": 9.0, "slots": 4, "asked": 0.0}

    async def carry_out() -> None:
        made: Any = ToldRound(fake, fake, {"servers": servers, "asked": time.monotonic(), **limits})  # type: ignore[arg-type]
        work = asyncio.create_task(made.run())
        for count in (8, 5):
            while not fake.sent or fake.sent[-1].get("claims") != 8:
                await asyncio.sleep(0)
            fake.sent[-1] = dict(fake.sent[-1], claims="answered")
            made.claimed([(i, body) for i in range(count)])
        await work

    asyncio.run(asyncio.wait_for(carry_out(), 10))
    first, segment, second, third, over = fake.sent
    assert (first["kind"], first["responses"], segment, over["kind"]) == ("news", [], {"kind": "segment"}, "over")
    assert [(each["index"], each["server"]) for each in second["responses"]] == [(i, i // 4) for i in range(8)]
    assert (third["claims"], [each["index"] for each in third["responses"]]) == (0, list(range(5)))


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
    monkeypatch.setattr(channel, "SEGMENT_BYTES", 64)
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
