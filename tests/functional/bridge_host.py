"""Imports Megatron-Bridge once, and forks for each run of a script: `megatron_bridge_environment.run` starts it.

A line of standard input asks for a run, {"ranks", "script", "arguments", "output"}; the answer is a line with the exit
status. A rank runs the script as torchrun would: as the main module, with the variables of a rank.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import signal
import socket
import sys
import traceback
from pathlib import Path
from typing import Any, TextIO


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _rank(variables: dict[str, str], script: str, arguments: list[str], output: str) -> int:
    """Forks a process that runs the script and writes to `output`; returns its process id."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for descriptor, source in ((0, os.open(os.devnull, os.O_RDONLY)), (1, file), (2, file)):
            os.dup2(source, descriptor)
        os.environ.update(variables)
        sys.argv = [script, *arguments]
        sys.path.insert(0, str(Path(script).parent))
        runpy.run_path(script, run_name="__main__")
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _run(ranks: int, script: str, arguments: list[str], output: str) -> int:
    """Runs `script` on `ranks` ranks, 0: without the variables of one; returns the first failure's status, or 0."""
    common = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
    common["MASTER_PORT"] = str(_free_port())
    variables: list[dict[str, str]] = [{**common, "RANK": str(i), "LOCAL_RANK": str(i)} for i in range(ranks)]
    alive = {_rank(each, script, arguments, output) for each in variables or [{}]}
    failed = 0
    while alive:
        child, found = os.wait()
        alive.discard(child)
        if found and not failed:  # the others may wait for this one in a collective
            failed = os.waitstatus_to_exitcode(found) or 1
            for other in alive:
                os.kill(other, signal.SIGKILL)
    return failed


def serve(answers: TextIO) -> None:
    """Answers until standard input ends."""
    import megatron.bridge  # noqa: F401
    import transformers.models.auto.modeling_auto  # noqa: F401

    gc.collect()
    gc.freeze()  # forks share what was imported
    for line in sys.stdin:
        asked: dict[str, Any] = json.loads(line)
        print(json.dumps(_run(**asked)), file=answers, flush=True)


if __name__ == "__main__":
    own = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what imports print is no answer
    serve(own)
