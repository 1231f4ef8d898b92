"""Checks of weight versions, and the schedule of engine calls between updates: which weights sample which responses.

With `rollout.mode=exact` the weights after max(0, k - N) steps, N = `rollout.max_lag`, sample the whole responses of
step k. With `rollout.mode=segments` these weights begin the responses, and every later version adds at most
T = `rollout.segment_tokens` tokens: with the weights after v steps, a response of step k grows to at most
(v - (k - N) + 1) T tokens in all. So token t comes from the weights after max(0, k - N + t // T) steps, independent of
time, and no length of a response is preferred. `rollout.mode=stream` is in `stream_rollouts.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from nemo_oprd.batch import types
from nemo_oprd.batch.types import Rollout
from nemo_oprd.config.schema import Config
from nemo_oprd.data.order import PromptOrder
from nemo_oprd.rollout.engine import TRAINING_STREAM, Request, SamplingParams

# Checks of versions and digests, so that training never learns unnoticed from samples of other weights.


def check_versions(rollouts: list[Rollout], step: int, newest: int, most: int) -> None:
    """Raises ValueError unless every token comes from weights that are at most `most` updates behind `newest`.

    `newest`: the number of optimizer steps behind the current weights, with which step `step` (from 0) begins.
    """
    for number, rollout in enumerate(rollouts):
        spans, tokens = rollout.weight_versions, len(rollout.response_ids)
        wrong = "no versions; expected one per token" if spans is None else types.problem(spans, tokens)
        if spans is not None and wrong is None:
            versions, oldest = spans[:, 0].tolist(), max(0, newest - most)
            outside = [version for version in versions if not oldest <= version <= newest]
            wrong = f"the version {outside[0]}; expected {oldest} to {newest} (rollout.max_lag)" if outside else None
        if wrong is not None:
            raise ValueError(
                f"the weights that sampled response {number} of step {step + 1} are not those of the schedule: {wrong}"
                "; does somebody else use or update a server? Resume from the last checkpoint"
            )


def lag_metrics(rollouts: list[Rollout], steps: int) -> dict[str, float]:
    """Returns mean and largest lag of tokens, `steps` minus the optimizer steps behind their weights; {} if unknown."""
    spans = [rollout.weight_versions for rollout in rollouts if rollout.weight_versions is not None]
    versions = np.concatenate([types.token_versions(each) for each in spans] or [np.zeros(0, np.int32)])
    if not len(versions):
        return {}
    return {"rollout/lag_mean": float((steps - versions).mean()), "rollout/lag_max": float(steps - versions.min())}


class WeightDigests:
    """The known digests of weights, by the number of optimizer steps behind them."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[str, str]] = {}  # (the digest, its source for messages)

    def note(self, steps: int, digest: str | None, where: str) -> None:
        """Records a digest, if there is one; raises ValueError if another digest of the same weights is known."""
        if digest is None:
            return
        known, before = self._known.setdefault(steps, (digest, where))
        if known != digest:
            raise ValueError(
                f"{where} has responses of the weights after {steps} updates with the digest {digest}, but by {before} "
                f"these weights have the digest {known}; expected the same weights, because responses of others would "
                "be mixed with this run's: remove that file to sample them anew"
            )

    def of(self, rollouts: Iterable[Rollout]) -> dict[str, str]:
        """Returns the known digests of the weights that sampled these responses, by the number of steps as text."""
        spans = [rollout.weight_versions for rollout in rollouts if rollout.weight_versions is not None]
        steps = sorted({int(version) for each in spans for version in each[:, 0]})
        return {str(each): self._known[each][0] for each in steps if each in self._known}


@dataclass(frozen=True)
class TrainingPrompts:
    """The encoded training prompts, file by file, and the order in which training visits them."""

    requests: list[Request]
    order: PromptOrder


NO_PROMPTS = TrainingPrompts([], PromptOrder(()))


def training_requests(prompts: TrainingPrompts, config: Config, first: int, count: int) -> list[Request]:
    """Makes requests of `count` prompts from index `first` in the run's order, each `rollout.per_prompt` times."""
    chosen = prompts.order.indices(config.seed, first, count)
    return [prompts.requests[index] for index in chosen for _ in range(config.rollout.per_prompt)]


def training_sampling(config: Config, step: int) -> SamplingParams:
    """Returns the sampling parameters of a training step (0-based)."""
    rollout, key = config.rollout, (config.seed, TRAINING_STREAM, step)
    limits = rollout.temperature, rollout.top_p, config.response_limit[1]
    return SamplingParams(*limits, key, record_routes=config.student.router_replay)


def schedule_settings(config: Config) -> dict[str, str]:
    """Returns the settings that decide which weights sample a response; {} if each step uses its own weights."""
    rollout = config.rollout
    if not rollout.max_lag:
        return {}
    settings = {"max_lag": rollout.max_lag, "updates_per_rollout": config.train.updates_per_rollout}
    if rollout.mode == "segments":
        settings["segment_tokens"] = rollout.tokens_per_segment
    named = {name: str(value) for name, value in settings.items()}
    return named | ({"mode": "stream"} if rollout.mode == "stream" else {})


def stream_settings(config: Config) -> dict[str, int]:
    """Returns the settings that decide which responses a step takes with `rollout.mode=stream`."""
    rollout, train = config.rollout, config.train
    of_rollout = {"rollout.max_lag": rollout.max_lag, "rollout.per_prompt": rollout.per_prompt}
    of_train = ("prompts_per_step", "updates_per_rollout")
    return of_rollout | {f"train.{name}": getattr(train, name) for name in of_train}


@dataclass(frozen=True)
class SamplingCall:
    """The work of one call of an engine: whole responses of one step, or the next parts of responses of several steps.

    Attributes:
        step: the step of whole responses; for parts, the step that is about to be computed.
        places: for each request the step and the number of its response.
        weights: the number of steps behind the weights that sample it.
        urgent: whether the next update needs it.
        last: whether it is the last call with these weights.
    """

    step: int
    requests: list[Request]
    params: SamplingParams
    places: list[tuple[int, int]]
    weights: int
    urgent: bool
    last: bool


@dataclass(frozen=True)
class Schedule:
    """The schedule of a run's sampling calls. `max_positions`: the student's."""

    config: Config
    prompts: TrainingPrompts
    max_positions: int

    def requests(self, step: int) -> list[Request]:
        """Returns one request per response of a step; none if the run does not sample."""
        count = self.config.train.prompts_per_step
        return training_requests(self.prompts, self.config, step * count, count) if self.prompts.requests else []

    def due(self, sampled: Mapping[int, list[Rollout]], done: int) -> list[SamplingCall]:
        """Lists the sampling calls due after `done` steps, in order, given the `sampled` responses.

        `sampled`: the responses by step, some of which may be unfinished (`finish_reason` None).
        """
        steps = range(done, min(done + self.config.rollout.max_lag, self.config.train.steps - 1) + 1)
        whole = self.config.rollout.mode == "exact"
        return self._whole(sampled, done, steps) if whole else self._parts(sampled, done, steps)

    def _whole(self, sampled: Mapping[int, list[Rollout]], done: int, steps: range) -> list[SamplingCall]:
        lag, calls = self.config.rollout.max_lag, []
        for step in [step for step in steps if step not in sampled]:
            requests, params = self.requests(step), training_sampling(self.config, step)
            places = [(step, i) for i in range(len(requests))]
            made = SamplingCall(
                step,
                requests,
                params=params,
                places=places,
                weights=max(0, step - lag),
                urgent=step == done,
                last=step == done + lag,
            )
            calls.append(made)
        return calls

    def _parts(self, sampled: Mapping[int, list[Rollout]], done: int, steps: range) -> list[SamplingCall]:
        """Lists an urgent sampling call for the parts that step `done` lacks, and one for the parts of later steps."""
        params, calls = training_sampling(self.config, done), list[SamplingCall]()
        for chosen in (steps[:1], steps[1:]):
            found: dict[tuple[int, int], Request] = {}
            for step in chosen:
                begun = sampled.get(step)
                for i, request in enumerate(self.requests(step)):
                    part = self._part(request, None if begun is None else begun[i], step, i, done)
                    if part is not None:
                        found[step, i] = part
            if found:
                # each request has a key of its own; this one identifies the sampling call in the cache
                named = replace(params, key=(*params.key, *(number for place in found for number in place)))
                urgent = done in chosen
                calls.append(SamplingCall(done, [*found.values()], named, [*found], done, urgent, last=False))
        return [*calls[:-1], *(replace(call, last=True) for call in calls[-1:])]

    def _part(self, request: Request, begun: Rollout | None, step: int, index: int, done: int) -> Request | None:
        """Returns the request for a response's next tokens by the weights after `done` steps; None if they add none."""
        tokens, lag = self.config.rollout.tokens_per_segment, self.config.rollout.max_lag
        have = 0 if begun is None else len(begun.response_ids)
        most = min((done - (step - lag) + 1) * tokens, self.config.response_limit[1]) - have
        if most <= 0 or (begun is not None and begun.finish_reason is not None):
            return None
        key = (*training_sampling(self.config, step).key, index)
        if begun is None:
            return replace(request, key=key, most=most)
        return replace(request, prompt_ids=begun.ids.tolist(), key=(*key, have // tokens), most=most, begun=have)

    def continued(self, request: Request, begun: Rollout | None, step: int, index: int) -> Request:
        """Returns the request for all missing tokens of response `index` of a step, seeded by the first one's index."""
        key = (*training_sampling(self.config, step).key, index)
        if begun is None:
            return replace(request, key=key)
        have = len(begun.response_ids)
        most = self.config.response_limit[1] - have
        return replace(request, prompt_ids=begun.ids.tolist(), key=(*key, have), most=most, begun=have)

    def grown(self, begun: Rollout | None, part: Rollout) -> Rollout:
        """Appends `part` to the response `begun`; the result has `finish_reason` None if it is unfinished."""
        rollout = part if begun is None else _joined(begun, part)
        if self.config.rollout.mode == "exact" or part.finish_reason not in ("length", None):
            return rollout
        is_full = len(rollout.response_ids) == self.config.response_limit[1] or rollout.length == self.max_positions
        return replace(rollout, finish_reason="length" if is_full else None)


def _joined(begun: Rollout, part: Rollout) -> Rollout:
    """Appends `part`, the next tokens; its prompt is all text before them, so its recorded experts cover that, too."""
    assert begun.weight_versions is not None and part.weight_versions is not None
    logprobs, routes = None, None
    if begun.logprobs is not None and part.logprobs is not None:
        logprobs = np.concatenate([begun.logprobs, part.logprobs])
    if begun.expert_routes is not None and part.expert_routes is not None:
        # keeps the experts at the time of sampling, even if later weights have computed the token again
        routes = np.concatenate([begun.expert_routes, part.expert_routes[len(begun.expert_routes) :]])
    return replace(
        begun,
        response_ids=np.concatenate([begun.response_ids, part.response_ids]),
        finish_reason=part.finish_reason,
        logprobs=logprobs,
        weight_versions=types.joined(begun.weight_versions, part.weight_versions),
        expert_routes=routes,
    )


def ended_on_purpose(rollouts: list[Rollout], config: Config) -> list[Rollout]:
    """Sets `finish_reason` "prefix" where `rollout.stop_after` ended a response; engines call any limit "length"."""
    key, limit = config.response_limit
    if key == "rollout.max_new_tokens":
        return rollouts
    return [
        replace(rollout, finish_reason="prefix")
        if rollout.finish_reason == "length" and len(rollout.response_ids) == limit
        else rollout
        for rollout in rollouts
    ]
