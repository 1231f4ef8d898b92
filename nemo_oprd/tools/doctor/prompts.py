"""The checks of prompts and sampled responses: instructions, the counts of `nemo-oprd data`, tokens, lengths, answers.

`run/prompt_files.py` counts duplicates and contamination, as for a run and for the command `data`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from nemo_oprd.batch.types import Rollout
from nemo_oprd.config.schema import Config
from nemo_oprd.data.preparation import DataReport
from nemo_oprd.data.prompts import Prompt
from nemo_oprd.data.tokenizer import Tokenizer
from nemo_oprd.evaluation.grading import extraction
from nemo_oprd.evaluation.grading.graders import BuiltinGrader, GraderChoice
from nemo_oprd.evaluation.teacher_lead import MIN_PROBLEMS, TeacherLead
from nemo_oprd.run.prompt_files import prepare_prompts, training_prompts, validation_problems
from nemo_oprd.tools.doctor.findings import Finding, flag

# The checks of the instructions in prompts, as the models read them: the same one twice, or two that contradict.
#
# Prompt files often hold an instruction that the settings add once more: by a template's system prompt, by
# `teacher.prompt`, by `data.suffix`, or in the file itself. The student then trains on prompts that no evaluation has.


INSTRUCTIONS_CHECK = "suffix"
# shorter repetitions ("Find the value.") occur in problems; instructions are longer
SENTENCE_WORDS = 5
# A problem may repeat a sentence of its own. An instruction is repeated in all prompts of a file, so in 1 % of them at
# least, whatever the mixture of files.
REPEATED_SHARE = 0.01
# marks of chat templates, which stand between the sentences of a rendered prompt; DeepSeek's have a wide |
SPECIAL = re.compile(r"<[|\uff5c][^<>]{1,40}[|\uff5c]>|\[/?INST\]|</?s>|<</?SYS>>")

_ANSWER = r"(?:answer|result|solution|number|value)"
# Requests of instructions, in any wording. "5 balls in a box" is no request, and neither is a `\boxed` with content.
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
    r"""Checks whether prompts repeat an instruction, repeat one in other words, or hold two that contradict each other.

    A source gets only the plainest of these three kinds, and only if at least two prompts, and `REPEATED_SHARE` of all,
    have it: single problems repeat sentences of their own.

    Args:
        prompts: source -> its prompts as a model reads them.
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
            yield Finding(
                INSTRUCTIONS_CHECK,
                "warning",
                text,
                {"source": source, "prompts": len(texts), "share": share},
                code=code,
            )
    if len(silent) == len(prompts):
        read = ", ".join(f"{len(texts)} of {source}" for source, texts in prompts.items())
        yield Finding(INSTRUCTIONS_CHECK, "ok", f"no instruction stands twice in the prompts as they are read ({read})")


def sentences(text: str) -> list[str]:
    """Returns the sentences and lines of a rendered prompt, in lower case, with single spaces."""
    parts = re.split(r"(?<=[.!?])\s+|\n+", re.sub(SPECIAL, "\n", text))
    return [" ".join(part.lower().split()) for part in parts]


def repeated_sentences(text: str) -> set[str]:
    """Returns the sentences of five or more words that occur twice in a prompt."""
    counts = Counter(sentence for sentence in sentences(text) if len(sentence.split()) >= SENTENCE_WORDS)
    return {sentence for sentence, count in counts.items() if count > 1}


def repeated_requests(text: str) -> set[str]:
    """Returns the requests of `REQUESTS` that two different sentences of a prompt make."""
    found = set(sentences(text))
    return {name for name, pattern in REQUESTS.items() if sum(bool(pattern.search(s)) for s in found) > 1}


def contradictions(text: str) -> set[str]:
    """Returns the names of the `CONTRADICTIONS` in a prompt."""
    plain = re.sub(SPECIAL, "\n", text)
    return {name for name, one, other in CONTRADICTIONS if one.search(plain) and other.search(plain)}


CHECK = "data"
_say = partial(flag, CHECK)
# A set whose problems nearly all stand in the training data is the training data.
NEARLY_ALL = 0.9
# DAPO-Math-17k repeats 7 % of its prompts.
DUPLICATES, CONTRADICTING = 0.1, 0.01
# the most visits of a prompt in a run; the fewest problems of a set: fewer show no difference below a third
VISITS, PROBLEMS = 50, 8
# answers stand in their own prompts more often than in those of others by this share of the prompts
ANSWER_SHARE, STATED_SHARE = 0.25, 0.02
ALIKE, ENOUGH, UNANSWERED = 0.9, 16, 0.05
SOLUTION_WORDS = 15  # no final answer has as many
# the most prompts of a file whose texts are checked; they are evenly spaced
LOOKED_AT = 5000
MARKED, EMPTY, OTHER_ROLE, UNKNOWN, LONG = 0.01, 0.01, 0.01, 0.01, 0.2
# of a prompt's characters that its tokens must stand for
KEPT = 0.95


def prompt_files(config: Config) -> Iterator[Finding]:
    """Checks the files' texts, without a tokenizer; yields one `ok` finding if nothing is wrong.

    Raises:
        ValueError: a file cannot be read, or `train` would refuse the prompts.
    """
    report = DataReport()
    # what is refused or dropped is counted first
    prepare_prompts(replace(config, data=replace(config.data, contamination="warn")), report)
    found = list(_counted(config, report.content))
    training = training_prompts(config)
    sets = validation_problems(config)
    for source, prompts in {"data.train": training, **{f"data.validation.{n}": p for n, p in sets.items()}}.items():
        found += _texts(source, prompts[:: -(-len(prompts) // LOOKED_AT) or 1])
    for name, problems in sets.items():
        found += _problems(f"data.validation.{name}", problems, graded=config.evaluation.every > 0)
        found += _graded(config, name, [problem for problem in problems if problem.answer is not None])
    text = f"{len(training):,} prompts and {sum(map(len, sets.values())):,} problems of validation: few repeat,"
    yield from found or [Finding(CHECK, "ok", f"{text} none hold their answers")]


def _counted(config: Config, content: dict[str, Any]) -> Iterator[Finding]:
    """Judges the counts of `nemo-oprd data`."""
    repeated = content["duplicates"]
    share = repeated["prompts"] / max(repeated["of"], 1)
    unique = repeated["of"] - repeated["prompts"]
    if share >= DUPLICATES and not config.data.deduplicate:
        text = f"data.train: {repeated['prompts']:,} of {repeated['of']:,} prompts repeat an earlier one, {unique:,} "
        text += "are left; "
        yield _say("warning", "duplicate-prompts", f"{text}expected each once; fix: data.deduplicate=true", **repeated)
    if repeated["with_another_answer"] >= max(2, CONTRADICTING * repeated["of"]):
        text = f"data.train: {repeated['with_another_answer']:,} prompts repeat an earlier one with another answer; "
        yield _say("warning", "contradicting-answers", f"{text}expected one answer; fix: correct the file", **repeated)
    visited = config.train.steps * config.train.prompts_per_step
    if config.rollout.replay is None and unique and visited > VISITS * unique:
        text = f"data.train: {unique:,} different prompts are visited {visited / unique:.0f} times each in train.steps="
        text += f"{config.train.steps}; expected at most {VISITS} visits; fix: more prompts, or fewer steps"
        yield _say("warning", "few-prompts", text, prompts=unique, visits=visited / unique)
    yield from _contained(config, content.get("contamination", {"sets": {}})["sets"])


def _contained(config: Config, sets: dict[str, dict[str, Any]]) -> Iterator[Finding]:
    action = config.data.contamination
    files = {Path(file).resolve() for file in config.data.train_files}
    for name, found in sets.items():
        share = found["contained"] / max(found["problems"], 1)
        is_file = Path(config.data.validation.get(name, "")).resolve() in files
        said = f"data.validation.{name}: {found['contained']:,} of {found['problems']:,} problems stand in data.train"
        if is_file or share >= NEARLY_ALL:
            text = f"{said}: an evaluation shows what was learned by heart; expected other problems; fix: another "
            yield _say("wrong", "validation-is-training", f"{text}file, or data.held_out", contained=share)
        elif found["contained"] and action == "warn":
            example = next(entry for entry in found["examples"] if entry["contained"])
            text = f"{said} ({found['same_text']:,} with the same text), e.g. {example['text'][:60]!r}; expected none; "
            yield _say("warning", "contaminated", f"{text}fix: data.contamination=drop", contained=share)


def _texts(source: str, prompts: Sequence[Prompt]) -> Iterator[Finding]:
    """Yields a warning for each fault that many prompts of a file have."""
    count = len(prompts)
    if not count:
        return

    def many(number: int, share: float) -> bool:
        return number >= max(min(2, count), share * count)

    contents = [prompt.text for prompt in prompts]
    marked = [text for text in contents if SPECIAL.search(text)]
    if many(len(marked), MARKED):
        match = SPECIAL.search(marked[0])
        mark = "" if match is None else match[0]
        text = f"{source}: {len(marked):,} of {count:,} prompts hold marks of a chat template, e.g. {mark!r}; expected "
        text += "text alone, because the template adds them; fix: remove them"
        yield _say("warning", "template-marks-in-prompt", text)
    empty = sum(not re.search(r"\w", text) for text in contents)
    if many(empty, EMPTY):
        text = f"{source}: {empty:,} of {count:,} prompts hold no word; expected problems; fix: correct the file"
        yield _say("warning", "prompts-empty", text, prompts=empty)
    roles = Counter(prompt.messages[prompt.asked]["role"] for prompt in prompts)
    if many(count - roles["user"], OTHER_ROLE):
        other = next(role for role in roles if role != "user")
        text = f"{source}: {count - roles['user']:,} of {count:,} prompts end with a message of the role {other!r}; "
        yield _say("warning", "role-unusual", f"{text}expected the user's; fix: remove what follows the user's message")
    told = _told(prompts)
    if told:
        text = f"{source}: {told:,} of {count:,} prompts hold their own answer; expected none; fix: remove it, or move "
        yield _say("warning", "answer-in-prompt", f"{text}it into a field that teacher.prompt names", prompts=told)
    answers = Counter(prompt.answer for prompt in prompts if prompt.answer is not None)
    (answer, same), *_ = answers.most_common(1) or [("", 0)]
    if answers.total() >= ENOUGH and same >= ALIKE * answers.total():
        text = f"{source}: {same:,} of {answers.total():,} answers are {str(answer)[:40]!r}; expected different ones; "
        yield _say("warning", "answers-alike", f"{text}fix: check the file's answers", share=same / answers.total())


def _told(prompts: Sequence[Prompt]) -> int:
    """Returns the number of prompts that hold or state their answer, if chance does not explain it; else 0.

    Short answers occur in many prompts: by chance, they occur as often in the preceding prompt of the file.
    """
    pairs = [(p.text, p.answer.strip()) for p in prompts if p.answer and p.answer.strip()]
    if len(pairs) < 2:
        return 0
    own = sum(_holds(text, answer) for text, answer in pairs)
    others = sum(_holds(pairs[i - 1][0], pairs[i][1]) for i in range(len(pairs)))
    stated = sum(_states(text, answer) for text, answer in pairs)
    if own - others > ANSWER_SHARE * len(pairs):
        return own
    return stated if stated >= max(2, STATED_SHARE * len(pairs)) else 0


def _holds(text: str, answer: str) -> bool:
    return re.search(rf"(?<![\w.]){re.escape(answer)}(?![\w])", text) is not None


def _states(text: str, answer: str) -> bool:
    wrapped = rf"[\s$*:=({{]*(?:\\boxed\{{)?\s*{re.escape(answer)}(?!\w)"
    return re.search(rf"(?:\b(?:answer|solution|result)\b(?: is| equals)?|\\boxed\{{){wrapped}", text, re.I) is not None


def _problems(source: str, problems: Sequence[Prompt], *, graded: bool) -> Iterator[Finding]:
    """Yields the faults of a validation set; `graded`: whether the run evaluates."""
    count = len(problems)
    if 0 < count < PROBLEMS:
        text = f"{source}: {count} problems show no difference between two models; expected {PROBLEMS} and more; fix: "
        yield _say("warning", "few-problems", f"{text}a larger set", problems=count)
    missing = sum(problem.answer is None for problem in problems)
    if graded and missing >= max(1, UNANSWERED * count):
        text = f"{source}: {missing:,} of {count:,} problems have no answer, so no response to them is correct; "
        yield _say("warning", "answers-missing", f"{text}expected an answer; fix: add a field answer", problems=missing)
    repeated = count - len({" ".join(p.text.split()) for p in problems})
    if repeated >= max(2, DUPLICATES * count):
        text = f"{source}: {repeated:,} of {count:,} problems repeat an earlier one; expected each once; fix: remove "
        yield _say("warning", "duplicate-problems", f"{text}them", problems=repeated)


def _graded(config: Config, name: str, problems: Sequence[Prompt]) -> Iterator[Finding]:
    """Checks whether the answers of a validation set have the form that the grader reads."""
    choice = GraderChoice(config.evaluation.graders, config.evaluation.judge)
    for line in choice.read(name, ((problem.data_source, problem.answer or "") for problem in problems)):
        yield Finding(CHECK, "ok", line)
    unlike: dict[tuple[str, str], list[str]] = {}
    for problem in problems:
        grader, answer = choice.of(name, problem.data_source), problem.answer or ""
        if isinstance(grader, BuiltinGrader) and (why := _unlike(grader, answer, problem.messages[-1]["content"])):
            unlike.setdefault((grader.grader, why), []).append(answer)
    for (grader_name, why), answers in unlike.items():
        if len(answers) >= max(1, UNANSWERED * len(problems)):
            text = f"data.validation.{name}: {len(answers):,} of {len(problems):,} answers {why}, e.g. "
            text += f"{answers[0][-60:]!r}, and {grader_name!r} grades them; expected answers as it reads them; fix: "
            text += f"the final answer alone in the file, or evaluation.graders.{name}"
            yield _say("warning", "answers-unlike-grader", text, problems=len(answers))


def _unlike(grader: BuiltinGrader, answer: str, prompt: Any) -> str | None:
    """Returns the fault of a reference answer for its grader, such as "are refused"; None if there is none."""
    try:
        grader.check(answer)
    except ValueError:
        return "are refused"
    form = extraction.form(answer)
    asks_for_box = isinstance(prompt, str) and REQUESTS["a boxed answer"].search(prompt) is not None
    if form is not None and form != grader.grader and not ("boxed" in grader.grader and asks_for_box):
        return f"have the form that {form!r} reads"
    words = [] if "boxed" in answer else re.findall(r"[^\W\d_]{3,}", extraction.reference(answer))
    return "are worked solutions without a mark" if len(words) >= SOLUTION_WORDS else None


def tokenized(
    config: Config, student: Tokenizer, teacher: Tokenizer | None, prompts: Sequence[Prompt]
) -> Iterator[Finding]:
    """Checks the tokens of a sample of prompts; `teacher`: tokenizer of one that reads the student's ids, else None."""
    count, check, limit = len(prompts), "prompt tokens", config.data.max_prompt_tokens
    contents = [prompt.text for prompt in prompts]
    ids = student.encode_plain(contents)
    found = []
    lost = [text for text, own in zip(contents, ids, strict=True) if _is_lost(student, text, own)]
    if len(lost) >= max(min(2, count), UNKNOWN * count):
        text = f"the student's tokens leave out characters of {len(lost):,} of {count:,} prompts, e.g. of "
        text += f"{lost[0][:60]!r}; expected all of a text; fix: the model's own tokenizer, or other prompts"
        found.append(Finding(check, "warning", text, {"prompts": len(lost)}, code="unknown-characters"))
    if teacher is not None and teacher is not student and teacher.fingerprint() == student.fingerprint():
        others = teacher.encode_plain(contents)
        other = sum(one != two for one, two in zip(ids, others, strict=True))
        if other:
            text = f"both tokenizers have the same tokens and cut {other:,} of {count:,} prompts differently; expected "
            text += f"the same; fix: copy tokenizer.json from {student.path} or {teacher.path} to the other"
            found.append(Finding(check, "warning", text, {"prompts": other}, code="tokenizers-split-differently"))
    if limit is not None:
        long = sum(len(student.encode_prompt(prompt.messages, prompt.tools)) > limit for prompt in prompts)
        if long > LONG * count:
            text = f"{long:,} of {count:,} prompts are longer than data.max_prompt_tokens={limit} (data.over_long="
            text += f"{config.data.over_long}); expected at most a fifth; fix: raise it"
            found.append(Finding(check, "warning", text, {"prompts": long}, code="prompts-over-limit"))
    yield from found or [Finding(check, "ok", f"the tokens of {count:,} prompts stand for their whole text")]


def _is_lost(tokenizer: Tokenizer, text: str, ids: list[int]) -> bool:
    unknown = tokenizer.hf.unk_token_id
    if unknown is not None and unknown in ids:
        return True
    plain = "".join(str(tokenizer.hf.decode(ids, clean_up_tokenization_spaces=False)).split())
    return len(plain) < KEPT * len("".join(text.split()))


# The checks of sampled responses: whether they end, and whether the teacher solves more than the student.


# responses "dominate" if they are more than half of all
DOMINATES = 0.5
# Repetitions never end, whatever the limit, so fewer of them matter.
LOOPS_DOMINATE = 0.25
# the tokens at the end of a response that are checked, and the longest repeated part, which occurs there at least twice
LOOP_TOKENS, LONGEST_PERIOD = 64, 32


def truncation(
    rollouts: list[Rollout], limit: int, run_limit: int, *, limited_by: str = "rollout.max_new_tokens"
) -> Finding:
    """Checks whether most responses are cut off at their limit.

    A cut response has no end and no answer: with `positions=last_k` the supervised tokens are in the middle of a
    thought, or in a loop, and the loss falls on text that no evaluation grades. If the limit is below the run's, few
    cut responses show that the longer limit cuts no more, while many show nothing, unless they repeat themselves.

    Args:
        limit, run_limit: the most tokens of a response here, and in the run.
        limited_by: the key of the limit. A key other than `rollout.max_new_tokens` ends responses on purpose: they
            are supervised completely, and only loops are a fault.
    """
    chosen = limited_by != "rollout.max_new_tokens"
    cut = [rollout for rollout in rollouts if rollout.finish_reason == "length"]
    loops = sum(repeats_itself(rollout.response_ids) for rollout in cut)
    share, looping = len(cut) / len(rollouts), loops / len(rollouts)
    lengths = [len(rollout.response_ids) for rollout in rollouts]
    numbers = {"responses": len(rollouts), "cut": share, "loops": looping, "limit": limit, "run_limit": run_limit}
    numbers["mean_tokens"] = float(np.mean(lengths))
    said = f"{len(cut)} of {len(rollouts)} responses reach the limit of {limit} tokens"
    said += f", {loops} of them in a loop" if cut else ""
    said += f" (mean length {numbers['mean_tokens']:.0f})"
    if looping > LOOPS_DOMINATE:
        text = f"{said}; expected endings: a loop never ends; fix: a student that ends, or another rollout.temperature"
        text += "; compare the stop ids and the templates above"
        return Finding("truncation", "warning", text, numbers, code="responses-loop")
    if share <= DOMINATES or chosen:
        said += f"; {limited_by} ends them there on purpose (rollout.stop_after=supervised)" if chosen else ""
        return Finding("truncation", "ok", said, numbers)
    if limit < run_limit:
        text = f"{said}, but the run's limit is {run_limit}: what is cut here may end; --max-new-tokens {run_limit} "
        return Finding("truncation", "skipped", f"{text}shows it", numbers)
    text = f"{said}; expected at most half; fix: raise rollout.max_new_tokens={run_limit}, or compare the stop ids "
    return Finding("truncation", "warning", f"{text}above", numbers, code="responses-cut")


def repeats_itself(ids: Sequence[int] | np.ndarray) -> bool:
    """Returns whether the last 64 tokens repeat one part of at most 32 tokens."""
    end = [*map(int, ids[-LOOP_TOKENS:])]
    if len(end) < LOOP_TOKENS:
        return False
    return any(end[period:] == end[:-period] for period in range(1, LONGEST_PERIOD + 1))


@dataclass(frozen=True)
class Answers:
    """One model's responses to validation problems."""

    solved: Sequence[bool]
    without_answer: int = 0  # responses in which the grader found no answer
    cut: int = 0  # responses that reached the limit

    def describe(self, limit: int) -> str:
        """Returns a text on how the responses ended, which may explain an accuracy."""
        return f"{self.without_answer} had no answer and {self.cut} were cut at {limit} tokens"


def teacher_is_better(student: Answers, teacher: Answers, limit: int, run_limit: int) -> Finding:
    """Checks whether the teacher solves more validation problems than the student.

    A teacher that is no better has nothing to give, and the loss falls nevertheless. Each model gives one response per
    problem, paired: only problems that exactly one of the two solves count, and with equal models either is the solver
    with probability 1/2 (McNemar's exact test).

    Args:
        limit, run_limit: the most tokens of a response here, and in the run's evaluations.
    """
    check, count = "teacher is better", len(student.solved)
    lead = TeacherLead(student.solved, teacher.solved)
    accuracies = lead.means
    cut = student.cut + teacher.cut
    numbers = {"problems": count, "student": accuracies[0], "teacher": accuracies[1], "only_teacher": lead.wins}
    numbers |= {"only_student": lead.losses, "cut": cut, "limit": limit, "student_cut": student.cut}
    numbers["teacher_cut"] = teacher.cut
    numbers |= {"student_without_answer": student.without_answer, "teacher_without_answer": teacher.without_answer}
    numbers["standard_error"] = lead.error
    if count < MIN_PROBLEMS:
        return Finding(check, "skipped", f"{count} problems show nothing; expected at least {MIN_PROBLEMS}", numbers)
    if limit < run_limit and cut > 2 * count * LOOPS_DOMINATE:
        text = f"{cut} of {2 * count} responses are cut at {limit} tokens, where evaluations allow {run_limit}: "
        return Finding(check, "skipped", f"{text}--max-new-tokens {run_limit} compares them whole", numbers)
    said = lead.describe()
    if lead.student_is_better:
        text = lead.complaint(detail=f" ({_both(student, teacher, limit)})")
        return Finding(check, "wrong", text, numbers, code="teacher-worse")
    if not any(teacher.solved):
        text = f"{said}: of the teacher's responses {teacher.describe(limit)}, of the student's "
        text += f"{student.describe(limit)}; expected a teacher that solves some; fix: "
        if teacher.cut > count / 2:
            text += "evaluation.max_new_tokens, or the stop ids above"
        elif teacher.without_answer > count / 2:
            text += "a prompt that asks for the answer as the grader expects it (data.suffix, evaluation.graders)"
        else:
            text += "easier problems, or another teacher"
        return Finding(check, "warning", text, numbers, code="teacher-solves-nothing")
    if lead.teacher_is_better:
        return Finding(check, "ok", said, numbers)
    text = f"{said}: no more than the student beyond chance ({_both(student, teacher, limit)}); expected a better "
    text += f"teacher; fix: another teacher, or --problems above {count} to see a small difference"
    return Finding(check, "warning", text, numbers, code="teacher-not-better")


def _both(student: Answers, teacher: Answers, limit: int) -> str:
    return f"of the teacher's responses {teacher.describe(limit)}, of the student's {student.describe(limit)}"
