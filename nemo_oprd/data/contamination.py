"""Which validation problems stand in the training data: by their text in normal form, and by sequences of words.

A problem counts as contained in a training prompt if their texts are the same, or if the training prompt has half or
more of the problem's sequences of 13 words. Instructions that a file's prompts share are left out on both sides, and so
are sequences that many training prompts have ("can be written in the form ... where m and n are relatively prime").
Problems that were reworded, translated or given other numbers are not found; problems of fewer than 13 words are found
by their whole text only.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from nemo_oprd.data.conversation import fields_beside_text
from nemo_oprd.data.prompts import Prompt
from nemo_oprd.data.text import normalize, without_instructions, words_of

# As in the decontamination of GPT-3: 13 words, and a sequence in more than 10 places of the training data says nothing.
SEQUENCE_WORDS, COMMON_IN = 13, 10
# Of DAPO-Math-17k and AMC 2023, half the sequences separated the same problems in other typesetting (0.5 to 1) from
# different problems of one kind (nearly all below 0.1).
CONTAINED_SHARE = 0.5

Sequence13 = tuple[str, ...]


@dataclass(frozen=True)
class Overlap:
    """A validation problem and the training prompt that has most of it.

    Attributes:
        problem: index in the validation set.
        training: index in the training prompts.
        share: of the problem's sequences of words that the training prompt has; 1 if the texts are the same.
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
        forms: per prompt, the normal forms of its problem, with and without the file's instructions, and what else the
            chat template reads.
        words: per prompt, the words of its problem without the instructions.
    """

    def __init__(self, prompts: Sequence[Prompt]) -> None:
        contents = [prompt.text for prompt in prompts]
        bodies = [normalize(text) for text in without_instructions(contents)]
        others = [fields_beside_text(prompt.messages, prompt.tools) for prompt in prompts]
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
        """Per validation set, its problems that share anything with a training prompt, in order.

        A problem that is contained in several training prompts is there once for each of them.
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
