"""In the first rank of a run with vLLM servers: kills processes of a server at recorded places of the run.

`ServerKiller` wraps the calls by which the trainer talks to its server, so that a kill hits its phase and not a random
moment. What it did goes as JSON lines through a pipe to the benchmark (`sigkill_vllm.py`):

    {"server": group}                             a server was started; its process group
    {"kill": index, "step": n, "at": time}        a strike hit
    {"repaired": index, "seconds": s}             the run went on
    {"hold": index, "step": n, "at": time}        the trainer waits to be killed
"""

from __future__ import annotations

import functools
import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.forked_run import find_call

GUARD, API_SERVER, ENGINE_CORE, WORKER = "guard", "API server", "engine core", "worker"
GROUP, TRAINER = "process group", "trainer"
PROCESSES = (GUARD, API_SERVER, ENGINE_CORE, WORKER, GROUP)

STARTING = "starting"
BEFORE_UPDATE, BETWEEN_BUCKETS, BEFORE_FINISH = "update: beginning", "update: between buckets", "update: finishing"
GENERATION, BETWEEN_STEPS, EVALUATION = "generation", "trainer busy", "evaluation"
PHASES = (STARTING, BEFORE_UPDATE, BETWEEN_BUCKETS, BEFORE_FINISH, GENERATION, BETWEEN_STEPS, EVALUATION)

# small enough for several buckets of the toy model, which has 1.5 MB of weights
BUCKET_BYTES = 1 << 19
# a kill during sampling comes after this many responses
ANSWERS = 3

CALLS = {
    "step": "nemo_oprd.rollout.training_rollouts:RolloutSampler.rollouts",
    "busy": "nemo_oprd.distillation.step:GradientAccumulation.forward_backward",
    "submit": "nemo_oprd.vllm.engine:VllmEngine.submit",
    "collect": "nemo_oprd.vllm.engine:VllmEngine.collect",
    "update": "nemo_oprd.vllm.engine:VllmEngine.update_weights",
    "start": "nemo_oprd.vllm.server_lifecycle:LocalServer.start",
    "healthy": "nemo_oprd.vllm.client:Client.is_healthy",
    "post": "nemo_oprd.vllm.client:Client.post",
    "answer": "nemo_oprd.vllm.sampler:Sampler._deliver",
    "buckets": "nemo_oprd.vllm.transport:buckets",
}


@dataclass(frozen=True)
class Strike:
    """SIGKILL to `process` in `phase`, at the first opportunity after `step` steps and the strike before it.

    While the server starts, `needs` names the process that must have been started, so that there is something to leave.
    """

    process: str
    phase: str
    step: int = 0
    needs: str = ENGINE_CORE


def server_processes(group: int) -> dict[str, list[int]]:
    """Kind -> process ids of a server's process group, told apart by who started whom."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            state, parent, its_group = (entry / "stat").read_text().rsplit(")", 1)[1].split()[:3]
            command = (entry / "cmdline").read_bytes()
        except OSError:  # ended meanwhile
            continue
        if int(its_group) == group and state not in "ZX" and b"resource_tracker" not in command:
            parents.setdefault(int(parent), []).append(int(entry.name))
    found, level = {GUARD: [group]}, [group]
    for kind in (API_SERVER, ENGINE_CORE, WORKER):
        level = sorted(pid for parent in level for pid in parents.get(parent, []))
        found[kind] = level
    return found


class ServerKiller:
    """Kills at each of `strikes` in turn; the next one is armed when the run has gone on.

    A strike while the server starts is armed at once, so it hits the restart that the strike before it caused.

    Args:
        pipe: descriptor for messages.
        strikes: what is left to do; `first` is the index of the first of them in the messages.
        since: when the trainer was killed, whose successor this is; it reports when it has gone on.
    """

    def __init__(self, pipe: int, strikes: list[Strike], first: int, since: float | None = None) -> None:
        self._pipe, self._strikes, self._next = pipe, strikes, first
        # strike -> when, and how often the server had been started
        self._unrepaired: dict[int, tuple[float, int]] = {} if since is None else {first - 1: (since, 0)}
        self._step, self._buckets, self._answers = 0, 0, 0
        self._sampling: str | None = None
        self._server: Any = None

    def install(self) -> None:
        """Wraps the calls."""
        wrappers = {
            "step": self._counting,
            "busy": self._busy,
            "submit": self._submitting,
            "collect": self._collecting,
            "update": self._updating,
            "start": self._starting,
            "healthy": self._asking,
            "post": self._posting,
            "answer": self._answering,
        }
        for name, wrapper in wrappers.items():
            owner, attribute = find_call(CALLS[name])
            setattr(owner, attribute, wrapper(getattr(owner, attribute)))
        transport, attribute = find_call(CALLS["buckets"])
        setattr(transport, attribute, functools.partial(getattr(transport, attribute), size=BUCKET_BYTES))

    def _counting(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def rollouts(sampler: Any, step: int) -> Any:
            self._step = step
            return call(sampler, step)

        return rollouts

    def _busy(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def forward_backward(*args: Any, **kwargs: Any) -> Any:
            if self._server is not None and self._server.pushed is not None:
                self._reach(BETWEEN_STEPS, self._server)
            return call(*args, **kwargs)

        return forward_backward

    def _submitting(self, call: Callable[..., Any]) -> Callable[..., Any]:
        from nemo_oprd.rollout.engine import TRAINING_STREAM

        def submit(engine: Any, requests: Any, sampling: Any, *args: Any, **kwargs: Any) -> Any:
            self._sampling = GENERATION if sampling.key[1] == TRAINING_STREAM else EVALUATION
            self._answers = 0
            return call(engine, requests, sampling, *args, **kwargs)

        return submit

    def _collecting(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def collect(*args: Any, **kwargs: Any) -> Any:
            result = call(*args, **kwargs)
            self._went_on()
            return result

        return collect

    def _updating(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def update_weights(*args: Any, **kwargs: Any) -> Any:
            result = call(*args, **kwargs)
            self._went_on()
            return result

        return update_weights

    def _starting(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def start(server: Any) -> Any:
            result = call(server)
            self._send({"server": server._process.pid})
            return result

        return start

    def _asking(self, call: Callable[..., Any]) -> Callable[..., Any]:
        async def is_healthy(client: Any, server: Any, *args: Any, **kwargs: Any) -> Any:
            if server.pushed is None:
                self._reach(STARTING, server)
            return await call(client, server, *args, **kwargs)

        return is_healthy

    def _posting(self, call: Callable[..., Any]) -> Callable[..., Any]:
        async def post(client: Any, server: Any, path: str, *args: Any, **kwargs: Any) -> Any:
            self._server = server
            if path == "/start_weight_update":
                self._buckets = 0
                self._reach(BEFORE_UPDATE, server)
            elif path == "/update_weights":
                self._buckets += 1
                if self._buckets == 2:
                    self._reach(BETWEEN_BUCKETS, server)
            elif path == "/finish_weight_update":
                self._reach(BEFORE_FINISH, server)
            return await call(client, server, path, *args, **kwargs)

        return post

    def _answering(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def take(*args: Any, **kwargs: Any) -> None:
            call(*args, **kwargs)
            self._answers += 1
            if self._answers == ANSWERS:
                self._reach(str(self._sampling), self._server)

        return take

    def _may_strike(self, phase: str) -> bool:
        """Whether the kill before this one is repaired, or the phase is part of that."""
        return not self._unrepaired or phase == STARTING

    def _reach(self, phase: str, server: Any) -> None:
        """Strikes if it is time to."""
        if not self._strikes:
            return
        strike = self._strikes[0]
        if strike.phase != phase or self._step < strike.step or not self._may_strike(phase):
            return
        processes = server_processes(server._process.pid)
        if not processes[WORKER if strike.process == WORKER else strike.needs]:
            return
        del self._strikes[0]
        at, index = time.time(), self._next
        self._next += 1
        if strike.process == TRAINER:
            self._send({"hold": index, "step": self._step, "at": at})
            time.sleep(3600)  # the server samples on meanwhile
        if strike.process == GROUP:
            os.killpg(server._process.pid, signal.SIGKILL)
        else:
            os.kill(processes[strike.process][-1], signal.SIGKILL)
        self._unrepaired[index] = at, server.generation
        self._send({"kill": index, "step": self._step, "at": at})

    def _went_on(self) -> None:
        """After a call of the engine: it has repaired what was killed, if a later server has the weights."""
        for index, (at, generation) in list(self._unrepaired.items()):
            if self._server.generation > generation and self._server.pushed is not None:
                self._send({"repaired": index, "seconds": time.time() - at})
                del self._unrepaired[index]

    def _send(self, message: dict[str, Any]) -> None:
        os.write(self._pipe, (json.dumps(message) + "\n").encode())
