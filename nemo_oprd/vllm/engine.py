"""The rollout engine of `rollout.engine=vllm`: servers on the machines of the job, or endpoints.

One rank per machine, the controller, starts the servers of its machine and calls them over Unix sockets. The other
ranks wait for it, and take part in the collectives that make the weight stream. Controllers claim requests from one
queue, so a fast server samples more of them. A thread of the controller sends them to the servers and takes the
answers; at the end all machines exchange the responses (`rollout/exchange.py`). If a server dies, the others take its
requests; after the round it is restarted and gets the current weights again. Another round then samples the missing
responses or, with `rollout.vllm.repeat=step`, all responses of the step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from nemo_oprd.batch.layout import Layout
from nemo_oprd.batch.types import Rollout
from nemo_oprd.config.schema import Config
from nemo_oprd.data.token_ids import TokenIds
from nemo_oprd.megatron.parallel import device, init_distributed
from nemo_oprd.megatron.weights.hf import TensorReader, hf_names
from nemo_oprd.models import ModelSpec
from nemo_oprd.rollout.engine import (
    Enough,
    Generates,
    GenerationCancelled,
    GenerationHandle,
    Keep,
    Request,
    SamplingParams,
    Weights,
    WeightStream,
    check_room,
)
from nemo_oprd.rollout.response import Response
from nemo_oprd.runtime.signals import StoppedWaiting, agree
from nemo_oprd.vllm import transport
from nemo_oprd.vllm.client import Client
from nemo_oprd.vllm.endpoint import Endpoint, caller
from nemo_oprd.vllm.fleet import Fleet, machines_and_devices
from nemo_oprd.vllm.launch import check_student_description, find_python, student_arguments
from nemo_oprd.vllm.placement import ServerPlacement, place_servers
from nemo_oprd.vllm.rounds import Rounds, VllmGenerationHandle
from nemo_oprd.vllm.sampler import Sampler, Task
from nemo_oprd.vllm.server_lifecycle import LocalServer, Server
from nemo_oprd.vllm.weight_transfer import UpdateCalls, WeightPush, digest_in

logger = logging.getLogger(__name__)


class VllmEngine(Generates):
    """A `RolloutEngine` whose servers are processes of their own; see the module's docstring."""

    def __init__(
        self,
        config: Config,
        spec: ModelSpec,
        directory: Path,
        ranks: Layout,
        eos_ids: tuple[int, ...],
        sampled: TokenIds | None = None,
    ) -> None:
        """Starts the servers; waits only for those on the trainer's GPUs. The layout `ranks` has the weight stream.

        Raises:
            ValueError: the placement of the servers is wrong, or a server refuses.
        """
        init_distributed()
        self._config, self._spec, self._eos_ids = config, spec, eos_ids
        self._known_ids = TokenIds(spec.vocab_size) if sampled is None else sampled
        self._settings = config.rollout.vllm
        cuda = device().type == "cuda"
        students = range(ranks.first_rank, ranks.first_rank + ranks.size)
        self._has_stream = dist.get_rank() in students
        self._places = place_servers(self._settings, *machines_and_devices(cuda), students)
        self._any_sleeps = any(place.sleeps for place in self._places)
        own = [place for place in self._places if place.controller == dist.get_rank()]
        client = Client() if own else None
        self._mine = Fleet(self._settings.start_timeout, client)
        self._sampler = None if client is None else Sampler(client)
        try:
            self._start(own, directory, cuda)
            names = set(hf_names(spec))
            calls = UpdateCalls(self._mine, self._places, len(names), self._describe, self._settings.request_timeout)
            places, mine, share = self._places, self._mine, self._settings.memory_share
            self._push = WeightPush(
                places, mine, calls=calls, names=names, device=device(), students=students, memory_share=share
            )
            self._push.settle()
        except BaseException:
            self.close()
            raise
        self._rounds = Rounds(self._mine, self._sampler, self._places)
        self._stream: WeightStream | None = None
        self.weights, self._version = Weights(0), ""
        self._asleep = 0  # sleep level of servers that share GPUs with the trainer; 0: awake, 2: without weights
        self.metrics: dict[str, float] = {}

    def _start(self, places: list[ServerPlacement], directory: Path, cuda: bool) -> None:
        """Adds the servers at this rank's `places`, and starts those of this run, without waiting for them."""
        flags = student_arguments(self._config, self._spec, directory, self._known_ids, cuda=cuda)
        for place in places:
            self._mine.add(_server_at(place, self._config, flags, self._mine.open_folder()))

    def _describe(self, found: dict[str, Any], server: str) -> None:
        check_student_description(found, server, self._config, self._spec, self._known_ids)

    def update_weights(self, weights: WeightStream, step: int) -> None:
        """See `RolloutEngine`. Returns once every server has the weights and the digests agree.

        After a signal ended the wait for a server, the next call that samples raises GenerationCancelled on all ranks.

        Raises:
            ValueError: a server refuses the weights, or died too often.
        """
        self._stream = weights
        if self._any_sleeps:
            transport.release()
        self._give(weights, step)
        self.weights = Weights(step, digest_in(self._version) or None)  # None after a signal: no server has them
        self._asleep = 0

    def load(self, read: TensorReader, source: str) -> None:
        """See `RolloutEngine`; reads the tensors again each time that servers need them."""

        def weights() -> Iterable[tuple[str, torch.Tensor]]:
            if not self._has_stream:
                return
            dtype = torch.float32 if self._config.precision == "fp32" else torch.bfloat16
            for name in hf_names(self._spec):
                yield name, read(name).to(device(), dtype)

        self.update_weights(weights, 0)

    def submit(
        self,
        requests: list[Request],
        sampling: SamplingParams,
        done: dict[int, Rollout] | None = None,
        keep: Keep | None = None,
    ) -> VllmGenerationHandle:
        """See `RolloutEngine`. `done` may hold any responses, because each one is sampled independently.

        The servers begin to sample. This is a collective only if servers gave memory back. A thread calls `keep`.

        Raises:
            ValueError: a prompt leaves no room for a response.
        """
        check_room(requests, self._spec.max_positions)
        assert self._stream is not None, "there are no weights to sample from"
        self._wake_up()
        limits = self._spec.max_positions, self._eos_ids, self._known_ids, self._settings.request_timeout
        handle = VllmGenerationHandle(requests, sampling, dict(done or {}), keep, Task(requests, sampling, *limits))
        if self._version:
            self._rounds.begin(handle, self._version, self.weights)
        return handle

    def collect(
        self, handle: GenerationHandle, should_cancel: Callable[[], bool] | None = None, *, last: bool = False
    ) -> list[Rollout]:
        """See `RolloutEngine`.

        Raises:
            ValueError: a server refuses, gives an invalid answer or died too often.
        """
        assert isinstance(handle, VllmGenerationHandle)
        while handle.missing():
            self._go_on(handle)
            self._complete_round(handle, should_cancel)
        sampled = self._rounds.shared(handle, handle.own)
        self._finish(handle, last=last)
        rollouts = {**handle.done, **sampled}
        return [rollouts[i] for i in range(len(handle.requests))]

    def gather(
        self, handle: GenerationHandle, enough: Enough, should_cancel: Callable[[], bool] | None = None
    ) -> dict[int, Rollout]:
        """See `RolloutEngine`. Restarts a dead server when no other server has a request left to sample.

        Raises:
            ValueError: as `collect`.
        """
        assert isinstance(handle, VllmGenerationHandle)
        while not enough(handle.complete):
            self._go_on(handle)
            if not self._rounds.watch(handle, enough, should_cancel or (lambda: False)):
                self._complete_round(handle, should_cancel)
        return self._rounds.given(handle)

    def cut(self, handle: GenerationHandle, should_cancel: Callable[[], bool] | None = None) -> dict[int, Rollout]:
        """See `RolloutEngine`. The servers abort their requests, and stay paused until the next weights.

        The call waits for no response. A dead server is restarted, gets the next weights, and loses unfinished tokens.

        Raises:
            ValueError: a server refuses, or died too often.
        """
        assert isinstance(handle, VllmGenerationHandle)
        first_tokens = dict[int, Response]()
        if handle.under_way is not None:
            found, first_tokens = self._rounds.cut(handle)
            if found.died:
                self._push.revive(found.died)
        given = self._rounds.given(handle, first_tokens)
        self._finish(handle, last=False)
        return given

    def _go_on(self, handle: VllmGenerationHandle) -> None:
        """Begins a round unless one is under way; raises GenerationCancelled if the servers have no weights."""
        if handle.under_way is not None:
            return
        if not self._version:
            raise GenerationCancelled({**handle.done, **self._rounds.shared(handle, handle.own)})
        self._rounds.begin(handle, self._version, self.weights)

    def _complete_round(self, handle: VllmGenerationHandle, should_cancel: Callable[[], bool] | None) -> None:
        """Waits for the end of a round, and prepares the next one if servers have died.

        Raises:
            GenerationCancelled, ValueError: as `collect`.
        """
        found = self._rounds.take(handle, should_cancel)
        cancelled, failed = found.cancelled, bool(found.died)
        if failed and not cancelled and should_cancel is not None:  # a server takes long to restart
            (cancelled,) = agree(device(), should_cancel())
        if cancelled:
            sampled = self._rounds.shared(handle, handle.own)
            self._finish(handle, last=True)
            raise GenerationCancelled({**handle.done, **sampled})
        assert failed or found.sampled, "no server had the weights"
        if failed and self._settings.repeat == "step":
            handle.forget()
        if failed:
            self._push.revive(found.died)
            self._push_again()

    def _finish(self, handle: VllmGenerationHandle, *, last: bool) -> None:
        """Records the metrics of the call, and lets servers give their GPU memory back."""
        busy = handle.busy_s
        self.metrics = {"rollout/server_deaths": float(self._mine.deaths)}
        if len(busy) > 1:
            # the share of all servers' time in which they waited for the slowest one
            self.metrics["rollout/straggler_idle"] = 1 - sum(busy.values()) / (len(busy) * max(busy.values()))
        self.rest(level=2 if last else 1)

    def rest(self, level: int = 2) -> None:
        """See `RolloutEngine`; with level 2, servers drop their weights instead of copying them to the host."""
        self._asleep = level
        if self._any_sleeps:  # no rank computes before the memory of its GPU is free
            self._push.call_sleepers(f"/sleep?level={self._asleep}&mode=wait")

    def _wake_up(self) -> None:
        """Gives the servers that share GPUs with the trainer their memory again, unless an update has done so."""
        if not self._any_sleeps or not self._asleep:
            return
        transport.release()
        if self._asleep == 2:
            self._push_again()
        else:
            self._push.call_sleepers("/wake_up")
        self._asleep = 0

    def _push_again(self) -> None:
        """Sends the same weights to all servers again, because some have lost them."""
        assert self._stream is not None
        self._give(self._stream, self.weights.steps, self._version)

    def _give(self, stream: WeightStream, step: int, version: str | None = None) -> None:
        """Sends weights to the servers and notes their version; empty if a signal ended the wait for a server."""
        try:
            self._version = self._push.push(stream, step, version)
        except StoppedWaiting as stopped:
            logger.info(str(stopped))
            self._version = ""

    def close(self) -> None:
        """See `RolloutEngine`; ends the servers of this run and removes their files in shared memory."""
        sampler, self._sampler = self._sampler, None
        try:
            if sampler is not None:
                sampler.close()
        finally:
            self._mine.close()


def _server_at(place: ServerPlacement, config: Config, flags: list[str], folder: Path) -> Server:
    """Makes a server, not yet started; its sockets are in `folder`."""
    settings = config.rollout.vllm
    common = place.number, config.rollout.max_batch, settings.max_restarts
    if place.url is not None:
        headers = caller(str(settings.token_file), config.output, place.url)
        return Endpoint(*common, generation=1, url=place.url, headers=headers)
    return LocalServer(
        *common,
        python=find_python(settings),
        flags=flags,
        devices=place.devices,
        log=Path(config.output) / "vllm" / f"server_{place.number}.log",
        directory=folder,
    )
