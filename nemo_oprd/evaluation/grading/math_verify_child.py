"""The child process of `equality.py`: runs math-verify with a limit of time and of memory.

It reads a line `[answer, given]`, writes `true` or `false`, and ends when its input closes. `equality.py` runs it by
path; it imports nothing of this package, which need not be on its import path.
"""

from __future__ import annotations

import json
import logging
import signal
import sys


def serve(time_limit_s: int, memory_limit_bytes: int) -> None:
    """Runs the child's loop. A pair that takes longer than the limit ends the process with SIGALRM."""
    import resource

    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())  # the signals to a job, blocked by the parent
    for number in blocked:
        signal.signal(number, signal.SIG_IGN)  # the parent handles them
    signal.pthread_sigmask(signal.SIG_UNBLOCK, blocked)
    # if the parent was killed while this process worked on a pair, its verdict ends the process without a traceback
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    from math_verify import LatexExtractionConfig, parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its timeouts are off
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = memory_limit_bytes if hard == resource.RLIM_INFINITY else min(memory_limit_bytes, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    grammar = [LatexExtractionConfig()]
    for line in sys.stdin:
        signal.alarm(time_limit_s)  # without a handler, the operating system ends the process, even inside a C call
        answer, given = (
            parse(rf"\boxed{{{text}}}", grammar, fallback_mode="no_fallback", parsing_timeout=0)
            for text in json.loads(line)
        )
        verdict = bool(answer and given) and verify(answer, given, timeout_seconds=0)
        signal.alarm(0)
        print(json.dumps(bool(verdict)), flush=True)


if __name__ == "__main__":
    serve(int(sys.argv[1]), int(sys.argv[2]))
