"""Whose responses are whose, and how much they weigh."""

from __future__ import annotations

import numpy as np
import pytest

from nemo_oprd.batch.token_table import make_rows
from nemo_oprd.batch.types import Rollout
from nemo_oprd.config.schema import TeacherSource
from nemo_oprd.config.teacher_routing import Routing

SOME = TeacherSource("a", data_sources=["x", "y"], weight=0.5)
REST = TeacherSource("b", weight=3.0)


def test_by_data_source() -> None:
    assert Routing((SOME, REST)).teachers_of(["y", "z", None, "x"]) == [0, 1, 1, 0]
    assert Routing((REST, SOME)).teachers_of(["y", "z"]) == [1, 0]
    assert [Routing((SOME, REST)).example(i) for i in (0, 1)] == ["x", None]
    with pytest.raises(ValueError, match=r"data_source='z' has no teacher: expected one of \['x', 'y'\]"):
        Routing((SOME,)).teachers_of(["x", "z"])
    with pytest.raises(ValueError, match=r"data_source=None has no teacher"):
        Routing((SOME,)).teachers_of(["x", None])


def test_nobody_is_idle() -> None:
    Routing((SOME, REST)).check(["x", "y", "q"], "here")
    for found, message in (
        (["y", "q"], r"teachers\[0\].*'x'"),
        (["x", "y"], r"teachers\[1\].*that no other teacher names"),
    ):
        with pytest.raises(ValueError, match=f"{message}"):
            Routing((SOME, REST)).check(found, "here")
        Routing((SOME, REST)).check(found, "here", all_used=False)
    with pytest.raises(ValueError, match="here: data_source='z' has no teacher"):
        Routing((SOME,)).check(["z"], "here", all_used=False)


def test_weights_of_teachers() -> None:
    rollouts = [Rollout([1], [2, 3], data_source="x"), Rollout([1], [2], data_source="q")]
    table = make_rows(rollouts, positions="all", k=1, position="token", aggregation="sequence_mean")
    weighed = table.scale_responses(Routing((SOME, REST)).weights([0, 1]))
    np.testing.assert_allclose(weighed.weight, [0.125, 0.125, 1.5])
    np.testing.assert_allclose(table.weight, [0.25, 0.25, 0.5])
