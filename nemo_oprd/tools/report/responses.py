"""Responses to validation problems in the report: before training, after it, and the teacher's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from nemo_oprd.evaluation.responses import GENERATIONS, read_lines
from nemo_oprd.run.run_reader import Run
from nemo_oprd.tools.report.evaluations import FIX, Evaluation, RunEvaluations
from nemo_oprd.tools.report.figures import Key

PER_KIND = 6


@dataclass(frozen=True)
class Shown:
    """One response: whose it is, its text, its grade, and its length in tokens."""

    label: str
    text: str
    correct: bool
    truncated: bool
    tokens: int


@dataclass(frozen=True)
class Sample:
    """A problem with its responses, in time, the teacher's last.

    `kinds` holds the filters that show it: "right" or "wrong", "truncated" of the last response of the student, and
    "changed" if its first one had another grade.
    """

    problem: int
    prompt: str
    answer: str
    responses: list[Shown]
    kinds: list[str]


@dataclass(frozen=True)
class Samples:
    """Responses of one run on one set; `total` problems, of which `samples` are shown."""

    key: Key
    set_name: str
    samples: list[Sample]
    total: int


def responses(run: RunEvaluations, prompt_text: Callable[[list[int]], str]) -> Iterator[Samples]:
    """The first response to some problems of each set, chosen so that every kind of change is among them.

    Args:
        prompt_text: token ids of a prompt -> its text.

    Raises:
        ValueError: a file of an evaluation is damaged.
    """
    if run.last is None:
        return
    for name, graded in run.last.graded.items():
        prompts = _prompts(run.last.directory, name)
        sides = (_first_responses(each, name, graded.answers) for each in (run.first, run.last, run.teacher))
        before, after, teacher = sides
        made = []
        for problem, answer in sorted(graded.answers.items()):
            shown = [side[problem] for side in (before, after, teacher) if problem in side]
            was, now = before.get(problem), after[problem]
            kinds = ["right" if now.correct else "wrong"] + (["truncated"] if now.truncated else [])
            kinds += ["changed"] if was is not None and was.correct != now.correct else []
            made.append(Sample(problem, prompt_text(prompts.get(problem, [])), answer, shown, kinds))
        yield Samples(run.key, name, _chosen(made), len(made))


def _first_responses(each: Evaluation | None, name: str, answers: dict[int, str]) -> dict[int, Shown]:
    """Problem -> its first response, for the problems that have the same answer in this evaluation."""
    if each is None or name not in each.graded:
        return {}
    found: dict[int, Shown] = {}
    for sample in each.graded[name].samples:
        shown = Shown(each.label, sample.response, sample.correct, bool(sample.truncated), sample.num_tokens)
        if each.graded[name].answers[sample.problem] == answers.get(sample.problem):
            found.setdefault(sample.problem, shown)
    return found


def _prompts(directory: Path, name: str) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for _, record in read_lines(directory / GENERATIONS / f"{name}.jsonl", "a response", FIX):
        ids = record.get("prompt_ids")
        found.setdefault(record["problem"], ids if isinstance(ids, list) else [])
    return found


def _chosen(samples: list[Sample]) -> list[Sample]:
    """At most `PER_KIND` each of: became right, still right, became wrong, still wrong; cut-off ones first."""
    kept: list[Sample] = []
    for right in (True, False):
        for changed in (True, False):
            of_kind = [s for s in samples if ("right" in s.kinds) == right and ("changed" in s.kinds) == changed]
            kept += sorted(of_kind, key=lambda sample: "truncated" not in sample.kinds)[:PER_KIND]
    return sorted(kept, key=lambda sample: sample.problem)


def prompt_decoder(run: Run) -> Callable[[list[int]], str]:
    """Token ids of a prompt -> its text, by the tokenizer of the run's export or of its student.

    Where neither has a tokenizer.json, the text is the number of tokens: lines of generations hold ids only.
    """
    sources = [run.path / "hf", *(Path(str(run.setting(f"student.{key}") or "")) for key in ("hf_path", "checkpoint"))]
    tokenizer = next((found for source in sources if (found := _tokenizer(source / "tokenizer.json"))), None)

    def text(ids: list[int]) -> str:
        if tokenizer is None:
            return f"a prompt of {len(ids)} tokens (no tokenizer.json in {sources[0]} or with the student)"
        return str(tokenizer.decode(ids, skip_special_tokens=True))

    return text


@cache
def _tokenizer(file: Path) -> Any:
    """The tokenizer in a file; None if there is none, or it can't be read: the page is complete without prompts."""
    if not file.is_file():
        return None
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(file))
    except Exception:  # the library raises plain Exception for any damage
        return None
