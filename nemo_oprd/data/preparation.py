"""Prepares training prompts from files: suffix, held-out split, duplicates, and overlap with validation sets.

`prepare` adds the suffix, holds problems out, and counts or drops duplicates, in this order; `decontaminate` compares
the remaining prompts with the validation sets. Lengths in tokens are checked elsewhere: they depend on a tokenizer.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from nemo_oprd.data.conversation import non_text_fields
from nemo_oprd.data.prompts import HELD_OUT, Prompt, load_prompts
from nemo_oprd.data.text import SuffixCounts, identity, normalize, share_of, with_suffix, without_instructions, words_of

# Contamination: validation problems in the training data, found by their normal form and by sequences of words.
#
# A problem counts as contained in a training prompt if their texts are the same, or if the training prompt has half or
# more of the problem's sequences of 13 words. Both sides leave out instructions that a file's prompts share, and
# sequences that many training prompts have ("can be written in the form ... where m and n are relatively
# prime"). Problems that were reworded, translated or given other numbers are not found; problems of fewer than 13 words
# are found by their whole text only.


# As in the decontamination of GPT-3: 13 words; a sequence in more than 10 training prompts is ignored.
SEQUENCE_WORDS, COMMON_IN = 13, 10
# In DAPO-Math-17k and AMC 2023, this threshold separates problems that differ in typesetting alone (shares of 0.5 to 1)
# from different problems of one kind (nearly all below 0.1).
CONTAINED_SHARE = 0.5

Sequence13 = tuple[str, ...]


@dataclass(frozen=True)
class Overlap:
    """A validation problem, and a training prompt that has its text or a share of its sequences of words.

    Attributes:
        problem: index in the validation set.
        training: index in the training prompts.
        share: fraction of the problem's sequences that the training prompt has; 1 if the texts are the same.
        same_text: whether the texts are the same in normal form.
    """

    problem: int
    training: int
    share: float
    same_text: bool

    @property
    def is_contained(self) -> bool:
        return self.same_text or self.share >= CONTAINED_SHARE


class Texts:
    """The texts of one file in the forms that are compared.

    Attributes:
        forms: per prompt, the normal forms of its problem, with and without the file's instructions, each followed by
            the other fields that the chat template reads.
        words: per prompt, the words of its problem without the instructions.
    """

    def __init__(self, prompts: Sequence[Prompt]) -> None:
        contents = [prompt.text for prompt in prompts]
        bodies = [normalize(text) for text in without_instructions(contents)]
        others = [non_text_fields(prompt.messages, prompt.tools) for prompt in prompts]
        self.forms = [
            {body + other, normalize(text) + other} for body, text, other in zip(bodies, contents, others, strict=True)
        ]
        self.words = [words_of(body) for body in bodies]


class TrainingTexts:
    """The training prompts of all files, in the forms that are compared; `overlaps` finds a validation set in them."""

    def __init__(self, files: Sequence[Sequence[Prompt]]) -> None:
        texts = [Texts(prompts) for prompts in files]
        self.words = [words for each in texts for words in each.words]
        self.by_form: dict[str, list[int]] = defaultdict(list)
        for index, forms in enumerate(forms for each in texts for forms in each.forms):
            for form in forms:
                self.by_form[form].append(index)

    def overlaps(self, sets: Mapping[str, Sequence[Prompt]]) -> dict[str, list[Overlap]]:
        """Returns per validation set its problems that share their text or a sequence with a training prompt, in order.

        A problem occurs once for each training prompt that contains it, or once, for the largest share, if none does.
        """
        texts = {name: Texts(prompts) for name, prompts in sets.items()}
        wanted = {sequence for each in texts.values() for words in each.words for sequence in _sequences(words)}
        places: dict[Sequence13, set[int]] = defaultdict(set)
        for index, words in enumerate(self.words if wanted else ()):
            for sequence in _sequences(words):
                if sequence in wanted:
                    places[sequence].add(index)
        telling = {sequence: found for sequence, found in places.items() if len(found) <= COMMON_IN}
        common = places.keys() - telling.keys()
        return {name: list(self._of_set(each, telling, common)) for name, each in texts.items()}

    def _of_set(
        self, texts: Texts, telling: Mapping[Sequence13, set[int]], common: set[Sequence13]
    ) -> Iterator[Overlap]:
        for problem, (forms, words) in enumerate(zip(texts.forms, texts.words, strict=True)):
            same = {index for form in forms for index in self.by_form.get(form, ())}
            sequences = set(_sequences(words)) - common
            counts = Counter(index for sequence in sequences for index in telling.get(sequence, ()))
            shares = {index: count / len(sequences) for index, count in counts.items()}
            shares |= dict.fromkeys(same, 1.0)
            found = [Overlap(problem, index, share, index in same) for index, share in sorted(shares.items())]
            contained = [overlap for overlap in found if overlap.is_contained]
            yield from contained or sorted(found, key=lambda overlap: -overlap.share)[:1]


def _sequences(words: list[str]) -> Iterator[Sequence13]:
    return zip(*(words[start:] for start in range(SEQUENCE_WORDS)), strict=False)


# examples in data.json, per validation set, and characters of a text in a message
EXAMPLES, SHOWN = 20, 90


@dataclass
class DataReport:
    """The report of the preparation of training prompts: lines for the log, and the content of OUTPUT/data.json."""

    lines: list[str] = field(default_factory=list)
    content: dict[str, Any] = field(default_factory=dict)

    def say(self, line: str) -> None:
        """Adds a line that begins with the configuration key of its subject."""
        self.lines.append(line)


@dataclass(frozen=True)
class Preparation:
    """The settings of `data` with these names, and the training `files`; `weighted`: each must keep a prompt."""

    files: tuple[str, ...]
    weighted: bool = False
    suffix: str | None = None
    held_out: float = 0.0
    deduplicate: bool = False
    contamination: Literal["warn", "drop", "refuse"] = "warn"


@dataclass(frozen=True)
class PreparedPrompts:
    """The training prompts, per file and in file order, and the held-out problems, in the order of their hashes.

    The order of the held-out problems does not depend on the files, so `evaluation.limit` always takes the same ones.
    """

    files: list[list[Prompt]]
    held_out: list[Prompt]


def prepare(settings: Preparation, report: DataReport) -> PreparedPrompts:
    """Reads the files, adds the suffix, sets the held-out part aside, and counts or drops duplicates.

    Raises:
        ValueError: a file cannot be read, nothing is held out, or no prompt remains of a weighted file or of all files.
    """
    loaded = [load_prompts(file) for file in settings.files]
    report.content["files"] = [
        {"file": file, "prompts": len(prompts)} for file, prompts in zip(settings.files, loaded, strict=True)
    ]
    suffixed = [with_suffix(prompts, settings.suffix) for prompts in loaded]
    files = [prompts for prompts, _ in suffixed]
    say_suffix(sum((counts for _, counts in suffixed), SuffixCounts()), "data.train", settings.suffix, report)
    identities = [[identity(prompt, settings.suffix) for prompt in prompts] for prompts in files]
    files, identities, held_out = _split(settings, files, identities, report)
    files = _without_duplicates(settings, files, identities, report)
    _check_not_empty(settings, files)
    return PreparedPrompts(files, held_out)


def say_suffix(counts: SuffixCounts, source: str, suffix: str | None, report: DataReport) -> None:
    """Reports the counts of the suffix in prompts of `source`; nothing without a suffix."""
    if suffix is None:
        return
    report.content.setdefault("suffix", {})[source] = vars(counts)
    line = f"data.suffix: added to {counts.added:,} prompts of {source}; {counts.present:,} have it already"
    if counts.other_words:
        line += f"; {counts.other_words:,} ask for \\boxed{{}} in other words and stay as they are"
    report.say(line)


def _split(
    settings: Preparation, files: list[list[Prompt]], identities: list[list[str]], report: DataReport
) -> tuple[list[list[Prompt]], list[list[str]], list[Prompt]]:
    """Returns (training prompts per file, their identities, held-out problems, each once)."""
    if not settings.held_out:
        return files, identities, []
    aside: dict[str, Prompt] = {}
    kept_files: list[list[Prompt]] = []
    kept_identities: list[list[str]] = []
    rows = 0
    for prompts, texts in zip(files, identities, strict=True):
        kept = []
        for prompt, text in zip(prompts, texts, strict=True):
            if share_of(text) < settings.held_out:
                aside.setdefault(text, prompt)
                rows += 1
            else:
                kept.append((prompt, text))
        kept_files.append([prompt for prompt, _ in kept])
        kept_identities.append([text for _, text in kept])
    total = sum(map(len, files))
    if not aside:
        raise ValueError(
            f"data.held_out={settings.held_out}: of {total} prompts none falls into the held-out part; expected at "
            "least one: raise it, or set it to 0"
        )
    report.content["held_out"] = {"problems": len(aside), "prompts": rows, "of": total}
    report.say(
        f"data.held_out={settings.held_out}: {len(aside):,} problems ({rows:,} of {total:,} prompts) are set aside as "
        f"the validation set {HELD_OUT}"
    )
    return kept_files, kept_identities, [aside[text] for text in sorted(aside, key=lambda text: (share_of(text), text))]


def _without_duplicates(
    settings: Preparation, files: list[list[Prompt]], identities: list[list[str]], report: DataReport
) -> list[list[Prompt]]:
    """Removes later occurrences of a problem, if `data.deduplicate` is set; reports their number in any case."""
    first: dict[str, str | None] = {}
    unique: list[list[Prompt]] = []
    repeated = contradicting = 0
    for prompts, texts in zip(files, identities, strict=True):
        unique.append([])
        for prompt, text in zip(prompts, texts, strict=True):
            if text not in first:
                first[text] = prompt.answer
                unique[-1].append(prompt)
                continue
            repeated += 1
            contradicting += first[text] != prompt.answer
    total = sum(map(len, files))
    report.content["duplicates"] = {
        "prompts": repeated, "with_another_answer": contradicting, "of": total, "dropped": settings.deduplicate
    }  # fmt: skip
    if repeated:
        what = "are dropped" if settings.deduplicate else "stay (data.deduplicate=true drops them)"
        other = f", {contradicting:,} of them with another answer" if contradicting else ""
        report.say(
            f"data.deduplicate={str(settings.deduplicate).lower()}: {repeated:,} of {total:,} prompts repeat an "
            f"earlier one{other}; they {what}"
        )
    return unique if settings.deduplicate else files


def decontaminate(
    settings: Preparation, prepared: PreparedPrompts, sets: dict[str, list[Prompt]], report: DataReport
) -> PreparedPrompts:
    """Compares the training prompts with the validation sets and applies `data.contamination`; returns the prompts.

    Raises:
        ValueError: problems are contained and `data.contamination=refuse`, or no prompt remains, as in `prepare`.
    """
    if not sets:
        return prepared
    files_of = zip(settings.files, prepared.files, strict=True)
    flat = [(file, prompt) for file, prompts in files_of for prompt in prompts]
    found = TrainingTexts(prepared.files).overlaps(sets)
    contained: set[int] = set()
    report.content["contamination"] = {
        "rule": {"words": SEQUENCE_WORDS, "share": CONTAINED_SHARE, "common_in_more_than": COMMON_IN},
        "action": settings.contamination,
        "sets": {},
    }
    for name, overlaps in found.items():
        certain = [overlap for overlap in overlaps if overlap.is_contained]
        contained |= {overlap.training for overlap in certain}
        report.content["contamination"]["sets"][name] = _set_content(sets[name], overlaps, flat)
        if certain:
            _say_contained(settings, name, sets[name], certain, flat, report)
    report.content["contamination"]["training_prompts"] = len(contained)
    if not contained:
        return prepared
    done = "are dropped" if settings.contamination == "drop" else "stay (data.contamination=drop drops them)"
    report.say(
        f"data.contamination={settings.contamination}: {len(contained):,} of {len(flat):,} training prompts contain a "
        f"validation problem; they {done}"
    )
    if settings.contamination != "drop":
        return prepared
    numbers = itertools.count()
    files = [[prompt for prompt in prompts if next(numbers) not in contained] for prompts in prepared.files]
    _check_not_empty(settings, files)
    return PreparedPrompts(files, prepared.held_out)


def _say_contained(
    settings: Preparation,
    name: str,
    problems: Sequence[Prompt],
    certain: list[Overlap],
    flat: list[tuple[str, Prompt]],
    report: DataReport,
) -> None:
    """Reports how many problems of a set are contained, with an example; raises with `data.contamination=refuse`."""
    number = len({overlap.problem for overlap in certain})
    same = len({overlap.problem for overlap in certain if overlap.same_text})
    example = next((overlap for overlap in certain if overlap.same_text), certain[0])
    file, prompt = flat[example.training]
    text = shortened(problems[example.problem].text)
    counted = (
        f"{number:,} of {len(problems):,} problems of {name} stand in data.train ({same:,} with the same text, "
        f"{number - same:,} by sequences of {SEQUENCE_WORDS} words), e.g. problem {example.problem} in prompt "
        f"{prompt.index} of {file}: {text!r}"
    )
    if settings.contamination == "refuse":
        raise ValueError(
            f"data.contamination=refuse: {counted}; expected none: remove them from data.train, or set "
            "data.contamination=drop to train without them"
        )
    report.say(f"data.contamination={settings.contamination}: {counted}")


def _set_content(problems: Sequence[Prompt], overlaps: list[Overlap], flat: list[tuple[str, Prompt]]) -> dict[str, Any]:
    """Returns the entry of a validation set in data.json: the counts, and the clearest examples."""
    certain = [overlap for overlap in overlaps if overlap.is_contained]
    clearest = sorted(overlaps, key=lambda overlap: (not overlap.same_text, -overlap.share, overlap.problem))
    examples = []
    for overlap in clearest[:EXAMPLES]:
        file, prompt = flat[overlap.training]
        examples.append({
            "problem": overlap.problem, "contained": overlap.is_contained, "same_text": overlap.same_text,
            "share": round(overlap.share, 4), "text": problems[overlap.problem].text,
            "training_file": file, "training_prompt": prompt.index, "training_text": prompt.text,
        })  # fmt: skip
    return {
        "problems": len(problems),
        "contained": len({overlap.problem for overlap in certain}),
        "same_text": len({overlap.problem for overlap in certain if overlap.same_text}),
        "share_any_sequence": len({overlap.problem for overlap in overlaps}),
        "contained_problems": sorted({overlap.problem for overlap in certain}),
        "examples": examples,
    }


def _check_not_empty(settings: Preparation, files: list[list[Prompt]]) -> None:
    empty = [file for file, prompts in zip(settings.files, files, strict=True) if not prompts]
    if empty and (settings.weighted or not any(files)):
        raise ValueError(
            f"data.train: no prompt of {empty[0]} remains to train on (data.held_out={settings.held_out}, "
            f"data.deduplicate={str(settings.deduplicate).lower()}, data.contamination={settings.contamination}); "
            "expected at least one: add prompts, remove the file, or change one of these keys"
        )


def shortened(text: str) -> str:
    """Returns the beginning of a text, in one line."""
    line = " ".join(text.split())
    return line if len(line) <= SHOWN else f"{line[:SHOWN]}..."
