"""Training prompts from files: the suffix, a held-out split, duplicates, and what validation sets have in common.

In this order: the suffix is added; the held-out part is set aside; duplicates are counted or dropped; what remains is
compared with the validation sets. Lengths in tokens are not checked here, because they belong to a tokenizer.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from nemo_oprd.data.contamination import COMMON_IN, CONTAINED_SHARE, SEQUENCE_WORDS, Overlap, TrainingTexts
from nemo_oprd.data.prompts import HELD_OUT, Prompt, load_prompts
from nemo_oprd.data.text import SuffixCounts, identity, share_of, with_suffix

# examples in data.json, per validation set, and how much of a text a message shows
EXAMPLES, SHOWN = 20, 90


@dataclass
class DataReport:
    """What was done to the training prompts: lines for the log, and the content of OUTPUT/data.json."""

    lines: list[str] = field(default_factory=list)
    content: dict[str, Any] = field(default_factory=dict)

    def say(self, line: str) -> None:
        """Adds a line that begins with the key that it is about."""
        self.lines.append(line)


@dataclass(frozen=True)
class Preparation:
    """The settings, as the keys of `data` with these names say; each of `weighted` files needs a prompt."""

    files: tuple[str, ...]
    weighted: bool = False
    suffix: str | None = None
    held_out: float = 0.0
    deduplicate: bool = False
    contamination: Literal["warn", "drop", "refuse"] = "warn"


@dataclass(frozen=True)
class PreparedPrompts:
    """The prompts to train on, per file and in file order, and those that were set aside, in the order of their hashes.

    The order of the held-out problems does not depend on the files, so `evaluation.limit` takes the same ones.
    """

    files: list[list[Prompt]]
    held_out: list[Prompt]


def prepare(settings: Preparation, report: DataReport) -> PreparedPrompts:
    """Reads the files, adds the suffix, sets the held-out part aside, and counts or drops duplicates.

    Raises:
        ValueError: a file cannot be read, or nothing is held out, or nothing else remains of a file.
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
    """Says what became of the suffix in prompts of `source`; nothing without a suffix."""
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
    """(Training prompts per file, their identities, held-out problems, each once)."""
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
    """The files without later occurrences of a problem, if `data.deduplicate` is set; counted in any case."""
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
    """Compares the training prompts with the validation sets and does what `data.contamination` says.

    Raises:
        ValueError: problems are contained and `data.contamination=refuse`, or nothing remains of a file.
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
    """Says how many problems of a set are contained, with an example; raises with `data.contamination=refuse`."""
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
    """What data.json says of a validation set: the counts, and the clearest examples."""
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
    """The beginning of a text, in one line."""
    line = " ".join(text.split())
    return line if len(line) <= SHOWN else f"{line[:SHOWN]}..."
