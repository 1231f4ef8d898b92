"""Files with weights: shares of every stretch, whole epochs of every file, and an order that resumes anywhere."""

from __future__ import annotations

from fractions import Fraction

import pytest

from nemo_oprd.config.loading import load_config
from nemo_oprd.data.order import PromptOrder, exact_weights, prompt_order
from nemo_oprd.rollout.engine import Request
from nemo_oprd.rollout.schedule import TrainingPrompts, training_requests

SIZES = (5, 3, 11)
WEIGHTS = ([1, 1, 1], [3, 1, 0.5], [0.1, 0.7, 1.3], [1, 100, 0.01])


def by_definition(sizes: tuple[int, ...], weights: list[float], seed: int, count: int) -> list[int]:
    """The order by sorting the visits' times, each visit counted from the beginning."""
    exact = [Fraction(str(weight)) for weight in weights]
    visits = sorted(
        (Fraction(2 * k + 1) / (2 * weight), file, k) for file, weight in enumerate(exact) for k in range(count)
    )
    order = []
    for _, file, k in visits[:count]:
        offset = sum(sizes[:file])
        order.append(offset + prompt_order(sizes[file], seed, k, 1, stream=file)[0])
    return order


@pytest.mark.parametrize("weights", WEIGHTS, ids=str)
def test_order_is_the_visits_sorted_by_time(weights: list[float]) -> None:
    order = PromptOrder(SIZES, exact_weights(weights))
    assert order.indices(7, 0, 120) == by_definition(SIZES, weights, 7, 120)


@pytest.mark.parametrize("weights", WEIGHTS, ids=str)
@pytest.mark.parametrize("chunk", [1, 4, 19, 200])
def test_mixture_resumes_anywhere(weights: list[float], chunk: int) -> None:
    order = PromptOrder(SIZES, exact_weights(weights))
    whole = order.indices(3, 0, 300)
    assert [i for start in range(0, 300, chunk) for i in order.indices(3, start, chunk)][:300] == whole
    far = 10**12
    assert order.indices(3, far, 8) == order.indices(3, far, 3) + order.indices(3, far + 3, 5)


@pytest.mark.parametrize("weights", WEIGHTS, ids=str)
def test_every_stretch_has_the_shares(weights: list[float]) -> None:
    order = PromptOrder(SIZES, exact_weights(weights))
    ends = [sum(SIZES[: file + 1]) for file in range(3)]
    files = [next(file for file, end in enumerate(ends) if index < end) for index in order.indices(0, 0, 700)]
    for start in (0, 17, 300):
        for length in (10, 64, 400):
            for file, weight in enumerate(weights):
                expected = length * weight / sum(weights)
                assert abs(files[start : start + length].count(file) - expected) <= len(SIZES)


def test_a_file_visits_all_its_prompts_in_every_epoch() -> None:
    order = PromptOrder(SIZES, exact_weights([1, 4, 1])).indices(1, 0, 600)
    own = [index for index in order if 5 <= index < 8]
    assert len(own) == 400
    epochs = [own[start : start + 3] for start in range(0, 399, 3)]
    assert all(sorted(epoch) == [5, 6, 7] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 6  # every permutation


def test_files_of_one_size_have_different_orders() -> None:
    order = PromptOrder((50, 50), exact_weights([1, 1])).indices(1, 0, 100)
    first, second = ([i for i in order if i < 50], [i - 50 for i in order if i >= 50])
    assert sorted(first) == sorted(second) == list(range(50)) and first != second


def test_one_file_keeps_its_order_with_a_weight_and_files_without_weights_are_one_pool() -> None:
    plain = prompt_order(6, 1234, 3, 20)
    assert PromptOrder((6,)).indices(1234, 3, 20) == plain
    assert PromptOrder((6,), exact_weights([2.5])).indices(1234, 3, 20) == plain
    assert PromptOrder((2, 0, 4)).indices(1234, 3, 20) == plain


def test_mixture_is_the_same_in_every_version() -> None:
    """Fixed by value: a changed order would silently change what a resumed run trains on."""
    assert PromptOrder((4, 3), exact_weights([3, 1])).indices(5, 10, 12) == EXPECTED


EXPECTED = [4, 0, 1, 2, 6, 3, 1, 3, 5, 2, 0, 1]


def test_requests_of_a_step_are_those_at_its_positions() -> None:
    """Each prompt `rollout.per_prompt` times; two halves of a step are the step."""
    overrides = ["student.hf_path=a", "teacher.hf_path=b", "rollout.per_prompt=2", "seed=4"]
    config = load_config("verify", overrides)
    order = PromptOrder((3, 2), exact_weights([1, 2]))
    prompts = TrainingPrompts([Request([number]) for number in range(5)], order)
    requests = training_requests(prompts, config, 6, 4)
    assert [request.prompt_ids[0] for request in requests] == [i for i in order.indices(4, 6, 4) for _ in range(2)]
    halves = training_requests(prompts, config, 6, 2) + training_requests(prompts, config, 8, 2)
    assert requests == halves
