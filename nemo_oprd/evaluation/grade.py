"""Grades a response: is its last `\\boxed{...}` the reference answer?

Answers are first compared as text, after removing everything that does not change an answer's meaning; that settles
nearly all of AIME and AMC. The others go to math-verify, restricted to its LaTeX grammar: its other parser passes whole
expressions to Python's `eval` and finds numbers in prose. With LaTeX, sympy evaluates only number tokens
(`Integer(10)`).

A model can box `9^{9^{9^9}}`. Python signals neither interrupt such a power (one C call) nor work outside the main
thread. Therefore math-verify runs in a child process, which the operating system ends after the time limit, and
math-verify's own timeouts are off. The child runs this file as a program and reads one JSON pair per line. It starts
with the first answer that needs math-verify; a missing math-verify is reported then.

There is no partial credit, no grade for answers without a box, and no tolerance beyond math-verify's six decimals.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading

# name of this way of grading in the files of grades
GRADER = "boxed"
JOB_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
TIME_LIMIT_S = 10  # the slowest pair of MATH-500 takes well under one second
MEMORY_LIMIT_BYTES = 4 * 2**30  # a huge integer must exhaust the child's limit, not the machine's memory
MAX_CHARACTERS = 1_000  # the longest reference answer of MATH-500 has 53; longer boxes hold prose

logger = logging.getLogger(__name__)


def extract_boxed(text: str) -> str | None:
    """The content of the last `\\boxed{...}` whose braces balance, stripped; None if there is none.

    Escaped braces (`\\{`, `\\}`) are content. A box that the length limit cuts off is ignored.

    Example: `extract_boxed(r"so \\boxed{\\frac{1}{2}}.") == r"\\frac{1}{2}"`.
    """
    last: tuple[int, int] | None = None
    open_braces: list[int | None] = []  # for each open brace, where a box's content starts; None if it is not a box
    for token in re.finditer(r"\\boxed\s*\{|\\.|[{}]", text, re.DOTALL):
        if token.group() == "}" and open_braces:
            start = open_braces.pop()
            if start is not None and (last is None or start > last[0]):
                last = (start, token.start())
        elif token.group().endswith("{") and token.group() != r"\{":
            open_braces.append(token.end() if len(token.group()) > 1 else None)
    return None if last is None else text[last[0] : last[1]].strip()


def is_correct(response: str, answer: str) -> bool:
    """Whether the response's last box holds the reference answer, as text or as an equivalent expression.

    May be called from any thread. A box of more than 1,000 characters is graded as wrong, and so is an expression that
    math-verify cannot decide within 10 seconds and 4 GiB. The latter logs a warning, because the grade then depends on
    the machine.

    Raises:
        RuntimeError: an answer needs math-verify, but math-verify does not start, for example because it is missing.
    """
    boxed = extract_boxed(response)
    if not boxed or len(boxed) > MAX_CHARACTERS:
        return False
    given, wanted = _canonical(boxed), _canonical(answer)
    if given == wanted:
        return True
    if (_is_number(given) and _is_number(wanted)) or _is_words(answer):
        return False
    return _VERIFIER.equivalent(_clean(answer), _clean(boxed))


# Applied in this order: normalises spacing and spelling, and removes units. A percent sign counts as a unit, because
# 50 answers "how many percent".
CLEANING = (
    (r",\s*\\!\s*", ","),
    (r"\N{MINUS SIGN}", "-"),
    (r"(?<=\d)(?:\\[,;: ]|~| |\{,\})(?=\d{3}(?!\d))", ""),  # 10\,080 and 10{,}080
    (r"(?<!\\)\\[!,;: ]|~", " "),
    (r"\\(?:left|right)(?![a-zA-Z])|\$|\\\$", ""),
    (r"\\[dt]frac(?![a-zA-Z])", r"\\frac"),
    (r"\\frac\s*(\d|[a-zA-Z]|\\[a-zA-Z]+(?=[\s\d\\]))", r"\\frac{\1}"),
    (r"(\\frac\{[^{}]*\})\s*(\d|[a-zA-Z]|\\pi(?![a-zA-Z]))", r"\1{\2}"),
    (r"\^\s*(?:\\circ(?![a-zA-Z])|\{\s*\\circ\s*\})|°|\\degree(?![a-zA-Z])", ""),
    (r"(?<=\d)\s*\\?%", ""),
    (r"(?<=[\d}])\s*\\(?:text|mbox|mathrm|textrm)\s*\{[^{}]*\}(?:\s*\^\s*\{?[23]\}?)?\s*$", ""),
    (r"^\s*\\(?:text|mbox|textbf|textrm|mathrm|mathbf|boldsymbol)\s*\{([^{}]*)\}\s*$", r"\1"),
    (r"[.,;\s]+$", ""),
)
NUMBER = re.compile(r"([+-]?)(\d+|\d{1,3}(?:,\d{3})+)?(?:\.(\d*))?")


def _clean(text: str) -> str:
    for pattern, replacement in CLEANING:
        text = re.sub(pattern, replacement, text)
    return text.strip()


def _canonical(text: str) -> str:
    """A canonical spelling: cleaned, spaces only between digits, one form per decimal number, words in lower case."""
    text = re.sub(r"(?<!\d) | (?!\d)", "", re.sub(r"\s+", " ", _clean(text)))
    number = NUMBER.fullmatch(text)
    if number and (number[2] or number[3]):
        whole, fraction = (number[2] or "").replace(",", "").lstrip("0"), (number[3] or "").rstrip("0")
        value = (whole or "0") + ("." + fraction if fraction else "")
        return "-" + value if number[1] == "-" and value != "0" else value
    choice = re.fullmatch(r"\(([A-Za-z])\)", text)
    text = choice[1] if choice else text
    return text.lower() if text.isalpha() and len(text) > 1 else text


def _is_number(canonical: str) -> bool:
    return re.fullmatch(r"-?\d+(\.\d+)?", canonical) is not None


def _is_words(answer: str) -> bool:
    """Whether the whole answer is words: as an expression, `east` would be a product and equal to `seat`."""
    return re.fullmatch(r"\s*\\text(bf|rm)?\s*\{[^{}]*\}\s*", answer) is not None


class _Verifier:
    """The child process that runs math-verify: one for each process that grades; a lock serialises threads' calls."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._owner = 0

    def equivalent(self, answer: str, given: str) -> bool:
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
        logger.warning("graded as wrong, stopped by signal %d (time or memory): %r against %r", -code, given, answer)
        return False

    def _running(self) -> subprocess.Popen[str]:
        """The running child. `_owner` is its parent: a forked process must not write into its parent's pipe."""
        if self._process is not None and self._process.poll() is not None:
            self.close()
        if self._process is None or self._owner != os.getpid():
            # -P keeps this folder off the import path, where metrics.py would shadow other modules of that name.
            command = [sys.executable, "-P", __file__, str(TIME_LIMIT_S)]
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


def _serve(time_limit_s: int) -> None:
    """The child's loop: reads a line `[answer, given]`, writes `true` or `false`; ends when its input closes."""
    import resource

    for number in JOB_SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # the parent handles a scheduler's signals to the job
    signal.pthread_sigmask(signal.SIG_UNBLOCK, JOB_SIGNALS)
    from math_verify import LatexExtractionConfig, parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its timeouts are off
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = MEMORY_LIMIT_BYTES if hard == resource.RLIM_INFINITY else min(MEMORY_LIMIT_BYTES, hard)
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
    _serve(int(sys.argv[1]))
