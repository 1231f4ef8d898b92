"""Ends a command: sets its exit code, and prints one message from one rank.

A user's mistake ends a command with one line on stderr and exit code 2. A run that a signal asked to stop ends with
`STOPPED_EXIT_CODE` after it has saved, or with 130 after a second Ctrl-C. An unexpected error prints one traceback and
ends the command with 1. The other ranks print nothing and exit with 1, or with 0 if `torchrun` would list them beside
the rank that it shows (`launcher.py`). Importing this module does not import torch.
"""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from collections.abc import Callable

from nemo_oprd.runtime import background, launcher, messages, waiting, watchdog
from nemo_oprd.runtime.disk import describe, is_about_files, no_space
from nemo_oprd.runtime.signals import STOPPED_EXIT_CODE, Stopped

# Seconds that a rank other than rank 0 waits before it reports an error that another rank may report, too. Before the
# process group is joined, ranks differ by the time that imports take on a busy machine; afterwards they are in step. A
# rank with an unexpected error, which may follow from another rank's mistake, waits longer than one with a clear error.
_WAIT_BEFORE_JOINING_S, _WAIT_AFTER_JOINING_S, _WAIT_WITHOUT_REASON_S = 30, 3, 6


def run_as_command(work: Callable[[], int], *, alone: bool = True) -> None:
    """Runs `work`, shows its messages, and ends like a command of this project, even inside another program.

    `work` returns the exit code. `alone`: this process has no other task, so it may exit without cleanup.
    """
    # set before torch is imported: if a rank ends with an error, torch prints a warning with a stack on all others
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # Megatron warns on every rank that Apex and Transformer Engine are absent
    warnings.filterwarnings("ignore", module=r"megatron\.")
    messages.show()
    watchdog.enabled = alone
    is_idle = True
    try:
        code = work()
        _leave()
    except Exception as error:
        code = _report(error)
        is_idle = background.leave(background.LEAVE_S)
    except KeyboardInterrupt:
        code = 130
    else:
        if code:
            sys.exit(code)
        return
    is_idle = is_idle and code != 0 and not waiting.has_abandoned()
    if watchdog.current() is None and is_idle:
        sys.exit(code)
    # other ranks may have died in a collective, and closing the communicators would wait for them; so would the
    # interpreter for a thread that writes to a disk that hangs, or waits for another rank
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def users_mistake(error: Exception) -> str | None:
    """Returns one line for an error that a user can fix: a ValueError, a file or the disk; None for other errors."""
    if isinstance(error, ValueError):
        return " ".join(line.strip() for line in str(error).splitlines() if line.strip())
    if isinstance(error, OSError) and is_about_files(error):
        return describe(error)
    if no_space(error):
        return f"the disk is full ({' '.join(str(error).split())}); free some space, or choose another output"
    return None


def _report(error: Exception) -> int:
    """Reports the error that ended the command, from one rank; returns the exit code.

    Rank 0 reports a mistake that all ranks find. A rank that alone finds a mistake, such as one in a shard that only it
    reads, reports it if no other rank has ended the job after some seconds.
    """
    if isinstance(error, Stopped):
        if messages.is_first_rank():
            print(error, file=sys.stderr, flush=True)
        _leave()
        return STOPPED_EXIT_CODE
    if isinstance(error, launcher.NeighbourFailed):
        return launcher.exit_code_after_neighbour()
    message = None if os.environ.get("NEMO_OPRD_TRACEBACK") else users_mistake(error)
    first, watch = messages.is_first_rank(), watchdog.current()
    # a collective fails when another rank dies; that rank reports the reason, so this one waits for it
    wait_s = _WAIT_AFTER_JOINING_S if message is not None else _WAIT_WITHOUT_REASON_S
    wait_s = 0 if first and message is not None else wait_s if _joined() else _WAIT_BEFORE_JOINING_S
    if watch is not None:
        if watch.failure(wait_s) is not None:
            return launcher.exit_code_after_neighbour()
        if watch.fails_first():
            _print(error, message)  # before the others learn of it: a launcher ends this rank after them
            watch.tell_failure(message or repr(error))
    else:
        if not first and launcher.neighbour_reported(wait_s):
            return launcher.exit_code_after_neighbour()
        _print(error, message)
        launcher.wait_for_neighbours()
    return 1 if message is None else 2


def _print(error: Exception, message: str | None) -> None:
    """Prints the line for the user, or the traceback if there is no line."""
    of_rank = "" if messages.is_first_rank() else f"rank {os.environ['RANK']}: "
    if message is None:
        traceback.print_exception(error)
    else:
        print(f"error: {of_rank}{message}", file=sys.stderr, flush=True)
    launcher.report(of_rank + (message or "".join(traceback.format_exception_only(error)).strip()))


def _leave() -> None:
    """Destroys the process group together with the other ranks, if this process has joined one."""
    watch = watchdog.current()
    if watch is not None:
        import torch.distributed as dist

        dist.barrier()  # while the watchdog runs, because another rank may still be working and may die
        watch.close()
        watch.wait_for_others()
    if _joined():
        sys.modules["torch.distributed"].destroy_process_group()


def _joined() -> bool:
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_available() and distributed.is_initialized()
