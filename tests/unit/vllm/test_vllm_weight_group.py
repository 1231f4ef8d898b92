"""A member of the group of weights waits for no other one for longer than a deadline, and tells the others why."""

from __future__ import annotations

import datetime
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from nemo_oprd.vllm.weight_group import WeightGroup
from nemo_oprd.vllm.worker import nemo_oprd_group
from nemo_oprd.vllm.worker.nemo_oprd_buckets import Bucket, receive_all, send
from nemo_oprd.vllm.worker.nemo_oprd_group import Group, TransferEnded

TIMEOUT = datetime.timedelta(seconds=60)
# the second of three members: it joins, and then takes part in nothing
ABSENT = """
import datetime, os, signal, sys, time, torch, torch.distributed as dist
from nemo_oprd_group import Group
store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False, timeout=datetime.timedelta(seconds=60))
Group(store, "test", 1, 3, "gloo", torch.device("cpu"), 60).open()
if sys.argv[2] == "killed":
    store.wait(["kill"])
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(600)
"""


@pytest.fixture
def store() -> Any:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)


@pytest.fixture
def absent(store: Any, request: pytest.FixtureRequest) -> Iterator[subprocess.Popen]:
    folder = Path(nemo_oprd_group.__file__).parent
    process = subprocess.Popen(
        [sys.executable, "-c", ABSENT, str(store.port), request.param], env={"PYTHONPATH": str(folder)}
    )
    yield process
    process.kill()
    process.wait()


def member(store: Any, rank: int, timeout_s: float, size: int = 3) -> Group:
    return Group(store.clone(), "test", rank, size, "gloo", torch.device("cpu"), timeout_s)


def bucket() -> Bucket:
    """Larger than what sockets hold, so that sending it takes a member who receives it."""
    made = Bucket([], torch.empty(1 << 25, dtype=torch.uint8))
    made.add("a", torch.ones(1 << 22))
    return made.trimmed()


def send_until_it_ends(group: Group) -> None:
    for _ in range(100):
        send(group, bucket())


@pytest.mark.parametrize("absent", ["hanging", "killed"], indirect=True)
def test_a_member_that_takes_part_in_nothing(store: Any, absent: subprocess.Popen, request: Any) -> None:
    """The first rank gives up within its deadline, and the third one leaves because it says so."""
    first, third = member(store, 0, 60.0), member(store, 2, 60.0)
    with ThreadPoolExecutor(2) as pool:
        opening = [pool.submit(group.open) for group in (first, third)]
        for opened in opening:
            opened.result(60)
        first._timeout_s = 2.0
        store.set("kill", "now")
        if request.node.callspec.params["absent"] == "killed":
            absent.wait()
        began = time.monotonic()
        receiving = pool.submit(receive_all, third, lambda _: None)
        with pytest.raises(RuntimeError) as gave_up:
            send_until_it_ends(first)
        first.end(str(gave_up.value))
        assert time.monotonic() - began < 30  # of the others' 60
        with pytest.raises(RuntimeError):
            receiving.result(30)
        assert time.monotonic() - began < 40
    by, why = first.over() or (None, "")
    assert by is None and why


def test_the_reason_of_the_member_who_refused_is_heard(store: Any) -> None:
    groups = [member(store, rank, 60.0) for rank in range(3)]

    def refuse(_: Bucket) -> None:
        raise ValueError("a layer of another shape")

    with ThreadPoolExecutor(3) as pool:
        for opened in [pool.submit(group.open) for group in groups]:
            opened.result(60)
        receiving = [pool.submit(receive_all, groups[1], refuse), pool.submit(receive_all, groups[2], lambda _: None)]
        with pytest.raises(RuntimeError):
            send_until_it_ends(groups[0])
        groups[0].end("it broke")
        with pytest.raises(ValueError, match="another shape"):
            receiving[0].result(10)
        with pytest.raises(RuntimeError):
            receiving[1].result(10)
    assert groups[0].over() == (1, "ValueError: a layer of another shape")


def test_who_waits_for_others_to_join_is_told(store: Any) -> None:
    """A member that died before it joined: nobody begins to connect, which could not be interrupted."""
    group = member(store, 0, 60.0, size=2)
    with ThreadPoolExecutor(1) as pool:
        opening = pool.submit(group.open)
        time.sleep(0.3)
        member(store, 1, 60.0, size=2).end("its server died")
        with pytest.raises(TransferEnded, match="its server died"):
            opening.result(5)


def test_a_deadline_for_joining(store: Any) -> None:
    with pytest.raises(TransferEnded, match="joining took longer than 1 s: a member does not take part"):
        member(store, 0, 1.0, size=2).open()


@pytest.mark.parametrize(
    "error", [RuntimeError("a member left"), socket.gaierror("no such host")], ids=["member", "host"]
)
def test_a_group_that_does_not_open_ends_the_transfer(error: Exception) -> None:
    """The caller reads the reason in `ended`, and sends nothing; an error would leave the other ranks waiting."""
    group, future = WeightGroup([], torch.device("cpu")), Future[Group]()
    future.set_exception(error)
    group.opened(future)
    group.send(None)
