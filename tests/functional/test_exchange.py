"""Packed arrays of single ranks reach every rank, over pretended machines."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from pool import Pools


@pytest.mark.parametrize(
    ("machines", "parts", "preferred", "leaders"),
    [
        ("a", [{4: 3, 7: 0}], (), [0]),
        ("aa", [{0: 5, 2: 1}, {1: 700}], (), [0]),
        ("ab", [{5: 40, 1: 3, 0: 0}, {}], (), [0, 1]),
        ("ab", [{}, {}], (), [0, 1]),
        ("abab", [{0: 1}, {3: 2, 9: 1000, 4: 5}, {}, {2: 77}], (3,), [0, 3]),
        ("aabb", [{}, {6: 10, 1: 11}, {}, {}], (1,), [1, 2]),
        ("abca", [{6: 10}, {}, {8: 1}, {1: 2}], (), [0, 1, 2]),
    ],
    ids=["one rank", "one machine", "one part", "nothing", "a leader that is not first", "no controller", "three"],
)
def test_every_rank_gets_every_item_as_it_was(
    pools: Pools,
    tmp_path: Path,
    machines: str,
    parts: list[dict[int, int]],
    preferred: tuple[int, ...],
    leaders: list[int],
) -> None:
    """And nothing keeps a name in shared memory."""
    arguments = {"folder": str(tmp_path), "machines": machines, "parts": parts, "preferred": preferred}
    keys, right, found, files, _ = pools[len(machines)].run("exchange_cases:share", **arguments)
    assert keys == sorted(key for part in parts for key in part)
    assert right
    assert found == leaders
    assert files == []


def test_no_object_collective_carries_tokens(pools: Pools, tmp_path: Path) -> None:
    """What is pickled grows with the digits of sizes, and not with the tokens or the responses."""
    few = [{1: 10, 2: 10}, {4: 10}]
    many = [dict.fromkeys(range(1, 300, 2), 1000), dict.fromkeys(range(2, 300, 2), 1000)]
    arguments = {"folder": str(tmp_path), "machines": "ab"}
    sent = [pools[2].run("exchange_cases:share", **arguments, parts=parts)[-1] for parts in (few, many)]
    assert 0 < sent[1] < sent[0] + 400


@pytest.mark.parametrize(("machines", "small"), [("ab", 1), ("aabb", 2), ("aab", 1)])
@pytest.mark.parametrize("both", [False, True], ids=["shared memory", "and disk"])
def test_a_machine_without_room(pools: Pools, tmp_path: Path, machines: str, small: int, both: bool) -> None:
    """It goes on with files on disk, and says so once; with neither, all ranks raise. Nothing is left."""
    folder, disk = (str(tmp_path / name) for name in ("memory", "disk"))
    for place in (folder, disk):
        Path(place).mkdir()
    arguments = {"folder": folder, "disk": disk, "machines": machines, "small": small}
    found = pools[len(machines)].run("exchange_cases:without_room", full=(folder, disk)[: 1 + both], **arguments)
    (said,) = found["said"]
    assert f"{folder} of " in said and "bytes of sampled responses don't fit (No space left on device); from" in said
    assert "in a temporary file (TMPDIR): enlarge /dev/shm (docker --shm-size)" in said and "\n" not in said
    assert found["on_disk"] == [machine == machines[small] for machine in machines]
    if both:
        assert f"{disk} of " in found["error"] and "enlarge /dev/shm (docker --shm-size), set TMPDIR" in found["error"]
        assert "\n" not in found["error"]
    else:
        assert found["error"] == ""


def test_shared_memory_of_one_megabyte(pools: Pools, tmp_path: Path) -> None:
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no tmpfs could be mounted (needs root)")
    try:
        (said,) = pools[2].run("exchange_cases:in_little_memory", folder=str(tmp_path), tokens=50_000)
        assert "don't fit (No space left on device)" in said
        assert pools[2].run("exchange_cases:in_little_memory", folder=str(tmp_path), tokens=500) == []
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_ranks_that_share_no_memory_are_told_apart(pools: Pools, tmp_path: Path) -> None:
    message = pools[2].run("exchange_cases:not_shared", folder=str(tmp_path), machines="aa")
    assert f"rank 1 can't open {tmp_path}/nemo_oprd_shared_" in message and "of the same machine" in message


@pytest.mark.parametrize("machines", ["a", "ab"])
def test_rollouts_that_the_first_rank_has_read(pools: Pools, machines: str) -> None:
    (right, few), (still, many) = pools[len(machines)].run("exchange_cases:rollouts_of_first_rank", machines=machines)
    assert right and still
    assert many < few + 100


def test_objects_stay_in_host_memory_over_nccl(pools: Pools) -> None:
    """With a group that only says that it is NCCL."""
    assert pools[2].run("exchange_cases:backends_over_nccl") == ["gloo"]
