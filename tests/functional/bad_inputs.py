"""Runs the bad inputs of bad_input_cases/ and writes what the program says: `docs/errors.json`, a page of the site.

    python tests/functional/bad_inputs.py --write

A case runs the command line in this process. Nothing expensive may have started when it ends: joining the process group
and building a model fail loudly here. `ranks` is what the job claims to have.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

from bad_input_case import GOLDEN, Case, Place
from bad_input_cases import CASES

from nemo_oprd.cli import main
from nemo_oprd.config.loading import default_config_dir

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "errors.json"
STARTED = "something expensive had started"


def arguments_of(case: Case, place: Place) -> list[str]:
    """The command line of a case."""
    own = [argument.replace("{root}", str(place.root)) for argument in case.arguments]
    if case.command in ("capture", "report", "toy", "from-nemo-rl"):
        return [case.command, *own]
    settings = {
        "student.hf_path": place.student,
        "teacher.hf_path": place.teacher,
        "output": place.output,
        "train.steps": 2,
    }
    if case.command == "verify" and "no replay" not in own:
        settings["rollout.replay"] = place.rollouts
    if case.command == "train":
        settings["data.train"] = place.prompts
    if case.command == "evaluate" and "no validation" not in own:
        settings["data.validation.held"] = place.prompts
    changed = [override.replace("{root}", str(place.root)) for override in case.overrides]
    given = {override.split("=")[0] for override in changed}
    for role in ("student", "teacher"):
        if f"{role}.checkpoint" in given and case.name not in WITH_HF_PATH:
            given.add(f"{role}.hf_path")
    good = [f"{key}={value}" for key, value in settings.items() if key not in given]
    options = [argument for argument in own if argument not in ("no replay", "no validation")]
    if "--config-name" not in options:
        options += ["--config-name", "verify"]
    return [case.command, *options, *good, *changed]


# cases of a checkpoint beside which hf_path stays set
WITH_HF_PATH = ("two sources", "checkpoint of another model in Megatron-Bridge's words", "adapters")


def contents(root: Path) -> dict[str, int]:
    """Every file and directory below `root`, and when it was written."""
    return {str(path.relative_to(root)): path.stat().st_mtime_ns for path in root.rglob("*")}


def run(case: Case, place: Place) -> tuple[int | None, str, str]:
    """Runs a case in this process: exit status, stdout, stderr."""

    def started(*_: Any, **__: Any) -> None:
        raise AssertionError(STARTED)

    out, err = io.StringIO(), io.StringIO()
    status: Any = None
    expensive = [
        "nemo_oprd.run.models.init_distributed",
        "nemo_oprd.run.evaluate.init_distributed",
        "nemo_oprd.run.models.build_chunks",
        "nemo_oprd.distillation.student.build_chunks",
        "nemo_oprd.rollout.in_process_engine.build_chunks",
    ]
    with contextlib.ExitStack() as stack:
        for target in expensive:
            stack.enter_context(mock.patch(target, started))
        stack.enter_context(mock.patch("torch.distributed.is_initialized", return_value=False))
        stack.enter_context(mock.patch.dict(os.environ, {"WORLD_SIZE": str(case.ranks), "RANK": "0"}))
        stack.enter_context(case.wrap())
        stack.enter_context(contextlib.redirect_stdout(out))
        stack.enter_context(contextlib.redirect_stderr(err))
        try:
            main(arguments_of(case, place))
        except SystemExit as stop:
            status = stop.code
    return status, out.getvalue(), err.getvalue()


def readable(case: Case, message: str, place: Place) -> str:
    """A message without this machine's paths and without the words of libraries, whose versions differ."""
    message = message.replace(str(place.root), "DIR").replace(str(GOLDEN), "tests/golden")
    message = message.replace(str(default_config_dir()), "conf")
    if case.library:
        found = re.search(case.library, message)
        assert found, (case.name, message)
        message = message[: found.start(1)] + "..." + message[found.end(1) :]
    return message


def document(messages: dict[str, str]) -> str:
    """Returns docs/errors.json from the messages of all cases: what is entered, and the line after `error: `."""
    groups: dict[str, dict[str, str]] = {}
    for case in CASES:
        group = groups.setdefault(case.category, {})
        assert case.what not in group, case.what
        group[case.what] = messages[case.name]
    return json.dumps(groups, indent=1, ensure_ascii=False) + "\n"


def fresh(good: Place, root: Path) -> Place:
    """A copy of the good inputs."""
    shutil.copytree(good.root, root)
    return Place(root)


def main_write() -> None:
    """Runs all cases and writes the document."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write docs/errors.json instead of printing it")
    options = parser.parse_args()
    messages = {}
    with tempfile.TemporaryDirectory() as directory:
        good = Place(Path(directory) / "good")
        good.root.mkdir()
        good.make()
        for number, each in enumerate(CASES):
            place = fresh(good, Path(directory) / str(number))
            each.prepare(place)
            status, _, err = run(each, place)
            assert status == 2, (each.name, status, err)
            messages[each.name] = readable(each, err.strip().removeprefix("error: "), place)
    text = document(messages)
    if options.write:
        DOCUMENT.write_text(text)
    else:
        sys.stdout.write(text)


if __name__ == "__main__":
    main_write()
