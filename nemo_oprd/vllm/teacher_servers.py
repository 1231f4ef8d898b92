"""The vLLM servers of one teacher: their placement, start and check, and the calls of the ranks that read from them.

One rank per machine, the controller, starts the servers of its machine. Every rank of the teacher's role sends requests
to servers of its own machine, over their Unix sockets, and finds the answers in the controller's folder in shared
memory. Endpoints, servers that others run, are used by all ranks of the role and checked by its first one
(`teacher_round.py`). An answer is a pure function of weights, ids and rows: if a server dies, the others compute its
requests; after the round it is restarted and checked again, and another round sends the requests still missing.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from nemo_oprd.batch.layout import Layout
from nemo_oprd.batch.plan import StepPlan
from nemo_oprd.batch.types import Rollout
from nemo_oprd.canary import CanaryVerdict
from nemo_oprd.config.schema import Config
from nemo_oprd.distillation.objective import StepObjective
from nemo_oprd.distillation.target_transfer import RowShard
from nemo_oprd.distillation.teacher import Teacher
from nemo_oprd.megatron.parallel import device, everyones, wait_for_all
from nemo_oprd.runtime.signals import StoppedWaiting
from nemo_oprd.vllm.client import Client
from nemo_oprd.vllm.endpoint import Endpoint
from nemo_oprd.vllm.fleet import Failures, Fleet, machines_and_devices
from nemo_oprd.vllm.launch import (
    TEACHER_BATCHED_TOKENS,
    TEACHER_KEY,
    TEACHER_SEQUENCES,
    TEACHER_VARIABLES,
    check_teacher_description,
    find_python,
    teacher_arguments,
)
from nemo_oprd.vllm.placement import dedicated_ranks, rank_groups
from nemo_oprd.vllm.server_lifecycle import LocalServer, Server, ServerDied
from nemo_oprd.vllm.teacher_bridge import ServedBridge
from nemo_oprd.vllm.teacher_canary import Canary
from nemo_oprd.vllm.teacher_requests import Shards, TeacherAnswer, TeacherRequest, sequence_requests
from nemo_oprd.vllm.teacher_round import Prefetcher, TeacherRound, host_room, server_room, shared_endpoint
from nemo_oprd.vllm.worker.nemo_oprd_requests import AnswerFolder, weights_digest

# A teacher whose states vLLM servers compute: its ranks request the rows of their own sequences.
#
# The role is data-parallel over the student's ranks and holds no weights. Plans, transfers and everything after them
# are those of any teacher. Servers send states in the model's dtype, or a bridge's projections of them, in float32.
# Servers that several runs share get no bridge, so the requesting rank projects their states.


@dataclass
class ServedTeacher(Teacher):
    """A teacher whose states vLLM servers compute; see the module's docstring."""

    servers: TeacherServers

    def captured(
        self, rollouts: list[Rollout], plan: StepPlan, objective: StepObjective
    ) -> tuple[RowShard | None, RowShard | None]:
        """See `Teacher`.

        Raises:
            ServerRefused: a server gives no states, or died too often.
        """
        match, term, coords = objective.run.teachers[self.number], objective.output, self.role.coords
        bridge = self.servers.bridge
        wanted = [] if coords is None else sequence_requests(rollouts, plan, coords.data, match, term, bridge)
        shards = Shards(match, term, self.dtype, objective.run.student.num_layers)
        self.servers.gather([each.request for each in wanted], lambda i, answer: shards.take(wanted[i], answer))
        return (None, None) if coords is None else shards.joined()

    def prefetch(self, step: int, rollouts: list[Rollout], plan: StepPlan, objective: StepObjective) -> None:
        """See `Teacher`."""
        match, term, bridge = objective.run.teachers[self.number], objective.output, self.servers.bridge
        if self.servers.prefetcher is None:
            return
        for data in range(plan.hidden.layout.data):  # any of these ranks may need them in the batch
            wanted = sequence_requests(rollouts, plan, data, match, term, bridge)
            self.servers.prefetcher.offer(step, [each.request for each in wanted], self.servers.near)

    def prefetch_span(self, step: int) -> tuple[float, float] | None:
        """See `Teacher`."""
        return None if self.servers.prefetcher is None else self.servers.prefetcher.span(step)

    def check(self, step: int) -> None:
        """See `Teacher`."""
        self.servers.check(step)

    def close(self) -> None:
        """Ends the servers."""
        self.servers.close()


# The servers' addresses and generations, which the ranks share once the servers have passed the canary.


@dataclass
class ServerRegistry:
    """Data of the servers that this rank uses.

    Attributes:
        generations: server's name -> the start that has passed the canary; an answer names the start that made it.
        rooms: server's number -> bytes of answers that it holds at a time; 0 or absent unless it is an endpoint.
    """

    generations: dict[str, int] = field(default_factory=dict)
    rooms: dict[int, int] = field(default_factory=dict)

    def share(self, own: dict[int, Server], servers: dict[int, Server], mine: set[int], *, elsewhere: bool) -> None:
        """Shares the data of this rank's `own` servers with all ranks, and takes theirs. Every rank calls this.

        Args:
            own: this rank's servers, by number.
            servers: those that this rank uses; the call adds those that other ranks of its machine started.
            mine: the numbers of all servers that this rank uses.
            elsewhere: whether all servers are endpoints, whose addresses every rank knows.
        """
        told = {
            number: (self.generations.get(server.name, 0), self.rooms.get(number, 0), str(server.socket))
            for number, server in own.items()
        }
        for number, (generation, room, at) in ((n, facts) for part in everyones(told) for n, facts in part.items()):
            if number in own or number not in mine:
                continue
            server = servers.setdefault(number, _neighbour(number))
            if not elsewhere:
                server.socket = Path(at)
            self.generations[server.name], self.rooms[number] = generation, room


def _neighbour(number: int) -> Server:
    """Makes the client side of a server that another rank of this machine has started."""
    return Server(number, TEACHER_SEQUENCES, key=TEACHER_KEY, role="the teacher's vLLM server")


logger = logging.getLogger(__name__)

# the share of free bytes in shared memory that answers may take on a machine
ANSWERS_SHARE = 0.25


@dataclass(frozen=True)
class _TeacherPlacement:
    """One server: the rank that starts or checks it, the ranks that use it, its CUDA devices (None: without CUDA).

    `url` is the address of an endpoint.
    """

    number: int
    controller: int
    readers: tuple[int, ...]
    devices: tuple[str, ...] | None = None
    url: str | None = None


def place(
    config: Config,
    machines: Sequence[str],
    devices: Sequence[str | None],
    readers: range,
    endpoints: Sequence[str] = (),
    first: int | None = None,
) -> list[_TeacherPlacement]:
    """Places the servers of a teacher, the same on every rank.

    Args:
        endpoints: the addresses of servers that others run; without any, the run starts its own.
        machines, devices: per rank of the world, as in `vllm/placement.py`.
        readers: the ranks that need states.
        first: the first rank of dedicated servers; None: the one behind the readers.

    Raises:
        ValueError: a machine with readers has no server, or a server has no reader on its machine.
    """
    if endpoints:
        return [_TeacherPlacement(number, readers[0], tuple(readers), url=url) for number, url in enumerate(endpoints)]
    settings = config.teacher.vllm
    behind = readers.stop if first is None or settings.placement == "colocated" else first
    end = behind + dedicated_ranks(settings)
    groups = rank_groups(settings, machines[:end], devices[:end], readers, "teacher")
    cuda, places = devices[readers[0]] is not None, []
    for number, group in enumerate(groups):
        near = tuple(rank for rank in readers if machines[rank] == machines[group[0]])
        if not near:
            raise ValueError(
                f"{TEACHER_KEY}.placement={settings.placement}: server {number} would be on {machines[group[0]]}, "
                "where no rank of the student is; expected one there, because states reach it through shared memory: "
                f"choose {TEACHER_KEY}.placement=colocated, or fewer {TEACHER_KEY}.replicas"
            )
        names = tuple(str(devices[rank]) for rank in group) if cuda else None
        places.append(_TeacherPlacement(number, near[0], near, names))
    served = {rank for each in places for rank in each.readers}
    without = sorted({machines[rank] for rank in readers if rank not in served})
    if without:
        raise ValueError(
            f"{TEACHER_KEY}.replicas={settings.replicas}: {', '.join(without)} would have no server of the teacher; "
            f"expected one on every machine of the student: set {TEACHER_KEY}.replicas to a multiple of "
            f"{len(set(machines))}"
        )
    return places


def longest_sequence(config: Config, canary: Canary) -> int:
    """Returns the largest number of tokens in a request of the run or of the canary, at most the model's positions.

    It returns the model's positions if prompts have no limit, if responses are replayed, if the teacher has prompts or
    ids of its own, or if flags set --max-num-batched-tokens, on which the canary's lengths depend.
    """
    limit, teacher, positions = config.data.max_prompt_tokens, config.teacher, canary.spec.max_positions
    others_ids = teacher.reads != "ids" or bool(config.own_prompts) or config.rollout.replay is not None
    flags = [str(flag).partition("=")[0].replace("_", "-") for flag in teacher.vllm.flags]
    if limit is None or others_ids or "--max-num-batched-tokens" in flags:
        return positions
    proof = max(map(len, canary.prompts({"chunk": TEACHER_BATCHED_TOKENS})))
    return min(positions, max(limit + config.rollout.max_new_tokens, proof))


def _local_server(
    config: Config, directory: Path, longest: int, where: _TeacherPlacement, number: int, folder: Path
) -> LocalServer:
    """Makes a server of teacher `number`, not yet started, with its sockets and answers in `folder`."""
    settings = config.teacher.vllm
    return LocalServer(
        where.number,
        TEACHER_SEQUENCES,
        settings.max_restarts,
        key=TEACHER_KEY,
        role="the teacher's vLLM server",
        python=find_python(settings, TEACHER_KEY),
        flags=teacher_arguments(config, directory, longest, cuda=device().type == "cuda"),
        devices=where.devices,
        log=Path(config.output) / "vllm" / f"teacher_{number}_server_{where.number}.log",
        directory=folder,
        variables=TEACHER_VARIABLES,
    )


class TeacherServers:
    """The servers of a teacher. Every rank of the world builds it and makes every call."""

    def __init__(
        self, config: Config, number: int, canary: Canary, readers: Layout, trainer_ranks: int | None = None
    ) -> None:
        """Starts the servers of this rank's machine, without waiting for them.

        Args:
            number: index of the teacher.
            canary: the teacher, and the check of its servers.
            readers: the layout of the ranks that need states.
            trainer_ranks: the number of ranks that hold models, the first ones of the world; dedicated servers of all
                teachers have the ranks after these, in the order of the teachers. None: up to the last reader.

        Raises:
            ValueError: the placement of the servers is wrong.
        """
        self._config, self._canary, self._spec = config, canary, canary.spec
        self._settings = config.teacher.vllm
        ranks = range(readers.first_rank, readers.first_rank + readers.size)
        machines, devices = machines_and_devices(device().type == "cuda")
        endpoints = config.teacher_endpoints(number)
        others = sum(other < number for other in config.started_teachers) * dedicated_ranks(self._settings)
        first = others + (ranks.stop if trainer_ranks is None else trainer_ranks)
        places = place(config, machines, devices, ranks, endpoints, first)
        self._longest = longest_sequence(config, canary)
        self._number = number
        # the number of this machine's ranks that hold answers
        self._neighbours = sum(machines[rank] == machines[torch.distributed.get_rank()] for rank in ranks)
        self._rank = torch.distributed.get_rank()
        self._mine = [each for each in places if self._rank in each.readers]
        self._servers: dict[int, Server] = {}  # those that this rank uses
        self._fleet = Fleet(self._settings.start_timeout, Client() if self._mine else None)
        self._answers: AnswerFolder | None = None  # of this machine's servers; None: they are endpoints
        self._are_elsewhere = bool(endpoints)
        self._known = ServerRegistry()
        self._described: dict[int, dict[str, Any]] = {}  # the descriptions of this rank's servers
        self.prefetcher: Prefetcher | None = None
        if not self._mine:
            return
        try:
            if self._settings.ahead_gib:
                about = canary.spec.hidden_size, canary.dtype, len(self._mine[0].readers)
                self.prefetcher = Prefetcher(self._client, self._settings, *about, self._slots)
            for each in self._mine:
                if each.url is None and each.controller != self._rank:
                    continue  # another rank starts it, and shares its address
                server = self._servers[each.number] = self._make_server(each)
                if each.controller == self._rank:
                    self._fleet.add(server)
        except BaseException:
            self.close()
            raise

    @property
    def _slots(self) -> int:
        """The largest number of requests that this rank has at one server at a time."""
        return max(1, TEACHER_SEQUENCES // max(len(each.readers) for each in self._mine))

    def _make_server(self, where: _TeacherPlacement) -> Server:
        """Makes a server that this rank uses, not yet started."""
        if where.url is not None:
            return shared_endpoint(self._config, where.number, where.url)
        folder = self._fleet.open_folder()
        return _local_server(self._config, self._canary.directory, self._longest, where, self._number, folder)

    @property
    def verdict(self) -> CanaryVerdict | None:
        """The verdict on the server that this rank checked last; None on ranks that check none."""
        return self._canary.verdict

    @property
    def near(self) -> list[Server]:
        """The servers that this rank uses."""
        return [*self._servers.values()]

    @property
    def bridge(self) -> ServedBridge | None:
        """The bridge that servers apply to requested states; None: the requesting rank applies it, if there is one."""
        return self._canary.bridge

    def wait(self) -> None:
        """Waits until all servers are healthy and have passed their checks. Every rank calls this.

        Raises:
            ServerRefused: a server failed a check, or died too often.
            StoppedWaiting: a signal asked the run to stop.
        """
        while failures := self._prove_all():
            self._revive(failures.died)

    def _prove_all(self) -> Failures:
        """Checks this rank's servers that are not ready, and shares their data; returns the deaths on all ranks."""
        failures, weights, own = Failures(), "", self._fleet.servers
        if own:
            weights = weights_digest(str(self._canary.directory))
        for number, server in own.items():
            if server.pushed is None:
                try:
                    self._prove(server, weights)
                except (ServerDied, ValueError, StoppedWaiting) as error:
                    failures.note(number, error)
        wait_for_all()  # servers start for minutes, longer than a collective may take
        failures = failures.shared()
        failures.check()
        mine = {each.number for each in self._mine}
        self._known.share(own, self._servers, mine, elsewhere=self._are_elsewhere)
        if self._answers is None and self._servers and not self._are_elsewhere:
            self._answers = AnswerFolder(str(self._folder))
        return failures

    @property
    def _folder(self) -> Path:
        """The folder with the sockets of this machine's servers and their answers."""
        socket = next(iter(self._servers.values())).socket
        assert socket is not None
        return socket.parent

    def _prove(self, server: Server, weights: str) -> None:
        """Waits for a server of this rank, and checks it.

        Raises:
            ServerDied: the server ended.
            ValueError: the server computes something else.
        """
        tensor = None if isinstance(server, Endpoint) else self._settings.tensor

        def describe(found: dict[str, Any], name: str) -> None:
            check_teacher_description(
                found, name, self._config, self._spec, weights, tensor=tensor, longest=self._longest
            )

        proving = self._fleet.prove(server, describe, self._install)
        described = self._described[server.number] = self._client.run(proving)
        self._known.generations[server.name] = described["generation"]
        if self._are_elsewhere:
            self._known.rooms[server.number] = server_room(self._client, server)
        else:
            self._answers = self._answers or AnswerFolder(str(self._folder))
        logger.info(f"{server.name} (teacher {self._number}): {self._show(server)}")
        server.pushed, server.is_ready = weights, True

    async def _install(self, server: Server) -> None:
        """Installs the hooks that capture states, and the bridge."""
        await self._client.call_workers(server, "nemo_oprd_install")
        if self.bridge is not None:
            assert server.socket is not None
            loading, timeout = self.bridge.loading(server.socket.parent), self._settings.start_timeout
            loaded = await self._client.post_watched(server, "/collective_rpc", loading, timeout=timeout)
            self.bridge.check_loaded(loaded["results"], server.name)

    @property
    def _client(self) -> Client:
        assert self._fleet.client is not None
        return self._fleet.client

    def _show(self, server: Server) -> str:
        """Runs the canary on a server; returns the result as a line. Raises as `_prove`."""
        return self._canary.prove(
            lambda state_requests: self._round().answers(state_requests, server), self._described[server.number]
        )

    def check(self, step: int) -> None:
        """Drops answers prefetched for past steps; runs the canary if due. Every rank calls this; raises as `wait`."""
        if self.prefetcher is not None and self._answers is not None:
            self.prefetcher.forget(step, self._answers)
        every, failures = self._settings.check_every, Failures()
        if not (every and step) or step % every:
            return
        for number in self._described:
            try:
                self._show(self._servers[number])
            except (ServerDied, ValueError) as error:
                failures.note(number, error)
        wait_for_all()
        failures = failures.shared()
        failures.check()
        self._revive(failures.died)
        self.wait()

    def gather(self, requests: Sequence[TeacherRequest], take: Callable[[int, TeacherAnswer], None]) -> None:
        """Sends the requests of this rank, which has none unless it is a reader. Every rank of the world calls this.

        Args:
            take: called in this thread with every answer, in any order: the index of its request, and the answer.

        Raises:
            ServerRefused: a server gives no states, or died too often.
        """
        missing = set(range(len(requests)))

        def delivered(index: int, answer: TeacherAnswer) -> None:
            missing.discard(index)
            take(index, answer)

        if self.prefetcher is not None:
            self.prefetcher.settle()
        if self._settings.ahead_gib:
            wait_for_all()  # another rank may have prefetched what this one needs
        if self.prefetcher is not None and self._answers is not None:
            generations = {*self._known.generations.values()}
            self.prefetcher.take_all(requests, self._answers, generations, delivered)
        while True:
            failures = Failures()
            if missing:
                self._round().request_states(requests, sorted(missing), delivered, failures, self.near)
            wait_for_all()
            failures = failures.shared()
            failures.check()
            if not failures.died:
                return
            self._revive(failures.died)
            self.wait()

    def _round(self) -> TeacherRound:
        """Makes the `TeacherRound` of this rank, with the room that is free now."""
        about, limit_s = (self._spec.hidden_size, self._canary.dtype), self._settings.request_timeout
        where = self._answers, self._known.generations
        return TeacherRound(self._client, *where, *about, self._room(), self._slots, limit_s)

    def _room(self) -> int:
        """Computes how many bytes of answers may wait for this rank: in shared memory or, with endpoints, its own."""
        if self._are_elsewhere:
            return min(host_room(self._neighbours), *self._known.rooms.values())
        free = os.statvfs(self._folder)
        return int(free.f_bavail * free.f_frsize * ANSWERS_SHARE) // len(self._mine[0].readers)

    def _revive(self, died: dict[int, str]) -> None:
        """Restarts dead servers; after any death, empties this machine's answer folder. Every rank calls this."""
        self._fleet.revive(died)
        if died and self._answers is not None and self._fleet.folder is not None:
            self._answers.clear()

    def close(self) -> None:
        """Ends the servers that this rank has started, and removes their files in shared memory."""
        with ExitStack() as ends:  # the last one first, and all of them, whatever fails
            if self._answers is not None:
                ends.callback(self._answers.close)
            ends.callback(self._fleet.close)
            if self.prefetcher is not None:
                ends.callback(self.prefetcher.close)
        self._servers, self._answers = {}, None
