"""Shows the messages of the logger `nemo_oprd` on the terminal while a command runs.

Modules log with `logging.getLogger(__name__)`, and importing them sets nothing up; a command calls `show`. A message is
a line without level or name, on stderr. The first rank shows those of level INFO, and every rank its warnings, with the
rank. `extra=ON_STDOUT` sends a message to stdout, and `extra=ANY_RANK` shows it from whichever rank logs it.
`hours_minutes_seconds` and `ranges` format durations and lists of numbers.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

Verbosity = Literal["quiet", "usual", "verbose"]
ON_STDOUT = {"on_stdout": True}
ANY_RANK = {"any_rank": True}
# `LibraryLog` takes these: Megatron warns of deprecated classes at every start, torch of a toolkit without a driver.
LIBRARIES = ("megatron", "torch.utils.cpp_extension")
LIBRARY_LOG = "libraries.log"


def is_first_rank() -> bool:
    """Returns whether this is the world's first rank; also valid before the process group is joined."""
    return _rank() == "0"


def show(verbosity: Verbosity = "usual") -> None:
    """Shows messages from now on; a later call only changes the verbosity.

    quiet: warnings; usual: also progress; verbose: all messages of every rank, with time, rank and module.
    """
    logger = logging.getLogger("nemo_oprd")
    logger.propagate = False  # a program around this one may show the messages of the root logger, too
    logger.setLevel({"quiet": logging.WARNING, "usual": logging.INFO, "verbose": logging.DEBUG}[verbosity])
    console = next((each for each in logger.handlers if isinstance(each, _Console)), None)
    if console is None:
        console = _Console()
        logger.addHandler(console)
    console.verbose = verbosity == "verbose"
    for name in LIBRARIES:
        library = logging.getLogger(name)
        library.propagate = False
        if _library_log not in library.handlers:
            library.addHandler(_library_log)


def write_library_log(directory: Path | None) -> None:
    """Writes warnings of libraries, past and future, into libraries.log of `directory`; the first rank alone does this.

    None stops that: the run is over, and its directory may belong to another run.
    """
    if is_first_rank():
        _library_log.write_to(None if directory is None else directory / LIBRARY_LOG)


class _Console(logging.Handler):
    """A handler that prints to the current sys.stdout and sys.stderr."""

    verbose = False

    def filter(self, record: logging.LogRecord) -> bool:
        from_all = self.verbose or record.levelno >= logging.WARNING or hasattr(record, "any_rank")
        return from_all or is_first_rank()

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        if self.verbose:
            time = logging.Formatter("%(asctime)s").formatTime(record)
            return f"{time} rank {_rank()} {record.name}: {text}"
        is_known = is_first_rank() or record.levelno < logging.WARNING or hasattr(record, "on_stdout")
        return text if is_known else f"rank {_rank()}: {text}"

    def emit(self, record: logging.LogRecord) -> None:
        stream = sys.stdout if hasattr(record, "on_stdout") else sys.stderr
        print(self.format(record), file=stream, flush=True)


class LibraryLog(logging.Handler):
    """Keeps each message of `LIBRARIES` once, for a file; prints errors, and with `verbose` everything."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: set[str] = set()
        self._unwritten: list[str] = []
        self._file: Path | None = None

    def write_to(self, file: Path | None) -> None:
        """Appends the kept messages to `file`, and later ones as they come; None: keeps later ones for the next."""
        self._file = file
        if file is None:
            self._seen.clear()
        self._flush()

    def emit(self, record: logging.LogRecord) -> None:
        consoles = (each for each in logging.getLogger("nemo_oprd").handlers if isinstance(each, _Console))
        for console in consoles:
            if console.verbose or record.levelno >= logging.ERROR:
                console.handle(record)
        line = f"{record.levelname} {record.name}: {record.getMessage()}"
        if line not in self._seen:
            self._seen.add(line)
            self._unwritten.append(line)
            self._flush()

    def _flush(self) -> None:
        if self._file is None or not self._unwritten:
            return
        try:
            with self._file.open("a") as stream:
                stream.writelines(f"{line}\n" for line in self._unwritten)
            self._unwritten.clear()
        except OSError as error:
            file, self._file = self._file, None
            logging.getLogger(__name__).warning(f"{file}: {error.strerror}; warnings of libraries are not kept")


_library_log = LibraryLog()


def _rank() -> str:
    return os.environ.get("RANK", "0")


def hours_minutes_seconds(seconds: float) -> str:
    """Formats seconds. Example: 3725.0 -> "1:02:05"; 65.0 -> "1:05"."""
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


def ranges(numbers: Iterable[int]) -> str:
    """Formats numbers briefly, such as "1-7, 9"."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(f"{first}" if first == last else f"{first}-{last}" for first, last in runs)
