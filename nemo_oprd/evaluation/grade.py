"""Grades a response: is its last `\\boxed{...}` the reference answer?

Text is compared first, after removing what does not change an answer's meaning; that settles nearly all of AIME and
AMC. The rest goes to math-verify, restricted to its LaTeX grammar: its other parser hands whole expressions to Python's
`eval` and finds numbers in prose. In LaTeX, sympy still evaluates number tokens (`Integer(10)`), nothing else.

A model can box `9^{9^{9^9}}`. Python signals don't interrupt such a power (one C call) and don't work outside the main
thread, so math-verify runs in a child process of its own, which the operating system ends when time is up; its own
timeouts stay off. The child is this very file run as a program, one JSON pair per line; it starts with the first answer
that needs it, and a machine without math-verify says so then.

Left out: partial credit, answers without a box, and any tolerance beyond math-verify's six decimals.
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

JOB_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
TIME_LIMIT_S = 10  # the slowest pair of MATH-500 takes well under one second
MEMORY_LIMIT_BYTES = 4 * 2**30  # huge integers end in a MemoryError of the child, not in the machine's
MAX_CHARACTERS = 1_000  # the longest reference answer of MATH-500 has 53; longer boxes hold prose

logger = logging.getLogger(__name__)


def extract_boxed(text: str) -> str | None:
    """The content of the last `\\boxed{...}` whose braces balance, stripped; None if there is none.

    Escaped braces (`\\{`, `\\}`) are content. A box that is cut off by the length limit does not count.

    Example: `extract_boxed(r"so \\boxed{\\frac{1}{2}}.") == r"\\frac{1}{2}"`.
    """
    last: tuple[int, int] | None = None
    open_braces: list[int | None] = []  # where a box's content starts; None for a brace that opens no box
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

    Safe in any thread. A box of more than 1,000 characters is wrong, and so is an expression that math-verify cannot
    settle within 10 seconds and 4 GiB; of that a warning is logged, because such a grade depends on the machine.

    Raises:
        RuntimeError: an answer needs math-verify and it does not start, for instance because it is not installed.
    """
    boxed = extract_boxed(response)
    if not boxed or len(boxed) > MAX_CHARACTERS:
        return False
    given, wanted = _canonical(boxed), _canonical(answer)
    if given == wanted:
        return True
    if (_is_number(given) and _is_number(wanted)) or _is_words(answer):
        return False
    return _CHILD.equivalent(_clean(answer), _clean(boxed))


# Applied in this order. Spacing, spelling and units go. A percent sign is a unit too: 50 answers "how many percent".
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
    """A spelling to compare: cleaned, spaces only between digits, one form per decimal number, words in lower case."""
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
    """Whether the whole answer is a text: as an expression, `east` would be a product and equal to `seat`."""
    return re.fullmatch(r"\s*\\text(bf|rm)?\s*\{[^{}]*\}\s*", answer) is not None


class _Child:
    """The process that runs math-verify. One per process that grades; calls from several threads take turns."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._owner = 0

    def equivalent(self, answer: str, given: str) -> bool:
        with self._lock:
            process = self._running()
            assert process.stdin is not None
            assert process.stdout is not None
            with contextlib.suppress(BrokenPipeError):  # then the reply is empty, and its exit code says why
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
                "verdict; its error is printed above. To install it: pip install 'math-verify[antlr4_9_3]'"
            )
        logger.warning("graded as wrong, stopped by signal %d (time or memory): %r against %r", -code, given, answer)
        return False

    def _running(self) -> subprocess.Popen[str]:
        """A forked process must not write into its parent's pipe, hence the owner."""
        if self._process is not None and self._process.poll() is not None:
            self.close()
        if self._process is None or self._owner != os.getpid():
            # -P keeps this folder off the import path, where metrics.py would hide other modules of that name.
            command = [sys.executable, "-P", __file__, str(TIME_LIMIT_S)]
            # A signal to the whole job must not end the child before it has said that it ignores them: it starts with
            # them blocked, and unblocks them there.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, JOB_SIGNALS)
            try:
                self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
            self._owner = os.getpid()
        return self._process

    def close(self) -> None:
        """Ends the process; the next call starts another."""
        if self._process is not None and self._owner == os.getpid():
            self._process.kill()
            self._process.communicate()
        self._process = None


_CHILD = _Child()
atexit.register(_CHILD.close)


def _serve(time_limit_s: int) -> None:
    """The child's loop: a line `[answer, given]` in, a line `true` or `false` out; ends when its input closes."""
    import resource

    for number in JOB_SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # a scheduler's signal to the job is the parent's to answer
    signal.pthread_sigmask(signal.SIG_UNBLOCK, JOB_SIGNALS)
    from math_verify import LatexExtractionConfig, parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns about the timeouts that are off on purpose
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = MEMORY_LIMIT_BYTES if hard == resource.RLIM_INFINITY else min(MEMORY_LIMIT_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    grammar = [LatexExtractionConfig()]
    for line in sys.stdin:
        signal.alarm(time_limit_s)  # no handler: the operating system ends the process, also inside a C call
        answer, given = (
            parse(rf"\boxed{{{text}}}", grammar, fallback_mode="no_fallback", parsing_timeout=0)
            for text in json.loads(line)
        )
        verdict = bool(answer and given) and verify(answer, given, timeout_seconds=0)
        signal.alarm(0)
        print(json.dumps(bool(verdict)), flush=True)


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
