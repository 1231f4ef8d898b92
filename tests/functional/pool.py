"""A pool of worker processes joined by gloo, kept alive over many cases: importing Megatron takes seconds, a case less.

Pools come and go with the number of ranks that tests want, so the workers are forked off a process that has imported
everything and does nothing else. `HostedPools` has such a process with an environment of its own.

`Pools()[n].run("module:function", **kwargs)` calls the function on every rank and returns rank 0's result; an exception
on any rank comes back as the text of its traceback.
"""

from __future__ import annotations

import gc
import importlib
import os
import socket
import sys
import time
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch.multiprocessing as mp

# what verify and train import when they are called, beside what importing the two imports
PRELOADED = [
    *(
        "transformers",
        "nemo_oprd.train",
        "nemo_oprd.run.verify",
        "nemo_oprd.distillation.reference",
    ),
    *(
        "nemo_oprd.run.training_state",
        "nemo_oprd.config.checks",
        "nemo_oprd.megatron.weights.megatron_checkpoint",
    ),
    "megatron.core.dist_checkpointing.strategies.torch",
    "megatron.core.dist_checkpointing.strategies.state_dict_saver",
    *("hydra", "hydra._internal.core_plugins", "einops._torch_specific", "numpy.ctypeslib", "numpy.ma", "numpy.random"),
    "transformers.models.llama.configuration_llama",
]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _work(rank: int, size: int, port: int, stays: bool, pipe: Connection) -> None:
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(size),
        LOCAL_RANK=str(rank),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        OMP_NUM_THREADS="1",
    )
    import torch
    from composing import composing_once

    from nemo_oprd.runtime.messages import show

    if stays:
        _share_gloo_device()
    gc.freeze()  # what was imported lives to the end: no collection of garbage needs to look through it
    composing_once().start()
    torch.set_num_threads(1)
    show()
    while True:
        try:
            task = pipe.recv()
        except EOFError:  # the tests are over, or were killed
            os._exit(0)
        target, kwargs = task
        module, function = target.split(":")
        try:
            result = getattr(importlib.import_module(module), function)(**kwargs)
            pipe.send((True, result if rank == 0 else None))
        except BaseException:
            pipe.send((False, traceback.format_exc()))


def _share_gloo_device() -> None:
    """Gives all groups of this process one device of gloo, which has one thread.

    Each group has its own otherwise, whose thread wakes 100 times per second: workers keep the groups of all layouts
    they have seen, and those that waited took a third of all CPU time.
    """
    from torch.distributed import ProcessGroupGloo

    own = ProcessGroupGloo.__init__
    devices: list[Any] = []

    def share(group: Any, store: Any, rank: int, size: int, timeout: Any) -> None:
        if not isinstance(timeout, timedelta):  # options, which name a device of their own
            return own(group, store, rank, size, timeout)
        if not devices:
            devices.append(ProcessGroupGloo.create_default_device())
        options = ProcessGroupGloo._Options()
        options._devices, options._timeout, options._threads = devices, timeout, 2
        return own(group, store, rank, size, options)

    ProcessGroupGloo.__init__ = share


class WorkerError(AssertionError):
    """A rank failed; holds its traceback."""


class Pool:
    """`size` ranks, forked by `context`, which take many cases (`stays`) or one, with groups as a command has them."""

    def __init__(self, size: int, context: Any, *, stays: bool = True) -> None:
        port = _free_port()
        self.size = size
        self._pipes, self._processes = [], []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(rank, size, port, stays, theirs))
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, target: str, timeout: float = 120, **kwargs: Any) -> Any:
        """Calls `target` with `kwargs` on every rank."""
        for pipe in self._pipes:
            pipe.send((target, kwargs))
        answers: dict[int, Any] = {}
        deadline = time.monotonic() + timeout
        while len(answers) < self.size:
            # whichever rank answers first: the one that failed explains why the others hang
            ready = wait([p for r, p in enumerate(self._pipes) if r not in answers], deadline - time.monotonic())
            if not ready:
                self.close()
                missing = sorted(set(range(self.size)) - set(answers))
                raise WorkerError(
                    f"ranks {missing} of {self.size} did not answer within {timeout} s: {target}({kwargs})"
                )
            for pipe in ready:
                rank = self._pipes.index(pipe)
                try:
                    ok, answers[rank] = pipe.recv()
                except EOFError:
                    ok, answers[rank] = False, "ended without an answer"
                if not ok:
                    # the others may wait for this one in a collective: the pool is of no more use
                    self.close()
                    raise WorkerError(f"rank {rank} of {self.size}:\n{answers[rank]}")
        return answers[0]

    @property
    def alive(self) -> bool:
        """Whether the workers can take another case."""
        return all(process.is_alive() for process in self._processes)

    def close(self) -> None:
        """Ends the workers."""
        for process in self._processes:
            process.kill()
            process.join()


class Pools:
    """One pool per size, started when first asked for and again after a failure."""

    def __init__(self, context: Any = None) -> None:
        if context is None:
            context = mp.get_context("forkserver")
            context.set_forkserver_preload(PRELOADED)
        self._context = context
        self._pools: dict[int, Pool] = {}

    def __getitem__(self, size: int) -> Pool:
        if size not in self._pools or not self._pools[size].alive:
            for other in list(self._pools):
                if other != size and self._pools[other].size + size > 6:
                    self._pools.pop(other).close()  # 1, 2 and 4 ranks stay, which most files use in turn
            self._pools[size] = Pool(size, self._context)
        return self._pools[size]

    def once(self, size: int, target: str, timeout: float = 240, **kwargs: Any) -> Any:
        """`self[size].run`, in workers that have done nothing else and end with it, as the processes of a launcher."""
        pool = Pool(size, self._context, stays=False)
        try:
            return pool.run(target, timeout, **kwargs)
        finally:
            pool.close()

    def close(self) -> None:
        """Ends all workers."""
        for pool in self._pools.values():
            pool.close()


class HostedPools:
    """Pools of a process with an environment of its own, which imports everything once and forks the workers.

    Args:
        environment: variables set before anything is imported; PYTHONPATH comes first on the path.
    """

    def __init__(self, environment: dict[str, str]) -> None:
        context = mp.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._host = context.Process(target=_host, args=(theirs, environment), daemon=True)
        self._host.start()
        theirs.close()

    def run(self, ranks: int, target: str, /, timeout: float = 120, **kwargs: Any) -> Any:
        """Calls `target` with `kwargs` on each of `ranks` ranks."""
        self._pipe.send((ranks, target, timeout, kwargs))
        ok, answer = self._pipe.recv()
        if not ok:
            raise WorkerError(answer)
        return answer

    def close(self) -> None:
        """Ends the process and all workers."""
        self._pipe.close()
        self._host.join()


def _host(pipe: Connection, environment: dict[str, str]) -> None:
    # the parent's sys.path was copied here already: PYTHONPATH alone would come too late
    sys.path[:0] = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    os.environ.update(environment, OMP_NUM_THREADS="1")
    for module in PRELOADED:
        importlib.import_module(module)
    mp.current_process()._config["daemon"] = False  # a daemon may start no workers
    pools = Pools(mp.get_context("fork"))
    while True:
        try:
            ranks, target, timeout, kwargs = pipe.recv()
        except EOFError:  # the tests are over, or were killed
            pools.close()
            os._exit(0)
        try:
            pipe.send((True, pools[ranks].run(target, timeout, **kwargs)))
        except WorkerError as error:
            pipe.send((False, str(error)))
