"""Which rank starts a teacher's server, and which ranks ask it."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from nemo_oprd.config.loading import load_config
from nemo_oprd.run.checks import make_layouts, reader_layout, trainer_ranks
from nemo_oprd.vllm import teacher_servers
from nemo_oprd.vllm.teacher_servers import place


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


def test_dedicated_servers_of_several_teachers_have_ranks_of_their_own() -> None:
    """In the order of the teachers, of which the second one is in the trainer and the last one is served elsewhere."""
    entries = [
        "{hf_path: a, data_sources: [x], engine: vllm}", "{hf_path: b, data_sources: [y]}",
        "{hf_path: c, data_sources: [z], engine: vllm}", "{hf_path: d, engine: vllm, endpoints: ['http://d:1']}",
    ]  # fmt: skip
    more = ["teacher.vllm.placement=dedicated", "teacher.vllm.tensor=2"]
    config = load_config("verify", ["student.hf_path=s", "output=o", f"teachers=[{', '.join(entries)}]", *more])
    assert (config.served_teachers, config.started_teachers) == ([0, 2, 3], [0, 2])
    assert trainer_ranks(config, 8) == 4
    devices = [str(rank) for rank in range(8)]
    found = [place(config, "a" * 8, devices, range(4), first=first)[0] for first in (4, 6)]
    assert [each.devices for each in found] == [("4", "5"), ("6", "7")]
    with pytest.raises(ValueError, match=r"4 rank\(s\) of servers leaves none of the 4 rank\(s\)"):
        trainer_ranks(config, 4)


def test_dedicated_servers_are_behind_a_dedicated_teacher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 8 ranks 0 to 3 are the student's, 4 and 5 the second teacher's, and 6 and 7 have servers of the others."""
    entries = [
        "{hf_path: a, data_sources: [x], engine: vllm}",
        "{hf_path: b, data_sources: [y]}",
        "{hf_path: c, engine: vllm}",
    ]
    more = ["teacher.placement=dedicated", "teacher.ranks=2", "teacher.parallel.tensor=2", "student.parallel.tensor=4"]
    more.append("teacher.vllm.placement=dedicated")
    config = load_config("verify", ["student.hf_path=s", "output=o", f"teachers=[{', '.join(entries)}]", *more])
    student, teacher = make_layouts(config, 8)
    assert (student.size, teacher.first_rank, teacher.size) == (4, 4, 2)
    asked: dict[int, int | None] = {}

    def stop(
        _config: Any, _machines: Any, _devices: Any, _readers: Any, _endpoints: Any, first: int | None
    ) -> list[Any]:
        asked[len(asked)] = first
        raise RuntimeError

    monkeypatch.setattr(teacher_servers, "place", stop)
    monkeypatch.setattr(teacher_servers, "machines_and_devices", lambda _: (["a"] * 8, ["0"] * 8))
    monkeypatch.setattr(teacher_servers, "device", lambda: torch.device("cpu"))
    for number in config.started_teachers:
        with pytest.raises(RuntimeError):
            teacher_servers.TeacherServers(
                config, number, mock.Mock(), reader_layout(student), trainer_ranks(config, 8)
            )
    assert [*asked.values()] == [6, 7]
    devices = [str(rank) for rank in range(8)]
    assert [place(config, "a" * 8, devices, range(4), (), first)[0].devices for first in (6, 7)] == [("6",), ("7",)]


def test_states_do_not_cross_machines() -> None:
    with pytest.raises(
        ValueError, match=r"replicas=None: b would have no server of the teacher; expected one on every"
    ):
        placed([], "ab", range(2))
    with pytest.raises(
        ValueError, match=r"server 0 would be on b, where no rank of the student is; expected one there"
    ):
        placed(["placement=dedicated"], "aab", range(2))


def test_servers_that_somebody_else_runs_are_asked_by_all_and_proven_by_the_first() -> None:
    """On whatever machine; no rank starts one."""
    config = load_config("verify", ["student.hf_path=a", "teacher.hf_path=b", "output=o", "teacher.engine=vllm"])
    urls = ["http://c:1", "unix:///tmp/socket"]
    found = place(config, "aabb", [None] * 4, range(1, 4), urls)
    assert [(each.controller, each.readers, each.devices) for each in found] == [(1, (1, 2, 3), None)] * 2
    assert [each.url for each in found] == urls


def test_each_teacher_has_its_own_addresses() -> None:
    """Those of its entry, else those of `teacher.vllm`."""
    entries = "{hf_path: a, data_sources: [x], engine: vllm, endpoints: ['http://a:1']}, "
    entries += "{hf_path: b, data_sources: [y], engine: vllm}, {hf_path: c}"
    settings = ["student.hf_path=a", "output=o", f"teachers=[{entries}]", "teacher.vllm.endpoints=['http://b:1']"]
    config = load_config("verify", settings)
    assert config.served_teachers == [0, 1] and config.has_own_teachers
    assert [config.teacher_endpoints(number) for number in (0, 1)] == [["http://a:1"], ["http://b:1"]]
