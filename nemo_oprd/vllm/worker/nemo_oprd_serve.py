"""Runs vLLM's server so that none of its processes outlives the guard that started it.

`python nemo_oprd_serve.py ARGUMENTS` is `python -m vllm.entrypoints.openai.api_server ARGUMENTS`. Every process of the
server runs the lines below: those that multiprocessing spawns import this file as their main module, and those that it
forks inherit the hook. A thread then ends the process group once the guard (`nemo_oprd_guard.py`), whose process id is
in NEMO_OPRD_GUARD, is gone: a killed guard cannot do it. Before that it removes the group's shared memory: files whose
names begin with NEMO_OPRD_SHARED_NAMES, and files that a process of the group has mapped, because vLLM's own code uses
other names, such as those of the shared memory of tensor-parallel workers on CPUs.
"""

import os
import select
import signal
import threading
from contextlib import suppress
from multiprocessing import process, shared_memory

from nemo_oprd_guard import SHARED_NAMES, group_members, mapped_shared_memory, named_shared_memory


def _name_shared_memory(names: str) -> None:
    """Makes the names of Python's semaphores and shared memory begin with `names`.

    These are private settings of Python's modules. Without them, the guard finds only files that it has seen mapped.
    """
    process.current_process()._config["semprefix"] = f"/{names}"  # type: ignore[attr-defined]
    shared_memory._SHM_NAME_PREFIX = f"/{names}"  # type: ignore[attr-defined]
    shared_memory._SHM_SAFE_NAME_LENGTH = len(f"/{names}") + 8  # type: ignore[attr-defined] # 8 random digits


def _end_group() -> None:
    # files in folders there belong to the process that uses the server, and stay
    mapped = {path for path in mapped_shared_memory(group_members(os.getpgrp())) if path.count("/") == 3}
    for path in mapped | named_shared_memory(os.environ.get(SHARED_NAMES, "")):
        with suppress(OSError):  # another process of the group was faster
            os.unlink(path)
    os.killpg(0, signal.SIGKILL)


def _watch() -> None:
    try:
        guard = os.pidfd_open(int(os.environ["NEMO_OPRD_GUARD"]))
    except ProcessLookupError:
        _end_group()
    poll = select.poll()
    poll.register(guard, select.POLLIN)
    poll.poll()
    _end_group()


def _start() -> None:
    threading.Thread(target=_watch, name="guard", daemon=True).start()


if "NEMO_OPRD_GUARD" in os.environ:
    if os.environ.get(SHARED_NAMES):
        _name_shared_memory(os.environ[SHARED_NAMES])
    os.register_at_fork(after_in_child=_start)
    _start()

if __name__ == "__main__":
    import runpy

    # without alter_sys: this file has to stay the main module, which multiprocessing imports in the processes it spawns
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
