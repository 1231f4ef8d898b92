"""`RolloutSampler` with `rollout.max_lag`: what it asks an engine for, and when."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nemo_oprd.batch.types import Rollout
from nemo_oprd.config.loading import load_config
from nemo_oprd.data.order import PromptOrder
from nemo_oprd.rollout import training_rollouts
from nemo_oprd.rollout.engine import GenerationCancelled, Request
from nemo_oprd.rollout.training_rollouts import RolloutSampler, TrainingPrompts
from nemo_oprd.runtime.signals import Stopped


class LoggingEngine:
    """Notes what it is asked for; the responses of the call that is `cancelled` are not complete."""

    def __init__(self, cancelled: int = -1) -> None:
        self.calls, self.cancelled, self.metrics = list[tuple[str, int]](), cancelled, {}

    def submit(self, requests: list[Request], params: Any, *_: Any) -> Any:
        self.calls.append(("submit", params.key[-1]))
        return SimpleNamespace(requests=requests, step=params.key[-1])

    def collect(self, ticket: Any, *_: Any, **__: Any) -> list[Rollout]:
        self.calls.append(("collect", ticket.step))
        if ticket.step == self.cancelled:
            raise GenerationCancelled
        return [Rollout([1], [ticket.step], weight_version=0) for _ in ticket.requests]


def test_what_is_sampled_when_with_a_lag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next step's responses are under way while a step is computed; a stop says how many steps are done."""
    monkeypatch.setattr(training_rollouts, "add_teacher_inputs", lambda inputs, taught_by, rollouts, requests: rollouts)
    settings = ["student.hf_path=a", "teacher.hf_path=b", "output=c", "train.prompts_per_step=1", "train.steps=4"]
    config = load_config("verify", [*settings, "rollout.max_lag=2", "rollout.replay=null"])
    prompts, routing = TrainingPrompts([Request([1])], PromptOrder((1,))), SimpleNamespace(teachers_of=list)

    def stop(*told: int) -> Any:
        raise Stopped(str(told))

    def sampler(engine: LoggingEngine) -> RolloutSampler:
        cache = SimpleNamespace(check=lambda: None, take=lambda *_: {}, put=lambda *_: None, finish=lambda: None)
        return RolloutSampler(config, routing, engine, prompts, [], cache, 0, lambda: True, stop)  # type: ignore[arg-type]

    engine = LoggingEngine()
    made, seen = sampler(engine), []
    for step in range(4):
        (rollout,) = made.rollouts(step)
        assert rollout.response_ids.tolist() == [step]
        made.settle(step)
        seen.append((engine.calls, len(made.unchecked())))
        engine.calls = []
    both = lambda step: [("submit", step), ("collect", step)]  # noqa: E731
    assert seen == [([*both(0), *both(1), *both(2)], 3), (both(3), 1), ([], 0), ([], 0)]
    made = sampler(LoggingEngine(cancelled=3))
    made.rollouts(0)
    made.settle(0)
    made.rollouts(1)
    with pytest.raises(Stopped, match=re.escape("(1, 0, 1)")):
        made.settle(1)
