"""Kills processes of the vLLM server that computes a run's teacher, and its trainer; compares with a run left alone.

    python -m benchmarks.sigkill --teacher vllm [--kills 20] [--seed 0] [--steps 8] [--python PYTHON] [--json FILE]

The trainer (two ranks, student TP2, which samples itself, fp32 on a CPU) lives on while a server's guard, API server,
engine core, worker or whole process group is killed: while the server starts, while it proves itself before the first
step and again during the run, before and amid the states of a step, and while the trainer samples, computes gradients
or saves. One kill in five hits the trainer's ranks instead; then the guard has to clean up alone, and the run is
started again from its checkpoint. Metrics (except times), responses and exported weights must equal those of the run
that was left alone, bit by bit; no process of a server and no new file in shared memory may be left.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.server_killer import API_SERVER, PROCESSES, STARTING, TRAINER, ServerKiller, Strike
from benchmarks.sigkill_vllm import PER_RUN, VllmBench
from tests.support.forked_run import find_call

PROVING, CHECKING = "first proof", "later proof"
ASKING, ANSWERING = "states: asking", "states: some are there"
SAMPLING, GRADIENT, SAVING = "trainer samples", "trainer's gradient", "trainer saves"
PHASES = (STARTING, PROVING, CHECKING, ASKING, ANSWERING, SAMPLING, GRADIENT, SAVING)
# before a server is ready; two deaths there in a row end a run
UNREADY = (STARTING, PROVING)
# a kill amid the states of a step or of a proof comes after this many answers
ANSWERS = 2

CALLS = {
    "step": "nemo_oprd.rollout.training_rollouts:RolloutSampler.rollouts",
    "sampling": "nemo_oprd.rollout.in_process_engine:MegatronEngine.collect",
    "gradient": "nemo_oprd.distillation.step:GradientAccumulation.forward_backward",
    "saving": "nemo_oprd.run.checkpointer:save_checkpoint",
    "start": "nemo_oprd.vllm.server_lifecycle:LocalServer.start",
    "healthy": "nemo_oprd.vllm.client:Client.is_healthy",
    "post": "nemo_oprd.vllm.client:Client.post",
    "answer": "nemo_oprd.vllm.teacher_round:AnswerFiles.read",
    "gather": "nemo_oprd.vllm.teacher_servers:TeacherServers.gather",
    "check": "nemo_oprd.vllm.teacher_servers:TeacherServers.check",
}


class TeacherKiller(ServerKiller):
    """Kills at the places of `CALLS`."""

    _phase: str | None = None  # what the answers are for that come now
    _asked = 0

    def install(self) -> None:
        """Wraps the calls."""
        wrappers: dict[str, Callable[..., Any]] = {
            "step": self._counting,
            "sampling": functools.partial(self._reaching, SAMPLING),
            "gradient": functools.partial(self._reaching, GRADIENT),
            "saving": functools.partial(self._reaching, SAVING),
            "start": self._starting,
            "healthy": self._asking,
            "post": self._posting,
            "answer": self._answering,
            "gather": functools.partial(self._answers_for, ANSWERING),
            "check": functools.partial(self._answers_for, CHECKING),
        }
        for name, wrapper in wrappers.items():
            owner, attribute = find_call(CALLS[name])
            setattr(owner, attribute, wrapper(getattr(owner, attribute)))

    def _may_strike(self, phase: str) -> bool:
        return not self._unrepaired or phase in UNREADY

    def _reaching(self, phase: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def reached(*args: Any, **kwargs: Any) -> Any:
            if self._server is not None and self._server.pushed is not None:
                self._reach(phase, self._server)
            return call(*args, **kwargs)

        return reached

    def _answers_for(self, phase: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def asked(*args: Any, **kwargs: Any) -> Any:
            self._phase, self._answers, self._asked = phase, 0, 0
            try:
                return call(*args, **kwargs)
            finally:
                self._phase = None
                self._went_on()

        return asked

    def _posting(self, call: Callable[..., Any]) -> Callable[..., Any]:
        async def post(client: Any, server: Any, *args: Any, **kwargs: Any) -> Any:
            self._server = server
            if self._phase == ANSWERING and server.pushed is not None:
                self._asked += 1
                if self._asked == 1:
                    self._reach(ASKING, server)
            return await call(client, server, *args, **kwargs)

        return post

    def _answering(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def read(*args: Any, **kwargs: Any) -> Any:
            found = call(*args, **kwargs)
            self._answers += 1
            if self._server.pushed is None:
                self._reach(PROVING, self._server)
            elif self._phase is not None and self._answers == ANSWERS:
                self._reach(self._phase, self._server)
            return found

        return read


class TeacherBench(VllmBench):
    """`VllmBench` for the servers of a teacher."""

    settings = (
        "teacher.engine=vllm",
        "teacher.vllm.max_restarts=20",
        "teacher.vllm.check_every=2",
        "rollout.save=true",
        "train.prompts_per_step=4",
    )
    key, calls, killer = "teacher.vllm", CALLS, TeacherKiller


def choose(kills: int, draw: random.Random, processes: Sequence[str] = PROCESSES) -> list[list[Strike]]:
    """The kills of each run, at most `PER_RUN`; 20 kills meet every phase and every process.

    The last kill of a full run is the trainer's, once a checkpoint exists. Between two kills of a server that is not
    ready there is another one.
    """
    trainers = kills // PER_RUN
    names, phases = list(processes), list(PHASES)
    draw.shuffle(names)
    draw.shuffle(phases)
    pairs = [(names[i % len(names)], phases[i % len(phases)]) for i in range(kills - trainers)]
    runs: list[list[Strike]] = [[] for _ in range(-(-kills // PER_RUN))]
    for number, (process, phase) in enumerate(sorted(pairs, key=lambda pair: PHASES.index(pair[1]))):
        runs[number % len(runs)].append(Strike(process, phase, needs=API_SERVER))
    for number, run in enumerate(runs):
        unready, others = ([s for s in run if (s.phase in UNREADY) == which] for which in (True, False))
        draw.shuffle(others)
        while len(unready) > len(others) + 1:  # they would follow each other
            others.append(Strike(unready.pop().process, ASKING, needs=API_SERVER))
        run[:] = [strike for at in range(len(others) + 1) for strike in (*unready[at : at + 1], *others[at : at + 1])]
        if number < trainers:
            run.append(Strike(TRAINER, PHASES[(2 + number) % len(PHASES)], step=2, needs=API_SERVER))
    return runs


def parse_strikes(texts: list[str]) -> list[Strike]:
    """The kills PROCESS/PHASE of one run, such as "worker/states: asking".

    Raises:
        ValueError: there is no such process or phase.
    """
    found = []
    for text in texts:
        process, _, phase = text.partition("/")
        if process not in (*PROCESSES, TRAINER) or phase not in PHASES:
            raise ValueError(f"{text!r}: expected PROCESS/PHASE of {(*PROCESSES, TRAINER)} and {PHASES}")
        found.append(Strike(process, phase, step=2 if process == TRAINER else 0, needs=API_SERVER))
    return found
