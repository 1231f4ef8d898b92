"""The size of each room: it may fall freely, and rises only together with house_counts.json."""

from __future__ import annotations

import json

import pytest
from house_counts import FILE, PACKAGE, counts, imported

RECORDED = json.loads(FILE.read_text())
FOUND = counts()


def test_rooms_are_those_of_the_list() -> None:
    listed = (PACKAGE / "rooms.txt").read_text().split()
    assert sorted(FOUND) == sorted([".", *listed]) and len(listed) <= 17


@pytest.mark.parametrize("room", sorted(FOUND))
def test_a_room_grows_only_by_an_edit_of_the_counts(room: str) -> None:
    grown = {name: number for name, number in FOUND[room].items() if number > RECORDED[room][name]}
    assert not grown, (
        f"{room}: {grown}, recorded {RECORDED[room]}. Is the growth the price of a feature? Then "
        "`python tests/support/house_counts.py --write`, in the commit of the feature"
    )


def test_imports_are_seen_wherever_they_stand(tmp_path) -> None:
    file = tmp_path / "module.py"
    file.write_text("import a.b\ndef f():\n    from a import c\n    from a.d import name\n")
    assert imported(file, {"a", "a.b", "a.c", "a.d", "a.e"}) == {"a", "a.b", "a.c", "a.d"}
