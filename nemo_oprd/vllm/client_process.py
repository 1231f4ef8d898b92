"""The controller's end of its client process: it starts the process, gives it requests, and takes responses.

The responses stay where the client process has written them (`channel.py`); this process maps them and reads none. If
the client process ends, the round ends with what was complete, and the next round starts another one.
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

# What a call of `generate` asks servers for: one request per response.


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
        """The request of one response. Unknown sampling parameters are ignored by the server without a word."""
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
                # the ids that end a response are ours, whatever generation_config.json says
                "ignore_eos": True,
                "stop_token_ids": list(self.eos_ids),
                "detokenize": False,
            },
        }


def seed_of(key: tuple[int, ...]) -> int:
    """The seed of a response, or of a part; 32 bits, of which every one depends on all of the key."""
    return int(np.random.SeedSequence(key).generate_state(1)[0])


MODULE = "nemo_oprd.vllm.client_main"


@dataclass
class Round:
    """What a controller brings home; also while the round is under way."""

    sampled: dict[int, Response] = field(default_factory=dict)  # by the index of the request
    cut: dict[int, Response] = field(default_factory=dict)  # the first tokens of responses, when the round was cut
    died: dict[int, str] = field(default_factory=dict)  # per server, why
    error: str | None = None  # what makes further sampling pointless
    busy_s: dict[int, float] = field(default_factory=dict)  # per server, the seconds until its last response
    waited_s: float = 0.0  # before that, until the client process began
    lost: list[str] = field(default_factory=list)  # how the client process ended, if it did
    is_cut: bool = False  # see `ClientProcess.cut`


@dataclass
class RoundSummary:
    """What ranks tell each other of a round: a `Round` with the indices alone of what was sampled.

    `served_s`: per server when it began and when its last response came, in seconds since the round began.
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
        """Of one rank, which was told to cancel, or not."""
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
        """What several ranks bring home together."""
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
        version: of the weights; servers that have others do not take part.
        step: optimizer steps behind these weights.
        claim: the index of the next request; None if there are no more. Other controllers claim from the same queue.
        slots: the most requests that a server gets at a time.
        keep: called with responses, by the index of their request; each counts once it has returned.
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
        """What the client process is told."""
        task = self.task
        limits = {"known_ids": asdict(task.known_ids), "timeout_s": task.timeout_s, "slots": self.slots}
        taking_part = [_address(server) for server in servers if server.pushed == self.version]
        about = {"version": self.version, "servers": taking_part, "asked": self.asked}
        return {"kind": "sample", **about, **limits}


def _address(server: Server) -> dict[str, Any]:
    """What the client process has to know of a server: fields of `client_main.OthersServer`."""
    paths = {"socket": server.socket, "log": server.log if isinstance(server, LocalServer) else None}
    names = {name: getattr(server, name) for name in ("number", "in_flight", "base_url", "headers")}
    return names | {"label": server.name} | {name: None if path is None else str(path) for name, path in paths.items()}


class Keeper:
    """Takes responses to `result` once `keep` has returned: in a thread, so that a slow disk holds up nothing else.

    `failed` is called in that thread if they can't be kept; the end of the context raises why.
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
        """Waits until all responses are kept."""
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
                while not self._waiting.empty():  # nobody else takes from it
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
        """Of the process, if there is one."""
        return None if self._process is None else self._process.pid

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        root = str(Path(nemo_oprd.__file__).parents[1])
        path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
        # a session of its own: it gets no signals that are for this process
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
        """Begins a round, whose responses and end go to `result`; what the future raises went wrong in our own code.

        `job.claim` and `job.keep` are called in threads of this object, each in its own.
        """
        if self._process is None:
            self._start()
        return self._thread.submit(self._carry_out, job, servers, result)

    def tell_death(self, number: int, why: str) -> None:
        """Says that a server has ended."""
        self._tell({"kind": "died", "server": number, "why": why})

    def stop(self) -> None:
        """Asks to end the round."""
        self._tell({"kind": "stop"})

    def cut(self, result: Round) -> None:
        """Asks to end the round that fills `result` with the tokens so far of what is under way (`Round.cut`)."""
        result.is_cut = True  # before it is told: perhaps the round's thread has not told of the round yet
        self._tell({"kind": "cut"})

    def _tell(self, message: dict[str, Any]) -> None:
        with suppress(OSError):  # it has ended, which the round notices
            self._channel.send(message)

    def _carry_out(self, job: Job, servers: list[Server], result: Round) -> None:
        try:
            with Keeper(job.keep, result, self.stop) as keeper:
                self._tell(job.message(servers))
                if result.is_cut:
                    self._tell({"kind": "cut"})
                self._listen(job, keeper, result)
        except BaseException:
            self._end()  # the servers give up what they sample when their connections close
            raise

    def _listen(self, job: Job, keeper: Keeper, result: Round) -> None:
        """Does what the client process asks for until the round is over, or the process has ended."""
        segments = SegmentReader()
        while (message := self._channel.receive()) is not None:
            kind = message.pop("kind")
            if kind == "news":
                if message["claims"]:  # first, because servers wait for that
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
        """Gives as many requests, or all that are left."""
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
        """Takes a response, which `server` has sampled; one that was cut is not kept."""
        ids, logprobs = segments.response(segment, offset, tokens)
        versions = np.array([[job.step, 0, tokens]], np.int32)  # the client process has compared `Job.version`
        response = Response(ids, finished, logprobs, versions, cut=cut)
        if cut:
            result.cut[index] = response
        else:
            keeper.add(index, response)

    def _end(self) -> str:
        """Ends the process; how it had ended."""
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
