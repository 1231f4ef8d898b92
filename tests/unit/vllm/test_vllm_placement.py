"""Which rank starts which vLLM server, on which GPUs, and how the weights get there."""

from __future__ import annotations

import re
from dataclasses import astuple
from typing import Any

import pytest

from nemo_oprd.config.rollout_schema import VllmConfig
from nemo_oprd.vllm.placement import ServerPlacement, dedicated_ranks, place_servers


def placed(machines: str, students: range, *, cuda: bool = False, **settings: Any) -> list[ServerPlacement]:
    """The servers of a job whose ranks are on the machines that `machines` names by one letter each.

    With `cuda` the ranks of a machine have its devices 0, 1, ...
    """
    devices = [str(machines[:rank].count(machine)) if cuda else None for rank, machine in enumerate(machines)]
    places = place_servers(VllmConfig(**settings), machines, devices, students)
    assert [place.number for place in places] == list(range(len(places)))
    return places


def short(places: list[ServerPlacement]) -> list[tuple]:
    """(controller, transport, devices) of each server."""
    return [(place.controller, place.transport, place.devices) for place in places]


@pytest.mark.parametrize(
    ("machines", "students", "settings", "expected"),
    [
        ("a", range(1), {}, [(0, "file", None)]),
        ("aaaa", range(4), {}, [(0, "file", None)]),
        ("aaaa", range(4), {"replicas": 3}, [(0, "file", None)] * 3),
        # one server per machine in turn, each started by the first rank there
        ("aabb", range(4), {"replicas": 3}, [(0, "file", None), (2, "file", None), (0, "file", None)]),
        ("aabb", range(4), {}, [(0, "file", None)]),
        ("aabb", range(4), {"replicas": 2, "tensor": 2}, [(0, "file", None), (2, "file", None)]),
        # machine b holds a dedicated teacher only
        ("aabb", range(2), {"replicas": 2}, [(0, "file", None)] * 2),
        # the student is not on the first ranks
        ("aabb", range(2, 4), {}, [(2, "file", None)]),
        ("aa", range(1, 2), {}, [(1, "file", None)]),
        ("aaaa", range(4), {"transport": "group"}, [(0, "group", None)]),
    ],
)
def test_colocated_without_cuda(machines: str, students: range, settings: dict, expected: list) -> None:
    places = placed(machines, students, **settings)
    assert short(places) == expected
    assert {place.workers for place in places} == {settings.get("tensor", 1)}
    assert not any(place.sleeps or place.url for place in places)


@pytest.mark.parametrize(
    ("machines", "students", "settings", "expected"),
    [
        ("aa", range(2), {}, [(0, "ipc", ("0",)), (0, "ipc", ("1",))]),
        ("aaaa", range(4), {"tensor": 2}, [(0, "ipc", ("0", "1")), (0, "ipc", ("2", "3"))]),
        ("aaaa", range(4), {"tensor": 2, "replicas": 1}, [(0, "ipc", ("0", "1"))]),
        # a rank that is left over has no server
        ("aaa", range(3), {"tensor": 2}, [(0, "ipc", ("0", "1"))]),
        ("aabb", range(4), {"tensor": 2}, [(0, "ipc", ("0", "1")), (2, "ipc", ("0", "1"))]),
        ("aabb", range(2), {}, [(0, "ipc", ("0",)), (0, "ipc", ("1",))]),
        ("aabb", range(2, 4), {}, [(2, "ipc", ("0",)), (2, "ipc", ("1",))]),
        ("aa", range(2), {"replicas": 1, "transport": "file"}, [(0, "file", ("0",))]),
        ("aa", range(2), {"replicas": 1, "transport": "ipc"}, [(0, "ipc", ("0",))]),
    ],
)
def test_colocated_with_cuda(machines: str, students: range, settings: dict, expected: list) -> None:
    """On the GPUs of the student, which are given back while nothing is sampled."""
    places = placed(machines, students, cuda=True, **settings)
    assert short(places) == expected
    assert all(place.sleeps for place in places)


@pytest.mark.parametrize(
    ("machines", "students", "cuda", "settings", "expected"),
    [
        ("aa", range(1), False, {}, [(0, "file", None)]),
        ("aaaa", range(2), False, {"replicas": 2}, [(0, "file", None)] * 2),
        # no student on machine b: its own first rank starts the server, and gets the weights through a group
        ("ab", range(1), False, {}, [(1, "group", None)]),
        ("aabb", range(2), False, {"tensor": 2}, [(2, "group", None)]),
        ("aaab", range(2), False, {"replicas": 2}, [(0, "file", None), (3, "group", None)]),
        # ranks between the student and the servers hold a dedicated teacher
        ("aabbb", range(2), False, {"replicas": 2}, [(2, "group", None)] * 2),
        ("aaaa", range(2), True, {"tensor": 2}, [(0, "group", ("2", "3"))]),
        ("aabb", range(2), True, {"replicas": 2}, [(2, "group", ("0",)), (2, "group", ("1",))]),
        ("aaaa", range(2), True, {"tensor": 2, "transport": "file"}, [(0, "file", ("2", "3"))]),
    ],
)
def test_dedicated(machines: str, students: range, cuda: bool, settings: dict, expected: list) -> None:
    places = placed(machines, students, cuda=cuda, placement="dedicated", **settings)
    assert short(places) == expected
    assert not any(place.sleeps for place in places)


def test_endpoints() -> None:
    """The first rank talks to all of them; where the host is this machine, files in shared memory reach them."""
    urls = ["http://127.0.0.1:1", "unix:///a/socket", "http://[::1]:3", "http://node7:4", "https://10.0.0.9"]
    places = placed("ab", range(2), endpoints=urls, tensor=2)
    assert [place.transport for place in places] == ["file"] * 3 + ["group"] * 2
    assert [place.url for place in places] == urls
    assert {astuple(place)[1:3] + astuple(place)[4:6] for place in places} == {(0, 2, None, False)}
    places = placed("ab", range(2), endpoints=urls, transport="group")
    assert [place.transport for place in places] == ["group"] * 5
    assert [place.transport for place in placed("a", range(1), endpoints=urls[:1], transport="file")] == ["file"]


@pytest.mark.parametrize(
    ("machines", "students", "cuda", "settings", "message"),
    [
        ("abab", range(4), True, {"tensor": 2}, "tensor=2: server 0 would have ranks [0, 1], which are on 2 machines"),
        ("aaab", range(4), True, {"tensor": 2}, "server 1 would have ranks [2, 3], which are on 2 machines"),
        (
            "aaab",
            range(2),
            False,
            {"tensor": 2, "placement": "dedicated"},
            "server 0 would have ranks [2, 3], which are on 2 machines; expected one: choose a divisor",
        ),
        ("aa", range(2), True, {"replicas": 3}, "replicas=3 servers on rollout.vllm.tensor=1 GPUs each need 3 GPUs"),
        ("aaaa", range(4), True, {"replicas": 3, "tensor": 2}, "each need 6 GPUs, but the student has 4; expected"),
        ("aa", range(1), True, {"tensor": 2}, "each need 2 GPUs, but the student has 1; expected at most that: lower"),
        ("a", range(1), False, {"transport": "ipc"}, "transport=ipc for server 0 needs the student on the same GPUs"),
        (
            "aa",
            range(1),
            True,
            {"transport": "ipc", "placement": "dedicated"},
            "transport=ipc for server 0 needs the student on the same GPUs",
        ),
        (
            "ab",
            range(1),
            False,
            {"transport": "file", "placement": "dedicated"},
            "transport=file for server 0 needs the student on the server's machine; expected group or auto",
        ),
        ("a", range(1), False, {"transport": "file", "endpoints": ["http://127.0.0.1", "http://b"]}, "for server 1"),
        ("a", range(1), False, {"transport": "ipc", "endpoints": ["http://127.0.0.1"]}, "transport=ipc for server 0"),
    ],
)
def test_what_is_impossible_is_refused(
    machines: str, students: range, cuda: bool, settings: dict, message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        placed(machines, students, cuda=cuda, **settings)


@pytest.mark.parametrize(
    ("settings", "ranks"),
    [
        ({}, 0),
        ({"replicas": 3, "tensor": 2}, 0),
        ({"placement": "dedicated"}, 1),
        ({"placement": "dedicated", "tensor": 2}, 2),
        ({"placement": "dedicated", "replicas": 3, "tensor": 2}, 6),
        ({"endpoints": ["http://a"], "tensor": 2}, 0),
    ],
)
def test_ranks_that_hold_servers_only(settings: dict, ranks: int) -> None:
    assert dedicated_ranks(VllmConfig(**settings)) == ranks


@pytest.mark.parametrize("settings", [{"replicas": 2}, {"placement": "dedicated"}])
def test_endpoints_exclude_servers_of_the_run(settings: dict) -> None:
    with pytest.raises(ValueError, match="expected either servers that are there or servers that this run starts"):
        VllmConfig(endpoints=["http://a"], **settings)
