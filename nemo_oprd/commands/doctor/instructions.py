r"""The checks of the instructions in prompts, as the models read them: the same one twice, or two that contradict.

Prompt files often hold the instruction that somebody adds once more: by a template's system prompt, by
`teacher.prompt`, by `data.suffix`, or in the file itself. The student then trains on prompts that no evaluation has.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

from nemo_oprd.commands.doctor.findings import Finding

CHECK = "suffix"
# shorter repetitions ("Find the value.") occur in problems; instructions are longer
SENTENCE_WORDS = 5
# A problem may repeat a sentence of its own. An instruction is repeated in all prompts of a file, so in 1 % of them at
# least, whatever the mixture of files.
REPEATED_SHARE = 0.01
# marks of chat templates, which stand between the sentences of a rendered prompt; DeepSeek's have a wide |
SPECIAL = re.compile(r"<[|\uff5c][^<>]{1,40}[|\uff5c]>|\[/?INST\]|</?s>|<</?SYS>>")

_ANSWER = r"(?:answer|result|solution|number|value)"
# What an instruction may ask for, however it is worded. "5 balls in a box" is no request, and neither is a full box.
REQUESTS: Mapping[str, re.Pattern[str]] = {
    "a boxed answer": re.compile(
        rf"\\boxed(?:\{{\s*\}}|(?!\s*\{{))|\b(?:{_ANSWER}|it)\b[^.!?\n]{{0,40}}\b(?:in|inside|within|into) an? box\b"
        rf"|\b(?:{_ANSWER}) (?:must|should|has to|is to) be boxed|\bbox(?:ed)? (?:the|your|its) (?:final )?{_ANSWER}",
        re.IGNORECASE,
    ),
    "reasoning step by step": re.compile(
        r"\bstep[- ]by[- ]step\b|\bone step at a time\b|\b(?:in|with|show|write) (?:all |your |the )?"
        r"(?:single |clear )?steps\b|\bshow (?:all )?your (?:work|reasoning)\b",
        re.IGNORECASE,
    ),
}
# two requests that no response can fulfil at once
CONTRADICTIONS: Sequence[tuple[str, re.Pattern[str], re.Pattern[str]]] = (
    (
        "reasoning, and the answer alone",
        REQUESTS["reasoning step by step"],
        re.compile(
            rf"\b(?:only|just|nothing but) (?:give |output |write |state |return )?(?:the |a )?(?:final )?{_ANSWER}\b"
            rf"|\b{_ANSWER} (?:only|alone)\b|\bwithout (?:any )?(?:explanation|reasoning|steps)\b"
            r"|\bno (?:explanation|reasoning)\b|\bdo(?: not|n't) (?:explain|reason|show)\b",
            re.IGNORECASE,
        ),
    ),
    (
        "an answer in a box, and an answer after another mark",
        REQUESTS["a boxed answer"],
        re.compile(r"####|\b(?:form|line|after|with|format)\b[^\n]{0,40}\banswer:", re.IGNORECASE),
    ),
)


def instructions(prompts: dict[str, list[str]]) -> Iterator[Finding]:
    r"""Whether prompts hold an instruction twice, or two instructions that contradict each other.

    Only the plainest of the three kinds is said of a source, and only if two prompts at least have it: single problems
    repeat sentences of their own.

    Args:
        prompts: where they come from -> prompts as a model reads them.
    """
    fix = "fix: remove one of them from the prompt file, data.suffix, teacher.prompt, or the template's system prompt"
    kinds: list[tuple[str, Callable[[str], set[str]], str, str]] = [
        ("instruction-repeated", repeated_sentences, "hold an instruction twice", "expected it once"),
        ("instruction-in-other-words", repeated_requests, "ask in two sentences for", "expected one of them"),
        ("instruction-conflicts", contradictions, "ask for", "expected one of the two"),
    ]
    silent = set(prompts)
    for code, find, what, expected in kinds:
        for source in sorted(silent):
            texts = prompts[source]
            counts = Counter(item for text in texts for item in find(text))
            item, count = max(counts.items(), key=lambda entry: (entry[1], entry[0]), default=("", 0))
            if not count or count < min(2, len(texts)) or count < REPEATED_SHARE * len(texts):
                continue
            silent.discard(source)
            share = count / len(texts)
            text = f"{share:.0%} of {len(texts)} prompts of {source} {what}: {item[:90]!r}; {expected}; {fix}"
            yield Finding(CHECK, "warning", text, {"source": source, "prompts": len(texts), "share": share}, code=code)
    if len(silent) == len(prompts):
        read = ", ".join(f"{len(texts)} of {source}" for source, texts in prompts.items())
        yield Finding(CHECK, "ok", f"no instruction stands twice in the prompts as they are read ({read})")


def sentences(text: str) -> list[str]:
    """The sentences and lines of a rendered prompt, in lower case, with single spaces."""
    parts = re.split(r"(?<=[.!?])\s+|\n+", re.sub(SPECIAL, "\n", text))
    return [" ".join(part.lower().split()) for part in parts]


def repeated_sentences(text: str) -> set[str]:
    """The sentences of five or more words that occur twice in a prompt."""
    counts = Counter(sentence for sentence in sentences(text) if len(sentence.split()) >= SENTENCE_WORDS)
    return {sentence for sentence, count in counts.items() if count > 1}


def repeated_requests(text: str) -> set[str]:
    """What two different sentences of a prompt ask for, by `REQUESTS`."""
    found = set(sentences(text))
    return {name for name, pattern in REQUESTS.items() if sum(bool(pattern.search(s)) for s in found) > 1}


def contradictions(text: str) -> set[str]:
    """The names of the `CONTRADICTIONS` in a prompt."""
    plain = re.sub(SPECIAL, "\n", text)
    return {name for name, one, other in CONTRADICTIONS if one.search(plain) and other.search(plain)}
