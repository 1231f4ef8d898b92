"""`StreamSampler`: what it asks an engine for, takes, and writes for a resume."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from nemo_oprd.batch.types import Rollout
from nemo_oprd.config.loading import load_config
from nemo_oprd.data.order import PromptOrder
from nemo_oprd.rollout import resume_cache, stream_rollouts, training_rollouts
from nemo_oprd.rollout.engine import Generates, GenerationCancelled, Request, Weights
from nemo_oprd.rollout.resume_cache import ResumeCache
from nemo_oprd.rollout.schedule import Schedule, TrainingPrompts, schedule_settings
from nemo_oprd.rollout.stream_rollouts import StreamSampler
from nemo_oprd.rollout.training_rollouts import STREAM_FILE, RolloutSampler, StoppedSampling

STEPS, SIZE, LIMIT = 8, 3, 20
END = 7  # the id that ends a response


class SlowEngine:
    """Gives every response one token per tick; those of prompt [9] end after 5 tokens, the others after 1.

    A call ticks as often as it needs until it has enough, and `cut` not at all. The first id of each token tells the
    weights that sampled it.
    """

    def __init__(self, version: int = 0) -> None:
        self.weights, self.metrics = Weights(version, f"digest of {version}"), dict[str, float]()
        self.asked, self.stops, self.stops_at_cut = list[list[Request]](), False, False

    def step(self) -> None:
        self.weights = Weights(self.weights.steps + 1, f"digest of {self.weights.steps + 1}")

    def submit(self, requests: list[Request], params: Any, done: Any = None, keep: Any = None) -> Any:
        self.asked.append(requests)
        made = SimpleNamespace(requests=requests, served={}, submitted=0.0, given=set(), done=dict(done or {}))
        made.tokens = {i: 0 for i in range(len(requests)) if i not in made.done}
        return made

    def _needs(self, request: Request) -> int:
        return 5 - (len(request.prompt_ids) - 1) if request.prompt_ids[0] == 9 else 1

    def _rollout(self, request: Request, tokens: int) -> Rollout:
        ends = tokens == self._needs(request)
        ids = [100 + self.weights.steps] * (tokens - ends) + [END] * ends
        spans = [[self.weights.steps, 0, tokens]]
        return Rollout(request.prompt_ids, ids, weight_versions=spans, finish_reason="stop" if ends else None)  # type: ignore[arg-type]

    def _complete(self, handle: Any) -> dict[int, Rollout]:
        whole = {i: tokens for i, tokens in handle.tokens.items() if tokens == self._needs(handle.requests[i])}
        return handle.done | {i: self._rollout(handle.requests[i], tokens) for i, tokens in whole.items()}

    def gather(self, handle: Any, enough: Callable[[Any], bool], should_cancel: Any = None) -> dict[int, Rollout]:
        while not enough({*self._complete(handle)}):
            for i in handle.tokens:
                handle.tokens[i] = min(handle.tokens[i] + 1, self._needs(handle.requests[i]))
            if self.stops:
                raise GenerationCancelled(self._complete(handle))
        new = {i: one for i, one in self._complete(handle).items() if i not in handle.given}
        handle.given |= {*new}
        return new

    def cut(self, handle: Any, should_cancel: Any = None) -> dict[int, Rollout]:
        if self.stops_at_cut:
            raise GenerationCancelled(self._complete(handle))
        whole = self.gather(handle, lambda complete: True)
        begun = {i: tokens for i, tokens in handle.tokens.items() if 0 < tokens < self._needs(handle.requests[i])}
        return whole | {i: self._rollout(handle.requests[i], tokens) for i, tokens in begun.items()}

    def rest(self) -> None:
        pass


class WholeEngine(Generates, SlowEngine):
    """Has all responses when it is asked for any, as the in-process engine."""

    gather, cut = Generates.gather, Generates.cut  # type: ignore[assignment]

    def collect(self, handle: Any, *_: Any, **__: Any) -> list[Rollout]:
        return [self._rollout(request, self._needs(request)) for request in handle.requests]


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank, and a teacher that reads what the student does."""
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(resume_cache, "first_ranks_rollouts", lambda rollouts: rollouts)
    for module in (resume_cache, training_rollouts, stream_rollouts):
        monkeypatch.setattr(module, "first_ranks", lambda value: value)
    monkeypatch.setattr(training_rollouts, "add_teacher_inputs", lambda inputs, taught_by, rollouts, requests: rollouts)


def sampler(engine: Any, folder: Path, first_step: int = 0, *more: str, kind: type = StreamSampler) -> Any:
    settings = ["student.hf_path=a", "teacher.hf_path=b", "output=c", f"train.prompts_per_step={SIZE}"]
    settings += [f"train.steps={STEPS}", "rollout.max_lag=4", "rollout.mode=stream", f"rollout.max_new_tokens={LIMIT}"]
    config = load_config("verify", [*settings, "rollout.replay=null", *more])
    requests = [Request([9 if i % SIZE == 0 else i]) for i in range(100, 100 + STEPS * SIZE)]
    prompts = TrainingPrompts(requests, PromptOrder((len(requests),)))
    schedule = Schedule(config, prompts, 64)

    cache = ResumeCache(folder, {"student": "a"} | schedule_settings(config))
    routing = SimpleNamespace(teachers_of=list)
    return kind(config, routing, engine, schedule, [], cache, first_step, lambda: True)


def taken_of(made: Any, steps: range) -> list[list[Rollout]]:
    found = []
    for step in steps:
        found.append(made.rollouts(step))
        made.settle(step)
        made.engine.step()
    return found


def prompts_of(steps: list[list[Rollout]]) -> list[int]:
    return sorted(int(one.prompt_ids[0]) for step in steps for one in step)


def check(steps: list[list[Rollout]], first: int = 0) -> None:
    """Every token is of the weights that its span names, and at most 4 steps old; a response ends once."""
    for step, rollouts in enumerate(steps, start=first):
        assert len(rollouts) == SIZE
        for one in rollouts:
            assert one.finish_reason == "stop" and one.response_ids[-1] == END and one.weight_versions is not None
            assert len(one.response_ids) == (5 if one.prompt_ids[0] == 9 else 1)
            for version, start, end in one.weight_versions.tolist():
                assert step - 4 <= version <= step
                assert {*one.response_ids[start:end].tolist()} <= {100 + version, END}


def test_long_responses_go_on_and_nothing_is_left_out(tmp_path: Path) -> None:
    whole = taken_of(sampler(WholeEngine(), tmp_path), range(STEPS))
    made = sampler(SlowEngine(), tmp_path)
    slow = taken_of(made, range(STEPS))
    check(slow)
    assert prompts_of(slow) == prompts_of(whole)
    spans = [len(one.weight_versions) for step in slow for one in step]  # type: ignore[arg-type]
    assert max(spans) > 1 and min(spans) == 1
    assert [*map(len, made.engine.asked)] != []
    # an engine that is never waited for takes every group in its own step, as mode exact with half the lag
    for step, rollouts in enumerate(whole):
        assert {int(one.weight_versions[0, 0]) for one in rollouts} == {max(0, step - 2)}  # type: ignore[index]
    assert not made._pool and not made._asked


def test_continuations_have_the_tokens_so_far_and_keys_of_their_own(tmp_path: Path) -> None:
    engine = SlowEngine()
    taken_of(sampler(engine, tmp_path), range(STEPS))
    keys = [request.key for requests in engine.asked for request in requests if len(request.prompt_ids) > 1]
    assert keys and all(key[-1] > 0 and len(key) == 5 for key in keys if key is not None)
    for request in (one for requests in engine.asked for one in requests):
        have = len(request.prompt_ids) - 1
        assert request.most == (LIMIT - have if have else None)


@pytest.mark.parametrize("made_step", [False, True], ids=["before the step is made", "after it"])
@pytest.mark.parametrize("done", [1, 2, 5])
def test_a_resume_takes_up_what_is_not_taken(tmp_path: Path, done: int, made_step: bool) -> None:
    """Also if the step that has taken some is not made; what the abandoned steps did does not count."""
    made = sampler(SlowEngine(), tmp_path / "rollouts")
    before = taken_of(made, range(done))
    if not made_step:
        made.rollouts(done)  # gives up in the gradient
        made.settle(done)
    made.write_pending(done, tmp_path / "checkpoint")
    if made_step:  # and goes on, until it is killed
        made.rollouts(done)
        made.settle(done)
    resumed = sampler(SlowEngine(done), tmp_path / "rollouts", done)
    resumed.read_pending(tmp_path / "checkpoint")
    after = taken_of(resumed, range(done, STEPS))
    check(after, done)
    assert prompts_of(before + after) == prompts_of(taken_of(sampler(WholeEngine(), tmp_path), range(STEPS)))
    kept = [one for step in after for one in step if one.weight_versions[0, 0] < done]  # type: ignore[index]
    assert kept, "tokens of the checkpoint are used"


def test_a_stop_keeps_what_is_complete(tmp_path: Path) -> None:
    """In the checkpoint that is written then, or in the cache if there is one already."""
    for has_checkpoint in (False, True):
        folder = tmp_path / str(has_checkpoint)
        made = sampler(SlowEngine(), folder)
        before = taken_of(made, range(2))
        if has_checkpoint:
            made.write_pending(2, folder / "checkpoint")
        made.engine.stops = True
        with pytest.raises(StoppedSampling, match=re.escape("(2, 2, ")):
            taken_of(made, range(2, STEPS))
        if not has_checkpoint:
            made.write_pending(2, folder / "checkpoint")
        engine = SlowEngine(2)
        resumed = sampler(engine, folder, 2)
        resumed.read_pending(folder / "checkpoint")
        after = taken_of(resumed, range(2, STEPS))
        check(after, 2)
        assert prompts_of(before + after) == prompts_of(taken_of(sampler(WholeEngine(), tmp_path), range(STEPS)))


def test_a_stop_before_the_weights_change_does_not_make_the_step(tmp_path: Path) -> None:
    """Where a cut waits for an evaluation: what the step has taken is there again, once."""
    made = sampler(SlowEngine(), tmp_path)
    before = taken_of(made, range(3))
    made.rollouts(3)
    made.engine.stops_at_cut = True
    with pytest.raises(StoppedSampling, match=re.escape("(3, 3, ")):
        made.settle(3)
    made.write_pending(3, tmp_path / "checkpoint")
    resumed = sampler(SlowEngine(3), tmp_path, 3)
    resumed.read_pending(tmp_path / "checkpoint")
    after = taken_of(resumed, range(3, STEPS))
    check(after, 3)
    assert prompts_of(before + after) == prompts_of(taken_of(sampler(WholeEngine(), tmp_path), range(STEPS)))


@pytest.mark.parametrize("change", ["train.prompts_per_step=1", "rollout.per_prompt=2", "rollout.max_lag=6"])
def test_other_settings_are_refused(tmp_path: Path, change: str) -> None:
    made = sampler(SlowEngine(), tmp_path)
    taken_of(made, range(2))
    made.write_pending(2, tmp_path / "checkpoint")
    with pytest.raises(ValueError, match=r"would be left out or taken twice: set them back") as caught:
        sampler(SlowEngine(2), tmp_path, 2, change).read_pending(tmp_path / "checkpoint")
    assert change.split("=")[0] in str(caught.value) and "\n" not in str(caught.value)


def test_another_mode_is_refused_and_the_other_way_round_goes_on(tmp_path: Path) -> None:
    made = sampler(SlowEngine(), tmp_path)
    taken_of(made, range(2))
    made.write_pending(2, tmp_path / "checkpoint")
    exact = "rollout.mode=exact"
    with pytest.raises(ValueError, match="rollout.mode=stream.* and this run has rollout.mode=exact.*set it back"):
        sampler(SlowEngine(2), tmp_path, 2, exact, kind=RolloutSampler).read_pending(tmp_path / "checkpoint")
    (tmp_path / "checkpoint" / STREAM_FILE).unlink()
    resumed = sampler(SlowEngine(2), tmp_path, 2)
    resumed.read_pending(tmp_path / "checkpoint")
    after = taken_of(resumed, range(2, STEPS))
    check(after, 2)
    assert len(prompts_of(after)) == (STEPS - 2) * SIZE


@pytest.mark.parametrize("content", ["", "[]", '{"places": []}', "\xff", '{"settings":{},"groups":1,"places":[[1]]}'])
def test_a_damaged_file_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / STREAM_FILE).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / STREAM_FILE).write_bytes(content.encode("latin1"))
    with pytest.raises(ValueError, match=f"{STREAM_FILE} is damaged; expected .* remove this checkpoint"):
        sampler(SlowEngine(2), tmp_path, 2).read_pending(tmp_path)


def test_places_are_plain_json(tmp_path: Path) -> None:
    made = sampler(SlowEngine(), tmp_path)
    taken_of(made, range(1))
    made.write_pending(1, tmp_path)
    told = json.loads((tmp_path / STREAM_FILE).read_text())
    assert told["groups"] == 3 and len(told["places"]) == 2 * SIZE
    assert told["settings"]["rollout.max_lag"] == 4
