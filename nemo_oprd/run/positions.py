"""Finds sequences longer than a model's positions, before a run, for `plan`, `rehearse` and `doctor`.

A response of the student ends where prompt and response have as many tokens as the student has positions
(`SamplingParams.limit_of`), and a prompt that leaves no room for a token is refused. A teacher that reads the student's
ids reads them to the end. Plain arithmetic, without torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from nemo_oprd.config.schema import Config
from nemo_oprd.models import ModelSpec

CODE = "positions-too-few"
# the assumed length of prompts, if neither the configuration nor the user gives one
USUAL_PROMPT = 256


@dataclass(frozen=True)
class TooFewPositions:
    """A model with fewer positions than its longest sequence has tokens.

    Attributes:
        text: the finding, the expected state, and the fix.
        positions, tokens: of the model, and of its longest sequence; a prompt of unknown length counts as 1 token.
    """

    role: str
    text: str
    positions: int
    tokens: int

    @property
    def line(self) -> str:
        """Returns the finding as a line for a terminal."""
        return f"warning ({CODE}): {self.text}"

    def as_json(self) -> dict[str, Any]:
        """Returns the finding as an entry of `findings`."""
        numbers = {"role": self.role, "positions": self.positions, "tokens": self.tokens}
        return {"code": CODE, "text": self.text, "numbers": numbers}


def prompt_tokens(config: Config, student: ModelSpec, given: int | None = None) -> int:
    """Returns the length of the longest prompts: `given`, else `data.max_prompt_tokens`, else a usual one that fits.

    Raises:
        ValueError: `given` leaves no room for a response.
    """
    positions, limit = student.max_positions, config.response_limit[1]
    if given is not None and given >= positions:
        raise ValueError(
            f"prompts of {given:,} tokens leave no room for a response in the student's {positions:,} positions, and "
            f"`train` refuses them; expected fewer than {positions:,}: lower --prompt-tokens"
        )
    known = known_prompt(config, student, given)
    if known is not None:
        return known
    return min(USUAL_PROMPT, positions - limit if limit < positions else max(1, positions // 8))


def known_prompt(config: Config, student: ModelSpec, given: int | None = None) -> int | None:
    """Returns the length of the longest prompts: `given` or `data.max_prompt_tokens`, if below `max_positions`."""
    known = given or config.data.max_prompt_tokens
    return known if known is not None and known < student.max_positions else None


def longest_response(config: Config, student: ModelSpec, prompt: int) -> int:
    """Returns the maximum number of tokens of a training response after a prompt of `prompt` tokens."""
    return min(config.response_limit[1], student.max_positions - prompt)


def too_few_positions(
    config: Config, student: ModelSpec, teachers: Mapping[int, ModelSpec], prompt: int | None = None
) -> Iterator[TooFewPositions]:
    """Yields the models with fewer positions than the longest sequences of a run; none if responses are replayed.

    Args:
        teachers: by their numbers in the run.
        prompt: tokens of the longest prompts; None: unknown, counted as 1.
    """
    if config.rollout.replay is not None:
        return
    key, limit = config.response_limit
    tokens = (prompt or 1) + limit  # at least one
    after = "" if prompt is None else f" after prompts of {prompt:,} tokens"
    if tokens > student.max_positions:
        yield _finding("student", student, f"{key}={limit}{after}", "prompt and response end there", tokens)
    reads_text = config.teacher.reads != "ids"
    for number, teacher in teachers.items():
        own_text = reads_text or config.has_own_prompt(number)
        read = tokens if own_text else min(tokens, student.max_positions)
        if teacher is student or read <= teacher.max_positions:
            continue
        end = "it reads positions that it was not made for"
        if own_text:
            end = "later tokens of a response have no target"
        elif number in config.served_teachers:
            end = "its servers take no longer sequences"
        role = "teacher" if not config.teachers else f"teacher {config.teachers[number].label}"
        yield _finding(role, teacher, f"{key}={limit}{after}", end, read)


def _finding(role: str, spec: ModelSpec, given: str, end: str, tokens: int) -> TooFewPositions:
    key = given.partition("=")[0] + (" or the prompts" if " after " in given else "")
    text = (
        f"the {role}'s max_position_embeddings is {spec.max_positions}, and {given}: {end}; expected at least {tokens} "
        f"positions; fix: lower {key}, or correct config.json"
    )
    return TooFewPositions(role, text, spec.max_positions, tokens)
