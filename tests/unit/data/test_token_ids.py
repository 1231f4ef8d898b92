"""Sets of token ids against Python's own sets."""

from __future__ import annotations

import random

import pytest

from nemo_oprd.data.token_ids import TokenIds


@pytest.mark.parametrize("seed", range(20))
def test_against_sets(seed: int) -> None:
    draw = random.Random(seed)
    limits = [draw.randint(1, 40) for _ in range(2)]
    one, other = ({i for i in range(limit) if draw.random() < 0.7} | {draw.randrange(limit)} for limit in limits)
    found, more = (TokenIds.of(draw.sample([*ids], len(ids)), 60) for ids in (one, other))
    assert {i for i in range(-2, 70) if i in found} == one and len(found) == len(one)
    assert found.mask.nonzero()[0].tolist() == sorted(one) and found.limit == max(one) + 1
    assert found == TokenIds.of(one, max(one) + 1) and TokenIds(**vars(found)) == found
    asked = [draw.randint(-2, 70) for _ in range(50)]
    assert found.outside(asked) == [i for i in asked if i not in one]
    missing = [i for start, end in found.missing_below(70) for i in range(start, end)]
    assert missing == [i for i in range(70) if i not in one]
    assert TokenIds.of(one, 10) == TokenIds.of({i for i in one if i < 10}, 60) if min(one) < 10 else True
    if one & other:
        assert found & more == TokenIds.of(one & other, 60)


def test_in_words() -> None:
    assert str(TokenIds(30)) == "0..29"
    assert str(TokenIds.of([1, 2, 6], 10)) == "0..6 without 0, 3..5"
    assert str(TokenIds.of([0, 2, 4, 6, 8], 10)) == "0..8 without 1, 3, 5, ..."
    with pytest.raises(ValueError, match="no id below 5 has a token"):
        TokenIds.of([7, 9], 5)
