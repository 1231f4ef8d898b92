"""`grade`: grades kept responses again; needs no model and imports no torch.

A target is the output of `evaluate`, a run with `evaluations/`, or a file of generations. Besides the responses, grades
depend on answers and graders, which come, in this order, from the command line, from the lines of the generations, and
from the table of data sources or the form of the answers (`evaluation/grading/graders.py`).
"""

from __future__ import annotations

import json
import logging
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from nemo_oprd.data.prompts import load_prompts
from nemo_oprd.evaluation.grading.grade_sets import (
    GradedSet,
    Side,
    check_answers,
    check_comparable,
    compare,
    finish,
    grade_set,
    samples_per_problem,
)
from nemo_oprd.evaluation.grading.graders import BUILTIN, GraderChoice, check_judge, check_name
from nemo_oprd.evaluation.intervals import CI
from nemo_oprd.evaluation.responses import DIFFERENCES, FIX, GENERATIONS, GradableResponse, read_responses
from nemo_oprd.evaluation.tables import EVALUATIONS, details, differences, table
from nemo_oprd.runtime.disk import check_output
from nemo_oprd.runtime.files import kind_of, write_atomically
from nemo_oprd.runtime.output_directories import check_directory
from nemo_oprd.runtime.run_lock import RunLock

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class GradeOptions:
    """The command's options.

    Attributes:
        targets: outputs of `evaluate`, runs, or files SET.jsonl.
        data: set -> file with its problems, whose answers replace those of the lines; "" stands for all other sets.
        graders: set -> grader; "" stands for all other sets.
        judge: `math_verify` or `text`.
        against: an output of `evaluate` or a file to compare with; None compares a run's first and last evaluation.
        output: directory of the results of a single file or evaluation; None: beside its generations.
    """

    targets: tuple[Path, ...]
    data: Mapping[str, Path] = field(default_factory=dict)
    graders: Mapping[str, str] = field(default_factory=dict)
    judge: str = "math_verify"
    against: Path | None = None
    output: Path | None = None


@dataclass(frozen=True)
class Evaluation:
    """Files of responses that one evaluation.json describes.

    Attributes:
        label: for tables.
        directory: receives the results.
        files: set -> file of its responses.
    """

    label: str
    directory: Path
    files: dict[str, Path]


@dataclass(frozen=True)
class Loaded:
    """An evaluation with the responses of its sets, the choice of their graders, and the lines to print about it."""

    of: Evaluation
    sets: dict[str, list[GradableResponse]]
    choice: GraderChoice
    notes: list[str]

    def side(self, name: str) -> Side:
        """Returns a set in the form that `check_comparable` takes."""
        answers = {response.problem: response.answer for response in self.sets[name]}
        graders = {self.choice.of(name, response.data_source).name for response in self.sets[name]}
        return str(self.of.directory), answers, graders


def by_set(key: str, texts: Sequence[str]) -> dict[str, str]:
    """Parses `SET=VALUE`, or `VALUE` for all sets, to set -> value; "" stands for all sets.

    Example: `by_set("--grader", ["aime24=number", "boxed"]) == {"aime24": "number", "": "boxed"}`.

    Raises:
        ValueError: a set has two values, or a value is empty.
    """
    found: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not (equals and re.fullmatch(r"\w[\w.-]*", name)):
            name, value = "", text
        if name in found or not value:
            raise ValueError(f"{key} {text}: expected one value for each set, as SET=VALUE or VALUE; correct it")
        found[name] = value
    return found


def grade(options: GradeOptions) -> None:
    """Writes grades, disagreements and evaluation.json beside the responses, and prints tables.

    Raises:
        ValueError: a target holds no responses, a reference answer is missing, a grader is wrong, `against` has other
            problems or graders, or another process uses a directory; one line that names the value, what was expected
            and the fix. Nothing is written then.
        OSError: the disk is full or a file can't be written; the error names the file.
    """
    check_judge("--judge", options.judge)
    evaluations = _merged([each for target in options.targets for each in find(target)])
    if options.output is not None:
        if len(evaluations) != 1:
            raise ValueError(
                f"--output {options.output} with {len(evaluations)} evaluations, expected one; omit it, or name one"
            )
        if options.output.resolve() != evaluations[0].directory.resolve():
            check_directory(options.output, "grade", "--output")
        evaluations = [replace(evaluations[0], directory=options.output)]
    if options.output is None:
        _check_places(evaluations, "--output")
    other = find(options.against) if options.against is not None else []
    if len(other) > 1:
        raise ValueError(
            f"--against {options.against} holds {len(other)} evaluations, expected one; name e.g. {other[-1].directory}"
        )
    _check_places(other, "--against")
    every = [*evaluations, *other]
    known = {name for each in every for name in each.files}
    for key, given in (("--data", options.data), ("--grader", options.graders)):
        for name in sorted(set(given) - known - {""}):
            raise ValueError(
                f"{key} {name}={given[name]}: there is no such set, expected one of {', '.join(sorted(known))}; "
                "correct the name"
            )
    loaded = [_load(each, options) for each in every]
    for line in dict.fromkeys(line for each in loaded for line in each.notes):
        logger.info(line)
    for mine in loaded[: len(evaluations)] if other else ():
        for name in mine.sets.keys() & loaded[-1].sets.keys():
            check_comparable(name, mine.side(name), loaded[-1].side(name))
    with ExitStack() as stack:
        for each in every:
            check_output(str(each.directory))
        for directory in {each.directory.resolve(): None for each in every}:
            stack.callback(RunLock(directory).undo)
        graded, rows = _grade(loaded)
        labels = [*rows]
        # the evaluation that the others are compared with is first
        shown = {each: rows[each] for each in labels[len(evaluations) :] + labels[: len(evaluations)]}
        print(table(shown), flush=True)
        print(details(shown), flush=True)
        _compare(evaluations, list(zip(rows, graded, strict=True)), len(other))


def _grade(loaded: Sequence[Loaded]) -> tuple[list[list[GradedSet]], dict[str, dict[str, Any]]]:
    """Returns (each evaluation's grades, label of an evaluation -> its metrics), both in the evaluations' order."""
    graded: list[list[GradedSet]] = []
    rows: dict[str, dict[str, Any]] = {}
    for number, each in enumerate(loaded, 1):
        directory = each.of.directory
        label = next(text for text in (each.of.label, str(directory), f"{directory} ({number})") if text not in rows)
        graded.append([grade_set(directory, name, own, each.choice) for name, own in each.sets.items()])
        rows[label] = finish(directory, graded[-1], keep_others=True)
        for line in (line for one in graded[-1] for line in one.statement()):
            logger.info(f"{label}: {line}")
    return graded, rows


def _check_places(evaluations: Sequence[Evaluation], key: str) -> None:
    """Raises ValueError, naming the option `key`, if results may not be written beside a file outside an evaluation."""
    for each in evaluations:
        if any(file.parent.name != GENERATIONS for file in each.files.values()):
            check_directory(each.directory, "grade", key, others=("evaluate",))


def _merged(evaluations: Sequence[Evaluation]) -> list[Evaluation]:
    """Merges the evaluations of each directory into one; raises ValueError if a set has two files."""
    found: dict[Path, Evaluation] = {}
    for each in evaluations:
        directory = each.directory.resolve()
        known = found.get(directory, each)
        for name, file in each.files.items():
            if known.files.get(name, file).resolve() != file.resolve():
                raise ValueError(
                    f"{file} and {known.files[name]} are both of the set {name}, expected one file; omit one"
                )
        found[directory] = replace(known, files={**each.files, **known.files})
    return list(found.values())


def find(target: Path) -> list[Evaluation]:
    """Returns the evaluations of a target; those of a run in the order of their steps, then the teacher's.

    An evaluation that `evaluate` of an earlier version wrote into a run comes last.

    Raises:
        ValueError: there are no responses.
    """
    if target.is_file():
        if not target.name.endswith(".jsonl"):
            raise ValueError(f"{target}: expected a file SET.jsonl of responses; {FIX}")
        of_evaluation = target.parent.name == GENERATIONS
        directory = target.parent.parent if of_evaluation else target.parent
        return [Evaluation(_label(directory), directory, {target.stem: target})]
    directory = target.parent if target.name == GENERATIONS else target
    if not directory.is_dir():
        what = f"is {kind_of(target)}" if kind_of(target) else "there is no such file or directory"
        raise ValueError(f"{target}: {what}, expected responses to grade; {FIX}")
    files = {file.stem: file for file in sorted((directory / GENERATIONS).glob("[!.]*.jsonl"))}
    inner = sorted((directory / EVALUATIONS).glob("*"))
    found = [each for path in inner if any((path / GENERATIONS).glob("[!.]*.jsonl")) for each in find(path)]
    if files:  # earlier versions let `evaluate` write into a run, whose own evaluations count all the same
        found.append(Evaluation(_label(directory), directory, files))
    if not found:
        partly = [*directory.glob(f"{GENERATIONS}/.*.jsonl")]
        fix = "finish sampling with the command that began it" if partly else FIX
        raise ValueError(f"{target}: no {GENERATIONS}/SET.jsonl, expected responses to grade; {fix}")
    return found


def _label(directory: Path) -> str:
    """Returns a label. Example: runs/a/evaluations/step_0000050 -> "a step 50"; runs/eval -> "eval"."""
    directory = directory.resolve()
    if directory.parent.name != EVALUATIONS:
        return directory.name
    step = re.fullmatch(r"step_0*(\d+)", directory.name)
    return f"{directory.parent.parent.name} {'step ' + step[1] if step else directory.name}"


def _load(each: Evaluation, options: GradeOptions) -> Loaded:
    """Reads and checks an evaluation, without grading it."""
    sets: dict[str, list[GradableResponse]] = {}
    graders = dict(options.graders)
    for name, file in each.files.items():
        data = options.data.get(name, options.data.get(""))
        problems = None if data is None else load_prompts(data)
        responses, named = read_responses(file, problems, data)
        if named is not None and name not in graders and "" not in graders:
            # a line never makes this process import code: other users may have written it
            check_name(f"{file}: grader", named)
            if named not in BUILTIN:
                raise ValueError(
                    f"{file}: was graded by {named}, a function that is not built in, expected it on the command line; "
                    f"add --grader {name}={named}, or choose a built-in grader"
                )
            graders[name] = named
        sets[name] = responses
    own = {name: grader for name, grader in graders.items() if name in each.files or not name}
    choice, notes = GraderChoice(own, options.judge, key="--grader {}"), list[str]()
    for name, responses in sets.items():
        notes += choice.read(name, ((response.data_source, response.answer) for response in responses))
        # all checks come before the first write
        samples_per_problem(name, responses)
        check_answers(name, responses, [choice.of(name, response.data_source) for response in responses])
    return Loaded(each, sets, choice, notes)


def _compare(evaluations: Sequence[Evaluation], graded: Sequence[tuple[str, list[GradedSet]]], others: int) -> None:
    """Prints and writes paired differences: against the other evaluation, or of the last and first step of a run."""
    pairs = [(number, len(graded) - 1) for number in range(len(evaluations) if others else 0)]
    runs = defaultdict[Path, list[int]](list)  # directory of a run's evaluations -> its steps, first to last
    for number, each in enumerate(() if others else evaluations):
        if each.directory.parent.name == EVALUATIONS and each.directory.name.startswith("step_"):
            runs[each.directory.parent].append(number)
    pairs += sorted((steps[-1], steps[0]) for steps in runs.values() if len(steps) > 1)
    for after, before in pairs:
        (label, mine), (against, theirs) = graded[after], graded[before]
        try:
            found = compare(mine, theirs)
        except ValueError as error:  # evaluations of a run, which may have begun with other problems or graders
            logger.info(f"no comparison of {label} with {against}: {error}")
            continue
        print(differences(found, against, label), flush=True)
        flat = {
            f"val/{name}/{metric}{suffix}": value
            for name, metrics in found.items()
            for metric, gap in metrics.items()
            for suffix, value in (("", gap.value), (CI, [gap.low, gap.high]))
        }
        text = json.dumps({"against": against, **flat}, indent=1) + "\n"
        write_atomically(evaluations[after].directory / DIFFERENCES, text)
