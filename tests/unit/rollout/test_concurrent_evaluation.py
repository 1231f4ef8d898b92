"""An evaluation that is sampled in one call with the responses of a step."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nemo_oprd.batch.types import Rollout
from nemo_oprd.data.token_ids import TokenIds
from nemo_oprd.rollout.concurrent_evaluation import EngineWithEvaluation, EvaluationRequests
from nemo_oprd.rollout.engine import EVALUATION_STREAM, TRAINING_STREAM, GenerationCancelled, Request, SamplingParams
from nemo_oprd.vllm.sampler import Task

TRAINING, EVALUATION = (
    SamplingParams(1.0, 1.0, 8, (0, TRAINING_STREAM, 3)),
    SamplingParams(0.7, 0.9, 4, (0, EVALUATION_STREAM, 1)),
)


class Engine:
    """Answers request i with id i, and keeps each response; the first `complete` of them, if it is cancelled."""

    def __init__(self, complete: int | None = None) -> None:
        self.complete = complete

    def submit(self, requests: list[Request], sampling: SamplingParams, done: Any, keep: Any) -> Any:
        return SimpleNamespace(requests=requests, sampling=sampling, done=done, keep=keep)

    def collect(self, handle: Any, should_cancel: Any, *, last: bool) -> list[Rollout]:
        rollouts = [Rollout([1], [i]) for i in range(len(handle.requests))]
        for i, rollout in enumerate(rollouts[: self.complete]):
            if handle.keep is not None:
                handle.keep({i: rollout})
        if self.complete is not None:
            raise GenerationCancelled(dict(enumerate(rollouts[: self.complete])))
        return rollouts

    def gather(self, handle: Any, enough: Any, should_cancel: Any = None) -> dict[int, Rollout]:
        """One response at a time is complete, the last ones first."""
        found = dict[int, Rollout]()
        while not enough({*handle.done, *found}):
            index = len(handle.requests) - 1 - len(handle.done) - len(found)
            found[index] = Rollout([1], [index], finish_reason="stop")
        handle.done |= found
        return found

    def cut(self, handle: Any, should_cancel: Any = None) -> dict[int, Rollout]:
        return {i: Rollout([1], [i]) for i in range(len(handle.requests)) if i not in handle.done}


def added() -> tuple[EvaluationRequests, dict[int, Rollout], list[Rollout]]:
    kept, taken = dict[int, Rollout](), list[Rollout]()
    return (
        EvaluationRequests([Request([5], sampled=(EVALUATION, i)) for i in range(3)], kept.update, taken.extend),
        kept,
        taken,
    )


def test_it_goes_with_the_next_call_and_no_other() -> None:
    engine, (added_requests, kept, taken) = EngineWithEvaluation(Engine()), added()  # type: ignore[arg-type]
    engine.add(added_requests)
    of_training: dict[int, Rollout] = {}
    handle = engine.submit([Request([1]), Request([2])], TRAINING, {}, of_training.update)
    assert [request.prompt_ids for request in handle.requests] == [[1], [2], [5], [5], [5]]
    assert [rollout.response_ids.tolist() for rollout in engine.collect(handle)] == [[0], [1]]
    assert {i: rollout.response_ids.tolist() for i, rollout in kept.items()} == {0: [2], 1: [3], 2: [4]}
    assert sorted(of_training) == [0, 1] and [rollout.response_ids.tolist() for rollout in taken] == [[2], [3], [4]]
    again = engine.submit([Request([1])], TRAINING)
    assert len(again.requests) == 1 and again.keep is None and len(engine.collect(again)) == 1
    engine.add(added_requests)
    engine.drop()
    assert len(engine.submit([Request([1])], TRAINING).requests) == 1


@pytest.mark.parametrize("wanted", [0, 1, 2])
def test_it_is_complete_before_a_call_is_cut(wanted: int) -> None:
    """Whatever was gathered of training's responses; training never sees those of the evaluation."""
    engine, (added_requests, _, taken) = EngineWithEvaluation(Engine()), added()  # type: ignore[arg-type]
    engine.add(added_requests)
    handle = engine.submit([Request([1]), Request([2])], TRAINING, {})
    found = engine.gather(handle, lambda complete: len(complete) >= wanted)
    assert sorted(found) == [[], [1], [0, 1]][wanted]
    rest = engine.cut(handle)
    assert sorted([*found, *rest]) == [0, 1]
    assert [rollout.response_ids.tolist() for rollout in taken] == [[2], [3], [4]]
    assert all(rollout.finish_reason == "stop" for rollout in taken), "nothing of it is cut"
    assert engine.cut(engine.submit([Request([1])], TRAINING, {}))[0].finish_reason is None


def test_what_is_complete_of_a_cancelled_call() -> None:
    """Training gets its own responses back; those of the evaluation are kept already."""
    engine, (added_requests, kept, taken) = EngineWithEvaluation(Engine(complete=4)), added()  # type: ignore[arg-type]
    engine.add(added_requests)
    handle = engine.submit([Request([1]), Request([2])], TRAINING)
    with pytest.raises(GenerationCancelled) as cancelled:
        engine.collect(handle)
    assert sorted(cancelled.value.completed) == [0, 1] and sorted(kept) == [0, 1] and not taken


def test_servers_sample_it_as_if_it_were_alone(tmp_path: Path) -> None:
    """The parameters and the seed of a request do not depend on the call that it is in."""
    added_requests, *_ = added()
    limits = 100, (1,), TokenIds(50), 60.0
    joined = Task([Request([1]), *added_requests.requests], TRAINING, *limits)
    alone = Task([Request([5])] * 3, EVALUATION, *limits)
    assert [joined.body(1 + i) for i in range(3)] == [alone.body(i) for i in range(3)]
    assert joined.body(0) == Task([Request([1])], TRAINING, *limits).body(0)
    assert joined.body(0)["sampling_params"]["temperature"] != joined.body(1)["sampling_params"]["temperature"]
