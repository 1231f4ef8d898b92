"""Judges whether two answers are equal, as text and by math-verify, and grades a boxed answer.

Answers are first compared as text, after removing everything that does not change an answer's meaning
(`spelling.py`); that settles nearly all of AIME and AMC. Two plain numbers are compared by value, words by their
letters. The others go to math-verify, restricted to its LaTeX grammar: its other parser passes whole expressions to
Python's `eval` and finds numbers in prose. With LaTeX, sympy evaluates only number tokens (`Integer(10)`).

A model can box `9^{9^{9^9}}`. Python signals neither interrupt such a power (one C call) nor work outside the main
thread. Therefore math-verify runs in a child process, which the operating system ends after the time limit, and
math-verify's own timeouts are off. The child runs `math_verify_child.py` and reads one JSON pair per line. It starts
with the first answer that needs math-verify; a missing math-verify is reported then.

There is no partial credit, no grade for answers without a box, and no tolerance beyond math-verify's six decimals.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from nemo_oprd.evaluation.grading.readings import pairs, settle, unlabelled
from nemo_oprd.evaluation.grading.spelling import canonical, is_number, is_percentage, is_words, same_in_base

# the signals that a scheduler or a user sends to all processes of a job
JOB_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
TIME_LIMIT_S = 10  # the slowest pair of MATH-500 takes well under one second
MEMORY_LIMIT_BYTES = 4 * 2**30  # a huge integer must exhaust the child's limit, not the machine's memory
MAX_CHARACTERS = 1_000  # the longest reference answer of MATH-500 has 53; longer boxes hold prose
_CHILD = Path(__file__).with_name("math_verify_child.py")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Judgement:
    """Whether an answer equals the reference.

    Attributes:
        correct: the verdict: `text`, or else `math_verify`.
        text: whether the two are equal as canonical text, as words or as decimal numbers.
        math_verify: its verdict; None if it was not asked or did not decide within its limits.
        undecided: math-verify was asked and did not decide; the comparison as text is then the verdict.
    """

    correct: bool
    text: bool
    math_verify: bool | None = None
    undecided: bool = False


def judge(given: str, answer: str, *, both: bool = False, by_text: bool = False) -> Judgement:
    r"""Whether `given` equals the reference `answer`.

    A percentage equals its number of percent and its value: 50\%, 50 and 0.5. May be called from any thread. An answer
    of more than 1,000 characters is wrong. An expression that math-verify cannot decide within 10 seconds and 4 GiB is
    compared as text; a warning is logged, because the grade then depends on the machine.

    Args:
        both: also ask math-verify where the texts are equal, to find where the two disagree.
        by_text: never ask math-verify.

    Raises:
        RuntimeError: math-verify is needed, but does not start, for example because it is missing.
    """
    if not given or len(given) > MAX_CHARACTERS:
        return Judgement(False, False)
    given, answer = unlabelled(given, answer)
    settled = settle(given, answer)
    if settled is not None:
        return Judgement(settled, settled)
    plain_given, plain_answer = canonical(given), canonical(answer)
    numbers = is_number(plain_given) and is_number(plain_answer)
    text = plain_given == plain_answer
    if numbers and not text and is_percentage(given) != is_percentage(answer):
        a, b = Fraction(plain_given), Fraction(plain_answer)
        text = a * 100 == b if is_percentage(answer) else a == b * 100
    based = same_in_base(plain_given, plain_answer)
    if based is not None:
        return Judgement(based or text, based or text)  # a numeral with a digit that its base lacks equals itself
    if numbers or is_words(answer) or by_text or (text and not both):
        return Judgement(text, text)
    verdict = _ask(pairs(given, answer))
    return Judgement(text or bool(verdict), text, verdict, undecided=verdict is None)


def _ask(readings: Iterator[tuple[str, str]]) -> bool | None:
    """Whether a pair is equal by math-verify; None if none is, and it did not decide one."""
    undecided = False
    for pair in readings:
        verdict = _VERIFIER.equivalent(*pair)
        if verdict:
            return True
        undecided |= verdict is None
    return None if undecided else False


class _Verifier:
    """The child process that runs math-verify: one for each process that grades; a lock serialises threads' calls."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._owner = 0

    def equivalent(self, answer: str, given: str) -> bool | None:
        """math-verify's verdict; None if it reached its limit of time or memory."""
        with self._lock:
            process = self._running()
            assert process.stdin is not None
            assert process.stdout is not None
            with contextlib.suppress(BrokenPipeError):  # the reply is then empty, and the exit code tells the reason
                process.stdin.write(json.dumps([answer, given]) + "\n")
                process.stdin.flush()
            reply = process.stdout.readline()
            if reply:
                return bool(json.loads(reply))
            process.communicate()  # closes the pipes and waits
            self._process, code = None, process.returncode
        if code >= 0:
            raise RuntimeError(
                f"math-verify's process ended with code {code} at answer {answer!r}, given {given!r}, expected a "
                "verdict; the error is printed above. To install math-verify: pip install 'math-verify[antlr4_9_3]'"
            )
        logger.warning("compared as text, stopped by signal %d (time or memory): %r against %r", -code, given, answer)
        return None

    def _running(self) -> subprocess.Popen[str]:
        """The running child. `_owner` is its parent: a forked process must not write into its parent's pipe."""
        if self._process is not None and self._process.poll() is not None:
            self.close()
        if self._process is None or self._owner != os.getpid():
            # -P keeps this folder off the import path, where metrics.py would shadow other modules of that name.
            command = [sys.executable, "-P", str(_CHILD), str(TIME_LIMIT_S), str(MEMORY_LIMIT_BYTES)]
            # A signal to the whole job must not end the child before the child ignores such signals: the child starts
            # with them blocked and unblocks them once they are ignored.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, JOB_SIGNALS)
            try:
                self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
            self._owner = os.getpid()
        return self._process

    def close(self) -> None:
        """Ends the child; the next call starts another one."""
        if self._process is not None and self._owner == os.getpid():
            self._process.kill()
            self._process.communicate()
        self._process = None


_VERIFIER = _Verifier()
atexit.register(_VERIFIER.close)
