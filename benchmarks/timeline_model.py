"""When the parts of a run begin and end, computed from how long each takes: a pure function, `predict`.

The schedule is that of `nemo_oprd/train.py` and `RolloutSampler`. With `rollout.max_lag=N` the weights after k steps
sample batch k + N while the gradient of step k is computed, and the optimizer waits for both; at the start the weights
before the first step sample batches 0 to N. With segments, segment j of batch k comes from the weights after
max(0, k - N + j) steps: weights sample parts of N + 1 batches. Step k waits for what batch k lacks, which is sampled
first and alone; the other parts are sampled during the gradient. With mode stream all that is admitted is asked for
after a push, the step waits for what it takes, and what is under way is cut when the gradient is there.

Left out: what a step computes twice because something died, and the time in which ranks tell each other things.
"""

from __future__ import annotations

import bisect
import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from nemo_oprd.rollout.stream_rollouts import Place, StreamRules
from nemo_oprd.run.timeline import SAMPLING, WAITING, Interval

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
    """`train.steps`, `rollout.max_lag`, and `rollout.segment_tokens` of mode `segments` (None: mode `exact`).

    `streams`: mode `stream`.
    """

    steps: int
    lag: int = 0
    segment_tokens: int | None = None
    streams: bool = False


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


class _Pool:
    """Servers with jobs that are all asked for at once and begun in their order; the first seconds of their work."""

    def __init__(self, jobs: Sequence[Job], servers: Servers, until: float = math.inf) -> None:
        self.jobs, self._servers = jobs, servers
        self.finished = [math.inf] * len(jobs)  # seconds after which a job is complete
        self._waiting, self._pool = list(enumerate(jobs))[::-1], [_Server() for _ in range(servers.count)]
        self._fill(self._pool)
        while any(server.live for server in self._pool):
            server = min(self._pool, key=lambda each: each.ends(servers))
            if server.ends(servers) > until:
                break
            server.advance(server.ends(servers), servers)
            while server.live and server.live[0][0] <= server.progress + 1e-9:
                self.finished[heapq.heappop(server.live)[1]] = server.now
            self._fill([server])
        for server in self._pool if until < math.inf else ():
            server.advance(until, servers)

    def tokens(self) -> list[int]:
        """What each job has sampled."""
        found = [job[0] if end < math.inf else 0 for job, end in zip(self.jobs, self.finished, strict=True)]
        for server in self._pool:
            for end, index in server.live:
                left = max(0, math.ceil(end - server.progress - 1e-9))
                found[index] = max(0, self.jobs[index][0] - left)
        return found

    def _fill(self, among: list[_Server]) -> None:
        """One job for each server in turn, as far as there is room."""
        servers = self._servers
        open_ = [server for server in among if servers.continuous or not server.live]
        while self._waiting and (open_ := [server for server in open_ if len(server.live) < servers.slots]):
            for server in open_:
                if self._waiting:
                    index, (tokens, known) = self._waiting.pop()
                    # what is known is paid like tokens, at the pace of a server with one response
                    cost = tokens + known * servers.known_s / servers.token_s
                    heapq.heappush(server.live, (server.progress + cost, index))


def finish_times(jobs: Sequence[Job], servers: Servers) -> list[float]:
    """Seconds after which each job is complete, if all are asked for at once and begun in their order."""
    return _Pool(jobs, servers).finished


def tokens_after(jobs: Sequence[Job], servers: Servers, seconds: float) -> list[int]:
    """The tokens of each job that are sampled after so many seconds."""
    return _Pool(jobs, servers, seconds).tokens()


def predict(
    lengths: Sequence[Sequence[int]], work: Work, servers: Servers, schedule: Schedule, prompt: int = 0
) -> list[Interval]:
    """The intervals of a run, as `nemo_oprd/run/timeline.py` records them, from second 0.

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
        self._pool: dict[Place, int] = {}  # with mode stream: the tokens of what no step has taken yet
        self._rules = StreamRules(schedule.lag, schedule.lag // 2, len(lengths[0]), schedule.steps)
        self._under_way: tuple[float, list[Place], list[Job]] = 0.0, [], []
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
                self._cut()
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
        if self._schedule.streams:
            return self._sample_stream(step), 0.0
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

    def _sample_stream(self, step: int) -> float:
        """Asks for all that is admitted and not complete; when the step has what it takes, which leaves the pool."""
        for group in range(self._rules.admitted(step - 1) if step else 0, self._rules.admitted(step)):
            self._pool |= {(group, i): 0 for i in range(self._rules.size)}
        complete = {place for place, have in self._pool.items() if have == self._length(place)}
        # the oldest, and of these those with the most tokens first, as the queue of requests
        places = sorted(self._pool.keys() - complete, key=lambda place: (place[0], -self._pool[place], place[1]))
        jobs = [(self._length(place) - self._pool[place], self._prompt + self._pool[place]) for place in places]
        self._under_way = self._now, places, jobs
        ends = sorted(zip(finish_times(jobs, self._servers), places, strict=True))
        # the fewest of these that are enough: more are never too many
        count = bisect.bisect_left(range(len(ends)), True, key=lambda count: self._takes(step, complete, ends, count))
        needed = ends[count - 1][0] if count else 0.0
        taken = self._rules.batch(step, self._pool, complete | {place for _, place in ends[:count]})
        assert taken is not None
        for place in taken:
            del self._pool[place]
        return self._now + needed

    def _takes(self, step: int, complete: set[Place], ends: list[tuple[float, Place]], count: int) -> bool:
        """Whether the step need not wait for more than `complete` and the first `count` of `ends`."""
        return self._rules.batch(step, self._pool, complete | {place for _, place in ends[:count]}) is not None

    def _cut(self) -> None:
        """With mode stream, ends what is under way: the weights change."""
        began, places, jobs = self._under_way
        self._under_way = 0.0, [], []
        if not jobs:
            return
        tokens = tokens_after(jobs, self._servers, self._now - began)
        last = max(time for time in (*finish_times(jobs, self._servers), 0.0))
        self._found.append(Interval(self._step, SAMPLING, began, min(self._now, began + last), self._step))
        for place, more in zip(places, tokens, strict=True):
            if place in self._pool:
                self._pool[place] += more

    def _length(self, place: Place) -> int:
        return self._lengths[place[0]][place[1]]
