"""The table of families: complete, in one line each, and printed without Megatron-Bridge."""

from __future__ import annotations

from unittest import mock

import pytest

from nemo_oprd.cli import main
from nemo_oprd.commands import families
from nemo_oprd.megatron.megatron_bridge.provider_fields import PLAIN, REFUSED
from nemo_oprd.models import FAMILIES
from nemo_oprd.models.megatron_bridge_families import KINDS, REFUSED_FAMILIES


@pytest.mark.parametrize(
    ("found", "says"), [(None, "is not installed here (scripts/"), (object(), "is installed here")]
)
def test_the_table_is_printed(capsys: pytest.CaptureFixture[str], found: object, says: str) -> None:
    with mock.patch.object(families, "find_spec", return_value=found):
        main(["families"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:-1]] == [*sorted(FAMILIES), *KINDS, *REFUSED_FAMILIES]
    assert says in lines[-1]
    assert [line.split()[1] for line in lines[1:-1]].count("refused") == len(REFUSED_FAMILIES)


def test_accepted_parts_are_those_that_others_are_refused_for() -> None:
    known = {*REFUSED, *PLAIN, "another softmax"}
    for name, kind in KINDS.items():
        assert kind.parts <= known, name
    assert not set(KINDS) & set(REFUSED_FAMILIES)
