"""How long ranks wait for each other."""

from __future__ import annotations

from pathlib import Path

import pytest
from pool import Pools


def test_nothing_ends_the_wait_for_a_late_rank(pools: Pools) -> None:
    found = pools[2].run("waiting_cases:wait_for_the_late", late_s=2.0)
    assert found["waited_s"] > 1.0  # of the 2 s that the other rank is late
    assert found["signals"] > 0


def test_the_store_does_not_grow_with_the_meetings(pools: Pools) -> None:
    few, many = pools[2].run("waiting_cases:keys_after", meetings=[2, 20])
    assert few == many


def test_subgroups_wait_as_long_as_the_world(pools: Pools) -> None:
    assert pools[2].run("waiting_cases:timeouts") == [3 * 3600.0] * 3


def test_a_rank_says_for_whom_it_waits_and_signals_end_it(pools: Pools, tmp_path: Path) -> None:
    """Others were never started, or something else listens where the first one should."""
    found = pools.once(1, "waiting_cases:all_alone", directory=tmp_path)
    assert {name: case["code"] for name, case in found.items()} == {
        "first": 75, "first, Slurm": 75, "first, Ctrl-C": 130, "other": 75, "other, mute": 130, "other, http": 75,
        "in use": 2,
    }  # fmt: skip
    assert max(case["seconds"] for case in found.values()) < 5
    at = "MASTER_ADDR:MASTER_PORT = 127.0.0.1:PORT"
    later = " (rank 0 waits for endpoints before it joins)"
    missing = f"waiting for rank(s) 1-2 of 3, limit 3 h: start them with {at} and WORLD_SIZE=3, or see why they ended"
    missing += later
    stopped = "while waiting for rank(s) 1-2 of 3; the same command starts again"
    alike = f"all ranks need the same MASTER_ADDR and MASTER_PORT{later}"
    assert found["first"]["said"][0] == missing and found["first"]["said"][-1] == f"stopped by SIGTERM {stopped}"
    assert found["first, Slurm"]["said"][-1] == f"stopped by SIGUSR1 {stopped}"
    assert set(found["first, Ctrl-C"]["said"]) == {missing}
    assert set(found["other"]["said"]) == {
        f"rank 1: waiting for rank(s) 0 at {at}, limit 3 h: nothing listens there (Connection refused); {alike}"
    }
    for name in ("other, mute", "other, http"):
        assert set(found[name]["said"]) == {
            f"rank 2: waiting for rank(s) 0 at {at}, limit 3 h: what listens there is not this job's store; {alike}"
        }
    (in_use,) = found["in use"]["said"]
    assert in_use.startswith("error: MASTER_PORT=PORT is in use by another program of this machine")


def test_the_first_rank_that_is_there_names_the_missing_ones(pools: Pools) -> None:
    said = pools.once(4, "waiting_cases:late", late_s=2.0)
    assert said and {line.partition(", limit")[0] for line in said} == {"waiting for rank(s) 2-3 of 4"}


@pytest.mark.parametrize("command", ["train", "evaluate", "doctor"])
def test_servers_of_others_are_asked_before_ranks_join(pools: Pools, tmp_path: Path, command: str) -> None:
    found = pools.once(1, "waiting_cases:without_endpoint", command=command, directory=tmp_path)
    key = "teacher.vllm" if command == "doctor" else "rollout.vllm"
    (line,) = found["said"]
    assert f"waited 1 s, which is the limit, for endpoint http://127.0.0.1:9 of {key}.endpoints: it does not" in line
    assert (found["code"], found["joined"]) == (1 if command == "doctor" else 2, False)
