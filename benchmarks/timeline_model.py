"""When the parts of a run begin and end, computed from how long each takes: a pure function, `predict`.

The schedule is that of `nemo_oprd/train.py` and `RolloutSampler`. With `rollout.max_lag=N` the weights after k steps
sample batch k + N while the gradient of step k is computed, and the optimizer waits for both; at the start the weights
before the first step sample batches 0 to N. With segments, segment j of batch k comes from the weights after
max(0, k - N + j) steps: weights sample parts of N + 1 batches. Step k waits for what batch k lacks, which is sampled
first and alone; the other parts are sampled during the gradient.

Left out: what a step computes twice because something died, and the time in which ranks tell each other things.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from nemo_oprd.observability.timeline import SAMPLING, WAITING, Interval

# (tokens to sample, tokens before them that are computed first)
Job = tuple[int, int]


@dataclass(frozen=True)
class Servers:
    """What samples.

    Attributes:
        count: of the servers, which are equal.
        slots: the most responses that a server works on at a time.
        token_s: seconds of a decoding step, in which each of a server's responses gets a token.
        live_s: seconds that each of these responses adds to it.
        known_s: seconds per token that is before a response or its continuation, paid when it begins.
        continuous: a slot takes the next response at once; else when all slots of its server are free.
    """

    count: int
    slots: int
    token_s: float
    live_s: float = 0.0
    known_s: float = 0.0
    continuous: bool = True


@dataclass(frozen=True)
class Work:
    """Seconds of the phases of a step besides sampling.

    Attributes:
        push: until the servers have new weights; also before the first step.
        gradient: of teacher and student, from the rollouts to the gradient.
        optimizer: of the optimizer's step.
        check: a comparison of responses with the student; with a lag there are two in a step.
        other: records and checkpoints, after the push.
        evaluation: of an evaluation, after every `evaluate_every`-th step; 0: there is none.
    """

    push: float
    gradient: float
    optimizer: float = 0.0
    check: float = 0.0
    other: float = 0.0
    evaluation: float = 0.0
    evaluate_every: int = 0


@dataclass(frozen=True)
class Schedule:
    """`train.steps`, `rollout.max_lag`, and `rollout.segment_tokens` of mode `segments` (None: mode `exact`)."""

    steps: int
    lag: int = 0
    segment_tokens: int | None = None


@dataclass
class _Server:
    """A server while it samples; its responses advance together, `progress` tokens so far."""

    progress: float = 0.0
    now: float = 0.0
    live: list[tuple[float, int]] = field(default_factory=list)  # heap of (progress at the end, index)

    def ends(self, servers: Servers) -> float:
        """When its next response is complete."""
        return self.now + (self.live[0][0] - self.progress) * self._pace(servers) if self.live else float("inf")

    def advance(self, time: float, servers: Servers) -> None:
        """Goes on to `time`, until which no response begins or ends."""
        if self.live:
            self.progress += (time - self.now) / self._pace(servers)
        self.now = time

    def _pace(self, servers: Servers) -> float:
        return servers.token_s + servers.live_s * len(self.live)


def finish_times(jobs: Sequence[Job], servers: Servers) -> list[float]:
    """Seconds after which each job is complete, if all are asked for at once and begun in their order."""
    found, waiting = [0.0] * len(jobs), list(enumerate(jobs))[::-1]
    pool = [_Server() for _ in range(servers.count)]

    def fill(server: _Server) -> None:
        index, (tokens, known) = waiting.pop()
        # what is known is paid like tokens, at the pace of a server with one response
        cost = tokens + known * servers.known_s / servers.token_s
        heapq.heappush(server.live, (server.progress + cost, index))

    def fill_free(among: list[_Server]) -> None:
        """One response for each server in turn, as far as there is room."""
        open_ = [server for server in among if servers.continuous or not server.live]
        while waiting and (open_ := [server for server in open_ if len(server.live) < servers.slots]):
            for server in open_:
                if waiting:
                    fill(server)

    fill_free(pool)
    while any(server.live for server in pool):
        server = min(pool, key=lambda each: each.ends(servers))
        server.advance(server.ends(servers), servers)
        while server.live and server.live[0][0] <= server.progress + 1e-9:
            found[heapq.heappop(server.live)[1]] = server.now
        fill_free([server])
    return found


def predict(
    lengths: Sequence[Sequence[int]], work: Work, servers: Servers, schedule: Schedule, prompt: int = 0
) -> list[Interval]:
    """The intervals of a run, as `nemo_oprd/observability/timeline.py` records them, from second 0.

    Args:
        lengths: per batch, the tokens of its responses in the order in which they are begun.
        prompt: tokens before each response.

    Raises:
        ValueError: responses have more segments than the lag allows.
    """
    return _Run(lengths, work, servers, schedule, prompt).intervals()


def seconds_per_step(intervals: Sequence[Interval]) -> list[float]:
    """The duration of each step from the beginning of its first phase to that of the next step's, or to the end."""
    own = [each for each in intervals if each.step and each.phase != SAMPLING]
    begins = [min(each.began for each in own if each.step == step) for step in sorted({each.step for each in own})]
    ends = [*begins[1:], max(each.ended for each in own)]
    return [end - begin for begin, end in zip(begins, ends, strict=True)]


class _Run:
    """The state of `predict`."""

    def __init__(
        self, lengths: Sequence[Sequence[int]], work: Work, servers: Servers, schedule: Schedule, prompt: int
    ) -> None:
        self._lengths, self._work, self._servers, self._schedule = lengths, work, servers, schedule
        self._prompt, self._now, self._step = prompt, 0.0, 0
        self._found: list[Interval] = []
        size, longest = schedule.segment_tokens, max(max(batch) for batch in lengths)
        if size is not None and -(-longest // size) - 1 > schedule.lag:
            raise ValueError(f"{longest} tokens in segments of {size}: expected a lag of {-(-longest // size) - 1}")

    def intervals(self) -> list[Interval]:
        work, last = self._work, self._schedule.steps
        self._spend("sync", work.push)
        for self._step in range(1, last + 1):
            needed, all_there = self._sample(self._step - 1)
            self._wait(needed)
            self._spend("check", work.check)
            self._spend("gradient", work.gradient)
            if self._schedule.lag:
                self._wait(all_there)
                self._spend("check", work.check)
            self._spend("optimizer", work.optimizer)
            self._spend("sync", work.push)
            self._spend("save", work.other)
            if work.evaluate_every and (self._step == last or self._step % work.evaluate_every == 0):
                self._spend("evaluation", work.evaluation)
        return self._found

    def _spend(self, phase: str, seconds: float) -> None:
        if seconds > 0:
            self._found.append(Interval(self._step, phase, self._now, self._now + seconds))
        self._now += seconds

    def _wait(self, until: float) -> None:
        self._spend(WAITING, max(0.0, until - self._now))

    def _sample(self, step: int) -> tuple[float, float]:
        """Samples with the weights after `step` steps; when the step's own responses are there, and when all are."""
        if self._schedule.segment_tokens is not None:
            return self._sample_segments(step, self._schedule.segment_tokens)
        lag, last = self._schedule.lag, self._schedule.steps - 1
        first = step + lag if step else 0  # the first weights sample all batches up to the lag, one after the other
        needed = at = self._now
        for batch in range(first, min(step + lag, last) + 1):
            ends = at + max(finish_times([(tokens, self._prompt) for tokens in self._lengths[batch]], self._servers))
            self._found.append(Interval(self._step, SAMPLING, at, ends, batch + 1))
            at = ends
            if batch < step + lag or batch == step:  # only the last batch that may be ahead is left under way
                needed = ends
        return needed, at

    def _sample_segments(self, step: int, size: int) -> tuple[float, float]:
        lag, last = self._schedule.lag, self._schedule.steps - 1
        needed = self._sample_parts(step, [step], size, self._now)
        return needed, self._sample_parts(step, range(step + 1, min(step + lag, last) + 1), size, needed)

    def _sample_parts(self, step: int, batches: Iterable[int], size: int, now: float) -> float:
        """Samples the parts of batches that the weights after `step` steps add, from `now` on; when all are there."""
        jobs, of = list[Job](), list[int]()  # the batch of each job
        for batch in batches:
            newest = step - batch + self._schedule.lag  # the segment that these weights end with
            begin, end = (newest if step else 0) * size, (newest + 1) * size
            for tokens in self._lengths[batch]:
                if tokens > begin:
                    jobs.append((min(tokens, end) - begin, self._prompt + begin))
                    of.append(batch)
        times = finish_times(jobs, self._servers)
        for batch in sorted(set(of)):
            ends = max(time for time, own in zip(times, of, strict=True) if own == batch)
            self._found.append(Interval(self._step, SAMPLING, now, now + ends, batch + 1))
        return now + max(times, default=0.0)
