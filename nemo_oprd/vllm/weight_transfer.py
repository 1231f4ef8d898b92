"""One weight transfer: from the trainer's stream of tensors to all servers, with a check that every byte has arrived.

Every rank of the world takes part, because the trainer's ranks make the stream by collectives. A controller pauses its
servers, sends the buckets, compares each worker's digest of the received tensors with the first rank's digest, sets the
version, and lets the servers sample again. Ranks share failures after each phase, and dead servers are then restarted.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from nemo_oprd.megatron.parallel import COLLECTIVE_TIMEOUT, everyones, first_ranks
from nemo_oprd.runtime.messages import ON_STDOUT
from nemo_oprd.vllm import transport
from nemo_oprd.vllm.client import CALL_TIMEOUT_S, Client
from nemo_oprd.vllm.fleet import Failures, Fleet
from nemo_oprd.vllm.placement import ServerPlacement
from nemo_oprd.vllm.server_lifecycle import Server, ServerDied, ServerRefused
from nemo_oprd.vllm.weight_group import Ended, Rendezvous, WeightGroup
from nemo_oprd.vllm.worker.nemo_oprd_buckets import Bucket, Digest

# The calls of a weight transfer to one server: wait until it is healthy, begin, receive, compare, sample again.


logger = logging.getLogger(__name__)

# limit of loading a bucket: one of 256 MB takes seconds; rebuilding a large layer takes longer
LOAD_TIMEOUT_S = 900.0
# limit of receiving a whole model over a slow network
RECEIVE_TIMEOUT_S = 4 * 3600.0
# seconds of a pause after which the log names its reason
SAY_AFTER_S = 10.0


@dataclass
class UpdateCalls:
    """The calls of one controller, and the state of each of its servers. Any call may raise ServerDied or ValueError.

    Attributes:
        fleet: this rank's servers; a rank that controls no server has no client, and makes no call.
        tensors: number of tensors of the model.
        describe: raises ValueError unless a server, by its description, fits this run.
        response_timeout: seconds that a response may take, including one for another client.
    """

    fleet: Fleet
    places: list[ServerPlacement]
    tensors: int
    describe: Callable[[dict[str, Any], str], None]
    response_timeout: float
    _joined: set[int] = field(default_factory=set)  # servers that have a transport
    _begun: set[int] = field(default_factory=set)  # servers with an update that has begun and received nothing
    _broken: set[int] = field(default_factory=set)  # servers with an update that is not finished

    @property
    def _client(self) -> Client:
        assert self.fleet.client is not None
        return self.fleet.client

    def forget(self, number: int) -> None:
        """Forgets a server that died."""
        self._joined.discard(number)
        self._begun.discard(number)
        self._broken.discard(number)

    def updates_begin(self) -> None:
        """Notes that servers receive tensors from here on, so that `prepare` begins a new update after a failure."""
        self._begun.clear()

    async def prepare(self, server: Server) -> None:
        """Waits until the server is healthy, pauses it, and begins an update."""
        if not server.is_ready:
            await self._prove(server)
        if server.number in self._begun:
            return
        if self.places[server.number].sleeps:
            await self._client.post_watched(server, "/wake_up?tags=weights")
        await self._pause(server)
        if self.places[server.number].transport != "group" and server.number not in self._joined:
            await self._client.post_watched(server, "/init_weight_transfer_engine", {"init_info": {}})
            self._joined.add(server.number)
        if server.number in self._broken:
            await self._client.call_workers(server, "nemo_oprd_give_up")
            self._broken.discard(server.number)
        await self._client.post_watched(server, "/start_weight_update")
        self._begun.add(server.number)

    async def _pause(self, server: Server) -> None:
        """Lets the server finish its requests, and hold back new ones.

        An endpoint may be in the middle of long responses for another client. Health checks go on meanwhile, so that
        the wait does not count as a death. The mode "wait" aborts nothing, and resets the prefix cache, which has keys
        of the old weights.
        """
        own = self.places[server.number].url is None
        limit = CALL_TIMEOUT_S if own else self.response_timeout
        call = asyncio.create_task(
            self._client.post_watched(server, "/pause?mode=wait", timeout=limit + CALL_TIMEOUT_S)
        )
        if not own and (await asyncio.wait([call], timeout=SAY_AFTER_S))[1]:
            logger.warning(f"{server.name} samples for somebody else; the update waits for that", extra=ON_STDOUT)
        if not (await asyncio.wait([call], timeout=limit))[1]:
            call.result()
            return
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        waited = f"{server.name} did not end the responses under way within {limit:.0f} s"
        if own:  # it has no other client
            raise ServerDied(waited)
        raise ServerRefused(
            f"{waited}, expected it to be within rollout.vllm.request_timeout: does somebody else use this server?"
        )

    async def _prove(self, server: Server) -> None:
        """Waits until the server is healthy, fits the run and survives a request."""
        await self.fleet.prove(server, self.describe, self._recover)
        server.is_ready = True

    async def _recover(self, server: Server) -> None:
        """Ends the unfinished update and the pause in which an earlier run may have left an endpoint."""
        await self._client.call_workers(server, "nemo_oprd_give_up")
        await self._client.post_watched(server, "/resume")

    async def settle(self, server: Server) -> None:
        """Waits until the server is healthy, and lets it give its GPU memory back."""
        if server.is_ready:
            return  # it sleeps since an earlier try, in which another server died
        await self._prove(server)
        await self._client.post_watched(server, "/sleep?level=2&mode=wait")

    async def join(self, server: Server, init_info: dict[str, Any]) -> None:
        """Lets the workers join the process group of the weights; returns once all members have joined."""
        path, body = "/init_weight_transfer_engine", {"init_info": init_info}
        # members who wait for the others have a deadline of their own
        await self._client.post_watched(server, path, body, timeout=init_info["timeout_s"] + CALL_TIMEOUT_S)

    async def update(self, server: Server, info: dict[str, Any]) -> None:
        """Lets the workers load one bucket; see `nemo_oprd_worker.UpdateInfo`."""
        await self._load(server, info, LOAD_TIMEOUT_S)

    async def receive(self, server: Server) -> None:
        """Lets the workers receive all buckets from the group, whose members have a deadline for each broadcast."""
        await self._load(server, {}, RECEIVE_TIMEOUT_S)

    async def _load(self, server: Server, info: dict[str, Any], timeout: float) -> None:
        self._broken.add(server.number)  # until `finish`: another server's failure may end the update before
        await self._client.post_watched(server, "/update_weights", {"update_info": info}, timeout=timeout)

    async def finish(self, server: Server, digest: str, version: str) -> None:
        """Compares the digests of all workers, and lets the server sample from the weights."""
        received = await self._client.call_workers(server, "nemo_oprd_received", timeout=LOAD_TIMEOUT_S)
        for worker, found in enumerate(received):
            stale = found.pop("stale", [])
            if found != {"digest": digest, "tensors": self.tensors}:
                raise ServerRefused(
                    f"{server.name}, worker {worker}: received {found['tensors']} tensors with the digest "
                    f"{found['digest']}, expected {self.tensors} with {digest}: the weights did not "
                    "arrive as sent; restart the server"
                )
            if stale:
                raise ServerRefused(
                    f"{server.name}, worker {worker}: {len(stale)} module(s) such as {stale[0]!r} took none of the "
                    "weights that came, and would keep the old ones; expected all of them: this vLLM can't reload the "
                    "model, choose another version or rollout.engine=megatron"
                )
        body = {"weight_version": version}
        await self._client.post_watched(server, "/finish_weight_update", body, timeout=LOAD_TIMEOUT_S)
        self._broken.discard(server.number)
        if self.places[server.number].sleeps:
            await self._client.post_watched(server, "/wake_up?tags=kv_cache")
        await self._client.post_watched(server, "/resume")
        server.pushed = version


class WeightPush:
    """Updates the weights of all servers of a run; every rank has one and calls it alike.

    Args:
        names: HF names of all tensors of the model.
        device: of this rank, for collectives over NCCL.
        students: the ranks that have the stream.
        memory_share: the fraction of a GPU's memory that a server takes.
    """

    def __init__(
        self,
        places: list[ServerPlacement],
        mine: Fleet,
        calls: UpdateCalls,
        names: set[str],
        device: torch.device,
        students: range,
        memory_share: float,
    ) -> None:
        self._places, self._mine, self._calls, self._names = places, mine, calls, names
        self._memory_share = memory_share
        self._group = WeightGroup(places, device)
        self._handle_group = None
        if any(place.transport == "ipc" for place in places):  # a collective of all ranks
            self._handle_group = dist.new_group(list(students), timeout=COLLECTIVE_TIMEOUT)

    def push(
        self, stream: Callable[[], Iterable[tuple[str, torch.Tensor]]], step: int, version: str | None = None
    ) -> str:
        """Sends the weights to every server; returns their version.

        Args:
            stream: makes the stream of all tensors; called on every rank, at most once per attempt.
            step: number of optimizer steps behind the weights; the version consists of it and the digest.
            version: of weights that some servers have already; the stream must still have their bytes.

        Raises:
            ServerRefused: a server refuses or died too often, the group broke twice, or the stream is not of `version`.
            StoppedWaiting: a signal asked the run to stop.
        """
        broke = None
        while True:
            failures, sent, ended = self._attempt(stream, step, version)
            if failures.died and not failures.stopped:  # a refusal may follow from a death that broke the group
                self.revive(failures.died)
                continue
            failures.check()
            if ended is None:
                assert sent is not None
                return sent
            if broke is not None:
                raise ServerRefused(
                    f"{ended.why}, for the second time and with all servers well; expected a network on which the "
                    "first rank reaches all of their workers: read the servers' logs"
                )
            broke = ended
            logger.warning(f"{ended.why}; all servers are well and join a new one", extra=ON_STDOUT)

    def settle(self) -> None:
        """Waits for servers that share GPUs with the trainer, and lets them give the memory back.

        A server measures its GPU's free memory while it starts, so it must have started before models are built.
        Every rank calls this.

        Raises:
            ServerRefused: a server does not fit the run, or died too often.
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

    def call_sleepers(self, path: str) -> None:
        """Calls the servers that share GPUs with the trainer, all at the same time (not yet run).

        Ignores dead servers: the next update finds them. Every rank calls this; it returns when all have answered.

        Raises:
            ServerRefused: a server refuses.
        """
        failures, client = Failures(), self._mine.client
        if client is not None:
            sleepers = [number for number in self._mine.servers if self._places[number].sleeps]
            self._each(sleepers, lambda server: client.post_watched(server, path), failures)
        failures.shared().check()

    def revive(self, died: dict[int, str]) -> None:
        """Restarts dead servers; the next `push` waits for them and sends them the weights. Every rank calls this.

        `died`: per server, why; the same on every rank. ServerRefused if a server died too often, or its GPU is full.
        """
        _make_room([self._places[n] for n in died if self._places[n].sleeps], self._mine, self._memory_share)
        for number in died:
            self._calls.forget(number)
        self._mine.revive(died)

    def _attempt(
        self, stream: Callable[[], Iterable], step: int, known: str | None
    ) -> tuple[Failures, str | None, Ended | None]:
        """Tries one transfer; returns (the failures, the version sent, why the group's transfer ended early)."""
        failures = Failures()
        self._each(list(self._mine.servers), self._calls.prepare, failures)
        if failures := failures.shared():
            return failures, None, None
        rendezvous = self._group.meet({number: server.generation for number, server in self._mine.servers.items()})
        if rendezvous is not None:
            self._join(rendezvous, failures)
            ended = first_ranks(self._group.ended())
            self._judge(failures, ended)
            if (failures := failures.shared()) or ended is not None:
                return failures, None, ended
        digest, ended = first_ranks((self._send(stream(), failures), self._group.ended()))
        self._judge(failures, ended)
        version = _version(step, str(digest))
        if known not in (None, version):
            failures.refused.append(
                f"the weights are not those of version {known} any more, but of {version}; expected the same bytes "
                "until the next update, because responses of both would be mixed: nothing may change the student "
                "while it is sampled from"
            )
        if not failures.refused:
            alive = [n for n in self._mine.servers if n not in failures.died and n not in failures.left]
            self._each(alive, lambda server: self._calls.finish(server, str(digest), version), failures)
        return failures.shared(), version, ended

    def _judge(self, failures: Failures, ended: Ended | None) -> None:
        """Records as refusals the errors of servers that ended the transfer; others left because it was over."""
        for number, said in failures.left.items():
            if ended is None:
                failures.refused.append(said)
            elif ended.server == number:  # perhaps one worker refused, and another one answered for the server
                name = self._mine.servers[number].name
                failures.refused.append(said if ended.why in said else f"{name} refuses the weights: {ended.why}")

    def _each(self, numbers: list[int], call: Callable[[Server], Coroutine], failures: Failures) -> None:
        """Runs `call` for servers of this rank concurrently, and records failures."""
        if self._mine.client is None or not numbers:
            return

        async def all_of_them() -> list:
            calls = (call(self._mine.servers[number]) for number in numbers)
            return await asyncio.gather(*calls, return_exceptions=True)

        for number, result in zip(numbers, self._mine.client.run(all_of_them()), strict=True):
            if isinstance(result, BaseException):
                failures.note(number, result)

    def _join(self, rendezvous: Rendezvous, failures: Failures) -> None:
        """Opens the group on the workers and the first rank; each waits for the others."""
        opened = self._group.open(rendezvous)
        members = [number for number in self._mine.servers if number in rendezvous.first_ranks]

        async def join(server: Server) -> None:
            try:
                await self._calls.join(server, rendezvous.init_info(server.number))
            except ServerRefused as error:
                failures.left[server.number] = str(error)
                self._group.report(server.number, str(error))  # at once: the others wait for this one
            except ServerDied as error:
                self._group.report(server.number, str(error))
                raise

        self._each(members, join, failures)
        self._group.opened(opened)

    def _send(self, weights: Iterable[tuple[str, torch.Tensor]], failures: Failures) -> str | None:
        """Sends the stream; returns its digest on the first rank, with which `finish` compares what arrived."""
        digest = Digest() if dist.get_rank() == 0 else None
        of_transport: dict[str, list[int]] = {"file": [], "group": [], "ipc": []}
        for number in self._mine.servers:
            of_transport[self._places[number].transport].append(number)
        self._calls.updates_begin()
        receiving = {}
        for number in of_transport["group"]:
            assert self._mine.client is not None
            receiving[number] = self._mine.client.start(self._calls.receive(self._mine.servers[number]))
            self._group.watch(number, receiving[number])
        if digest is None and not of_transport["file"] and self._handle_group is None:
            for _ in weights:  # this rank only takes part in making the stream
                pass
        else:
            self._send_buckets(weights, of_transport, digest, failures)
        self._group.send(None)
        for number, received in receiving.items():
            try:
                self._group.wait_for(self._mine.servers[number].name, received)
            except ServerDied as error:
                failures.note(number, error)
            except ServerRefused as error:
                failures.left[number] = str(error)
        return None if digest is None else digest.value()

    def _send_buckets(
        self,
        weights: Iterable[tuple[str, torch.Tensor]],
        of_transport: dict[str, list[int]],
        digest: Digest | None,
        failures: Failures,
    ) -> None:
        """Sends the stream bucket by bucket; adds it to a given `digest`, and checks that no tensor is missing.

        `of_transport`: the servers of this rank, by transport.
        """
        allocate = transport.shareable_room if self._handle_group is not None else transport.room
        for bucket in transport.buckets(weights, allocate=allocate):
            if digest is not None:
                digest.add(bucket)
            if of_transport["file"]:
                self._send_file(bucket, of_transport["file"], failures)
            if self._handle_group is not None:
                self._send_handles(bucket, of_transport["ipc"], failures)
            self._group.send(bucket)
        missing = self._names - set(digest.tensors) if digest is not None else None
        if missing:
            failures.refused.append(
                f"the weights to send lack {len(missing)} of {len(self._names)} tensors, such as {min(missing)}; "
                "expected all of them"
            )

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
        dist.barrier(group=self._handle_group)  # the next bucket uses the same memory

    def _update(self, servers: list[int], info: dict[str, Any], failures: Failures) -> None:
        alive = [number for number in servers if number not in failures.died]
        self._each(alive, lambda server: self._calls.update(server, info), failures)


def _version(step: int, digest: str) -> str:
    return f"{step}-{digest}"


def digest_in(version: str) -> str:
    """Returns the digest in the version of weights."""
    return version.partition("-")[2]


def _make_room(places: list[ServerPlacement], mine: Fleet, share: float) -> None:
    """Ends the servers at `places` and frees unused GPU memory: a server measures what is free when it starts.

    No rank may compute meanwhile. ServerRefused if less than the fraction `share` is free: every start would fail.
    """
    if not places:
        return
    for place in places:
        if place.number in mine.servers:
            mine.servers[place.number].close()
    transport.release()
    for problem in transport.lacking(places, share):
        raise ServerRefused(problem)
