"""Runs vLLM's server so that none of its processes outlives the guard that started it.

`python nemo_oprd_serve.py ARGUMENTS` is `python -m vllm.entrypoints.openai.api_server ARGUMENTS`. Every process of the
server runs the lines below: those that multiprocessing spawns import this file as their main module, and those that it
forks inherit the hook. A thread then ends the process group once the guard (`guard.py`), whose process id is in
NEMO_OPRD_GUARD, is gone: a guard that was killed could not do it.
"""

import os
import select
import signal
import threading


def _watch() -> None:
    try:
        guard = os.pidfd_open(int(os.environ["NEMO_OPRD_GUARD"]))
    except ProcessLookupError:
        os.killpg(0, signal.SIGKILL)
    poll = select.poll()
    poll.register(guard, select.POLLIN)
    poll.poll()
    os.killpg(0, signal.SIGKILL)


def _start() -> None:
    threading.Thread(target=_watch, name="guard", daemon=True).start()


if "NEMO_OPRD_GUARD" in os.environ:
    os.register_at_fork(after_in_child=_start)
    _start()

if __name__ == "__main__":
    import runpy

    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=True)
