"""Which rank starts a teacher's server, and which ranks ask it."""

from __future__ import annotations

import pytest

from nemo_oprd.config.loading import load_config
from nemo_oprd.teacher_servers.servers import place


def placed(settings: list[str], machines: str, readers: range, *, cuda: bool = False) -> list[tuple]:
    """(Controller, readers, devices) of each server; `machines`: a letter per rank."""
    base = ["student.hf_path=a", "teacher.hf_path=b", "output=o", "teacher.engine=vllm"]
    config = load_config("verify", [*base, *(f"teacher.vllm.{each}" for each in settings)])
    devices = [str(machines[:rank].count(name)) if cuda else None for rank, name in enumerate(machines)]
    return [(each.controller, each.readers, each.devices) for each in place(config, machines, devices, readers)]


def test_without_gpus_one_server_and_every_rank_asks_it() -> None:
    assert placed([], "aaaa", range(4)) == [(0, (0, 1, 2, 3), None)]
    assert placed(["replicas=2"], "aabb", range(4)) == [(0, (0, 1), None), (2, (2, 3), None)]


def test_with_gpus_beside_the_student_or_on_the_last_ranks() -> None:
    assert placed(["tensor=2"], "aaaa", range(4), cuda=True) == [
        (0, (0, 1, 2, 3), ("0", "1")),
        (0, (0, 1, 2, 3), ("2", "3")),
    ]
    dedicated = ["placement=dedicated", "tensor=2"]
    assert placed(dedicated, "aaaa", range(2), cuda=True) == [(0, (0, 1), ("2", "3"))]
    # the last rank of all holds a server of the student's samples
    assert placed(["placement=dedicated"], "aaaa", range(2), cuda=True) == [(0, (0, 1), ("2",))]


def test_states_do_not_cross_machines() -> None:
    with pytest.raises(
        ValueError, match=r"replicas=None: b would have no server of the teacher; expected one on every"
    ):
        placed([], "ab", range(2))
    with pytest.raises(
        ValueError, match=r"server 0 would be on b, where no rank of the student is; expected one there"
    ):
        placed(["placement=dedicated"], "aab", range(2))
