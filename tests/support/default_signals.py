"""Signals as the processes of a terminal have them, whatever started the tests.

`nohup` and a shell's `&` ignore some signals, and all that the tests start would inherit that: signals that a test
sends would end nothing. `restore_signals` of `Popen` is about other signals.
"""

from __future__ import annotations

import signal

ASK_TO_STOP = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


def default_signals() -> None:
    """Gives this process the default answer to each signal that asks it to stop: the `preexec_fn` of a `Popen`, or a
    call after a fork."""
    for number in ASK_TO_STOP:
        signal.signal(number, signal.default_int_handler if number is signal.SIGINT else signal.SIG_DFL)
