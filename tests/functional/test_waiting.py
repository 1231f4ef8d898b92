"""How long ranks wait for each other."""

from __future__ import annotations

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
