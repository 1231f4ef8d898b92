"""The command line, for test_launchers.py: at its second update each rank notes its process id, and waits until it may
go on.

torchrun ... launched_run.py DIRECTORY train ...
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

from nemo_oprd.cli import main
from nemo_oprd.distillation.student import Student

directory = Path(sys.argv[1])
update = Student.optimizer_step


def noting(student: Student, step: int, *args: Any) -> Any:
    """In place of `Student.optimizer_step`."""
    if step == 1:
        rank = os.environ["RANK"]
        partial = directory / f".pid-{rank}"
        partial.write_text(str(os.getpid()))
        partial.rename(directory / f"pid-{rank}")
        while not (directory / "go-on").exists():
            time.sleep(0.01)
    return update(student, step, *args)


Student.optimizer_step = noting  # type: ignore[method-assign]
del sys.argv[1]
main()
