"""The rollout engine of `rollout.engine=vllm`: servers on the machines of the job, or endpoints.

One rank per machine, the controller, starts the servers of its machine and talks to them over loopback. The other ranks
wait for it, and take part in the collectives that make the weight stream. Controllers claim requests from one queue, so
a fast server samples more of them. If a server dies, the round ends when nothing is left to claim; the server is
restarted, gets the current weights again, and the next round samples what is missing.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from nemo_oprd.batch.types import Rollout
from nemo_oprd.config.schema import Config
from nemo_oprd.layout import Layout
from nemo_oprd.models import ModelSpec
from nemo_oprd.models.megatron.parallel import device, everyones, init_distributed
from nemo_oprd.models.megatron.param_names import mappings_by_name
from nemo_oprd.models.weights.hf import TensorReader
from nemo_oprd.rollout.engine import GenerationCancelled, Keep, Request, SamplingParams, WeightStream, check_room
from nemo_oprd.rollout.vllm import gpu_memory
from nemo_oprd.rollout.vllm.controlled import Controlled, machines_and_devices
from nemo_oprd.rollout.vllm.launch import check_description, find_python, server_arguments
from nemo_oprd.rollout.vllm.placement import Place, place_servers
from nemo_oprd.rollout.vllm.request_queue import LengthEstimate, RequestQueue
from nemo_oprd.rollout.vllm.sampling import Round, Sampled, Sampling, Task, joined
from nemo_oprd.rollout.vllm.server import Endpoint, LocalServer, Server, ServerRefused
from nemo_oprd.rollout.vllm.update_calls import UpdateCalls
from nemo_oprd.rollout.vllm.weight_push import WeightPush
from nemo_oprd.runtime.signals import agree

# how often a rank that waits for responses asks whether it should cancel
CANCEL_CHECK_S = 0.5


class VllmEngine:
    """A `RolloutEngine` whose servers are processes of their own; see the module's docstring."""

    def __init__(
        self,
        config: Config,
        spec: ModelSpec,
        directory: Path,
        ranks: Layout,
        eos_ids: tuple[int, ...],
        vocab_limit: int | None = None,
    ) -> None:
        """Starts the servers and returns without waiting for them; see `make_engine`. The ranks have the weight stream.

        Raises:
            ValueError: the placement of the servers is wrong, or a server refuses.
        """
        init_distributed()
        self._config, self._spec, self._eos_ids = config, spec, eos_ids
        self._known_ids = vocab_limit or spec.vocab_size
        self._settings = config.rollout.vllm
        cuda = device().type == "cuda"
        students = range(ranks.first_rank, ranks.first_rank + ranks.size)
        self._has_stream = dist.get_rank() in students
        self._places = place_servers(self._settings, *machines_and_devices(cuda), students)
        self._any_sleeps = any(place.sleeps for place in self._places)
        self._mine = Controlled()
        try:
            own = [place for place in self._places if place.controller == dist.get_rank()]
            flags = server_arguments(config, spec, directory, self._known_ids, cuda=cuda)
            self._mine.start(own, lambda place: self._make_server(place, flags))
            names = {name for mapping in mappings_by_name(spec).values() for name in mapping.hf}
            patience = self._settings.start_timeout
            limits = patience, self._settings.request_timeout
            calls = UpdateCalls(self._mine.client, self._places, len(names), self._describe, *limits)
            share = self._settings.memory_share
            self._push = WeightPush(self._places, self._mine, calls, names, device(), students, share)
            self._push.settle()
        except BaseException:
            self.close()
            raise
        self._queue = RequestQueue(self._mine.client is not None, len({place.controller for place in self._places}))
        self._lengths = LengthEstimate()
        self._stream: WeightStream | None = None
        self._step, self._version = 0, ""
        self._asleep = 0  # the level of servers that share GPUs with the trainer; 0: awake, 2: without weights
        self.metrics: dict[str, float] = {}

    def _make_server(self, place: Place, flags: list[str]) -> Server:
        """A server of this rank, not yet started."""
        common = place.number, self._config.rollout.max_batch, self._settings.max_restarts
        if place.url is not None:
            return Endpoint(*common, generation=1, base_url=place.url.rstrip("/"))
        assert self._mine.folder is not None
        return LocalServer(
            *common,
            python=find_python(self._settings),
            flags=flags,
            devices=place.devices,
            log=Path(self._config.output) / "vllm" / f"server_{place.number}.log",
            directory=self._mine.folder.path,
        )

    def _describe(self, found: dict[str, Any], server: str) -> None:
        try:
            check_description(found, server, self._config, self._spec, self._known_ids)
        except ValueError as error:
            raise ServerRefused(str(error)) from None

    def update_weights(self, weights: WeightStream, step: int) -> None:
        """See `RolloutEngine`. Returns once every server has the weights and has proved it.

        Raises:
            ValueError: a server refuses the weights, or died too often.
        """
        self._stream, self._step = weights, step
        if self._any_sleeps:
            gpu_memory.release()
        self._version = self._push.push(weights, step)
        self._asleep = 0

    def load(self, read: TensorReader, source: str) -> None:
        """See `RolloutEngine`; the tensors are read as often as servers need them."""

        def weights() -> Iterable[tuple[str, torch.Tensor]]:
            if not self._has_stream:
                return
            dtype = torch.float32 if self._config.precision == "fp32" else torch.bfloat16
            for mapping in mappings_by_name(self._spec).values():
                for name in mapping.hf:
                    yield name, read(name).to(device(), dtype)

        self.update_weights(weights, 0)

    def generate(
        self,
        requests: list[Request],
        sampling: SamplingParams,
        should_cancel: Callable[[], bool] | None = None,
        done: dict[int, Rollout] | None = None,
        keep: Keep | None = None,
        *,
        last: bool = False,
    ) -> list[Rollout]:
        """See `RolloutEngine`. Each response is kept by itself, so `done` may hold any of them.

        `keep` is called on the controllers, in the thread of their client.

        Raises:
            ValueError: a prompt leaves no room for a response, or a server refuses, answers nonsense or died too often.
        """
        check_room(requests, self._spec.max_positions)
        assert self._stream is not None, "there are no weights to sample from"
        self._wake_up()
        kept, results, busy = dict(done or {}), dict[int, Sampled](), dict[int, float]()
        limits = self._spec.max_positions, self._eos_ids, self._known_ids, self._settings.request_timeout
        task = Task(requests, sampling, *limits)
        while missing := [i for i in range(len(requests)) if i not in kept and i not in results]:
            found, cancelled = self._round(task, self._lengths.longest_first(requests, missing), should_cancel, keep)
            results |= found.sampled
            busy |= found.busy_s
            if found.error is not None:
                raise ServerRefused(found.error)
            if found.died and not cancelled and should_cancel is not None:  # a server takes long to restart
                (cancelled,) = agree(device(), should_cancel())
            if cancelled:
                raise GenerationCancelled({**kept, **self._rollouts(requests, results)})
            assert found.died or found.sampled, "no server had the weights"
            if found.died:
                if self._settings.repeat == "step":
                    results = {}
                self._push.revive(found.died)
                self._push_again()
        self._finish(requests, results, busy, last=last)
        rollouts = {**kept, **self._rollouts(requests, results)}
        return [rollouts[i] for i in range(len(requests))]

    def _round(
        self, task: Task, order: list[int], should_cancel: Callable[[], bool] | None, keep: Keep | None
    ) -> tuple[Round, bool]:
        """One round of all controllers: (what they bring home together, whether it was cancelled)."""
        claim, client = self._queue.open(order), self._mine.client
        mine, work = Round(), None
        if client is not None:
            slots = -(-len(order) // len(self._places))
            sampling = Sampling(client, task, self._version, claim, slots, mine)
            if keep is not None:
                sampling.keep = lambda i, sampled: keep({i: _rollout(task.requests[i], sampled, self._step)})
            work = client.start(sampling.run([*self._mine.servers.values()]))
        cancelled = self._wait(work, mine, should_cancel)
        parts = everyones((mine.portable(), cancelled))
        self._queue.close()
        return joined([part for part, _ in parts]), any(cancelled for _, cancelled in parts)

    def _wait(self, work: Future | None, mine: Round, should_cancel: Callable[[], bool] | None) -> bool:
        """Waits until all controllers have finished; whether this rank was told to cancel before its part was done.

        Whoever learns that the run is asked to stop tells the controllers; the ranks' answers may differ.
        """
        cancelled = False
        while work is not None and not work.done():
            try:
                work.result(CANCEL_CHECK_S)
            except FutureTimeout:
                cancelled = cancelled or self._queue.is_cancelled() or (should_cancel is not None and should_cancel())
                if cancelled:
                    self._queue.cancel()
                    assert self._mine.client is not None
                    self._mine.client.call(mine.stop.set)
        if work is not None:
            work.result()  # raises what went wrong in our own code
        self._queue.finish()
        while not self._queue.wait_for_all(datetime.timedelta(seconds=2)):
            if should_cancel is not None and should_cancel():
                self._queue.cancel()
        return cancelled

    def _rollouts(self, requests: list[Request], results: dict[int, Sampled]) -> dict[int, Rollout]:
        return {i: _rollout(requests[i], sampled, self._step) for i, sampled in results.items()}

    def _finish(
        self, requests: list[Request], results: dict[int, Sampled], busy: dict[int, float], *, last: bool
    ) -> None:
        """Learns from the lengths, notes the metrics of the call, and lets servers give their GPU memory back."""
        self._lengths.learn(requests, {i: len(sampled.ids) for i, sampled in results.items()})
        self.metrics = {"rollout/server_deaths": float(self._push.deaths)}
        if len(busy) > 1:
            # the share of the time of all servers in which they waited for the slowest one
            self.metrics["rollout/straggler_idle"] = 1 - sum(busy.values()) / (len(busy) * max(busy.values()))
        self._asleep = 2 if last else 1  # weights that are replaced next need not be copied to the host
        self._mine.call_sleepers(f"/sleep?level={self._asleep}&mode=wait")
        if self._any_sleeps:
            dist.barrier()  # no rank computes before the memory of its GPU is free

    def _wake_up(self) -> None:
        """Gives servers that share GPUs with the trainer their memory again, unless an update has done so."""
        if not self._any_sleeps or not self._asleep:
            return
        gpu_memory.release()
        if self._asleep == 2:
            self._push_again()
        else:
            self._mine.call_sleepers("/wake_up")
        self._asleep = 0

    def _push_again(self) -> None:
        """Gives servers that lost the weights the same ones once more."""
        assert self._stream is not None
        self._version = self._push.push(self._stream, self._step, self._version)

    def close(self) -> None:
        """See `RolloutEngine`: ends the servers of this run and removes what they left in shared memory."""
        self._mine.close()
        self._mine = Controlled()


def _rollout(request: Request, sampled: Sampled, step: int) -> Rollout:
    return request.answered(sampled.ids, finished=sampled.finished, logprobs=sampled.logprobs, weight_version=step)
