"""The built-in graders by name, the grader of each data source, and users' own graders. Imports no torch.

A grader takes a response's text and the reference answer, and returns the answer that it found and whether it is right.
`MODULE:FUNCTION` names a user's own function, which is imported from Python's path or from the working directory.
docs/evaluation.md describes such a function.
"""

from __future__ import annotations

import difflib
import functools
import hashlib
import importlib.metadata
import importlib.util
import inspect
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Protocol

from nemo_oprd.evaluation.grading import extraction, numerals
from nemo_oprd.evaluation.grading.equality import Judgement, judge
from nemo_oprd.evaluation.grading.spelling import canonical, is_number, is_percentage
from nemo_oprd.losses.import_path import import_function, is_import_path

# increase when a built-in grader changes a grade of the same response: partial grades on disk are then not used
VERSION = 5
DEFAULT = "boxed"
JUDGES = ("math_verify", "text")


@dataclass(frozen=True)
class Grade:
    """The grade of one response.

    Attributes:
        extracted: the answer in the response; None if the grader found none.
        correct: whether it is right.
        judgement: the comparison; None if the grader decided without `judge`.
    """

    extracted: str | None
    correct: bool
    judgement: Judgement | None = None


class Grader(Protocol):
    """Grades responses. `name` is written beside every grade; `key` changes whenever grades may change."""

    @property
    def name(self) -> str: ...

    @property
    def key(self) -> str: ...

    def check(self, answer: str) -> None:
        """Raises ValueError if the grader can't compare with this reference answer."""

    def __call__(self, response: str, answer: str) -> Grade: ...


@dataclass(frozen=True)
class _Builtin:
    """The functions of a built-in grader: extraction, comparison, and reading of reference answers.

    Attributes:
        summary: for messages.
        extract: finds the answer in the final part of a response.
        compare: returns whether an answer equals the result of `reference`; None leaves that to `judge`.
        mathematical: whether it uses math-verify.
        reference: returns the value to compare with, from the reference answer; None if that is not as `expected`.
    """

    summary: str
    extract: Callable[[str], str | None]
    compare: Callable[[str, str], bool | None] = lambda given, reference: None
    mathematical: bool = True
    reference: Callable[[str], str | None] = lambda answer: answer
    expected: str = "an answer"


@cache
def _math_verify_version() -> str:
    try:
        return importlib.metadata.version("math-verify")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


@lru_cache(maxsize=100_000)
def _judged(extracted: str, answer: str, by_text: bool) -> Judgement:
    """Judges with a cache: a problem's samples give few different answers; math-verify takes milliseconds for each."""
    return judge(extracted, answer, both=True, by_text=by_text)


def _letter(answer: str) -> str | None:
    return extraction.extract_choice(answer) or extraction.extract_choice(f"Answer: {answer}")


@lru_cache(maxsize=100_000)
def _number(answer: str) -> str | None:
    """Returns the number in a reference answer: a whole expression, or a text's marked or only number; else None."""
    if is_number(canonical(answer)):  # also with a unit; a percentage must stay one
        return answer
    if extraction.marked_number(answer) is not None:
        return extraction.extract_number(answer)
    if re.search(r"[A-Za-z]{2}", re.sub(r"\\[A-Za-z]+", "", answer)) is None:
        return answer if extraction.numbers_in(answer) else None
    found = numerals.read(answer)
    return found.spelling if found is not None and not re.search(r"\d", found.outside) else None


@lru_cache(maxsize=100_000)
def _same_number(given: str, answer: str) -> bool | None:
    """Returns whether two numbers are exactly equal (50 and 0.5 equal a reference of 50%); None if one is no number."""
    found, wanted = numerals.read(given), numerals.read(answer)
    if found is None or wanted is None:
        return None
    return found.value == wanted.value or (is_percentage(answer) and 100 * found.value == wanted.value)


BUILTIN: dict[str, _Builtin] = {
    "boxed": _Builtin(
        r"the last \boxed{...}, with those side by side", extraction.extract_boxed, reference=extraction.reference
    ),
    "answer_line": _Builtin('the last "Answer:" line', extraction.extract_answer_line, reference=extraction.reference),
    "answer_line_or_boxed": _Builtin(
        r'the last "Answer:" line, without one the last \boxed{...}',
        extraction.extract_answer_line_or_boxed,
        reference=extraction.reference,
    ),
    "number": _Builtin(
        r'the number in the last \boxed{...}, "Answer:", "answer is" or "####", without any the last number',
        extraction.extract_number,
        _same_number,
        reference=_number,
        expected="a number, or a text that marks one number as GSM8K does (#### 72)",
    ),
    "choice": _Builtin(
        r'the letter in the last \boxed{...}, "Answer:" or "answer is"',
        extraction.extract_choice,
        str.__eq__,
        mathematical=False,
        reference=_letter,
        expected="a letter such as C or (C)",
    ),
    "exact": _Builtin(
        r'the text of the last \boxed{...} or "Answer:" line, without any the whole response; compared exactly',
        extraction.extract_exact,
        lambda given, answer: given.split() == answer.split(),
        mathematical=False,
    ),
}
# the data sources, by their names in files, whose prompts ask for another form than a box
DATA_SOURCES = {"math_dapo": "answer_line_or_boxed", "openai/gsm8k": "number", "gsm8k": "number"}


@dataclass(frozen=True)
class BuiltinGrader:
    """A built-in grader with its judge: `math_verify`, or `text` for comparison as text alone."""

    grader: str
    judge: str = "math_verify"

    @property
    def name(self) -> str:
        return self.grader if self.judge == "math_verify" or not self._entry.mathematical else f"{self.grader} (text)"

    @property
    def key(self) -> str:
        return f"{self.name} version {VERSION}, math-verify {_math_verify_version()}"

    @property
    def _entry(self) -> _Builtin:
        return BUILTIN[self.grader]

    def check(self, answer: str) -> None:
        if self._entry.reference(answer) is None:
            raise ValueError(
                f"answer {answer!r} with grader {self.grader!r}, expected {self._entry.expected}; choose another grader"
            )

    def __call__(self, response: str, answer: str) -> Grade:
        entry, final = self._entry, extraction.final_part(response)
        extracted = entry.extract(final) if final.strip() else None
        if not extracted:
            return Grade(extracted, correct=False)
        reference = entry.reference(answer)
        equal = False if reference is None else entry.compare(extracted, reference)
        if reference is None or equal is not None:
            return Grade(extracted, bool(equal))
        judgement = _judged(extracted, reference, self.judge == "text")
        return Grade(extracted, judgement.correct, judgement)


@dataclass(frozen=True)
class OwnGrader:
    """A user's own function: `f(response, answer)` returns a bool, or (bool, the answer that it found or None)."""

    name: str
    function: Callable[[str, str], Any]

    @property
    def key(self) -> str:
        """Returns a key with a digest of the function's file, so that grades of an earlier version are not kept."""
        content = b"".join(Path(file).read_bytes() for file in self._files())
        return f"{self.name} {hashlib.sha256(content).hexdigest()[:12]}"

    def _files(self) -> list[str]:
        """Returns the function's source file; of a partial, also that of the module in `name`, which has its arguments.

        For an instance or a function without a source file, it returns the module's source file alone, if there is one.
        """
        module, function = sys.modules.get(self.name.partition(":")[0]), inspect.unwrap(self.function)
        parts: list[Any] = []
        while isinstance(function, functools.partial):
            parts, function = [module], inspect.unwrap(function.func)
        return [file for file in (*map(_source_of, parts), _source_of(function) or _source_of(module)) if file]

    def check(self, answer: str) -> None:
        """Calls the function on an empty response."""
        self("", answer)

    def __call__(self, response: str, answer: str) -> Grade:
        try:
            result = self.function(response, answer)
        except Exception as error:
            error.add_note(f"grader {self.name}, answer {answer!r}, response ending with {response[-200:]!r}")
            raise
        correct, extracted = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
        if type(correct).__name__ not in ("bool", "bool_") or not isinstance(extracted, str | None):
            raise ValueError(
                f"grader {self.name} returned {result!r} for answer {answer!r}, expected a bool, or (bool, text of the "
                "answer that it found or None); correct the function (docs/evaluation.md)"
            )
        # a bare bool does not show whether there was an answer: it counts as gradable
        shown = extracted if isinstance(result, tuple) else ""
        return Grade(shown, bool(correct))


def _source_of(part: Any) -> str | None:
    """Returns the source file of a module, class or function; None if there is none."""
    try:
        file = inspect.getsourcefile(part)
    except TypeError:  # an instance, or what is written in C
        return None
    return file if file and Path(file).is_file() else None  # code that exec made names no file


def check_name(key: str, name: str) -> None:
    """Checks the name of a grader; imports nothing.

    Args:
        key: the origin of the name, for the message. Example: "evaluation.graders.aime24".

    Raises:
        ValueError: `name` is neither a built-in grader nor MODULE:FUNCTION.
    """
    if name in BUILTIN or is_import_path(name):
        return
    near = difflib.get_close_matches(name, BUILTIN, n=1, cutoff=0.5)
    fix = f"did you mean {near[0]!r}?" if near else "choose one"
    raise ValueError(
        f"{key}={name!r}: expected one of {', '.join(BUILTIN)}, or MODULE:FUNCTION for a function of your own "
        f"(docs/evaluation.md); {fix}"
    )


def check_judge(key: str, judge: str) -> None:
    """Raises ValueError unless `judge` is known and, if it is math-verify, installed; imports nothing."""
    if judge not in JUDGES:
        raise ValueError(f"{key}={judge!r}: expected one of {', '.join(JUDGES)}; choose one")
    if judge == "math_verify" and importlib.util.find_spec("math_verify") is None:
        raise ValueError(
            f"{key}=math_verify, but math-verify is not installed, expected it for grading; pip install "
            f"'math-verify[antlr4_9_3]', or compare answers as text only with {key}=text"
        )


def resolve(key: str, name: str, judge: str = "math_verify") -> Grader:
    """Returns the grader of that name; imports a user's own function.

    Raises:
        ValueError: as `check_name`, or there is no such function, or it can't be called with (response, answer).
    """
    check_name(key, name)
    if name in BUILTIN:
        return BuiltinGrader(name, judge)
    function = import_function(key, name, "docs/evaluation.md")
    try:
        inspect.signature(function).bind("response", "answer")
    except (TypeError, ValueError) as error:  # ValueError: some functions written in C have no signature
        raise ValueError(
            f"{key}={name} can't be called with a response and an answer ({error}); expected a function(response, "
            "answer): correct the function"
        ) from error
    return OwnGrader(name, function)


class GraderChoice:
    """Chooses the grader of a response: by its set where one was named, else by its data source, else `boxed`.

    `read` replaces `boxed` by the grader for the form of a data source's reference answers.

    Args:
        named: set -> name of a grader; "" stands for all sets that are not named.
        judge: `math_verify`, or `text` for comparison as text alone.
        key: the origin of the names, for messages; a set's name replaces {}.
    """

    def __init__(
        self, named: Mapping[str, str], judge: str = "math_verify", key: str = "evaluation.graders.{}"
    ) -> None:
        self._key = key
        self._named = {name: resolve(key.format(name).rstrip(" ."), grader, judge) for name, grader in named.items()}
        self._by_name = {name: BuiltinGrader(name, judge) for name in BUILTIN}
        self._by_form: dict[tuple[str, str], str] = {}  # (set, data source) -> grader

    def read(self, set_name: str, answers: Iterable[tuple[str | None, str]]) -> list[str]:
        """Reads the (data source, reference answer) of all problems of a set; returns a line for each choice made.

        If all answers of a data source have one form (`extraction.form`), and neither the set nor the data source has
        a grader of its own, the grader of that form grades the source's responses in this set.
        """
        forms = defaultdict[str, set[str | None]](set)
        for source, answer in answers:
            if self._is_default(set_name, source):
                forms[source or ""].add(extraction.form(answer))
        lines = []
        for source, (form, *others) in forms.items():
            self._by_form.pop((set_name, source), None)
            if form is not None and not others:
                self._by_form[set_name, source] = form
                lines.append(
                    f"{set_name}: all answers of the data source {source!r} end in the form that {form!r} reads, which "
                    f"grades them in place of {DEFAULT!r}; {self._key.format(set_name)}=NAME names another grader"
                )
        return lines

    def of(self, set_name: str, data_source: str | None) -> Grader:
        """Returns the grader of a response to a problem of this set and data source."""
        if not self._is_default(set_name, data_source):
            named = self._named.get(set_name) or self._named.get("")
            return named or self._by_name[DATA_SOURCES[data_source or ""]]
        return self._by_name[self._by_form.get((set_name, data_source or ""), DEFAULT)]

    def _is_default(self, set_name: str, data_source: str | None) -> bool:
        """Returns whether neither the set nor the data source has a grader of its own."""
        return not {set_name, ""} & self._named.keys() and (data_source or "") not in DATA_SOURCES
