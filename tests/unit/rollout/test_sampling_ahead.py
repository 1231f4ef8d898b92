"""`RolloutSampler` with `rollout.max_lag`: what it asks an engine for, and when."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from nemo_oprd.batch import types
from nemo_oprd.batch.types import Rollout
from nemo_oprd.config.loading import load_config
from nemo_oprd.data.order import PromptOrder
from nemo_oprd.rollout import resume_cache, schedule, training_rollouts
from nemo_oprd.rollout.concurrent_evaluation import EngineWithEvaluation, EvaluationRequests
from nemo_oprd.rollout.engine import GenerationCancelled, Request, Weights
from nemo_oprd.rollout.resume_cache import ResumeCache
from nemo_oprd.rollout.schedule import Schedule, TrainingPrompts, schedule_settings
from nemo_oprd.rollout.training_rollouts import RolloutSampler, StoppedSampling

STEPS = 8


class VersionedEngine:
    """Notes what it is asked for, and stamps responses; those of the step `cancelled` are not complete."""

    weights: Weights

    def step(self) -> None:
        """Takes the weights after one more step."""
        self.weights = Weights(self.weights.steps + 1, f"digest of {self.weights.steps + 1}")

    def __init__(self, version: int = 0, cancelled: int = -1) -> None:
        self.calls, self.cancelled, self.metrics = list[tuple[str, int]](), cancelled, {}
        self.weights = Weights(version, f"digest of {version}")

    def submit(self, requests: list[Request], params: Any, *_: Any) -> Any:
        self.calls.append(("submit", params.key[-1]))
        return SimpleNamespace(requests=requests, step=params.key[-1], served={}, submitted=0.0)

    def collect(self, handle: Any, *_: Any, **__: Any) -> list[Rollout]:
        self.calls.append(("collect", handle.step))
        one = Rollout([1], [handle.step], weight_versions=[[self.weights.steps, 0, 1]], finish_reason="stop")  # type: ignore[arg-type]
        sampled = [one for _ in handle.requests]
        if handle.step == self.cancelled:
            raise GenerationCancelled({0: sampled[0]})
        return sampled

    def rest(self) -> None:
        pass


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank, and a teacher that reads what the student does."""
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(resume_cache, "first_ranks_rollouts", lambda rollouts: rollouts)
    monkeypatch.setattr(resume_cache, "first_ranks", dict)
    monkeypatch.setattr(training_rollouts, "first_ranks", bool)
    monkeypatch.setattr(training_rollouts, "add_teacher_inputs", lambda inputs, taught_by, rollouts, requests: rollouts)


def sampler(engine: VersionedEngine, folder: Path, lag: int, first_step: int = 0, more: tuple = ()) -> RolloutSampler:
    settings = ["student.hf_path=a", "teacher.hf_path=b", "output=c", "train.prompts_per_step=2", *more]
    config = load_config("verify", [*settings, f"train.steps={STEPS}", f"rollout.max_lag={lag}", "rollout.replay=null"])
    prompts, routing = TrainingPrompts([Request([1])] * 2, PromptOrder((2,))), SimpleNamespace(teachers_of=list)
    calls, cache = Schedule(config, prompts, 64), ResumeCache(folder, {"student": "a"} | schedule_settings(config))

    return RolloutSampler(config, routing, engine, calls, [], cache, first_step, lambda: True)  # type: ignore[arg-type]


def test_what_is_sampled_when(tmp_path: Path) -> None:
    """The next step's responses are under way while a step is computed, and are checked before the weights change."""
    engine = VersionedEngine()
    made, seen = sampler(engine, tmp_path, lag=2), []
    for step in range(STEPS):
        rollouts = made.rollouts(step)
        assert [rollout.response_ids.tolist() for rollout in rollouts] == [[step]] * 2
        seen.append((engine.calls, len(made.unchecked())))
        engine.calls = []
        made.settle(step)
        engine.step()
        seen.append((engine.calls, len(made.unchecked())))
        engine.calls = []
    first = [(kind, step) for step in (0, 1) for kind in ("submit", "collect")]
    ahead = [each for step in range(3, STEPS) for each in (([("submit", step)], 0), ([("collect", step)], 1))]
    assert seen == [([*first, ("submit", 2)], 2), ([("collect", 2)], 1), *ahead, *[([], 0)] * 4]
    made.cache.finish()


@pytest.mark.parametrize("settled", [False, True], ids=["killed in the gradient", "killed before the weights change"])
@pytest.mark.parametrize("done", [0, 1, 3])
@pytest.mark.parametrize(("before", "after"), [(1, 1), (2, 2), (1, 0), (2, 1), (2, 0), (0, 1), (1, 2)])
def test_a_resumed_run_has_responses_of_the_right_weights(
    tmp_path: Path, before: int, after: int, done: int, settled: bool
) -> None:
    """Those that the schedule names; with another lag, of nothing older than it allows."""
    engine = VersionedEngine()
    made = sampler(engine, tmp_path, before)
    for step in range(done):
        made.rollouts(step)
        made.settle(step)
        engine.step()
    made.cache.finish()
    made.write_pending(done, tmp_path / "checkpoint")
    made.rollouts(done)
    if settled:
        made.settle(done)
    made.cache.finish()  # of what was written before the kill
    again = VersionedEngine(version=done)
    resumed = sampler(again, tmp_path, after, done)
    if done:
        resumed.read_pending(tmp_path / "checkpoint")
    for step in range(done, STEPS):
        versions = {int(rollout.weight_versions[0, 0]) for rollout in resumed.rollouts(step)}  # type: ignore[index]
        resumed.settle(step)
        again.step()
        expected = max(0, step - after)
        assert versions == {expected if before == after else max(done, expected)}
    sampled = [step for kind, step in again.calls if kind == "submit"]
    if before == after:  # a checkpoint holds what is ahead, and the cache the last one
        assert sampled == [*range(0 if done else after), *range(done + after + settled, STEPS)]
    resumed.cache.finish()


def test_a_stop_while_responses_are_under_way(tmp_path: Path) -> None:
    """It says how many steps are done and which one was sampled; what was complete is taken up."""
    made = sampler(VersionedEngine(cancelled=3), tmp_path, lag=2)
    made.rollouts(0)
    made.settle(0)
    made.engine.step()  # type: ignore[attr-defined]
    made.rollouts(1)
    with pytest.raises(StoppedSampling, match=re.escape("(1, 3, 1, 2)")):
        made.settle(1)
    made.write_pending(1, tmp_path / "checkpoint")
    engine = VersionedEngine(version=1)
    resumed = sampler(engine, tmp_path, 2, first_step=1)
    resumed.read_pending(tmp_path / "checkpoint")
    assert len(resumed.rollouts(1)) == 2 and engine.calls == [("submit", 3)]
    resumed.settle(1)
    resumed.cache.finish()


def test_a_stop_at_the_start_says_that_nothing_is_kept_if_the_next_run_would_not_find_it(tmp_path: Path) -> None:
    """With another lag than before, the first responses of a resumed run are of no run that would resume after it."""
    made = sampler(VersionedEngine(version=3, cancelled=3), tmp_path, 2, first_step=3)
    with pytest.raises(StoppedSampling, match=re.escape("(3, 3, 0, 2)")):
        made.rollouts(3)


LIMIT = 7


class GrowingEngine(VersionedEngine):
    """Response i of step s has `length(s, i)` tokens; token t has the id 100 * version + t, a function of the seed too.

    With a fault, the versions that it says are wrong from some weights on.
    """

    def __init__(
        self, version: int = 0, cancelled: int = -1, fault: Callable[[int, int], int] = lambda version, step: version
    ) -> None:
        super().__init__(version, cancelled)
        self.fault, self.keys = fault, list[tuple[int, ...]]()

    def submit(self, requests: list[Request], params: Any, done: dict[int, Rollout], *_: Any) -> Any:
        return SimpleNamespace(requests=requests, step=params.key[2], done=done, served={}, submitted=0.0)

    def collect(self, handle: Any, *_: Any, **__: Any) -> list[Rollout]:
        sampled = [handle.done.get(i) or self.answer(request) for i, request in enumerate(handle.requests)]
        if handle.step == self.cancelled:
            raise GenerationCancelled(dict(enumerate(sampled[::2])) if len(sampled) == 1 else {1: sampled[1]})
        return sampled

    def answer(self, request: Request) -> Rollout:
        assert request.key is not None and request.most is not None and request.most > 0
        self.keys.append(request.key)
        have, length = len(request.prompt_ids) - 1, length_of(*request.key[2:4])
        tokens = min(request.most, length - have)
        ids = [100 * self.weights.steps + have + t for t in range(tokens)]
        spans = [[self.fault(self.weights.steps, request.key[2]), 0, tokens]]
        reason = "stop" if have + tokens == length else "length"
        return Rollout(request.prompt_ids, ids, logprobs=[-0.5] * tokens, weight_versions=spans, finish_reason=reason)  # type: ignore[arg-type]


def length_of(step: int, i: int) -> int:
    """Some end after a token or two, some at the end of a segment, some at the limit, and some would go on."""
    return 1 + (3 * step + 5 * i) % 9


def segmented(engine: VersionedEngine, folder: Path, lag: int, tokens: int, first_step: int = 0) -> RolloutSampler:
    more = "rollout.mode=segments", f"rollout.segment_tokens={tokens}", f"rollout.max_new_tokens={LIMIT}"
    return sampler(engine, folder, lag, first_step, more)


def check_step(rollouts: list[Rollout], step: int, lag: int, tokens: int) -> None:
    """Token t comes from the weights after max(0, step - lag + t // tokens) steps."""
    for i, rollout in enumerate(rollouts):
        length = length_of(step, i)
        versions = [max(0, step - lag + t // tokens) for t in range(min(length, LIMIT))]
        assert rollout.prompt_ids.tolist() == [1]
        assert rollout.response_ids.tolist() == [100 * version + t for t, version in enumerate(versions)]
        assert rollout.finish_reason == ("stop" if length <= LIMIT else "length")
        assert types.token_versions(rollout.weight_versions).tolist() == versions  # type: ignore[arg-type]
        assert len(rollout.logprobs) == len(versions)  # type: ignore[arg-type]


def until_settled(made: RolloutSampler, step: int) -> None:
    made.rollouts(step)
    made.settle(step)


def run_all(made: RolloutSampler, engine: VersionedEngine) -> None:
    for step in range(STEPS):
        until_settled(made, step)
        engine.step()


def take_up(resumed: RolloutSampler, checkpoint: Path) -> None:
    resumed.read_pending(checkpoint)
    resumed.rollouts(3)


SEGMENTS = [(0, 7), (1, 4), (2, 3), (2, 4), (2, 7), (3, 2), (4, 3)]


@pytest.mark.parametrize(("lag", "tokens"), SEGMENTS)
def test_segments_come_from_the_weights_of_the_schedule(tmp_path: Path, lag: int, tokens: int) -> None:
    engine = GrowingEngine()
    made = segmented(engine, tmp_path, lag, tokens)
    for step in range(STEPS):
        check_step(made.rollouts(step), step, lag, tokens)
        for rollout in (rollout for part in made.unchecked() for rollout in part):
            assert rollout.weight_versions[:, 0].tolist() == [step]  # type: ignore[index]
        made.settle(step)
        for rollout in (rollout for part in made.unchecked() for rollout in part):
            assert rollout.weight_versions[:, 0].tolist() == [step]  # type: ignore[index]
        engine.step()
    made.cache.finish()
    assert len({*engine.keys}) == len(engine.keys), "no two parts have the same randomness"


def test_an_evaluation_goes_with_what_is_sampled_during_the_gradient(tmp_path: Path) -> None:
    """With as many segments as students, the ranks wait for the last ones, which come first."""
    engine, seen = GrowingEngine(), []
    made = segmented(engine, tmp_path, lag=1, tokens=4)
    made.with_evaluation = EngineWithEvaluation(engine)  # type: ignore[arg-type]
    evaluation = Request([1], key=(0, 0, 0, 0), most=1)
    for step in range(2):
        made.with_evaluation.add(
            EvaluationRequests([evaluation] * 3, lambda found: None, lambda taken: seen.append(len(taken)))
        )
        check_step(made.rollouts(step), step, 1, 4)
        assert len(seen) == step, "nothing of the evaluation before the gradient"
        made.settle(step)
        assert seen == [3] * (step + 1)
        engine.step()
    made.cache.finish()


@pytest.mark.parametrize("killed", ["in the gradient", "before the weights change", "while it samples"])
@pytest.mark.parametrize("done", [0, 1, 3, 6])
@pytest.mark.parametrize(("lag", "tokens"), [(1, 4), (2, 3), (2, 4)])
def test_segments_after_a_resume(tmp_path: Path, lag: int, tokens: int, done: int, killed: str) -> None:
    """What the checkpoint and the cache hold goes on where it was, and is not sampled again."""
    engine = GrowingEngine(cancelled=done if killed == "while it samples" else -1)
    made = segmented(engine, tmp_path, lag, tokens)
    for step in range(done):
        made.rollouts(step)
        made.settle(step)
        engine.step()
    made.cache.finish()
    made.write_pending(done, tmp_path / "checkpoint")
    if killed == "while it samples":
        with pytest.raises(StoppedSampling):
            until_settled(made, done)
    else:
        made.rollouts(done)
        if killed != "in the gradient":
            made.settle(done)
        made.cache.finish()
    again = GrowingEngine(version=done)
    resumed = segmented(again, tmp_path, lag, tokens, done)
    if done:
        resumed.read_pending(tmp_path / "checkpoint")
    for step in range(done, STEPS):
        check_step(resumed.rollouts(step), step, lag, tokens)
        resumed.settle(step)
        again.step()
    resumed.cache.finish()
    if killed == "before the weights change":
        before = {key for key in engine.keys if key in again.keys}
        urgent = done - lag + -(-LIMIT // tokens) - 1 == done or done == 0
        assert all(key[2] == done for key in before) and (urgent or not before)


def test_other_settings_sample_anew_what_was_ahead(tmp_path: Path) -> None:
    """No token is older than the lag allows."""
    made = segmented(engine := GrowingEngine(), tmp_path, 2, 3)
    for step in range(3):
        made.rollouts(step)
        made.settle(step)
        engine.step()
    made.write_pending(3, tmp_path / "checkpoint")
    resumed = segmented(again := GrowingEngine(version=3), tmp_path, 2, 4, first_step=3)
    resumed.read_pending(tmp_path / "checkpoint")
    made.cache.finish()
    for step in range(3, STEPS):
        for rollout in resumed.rollouts(step):
            versions = types.token_versions(rollout.weight_versions).tolist()  # type: ignore[arg-type]
            assert versions == [max(3, step - 2 + t // 4) for t in range(len(versions))]
        resumed.settle(step)
        again.step()
    resumed.cache.finish()


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (lambda version, step: version - (step == 4), "the version 1; expected 2 to 4"),
        (lambda version, step: version + (step == 4), "the version 5; expected 2 to 4"),
        (lambda version, step: {2: 3, 3: 2}.get(version, 4) if step == 4 else version, "the versions [3, 2] one after"),
    ],
    ids=["older than the lag", "newer than the student", "swapped"],
)
def test_versions_that_are_not_those_of_the_schedule_end_the_run(
    tmp_path: Path, fault: Callable[[int, int], int], message: str
) -> None:
    made = segmented(engine := GrowingEngine(fault=fault), tmp_path, 2, 3)
    with pytest.raises(ValueError, match=rf"^the weights that sampled response \d of step 5 .*{re.escape(message)}"):
        run_all(made, engine)
    made.cache.finish()


@pytest.mark.parametrize("file", ["the checkpoint", "the cache", "two files"])
def test_responses_of_other_weights_of_the_same_number_end_the_resume(tmp_path: Path, file: str) -> None:
    """The digests say so: of the weights with which the run begins, and of earlier ones that two files name."""
    made = segmented(engine := GrowingEngine(), tmp_path, 2, 3)
    for step in range(3):
        made.rollouts(step)
        made.settle(step)
        engine.step()
    made.write_pending(3, tmp_path / "checkpoint")
    made.rollouts(3)
    made.settle(3)
    made.cache.finish()
    again = GrowingEngine(version=3)
    if file == "two files":  # step 5 has tokens of the weights after 2 steps, as step 4 has
        other = segmented(GrowingEngine(version=2), tmp_path / "other", 2, 3, first_step=2)
        other.engine.weights = Weights(2, "another digest")
        other.rollouts(2)
        other.settle(2)
        other.write_pending(3, tmp_path / "others")
        other.cache.finish()
        name = "rollouts/step_0000005.safetensors"
        (tmp_path / "others" / name).replace(tmp_path / "checkpoint" / name)
    elif file == "the cache":
        again.weights = Weights(3, "another digest")
    resumed = segmented(again, tmp_path, 2, 3, first_step=3)
    if file == "the checkpoint":
        resumed.cache.digests.note(2, "another digest", "this run")
    where = "pending" if file == "the cache" else "checkpoint/rollouts/step_000000[45]"
    with pytest.raises(ValueError, match=rf"{where}.*: remove that file to sample them anew$"):
        take_up(resumed, tmp_path / "checkpoint")
    resumed.cache.finish()


def test_recorded_experts_of_a_response_in_parts_are_those_of_its_sampling() -> None:
    """A later part computes the earlier tokens again, with other experts; only its own tokens count, and the last."""
    begun = Rollout([7], [1, 2], weight_versions=[[0, 0, 2]], expert_routes=np.full((2, 1, 1), 0))  # type: ignore[arg-type]
    part = Rollout([7, 1, 2], [3, 4], weight_versions=[[1, 0, 2]], expert_routes=np.full((4, 1, 1), 1))  # type: ignore[arg-type]
    whole = schedule._joined(begun, part)
    assert whole.prompt_ids.tolist() == [7] and whole.response_ids.tolist() == [1, 2, 3, 4]
    assert whole.expert_routes.ravel().tolist() == [0, 0, 1, 1]  # type: ignore[union-attr]
    assert whole.weight_versions.tolist() == [[0, 0, 2], [1, 2, 4]]  # type: ignore[union-attr]


def test_a_response_that_fills_the_positions_is_complete(tmp_path: Path) -> None:
    """No more is asked of it, as a prompt of that length would leave no room."""
    made = segmented(GrowingEngine(), tmp_path, 2, 3).schedule
    begun = Rollout([1] * 58, [1] * 3, weight_versions=[[0, 0, 3]])  # type: ignore[arg-type]
    part = Rollout(begun.ids, [2] * 3, weight_versions=[[1, 0, 3]], finish_reason="length")  # type: ignore[arg-type]
    assert made.grown(begun, part).finish_reason == "length"
    shorter = replace(begun, prompt_ids=begun.prompt_ids[1:])
    assert made.grown(shorter, part).finish_reason is None
    ended = made.grown(begun, replace(part, finish_reason="stop"))
    assert ended.finish_reason == "stop" and made._part(Request([1]), ended, 1, 0, 1) is None
