"""Commands in processes that are forked off one that has imported what takes long: they differ from those of a shell or
a launcher in their start only. Ranks have the variables that torchrun gives them.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

from pool import Pools, WorkerError


def python(
    pools: Pools, arguments: list[str], directory: Path, logs: Path, ranks: int = 1, patience_s: float = 240
) -> str:
    """What the first rank of `python ARGUMENTS` in `directory` prints to stdout. They begin with a script, -m or -c.

    Raises:
        AssertionError: a rank ended with another status than 0; holds the ends of all that the ranks printed.
    """
    logs.mkdir(parents=True)
    try:
        pools.once(ranks, "forked_commands:run", patience_s, arguments=arguments, directory=directory, logs=logs)
    except WorkerError as error:
        said = "\n".join(f"{log.name}: {log.read_text()[-2000:]}" for log in sorted(logs.iterdir()))
        raise AssertionError(f"python {' '.join(arguments)}\n{said}\n{error}") from error
    return (logs / "0.out").read_text()


def run(arguments: list[str], directory: Path, logs: Path) -> None:
    """Runs the command in this process, which does nothing else."""
    for descriptor, name in ((1, "out"), (2, "err")):
        log = os.open(logs / f"{os.environ['RANK']}.{name}", os.O_WRONLY | os.O_CREAT)
        os.dup2(log, descriptor)
    os.chdir(directory)
    module = arguments[0] == "-m"
    sys.argv = arguments[module:]
    sys.path.insert(0, "" if module else str(Path(arguments[0]).parent))
    try:
        if arguments[0] == "-c":
            exec(arguments[1], {"__name__": "__main__"})
        elif module:
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
