"""Grades the responses of a set: writes grades/SET.jsonl, disagreements/SET.jsonl and metrics. Imports no torch.

`grade_set` appends grades to `grades/.SET.part.jsonl`. The next start after a killed process continues there, if
responses, reference answers and graders are the same. `finish` removes the part after it has written the metrics; until
then a complete set is not graded twice.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from nemo_oprd.evaluation import intervals
from nemo_oprd.evaluation.grading.equality import MAX_CHARACTERS
from nemo_oprd.evaluation.grading.graders import Grade, Grader, GraderChoice
from nemo_oprd.evaluation.grading.spelling import canonical
from nemo_oprd.evaluation.intervals import Sample
from nemo_oprd.evaluation.responses import (
    DISAGREEMENTS,
    ESCAPED,
    GENERATIONS,
    GRADES,
    METRICS,
    GradableResponse,
    read_lines,
    read_responses,
    write_lines,
)
from nemo_oprd.losses.import_path import is_import_path
from nemo_oprd.runtime.disk import naming
from nemo_oprd.runtime.files import read_json, write_atomically

logger = logging.getLogger(__name__)

EVERY_S = 15.0
# fields of a line of the grades: type, and name of the type in messages
_FIELDS = {
    "problem": (int, "a whole number"),
    "sample": (int, "a whole number"),
    "extracted": (str | None, "a text or null"),
    "correct": (bool, "true or false"),
    "grader": (str, "a name"),
}


@dataclass(frozen=True)
class GradedSet:
    """A set's grades, in the order of its responses.

    Attributes:
        where: the directory of the evaluation, for messages.
        k: responses per problem.
        answers: problem -> reference answer.
        graders: name of a grader -> number of responses.
        undecided: responses about which math-verify did not decide, so that the text comparison is the verdict.
        disagreements: responses about which the text comparison and math-verify disagree.
    """

    name: str
    where: str
    k: int
    samples: list[Sample]
    answers: dict[int, str]
    graders: dict[str, int]
    undecided: int
    disagreements: int

    @cached_property
    def metrics(self) -> intervals.Metrics:
        return intervals.measure(self.samples, self.k, self.values)

    @cached_property
    def values(self) -> intervals.Values:
        return intervals.per_problem(self.samples, self.k)

    def statement(self) -> list[str]:
        """Returns the facts about the grades that a reader needs, one line each."""
        by = ", ".join(f"{name} ({count} responses)" for name, count in self.graders.items())
        lines = [f"{self.name}: graded by {by}"]
        if self.undecided:
            lines.append(f"{self.name}: {self.undecided} answers were compared as text: math-verify reached its limit")
        if self.disagreements:
            lines.append(
                f"{self.name}: text comparison and math-verify disagree about {self.disagreements} answers: "
                f"{DISAGREEMENTS}/{self.name}.jsonl"
            )
        without = sum(sample.vote is None for sample in self.samples)
        if 2 * without > len(self.samples):
            lines.append(
                f"{self.name}: {without} of {len(self.samples)} responses have no answer that the grader finds; if the "
                "prompts ask for another form, choose another grader (docs/evaluation.md)"
            )
        return lines


def grade_set(directory: Path, name: str, responses: Sequence[GradableResponse], choice: GraderChoice) -> GradedSet:
    """Grades a set, continuing an interrupted grading, and writes its grades and disagreements.

    Args:
        directory: of the evaluation.
        responses: of the whole set, k per problem, in any order.

    Raises:
        ValueError: there are no responses, a problem lacks some of its k samples, or a grader refuses an answer.
        OSError: the disk is full or a file can't be written; the error names the file.
    """
    samples_per_problem(name, responses)
    graders = [choice.of(name, response.data_source) for response in responses]
    check_answers(name, responses, graders)
    _log_if_changed(directory, name, graders)
    part = _part(directory, name)
    key = _key(responses, graders)
    records = _kept(part, key, responses, name)
    (directory / GRADES).mkdir(parents=True, exist_ok=True)
    if not records:
        write_atomically(part, json.dumps({"grading": key}) + "\n")
    shown = time.monotonic()
    with naming(part), part.open("a", encoding="utf-8", errors=ESCAPED) as file:
        for response, grader in zip(responses[len(records) :], graders[len(records) :], strict=True):
            records.append(_record(response, grader, grader(response.text, response.answer)))
            # flushed to the operating system, so that it outlives this process
            file.write(json.dumps(records[-1], ensure_ascii=False) + "\n")
            file.flush()
            if time.monotonic() - shown >= EVERY_S:
                shown = time.monotonic()
                logger.info(f"grading {name}: {len(records)}/{len(responses)} responses")
    write_lines(directory / GRADES / f"{name}.jsonl", ({key: record[key] for key in _FIELDS} for record in records))
    return _graded(directory, name, responses, records, _write_disagreements(directory, name, responses, records))


def _graded(
    directory: Path,
    name: str,
    responses: Sequence[GradableResponse],
    records: Sequence[Mapping[str, Any]],
    disagreements: int,
) -> GradedSet:
    return GradedSet(
        name=name,
        where=str(directory),
        k=samples_per_problem(name, responses),
        samples=[_sample(response, record) for response, record in zip(responses, records, strict=True)],
        answers={response.problem: response.answer for response in responses},
        graders=dict(Counter(record["grader"] for record in records)),
        undecided=sum(bool(record.get("undecided")) for record in records),
        disagreements=disagreements,
    )


def finish(directory: Path, graded: Sequence[GradedSet], *, keep_others: bool) -> dict[str, Any]:
    """Writes evaluation.json, removes the partial grades and returns the metrics, `val/SET/METRIC` -> value.

    Args:
        keep_others: keeps the metrics of the sets that were not graded now.

    Raises:
        ValueError: an evaluation.json whose metrics are to be kept is damaged.
        OSError: as `grade_set`.
    """
    file, metrics = directory / METRICS, dict[str, Any]()
    if keep_others and file.exists():
        old = read_json(file, "metrics", "remove it and grade all sets again")
        ours = tuple(f"val/{each.name}/" for each in graded)
        metrics = {name: value for name, value in old.items() if not name.startswith(ours)}
    for each in graded:
        metrics |= {f"val/{each.name}/{name}": value for name, value in each.metrics.items()}
    write_atomically(file, json.dumps(metrics, indent=1) + "\n")
    for each in graded:
        _part(directory, each.name).unlink(missing_ok=True)
    return metrics


Side = tuple[str, Mapping[int, str], set[str]]  # a directory, problem -> reference answer, the names of the graders


def check_comparable(name: str, after: Side, before: Side) -> None:
    """Checks that the grades of a set in two evaluations may be compared.

    Raises:
        ValueError: the reference answers or the graders of the two evaluations differ.
    """
    (here, answers, graders), (there, others, their_graders) = after, before
    for problem in sorted({*answers, *others}):
        mine, theirs = answers.get(problem), others.get(problem)
        if mine != theirs:
            raise ValueError(
                f"{name}: problem {problem} has the answer {mine!r} in {here} and {theirs!r} in {there}, expected the "
                "same problems in both; compare evaluations of one set"
            )
    if graders != their_graders:
        raise ValueError(
            f"{name}: is graded by {', '.join(sorted(graders))} in {here} and by {', '.join(sorted(their_graders))} in "
            f"{there}, expected the same graders in both; grade both with `nemo-oprd grade` and --grader {name}=NAME"
        )


def compare(after: Iterable[GradedSet], before: Iterable[GradedSet]) -> dict[str, dict[str, intervals.Difference]]:
    """Returns set -> metric -> paired difference of two evaluations, for their common sets.

    Raises:
        ValueError: as `check_comparable`.
    """
    others = {each.name: each for each in before}
    shared = [(each, others[each.name]) for each in after if each.name in others]
    for each, other in shared:
        check_comparable(
            each.name, (each.where, each.answers, set(each.graders)), (other.where, other.answers, set(other.graders))
        )
    return {each.name: intervals.paired_differences(each.values, other.values) for each, other in shared}


def read_graded(directory: Path) -> dict[str, GradedSet]:
    """Reads set -> its grades in the files of a finished evaluation, without grading.

    Raises:
        ValueError: a file is missing or damaged, or grades and responses do not match.
    """
    found, fix = {}, "grade again with `nemo-oprd grade`"
    for file in sorted((directory / GRADES).glob("[!.]*.jsonl")):
        responses, _ = read_responses(directory / GENERATIONS / file.name)
        records = []
        for where, record in read_lines(file, "a grade", fix):
            wrong = _wrong_field(record)
            if wrong is not None:
                raise ValueError(f"{where}: {wrong} is {record.get(wrong)!r}, expected {_FIELDS[wrong][1]}; {fix}")
            records.append(record)
        if [(r.problem, r.sample) for r in responses] != [(r["problem"], r["sample"]) for r in records]:
            raise ValueError(f"{file}: not the grades of {GENERATIONS}/{file.name}, expected one for each line; {fix}")
        found[file.stem] = _graded(directory, file.stem, responses, records, 0)
    return found


def _wrong_field(record: Mapping[str, Any]) -> str | None:
    """Returns the first field of a grade that is missing or has another type; None if the grade is complete."""
    return next((k for k, (kind, _) in _FIELDS.items() if k not in record or not isinstance(record[k], kind)), None)


def check_answers(name: str, responses: Sequence[GradableResponse], graders: Sequence[Grader]) -> None:
    """Raises ValueError for a reference answer with which its grader can't compare, naming the problem."""
    checked = set[tuple[str, str]]()
    for response, grader in zip(responses, graders, strict=True):
        if (grader.name, response.answer) not in checked:
            checked.add((grader.name, response.answer))
            try:
                grader.check(response.answer)
            except ValueError as error:
                raise ValueError(f"{name}, problem {response.problem}: {error}") from error


def samples_per_problem(name: str, responses: Sequence[GradableResponse]) -> int:
    """Returns the k of a set. Raises ValueError if there are no responses, or a problem lacks some or has one twice."""
    counts = Counter(response.problem for response in responses)
    if not counts:
        raise ValueError(f"{name}: no responses, expected at least one; sample some with `evaluate`")
    k = max(counts.values())
    twice = [pair for pair, count in Counter((r.problem, r.sample) for r in responses).items() if count > 1]
    if twice:
        raise ValueError(
            f"{name}: problem {twice[0][0]} has sample {twice[0][1]} more than once, expected it once; remove the rest"
        )
    for problem, count in counts.items():
        if count != k:
            raise ValueError(
                f"{name}: problem {problem} has {count} responses, expected {k} as others have; sample the rest with "
                "`evaluate`"
            )
    return k


def _part(directory: Path, name: str) -> Path:
    return directory / GRADES / f".{name}.part.jsonl"


def _key(responses: Sequence[GradableResponse], graders: Sequence[Grader]) -> str:
    """Returns a digest that changes whenever a grade may change."""
    digest, keys = hashlib.sha256(), dict[str, str]()
    for response, grader in zip(responses, graders, strict=True):
        if grader.name not in keys:
            keys[grader.name] = grader.key
        parts = (response.problem, response.sample, response.text, response.answer, keys[grader.name])
        digest.update(json.dumps(parts).encode())
    return digest.hexdigest()


def _kept(part: Path, key: str, responses: Sequence[GradableResponse], name: str) -> list[dict[str, Any]]:
    """Returns grades of an interrupted grading of equal responses by equal graders; truncates the part after them.

    It keeps them up to the first line that is damaged or is not the grade of the response in its place.
    """
    if not part.exists():
        return []
    first, *lines = part.read_bytes().splitlines(keepends=True) or [b""]
    if _object(first) != {"grading": key}:
        logger.info(f"{name}: grades of an interrupted grading of other responses or by another grader are left out")
        return []
    records = list[dict[str, Any]]()
    for line, response in zip(lines, responses, strict=False):
        record = _object(line)
        number = response.problem, response.sample
        if _wrong_field(record) is not None or (record["problem"], record["sample"]) != number:
            break
        records.append(record)
    if records:
        logger.info(f"grading {name}: {len(records)} of {len(responses)} grades are kept from an earlier start")
    write_atomically(part, b"".join([first, *lines[: len(records)]]).decode())
    return records


def _object(line: bytes) -> dict[str, Any]:
    """Returns the object in a line; {} if a process was killed while it wrote the line."""
    try:
        record = json.loads(line) if line.endswith(b"\n") else {}
    except ValueError:
        return {}
    return record if isinstance(record, dict) else {}


def _log_if_changed(directory: Path, name: str, graders: Sequence[Grader]) -> None:
    """Logs that the grades on disk come from other graders and will be replaced as a whole."""
    file = directory / GRADES / f"{name}.jsonl"
    if file.exists():
        before = {str(record.get("grader")) for _, record in read_lines(file, "a grade", "remove that file")}
        now = {grader.name for grader in graders}
        if before != now:
            was, by = ", ".join(sorted(before)), ", ".join(sorted(now))
            logger.info(f"{name}: was graded by {was}; all its grades are now replaced by those of {by}")


def _record(response: GradableResponse, grader: Grader, grade: Grade) -> dict[str, Any]:
    """Returns a line of the part: the line of the grades, and the comparison if math-verify was used."""
    values = response.problem, response.sample, grade.extracted, grade.correct, grader.name
    record: dict[str, Any] = dict(zip(_FIELDS, values, strict=True))
    judgement = grade.judgement
    if judgement is not None and (judgement.math_verify is not None or judgement.undecided):
        record |= {"text": judgement.text, "math_verify": judgement.math_verify}
        record |= {"undecided": True} if judgement.undecided else {}
    return record


def _write_disagreements(
    directory: Path, name: str, responses: Sequence[GradableResponse], records: Sequence[Mapping[str, Any]]
) -> int:
    """Writes the responses about which the two comparisons disagree; returns their number. Without any, no file."""
    keys = ("problem", "sample", "answer", "extracted", "text", "math_verify", "correct", "grader")
    found = [
        {key: response.answer if key == "answer" else record[key] for key in keys}
        for response, record in zip(responses, records, strict=True)
        if "text" in record and record["text"] != record["math_verify"]
    ]
    file = directory / DISAGREEMENTS / f"{name}.jsonl"
    if found:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_lines(file, found)
    else:
        file.unlink(missing_ok=True)
    return len(found)


def _sample(response: GradableResponse, record: Mapping[str, Any]) -> Sample:
    extracted = record["extracted"]
    # an empty box is no answer, but a bare bool of a user's grader counts as an answer
    none = extracted is None or (not extracted and not is_import_path(record["grader"]))
    # a text that is too long for an answer is compared with others literally
    spelling = extracted if none or len(extracted) > MAX_CHARACTERS else canonical(extracted)
    facts = response.truncated, response.subject, response.level
    vote = None if none else spelling
    return Sample(response.problem, response.text, record["correct"], response.tokens, vote, *facts)
