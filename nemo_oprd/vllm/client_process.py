"""The controller's side of sampling: request bodies and seeds, rounds and their summaries, and the client process.

The controller starts the client process, hands out requests and takes responses. The responses stay in the segments of
the client process (`channel.py`); the controller maps them and reads none. If the client process ends, the round ends
with the responses complete so far, and the next round starts another one.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np

import nemo_oprd
from nemo_oprd.data.token_ids import TokenIds
from nemo_oprd.rollout.engine import Request, SamplingParams
from nemo_oprd.rollout.response import Response
from nemo_oprd.runtime.background import Aside
from nemo_oprd.vllm.channel import Channel, SegmentReader
from nemo_oprd.vllm.server import LocalServer, Server

# The requests of a call of `generate`: one HTTP request per response.


@dataclass(frozen=True)
class Task:
    """The requests of a call, and the limits that all responses share."""

    requests: Sequence[Request]
    sampling: SamplingParams
    max_positions: int
    eos_ids: tuple[int, ...]
    known_ids: TokenIds
    timeout_s: float

    def body(self, index: int) -> dict[str, Any]:
        """The HTTP request of one response. The server silently ignores unknown sampling parameters."""
        request = self.requests[index]
        sampling, number = request.sampled or (self.sampling, index)
        return {
            "token_ids": [*map(int, request.prompt_ids)],
            "sampling_params": {
                "max_tokens": sampling.limit_of(request, self.max_positions),
                "temperature": sampling.temperature,
                "top_p": sampling.top_p if sampling.temperature else 1.0,
                "seed": seed_of(sampling.key_of(request, number)),
                "logprobs": 0,  # of the sampled id only
                # our ids end a response, whatever generation_config.json says
                "ignore_eos": True,
                "stop_token_ids": list(self.eos_ids),
                "detokenize": False,
            },
        }


def seed_of(key: tuple[int, ...]) -> int:
    """Derives the seed of a response, or of a part; every one of its 32 bits depends on the whole key."""
    return int(np.random.SeedSequence(key).generate_state(1)[0])


MODULE = "nemo_oprd.vllm.client_main"


@dataclass
class Round:
    """Result of a controller's round, which grows while the round is under way."""

    sampled: dict[int, Response] = field(default_factory=dict)  # by the index of the request
    cut: dict[int, Response] = field(default_factory=dict)  # the first tokens of responses, when the round was cut
    died: dict[int, str] = field(default_factory=dict)  # per server, why
    error: str | None = None  # an error that makes further sampling pointless
    busy_s: dict[int, float] = field(default_factory=dict)  # per server, the seconds until its last response
    waited_s: float = 0.0  # the seconds before that, until the client process began
    lost: list[str] = field(default_factory=list)  # the end of the client process, if it ended
    is_cut: bool = False  # see `ClientProcess.cut`


@dataclass
class RoundSummary:
    """Summary of a round for other ranks: a `Round` with the indices of responses instead of the responses.

    `served_s`: per server when it began and when its last response arrived, in seconds since the round began.
    """

    sampled: set[int]
    died: dict[int, str]
    error: str | None
    busy_s: dict[int, float]
    served_s: dict[int, tuple[float, float]]
    lost: list[str]
    cancelled: bool

    @staticmethod
    def of(mine: Round, cancelled: bool) -> RoundSummary:
        """Summarises one rank's round; `cancelled`: whether the rank was asked to cancel it."""
        served = {number: (mine.waited_s, mine.waited_s + seconds) for number, seconds in mine.busy_s.items()}
        return RoundSummary(
            {*mine.sampled},
            mine.died,
            error=mine.error,
            busy_s=mine.busy_s,
            served_s=served,
            lost=mine.lost,
            cancelled=cancelled,
        )

    @staticmethod
    def joined(parts: list[RoundSummary]) -> RoundSummary:
        """Merges the summaries of several ranks."""
        return RoundSummary(
            {i for part in parts for i in part.sampled},
            {number: why for part in parts for number, why in part.died.items()},
            error=next((part.error for part in parts if part.error is not None), None),
            busy_s={number: seconds for part in parts for number, seconds in part.busy_s.items()},
            served_s={number: seconds for part in parts for number, seconds in part.served_s.items()},
            lost=[how for part in parts for how in part.lost],
            cancelled=any(part.cancelled for part in parts),
        )


@dataclass(frozen=True)
class Job:
    """One round of a controller.

    Attributes:
        version: of the weights; servers with another version do not take part.
        step: optimizer steps behind these weights.
        claim: returns the index of the next request; None if none is left. Other controllers use the same queue.
        slots: the largest number of requests that a server gets at a time.
        keep: stores responses, by the index of their request; each counts once `keep` has returned.
        asked: when the round began, by the clock that all processes of a machine share.
    """

    task: Task
    version: str
    step: int
    claim: Callable[[], int | None]
    slots: int
    keep: Callable[[dict[int, Response]], None] | None = None
    asked: float = field(default_factory=time.monotonic)

    def message(self, servers: list[Server]) -> dict[str, Any]:
        """Makes the message that starts the round in the client process."""
        task = self.task
        limits = {"known_ids": asdict(task.known_ids), "timeout_s": task.timeout_s, "slots": self.slots}
        taking_part = [_address(server) for server in servers if server.pushed == self.version]
        about = {"version": self.version, "servers": taking_part, "asked": self.asked}
        return {"kind": "sample", **about, **limits}


def _address(server: Server) -> dict[str, Any]:
    """Returns the description of a server for the client process: fields of `client_main.OthersServer`."""
    paths = {"socket": server.socket, "log": server.log if isinstance(server, LocalServer) else None}
    names = {name: getattr(server, name) for name in ("number", "in_flight", "base_url", "headers")}
    return names | {"label": server.name} | {name: None if path is None else str(path) for name, path in paths.items()}


class Keeper:
    """Adds responses to `result` once `keep` has returned, in a thread, so that a slow disk delays nothing else.

    If `keep` fails, the thread calls `failed`, and the end of the context raises the error.
    """

    def __init__(
        self, keep: Callable[[dict[int, Response]], None] | None, result: Round, failed: Callable[[], None]
    ) -> None:
        self._keep, self._result, self._failed = keep, result, failed
        self._waiting = SimpleQueue[tuple[int, Response] | None]()  # None: there are no more
        self._aside = Aside("the responses to keep")

    def __enter__(self) -> Keeper:
        if self._keep is not None:
            keep = self._keep
            self._aside.start(lambda: self._work(keep))
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Waits until all responses are stored."""
        self._waiting.put(None)
        if kind is None:
            self._aside.finish()
        else:
            self._aside.abandon()

    def add(self, index: int, response: Response) -> None:
        """Takes a response, by the index of its request."""
        if self._keep is None:
            self._result.sampled[index] = response
        else:
            self._waiting.put((index, response))

    def _work(self, keep: Callable[[dict[int, Response]], None]) -> None:
        try:
            is_over = False
            while not is_over:
                found = [self._waiting.get()]
                while not self._waiting.empty():  # no other thread takes from it
                    found.append(self._waiting.get())
                is_over, responses = found[-1] is None, dict(filter(None, found))
                if responses:
                    keep(responses)
                    self._result.sampled |= responses
        except BaseException:
            self._failed()
            raise


class ClientProcess:
    """Samples in a process of its own; see the module's docstring. It starts at once, and again for a later round."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "vllm-client-process")
        self._process: subprocess.Popen | None = None
        self._ending = threading.Lock()
        self._start()

    @property
    def pid(self) -> int | None:
        """The id of the process, if there is one."""
        return None if self._process is None else self._process.pid

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        root = str(Path(nemo_oprd.__file__).parents[1])
        path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
        # a session of its own: signals to this process do not reach it
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", MODULE, str(theirs.fileno()), str(os.getpid())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": path},
        )
        theirs.close()
        self._channel = Channel(ours)

    def start(self, job: Job, servers: list[Server], result: Round) -> Future[None]:
        """Begins a round, whose responses and end go to `result`; the future raises errors of this program only.

        Threads of this object call `job.claim` and `job.keep`, each in its own.
        """
        if self._process is None:
            self._start()
        return self._thread.submit(self._carry_out, job, servers, result)

    def tell_death(self, number: int, why: str) -> None:
        """Tells the client process that a server has ended."""
        self._tell({"kind": "died", "server": number, "why": why})

    def stop(self) -> None:
        """Asks the client process to end the round."""
        self._tell({"kind": "stop"})

    def cut(self, result: Round) -> None:
        """Asks the client process to end the round that fills `result` now; partial responses go to `Round.cut`."""
        result.is_cut = True  # before the message: perhaps the round's thread has not started the round yet
        self._tell({"kind": "cut"})

    def _tell(self, message: dict[str, Any]) -> None:
        with suppress(OSError):  # the process has ended, which the round notices
            self._channel.send(message)

    def _carry_out(self, job: Job, servers: list[Server], result: Round) -> None:
        try:
            with Keeper(job.keep, result, self.stop) as keeper:
                self._tell(job.message(servers))
                if result.is_cut:
                    self._tell({"kind": "cut"})
                self._listen(job, keeper, result)
        except BaseException:
            self._end()  # the servers abort requests whose connections close
            raise

    def _listen(self, job: Job, keeper: Keeper, result: Round) -> None:
        """Executes the client process's messages until the round is over, or the process has ended."""
        segments = SegmentReader()
        while (message := self._channel.receive()) is not None:
            kind = message.pop("kind")
            if kind == "news":
                if message["claims"]:  # first, because servers wait for requests
                    self._claim(job, message["claims"])
                for response in message["responses"]:
                    self._take(job, segments, keeper, result, **response)
            elif kind == "segment":
                segments.add(self._channel.take_file())
            elif kind == "over":
                result.died, result.error = dict(message["died"]), message["error"]
                result.busy_s, result.waited_s = dict(message["busy_s"]), message["waited_s"]
                return
            else:
                raise RuntimeError(f"the client process of the vLLM servers failed: {message['traceback']}")
        result.lost.append(self._end())

    def _claim(self, job: Job, count: int) -> None:
        """Sends `count` requests, or all that are left, to the client process."""
        requests = []
        for _ in range(count):  # one at a time, so that machines take turns
            index = job.claim()
            if index is None:
                break
            requests.append((index, job.task.body(index)))
        self._tell({"kind": "claimed", "requests": requests})

    def _take(
        self,
        job: Job,
        segments: SegmentReader,
        keeper: Keeper,
        result: Round,
        *,
        index: int,
        finished: bool,
        cut: bool,
        server: int,
        segment: int,
        offset: int,
        tokens: int,
    ) -> None:
        """Takes a response that `server` has sampled; a partial one is not stored."""
        ids, logprobs = segments.response(segment, offset, tokens)
        versions = np.array([[job.step, 0, tokens]], np.int32)  # the client process has compared `Job.version`
        response = Response(ids, finished, logprobs, versions, cut=cut)
        if cut:
            result.cut[index] = response
        else:
            keeper.add(index, response)

    def _end(self) -> str:
        """Ends the process; returns how it had ended."""
        with self._ending:  # the round's thread may notice the end while the engine is closed
            process, self._process = self._process, None
        if process is None:
            return "it was ended"
        self._channel.close()
        with suppress(subprocess.TimeoutExpired):
            process.wait(1.0)  # it may be ending by itself
        process.kill()
        code = process.wait()
        how = f"with status {code}" if code >= 0 else f"by signal {-code} ({signal.Signals(-code).name})"
        return f"process {process.pid} ended {how}"

    def close(self) -> None:
        """Ends the process."""
        process = self._process
        if process is not None:
            process.kill()
            self._end()
        self._thread.shutdown()
