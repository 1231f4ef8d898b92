"""One weight update: from the trainer's stream of tensors to all servers, with a proof that every byte has arrived.

Every rank of the world takes part, because the stream is made by collectives of the trainer's ranks. A controller
pauses its servers, sends the buckets, compares the digest that every worker computed from what it received with that of
the first rank, names the version and resumes. What fails on one controller is known on all ranks after the phase in
which it failed; a server that failed is restarted by the next attempt.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from nemo_oprd.models.megatron.parallel import COLLECTIVE_TIMEOUT, everyones, first_ranks
from nemo_oprd.rollout.vllm import transport
from nemo_oprd.rollout.vllm.controlled import Controlled
from nemo_oprd.rollout.vllm.placement import Place
from nemo_oprd.rollout.vllm.server import Server, ServerDied, ServerRefused
from nemo_oprd.rollout.vllm.update_calls import UpdateCalls
from nemo_oprd.rollout.vllm.weight_group import Rendezvous, WeightGroup
from nemo_oprd.rollout.vllm.worker.nemo_oprd_buckets import Bucket, Digest


@dataclass
class Failures:
    """Servers that died in an attempt, and refusals, of which no repetition is expected to help."""

    died: dict[int, str] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)

    def note(self, server: int, error: BaseException) -> None:
        """Takes up what a call to a server raised."""
        if isinstance(error, ServerDied):
            self.died.setdefault(server, str(error))
        elif isinstance(error, ServerRefused | ValueError):
            self.refused.append(str(error))
        else:
            raise error

    def __bool__(self) -> bool:
        """Whether anything failed."""
        return bool(self.died or self.refused)

    def shared(self) -> Failures:
        """Those of all ranks."""
        parts = everyones(self)
        died = {number: why for part in parts for number, why in part.died.items()}
        return Failures(died, [refusal for part in parts for refusal in part.refused])

    def check(self) -> None:
        """Raises ServerRefused with the first refusal, if there is one."""
        if self.refused:
            raise ServerRefused(self.refused[0])


class WeightPush:
    """Updates the weights of all servers of a run; every rank has one and calls it alike.

    Args:
        names: HF names of all tensors of the model.
        device: of this rank, for collectives over NCCL.
        students: the ranks that have the stream.
    """

    def __init__(
        self,
        places: list[Place],
        mine: Controlled,
        calls: UpdateCalls,
        names: set[str],
        device: torch.device,
        students: range,
    ) -> None:
        self._places, self._mine, self._calls, self._names = places, mine, calls, names
        self.deaths = 0  # of all servers, in this run
        self._false_starts: dict[int, int] = {}  # server -> deaths since it was last ready
        self._group = WeightGroup(places, device)
        self._handle_group = None
        if any(place.transport == "ipc" for place in places):  # a collective of all ranks
            self._handle_group = dist.new_group(list(students), timeout=COLLECTIVE_TIMEOUT)

    def push(self, stream: Callable[[], Iterable[tuple[str, torch.Tensor]]], step: int) -> str:
        """Gives the weights to every server; returns their version.

        Args:
            stream: the whole model; called on every rank, once per attempt.
            step: the first part of the version.

        Raises:
            ServerRefused: a server refuses, or died too often.
        """
        while True:
            failures, version = self._attempt(stream, step)
            if not failures.died:  # a refusal may follow from a death that broke the group
                failures.check()
                assert version is not None
                return version
            self.revive(failures.died)

    def settle(self) -> None:
        """Waits for servers that share GPUs with the trainer, and lets them give the memory back.

        A server measures what is free on its GPU while it starts, so it must have started before models are built.
        Every rank calls this.

        Raises:
            ServerRefused: a server is not the right one, or died too often.
        """
        sleeping = {place.number for place in self._places if place.sleeps}
        while sleeping:
            failures = Failures()
            self._each([n for n in self._mine.servers if n in sleeping], self._calls.settle, failures)
            failures = failures.shared()
            failures.check()
            if not failures.died:
                return
            self.revive(failures.died)

    def revive(self, died: dict[int, str]) -> None:
        """Restarts servers that died; the next `push` waits for them and gives them the weights. Every rank calls this.

        `died`: per server, why; the same on every rank. Raises ServerRefused if a server died too often.
        """
        failures = Failures()
        self.deaths += len(died)
        for number, why in died.items():
            if (server := self._mine.servers.get(number)) is None:
                continue
            server.pushed = None
            self._false_starts[number] = 0 if self._calls.forget(server) else self._false_starts.get(number, 0) + 1
            if self._false_starts[number] > 1:
                failures.refused.append(
                    f"{why}; it died twice before it was ready, expected a server that starts: read its log"
                )
                continue
            try:
                server.restart(why)
            except ServerRefused as refusal:
                failures.refused.append(str(refusal))
        failures.shared().check()

    def _attempt(self, stream: Callable[[], Iterable], step: int) -> tuple[Failures, str | None]:
        failures = Failures()
        self._each(list(self._mine.servers), self._calls.prepare, failures)
        if failures := failures.shared():
            return failures, None
        rendezvous = self._group.meet({number: server.generation for number, server in self._mine.servers.items()})
        if rendezvous is not None:
            self._join(rendezvous, failures)
            if failures := failures.shared():
                return failures, None
        digest = first_ranks(self._send(stream(), failures))
        version = f"{step}-{digest}"
        alive = [number for number in self._mine.servers if number not in failures.died]
        self._each(alive, lambda server: self._calls.finish(server, str(digest), version), failures)
        return failures.shared(), version

    def _each(self, numbers: list[int], call: Callable[[Server], Coroutine], failures: Failures) -> None:
        """Calls `call` for servers of this rank at the same time, and notes which of them failed."""
        if self._mine.client is None or not numbers:
            return

        async def all_of_them() -> list:
            calls = (call(self._mine.servers[number]) for number in numbers)
            return await asyncio.gather(*calls, return_exceptions=True)

        for number, result in zip(numbers, self._mine.client.run(all_of_them()), strict=True):
            if isinstance(result, BaseException):
                failures.note(number, result)

    def _join(self, rendezvous: Rendezvous, failures: Failures) -> None:
        """The workers and the first rank open the group; each waits for the others."""
        opened = self._group.open(rendezvous)
        members = [number for number in self._mine.servers if number in rendezvous.first_ranks]
        self._each(members, lambda server: self._calls.join(server, rendezvous.init_info(server.number)), failures)
        for number, why in self._group.opened(opened).items():
            failures.died.setdefault(number, why)

    def _send(self, weights: Iterable[tuple[str, torch.Tensor]], failures: Failures) -> str | None:
        """Sends the stream; returns its digest on the ranks that have the stream."""
        digest = Digest()
        of_transport: dict[str, list[int]] = {"file": [], "group": [], "ipc": []}
        for number in self._mine.servers:
            of_transport[self._places[number].transport].append(number)
        self._calls.updates_begin()
        receiving = {number: self._start_receiving(number) for number in of_transport["group"]}
        allocate = transport.shareable_room if self._handle_group is not None else transport.room
        for bucket in transport.buckets(weights, allocate=allocate):
            digest.add(bucket)
            if of_transport["file"]:
                self._send_file(bucket, of_transport["file"], failures)
            if self._handle_group is not None:
                self._send_handles(bucket, of_transport["ipc"], failures)
            failures.died = self._group.send(bucket) | failures.died
        failures.died = self._group.send(None) | failures.died
        for number, received in receiving.items():
            if number in failures.died:  # a member of the group is gone; the others wait for it
                received.cancel()
                continue
            try:
                received.result()
            except (ServerDied, ServerRefused) as error:
                failures.note(number, error)
        missing = self._names - set(digest.tensors)
        if digest.tensors and missing:
            failures.refused.append(
                f"the weights to send lack {len(missing)} of {len(self._names)} tensors, such as {min(missing)}; "
                "expected all of them"
            )
        return digest.value() if digest.tensors else None

    def _send_file(self, bucket: Bucket, servers: list[int], failures: Failures) -> None:
        assert self._mine.folder is not None
        try:
            path = self._mine.folder.write(bucket)
        except ValueError as error:
            failures.refused.append(str(error))
            return
        info = {"path": str(path), "entries": bucket.describe(), "bytes": len(bucket.data)}
        self._update(servers, info, failures)
        path.unlink()  # the workers have mapped it

    def _send_handles(self, bucket: Bucket, servers: list[int], failures: Failures) -> None:
        handles = everyones(transport.memory_handle(bucket), self._handle_group)
        info = {"handles": dict(handles), "entries": bucket.describe(), "bytes": len(bucket.data)}
        self._update(servers, info, failures)
        dist.barrier(group=self._handle_group)  # the bucket's memory is used again

    def _update(self, servers: list[int], info: dict[str, Any], failures: Failures) -> None:
        alive = [number for number in servers if number not in failures.died]
        self._each(alive, lambda server: self._calls.update(server, info), failures)

    def _start_receiving(self, number: int) -> Future:
        """The call in which the workers of a server receive all buckets of the group."""
        assert self._mine.client is not None
        return self._mine.client.start(self._calls.update(self._mine.servers[number], {}))
