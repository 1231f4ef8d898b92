"""`RolloutSampler` with `rollout.max_lag`: what it asks an engine for, and when."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from nemo_oprd.batch.types import Rollout
from nemo_oprd.config.loading import load_config
from nemo_oprd.data.order import PromptOrder
from nemo_oprd.rollout import resume_cache, training_rollouts
from nemo_oprd.rollout.engine import GenerationCancelled, Request
from nemo_oprd.rollout.resume_cache import ResumeCache
from nemo_oprd.rollout.training_rollouts import RolloutSampler, TrainingPrompts
from nemo_oprd.runtime.signals import Stopped

STEPS = 8


class VersionedEngine:
    """Notes what it is asked for, and stamps responses; those of the step `cancelled` are not complete."""

    def __init__(self, version: int = 0, cancelled: int = -1) -> None:
        self.calls, self.version, self.cancelled, self.metrics = list[tuple[str, int]](), version, cancelled, {}

    def submit(self, requests: list[Request], params: Any, *_: Any) -> Any:
        self.calls.append(("submit", params.key[-1]))
        return SimpleNamespace(requests=requests, step=params.key[-1], served={})

    def collect(self, ticket: Any, *_: Any, **__: Any) -> list[Rollout]:
        self.calls.append(("collect", ticket.step))
        sampled = [Rollout([1], [ticket.step], weight_version=self.version) for _ in ticket.requests]
        if ticket.step == self.cancelled:
            raise GenerationCancelled({0: sampled[0]})
        return sampled

    def rest(self) -> None:
        pass


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank, and a teacher that reads what the student does."""
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(resume_cache, "first_ranks_rollouts", lambda rollouts: rollouts)
    monkeypatch.setattr(training_rollouts, "add_teacher_inputs", lambda inputs, taught_by, rollouts, requests: rollouts)


def sampler(engine: VersionedEngine, folder: Path, lag: int, first_step: int = 0) -> RolloutSampler:
    settings = ["student.hf_path=a", "teacher.hf_path=b", "output=c", "train.prompts_per_step=2"]
    config = load_config("verify", [*settings, f"train.steps={STEPS}", f"rollout.max_lag={lag}", "rollout.replay=null"])
    prompts, routing = TrainingPrompts([Request([1])] * 2, PromptOrder((2,))), SimpleNamespace(teachers_of=list)
    cache = ResumeCache(folder, {"student": "a"}, lag)

    def stop(*told: int) -> Any:
        raise Stopped(str(told))

    return RolloutSampler(config, routing, engine, prompts, [], cache, first_step, lambda: True, stop)  # type: ignore[arg-type]


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
        engine.version += 1
    made.cache.finish()
    made.write_ahead(done, tmp_path / "checkpoint")
    made.rollouts(done)
    if settled:
        made.settle(done)
    made.cache.finish()  # of what was written before the kill
    again = VersionedEngine(version=done)
    resumed = sampler(again, tmp_path, after, done)
    if done:
        resumed.read_ahead(tmp_path / "checkpoint")
    for step in range(done, STEPS):
        versions = {rollout.weight_version for rollout in resumed.rollouts(step)}
        resumed.settle(step)
        again.version += 1
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
    made.rollouts(1)
    with pytest.raises(Stopped, match=re.escape("(1, 3, 1, 2)")):
        made.settle(1)
    made.write_ahead(1, tmp_path / "checkpoint")
    engine = VersionedEngine(version=1)
    resumed = sampler(engine, tmp_path, 2, first_step=1)
    resumed.read_ahead(tmp_path / "checkpoint")
    assert len(resumed.rollouts(1)) == 2 and engine.calls == [("submit", 3)]
    resumed.settle(1)
    resumed.cache.finish()


def test_a_stop_at_the_start_says_that_nothing_is_kept_if_the_next_run_would_not_find_it(tmp_path: Path) -> None:
    """With another lag than before, the first responses of a resumed run are of no run that would resume after it."""
    made = sampler(VersionedEngine(version=3, cancelled=3), tmp_path, 2, first_step=3)
    with pytest.raises(Stopped, match=re.escape("(3, 3, 0, 2)")):
        made.rollouts(3)
