"""Types of configuration values: pydantic's checks, the words of their messages, and the rules for resumed runs.

The `description` of a type completes "KEY=VALUE: expected ..."; `config/messages.py` puts the two together.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Annotated, Literal, TypeVar

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field

Rule = Literal["free", "learned", "fixed"]


@dataclass(frozen=True)
class ResumeRule:
    """The rule for resumed runs; annotates a key, or a group for those of its keys without a rule of their own."""

    rule: Rule


T = TypeVar("T")
# no effect on the training result (layout, logging, saving, evaluation, memory): a run may change it at any start
Free = Annotated[T, ResumeRule("free")]
# changes the training result: needs permission (`train.allow_changes`)
Learned = Annotated[T, ResumeRule("learned")]
# no checkpoint can be continued with another value
Fixed = Annotated[T, ResumeRule("fixed")]

# No unknown keys; no "1" for 1 and no true for 1, but an integer for a number; neither NaN nor infinity.
STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

_MORE_THAN_ZERO = Field(gt=0, description="more than 0; choose a larger number")
_ZERO_OR_MORE = Field(ge=0, description="0 or more; choose another number")

PositiveInt = Annotated[int, _MORE_THAN_ZERO]
PositiveFloat = Annotated[float, _MORE_THAN_ZERO]
NonNegativeInt = Annotated[int, _ZERO_OR_MORE]
NonNegativeFloat = Annotated[float, _ZERO_OR_MORE]


def _as_path(text: str) -> str:
    if not text:
        raise ValueError("{key}='': expected a path; give one, or leave the key out")
    if "\0" in text:
        raise ValueError(f"{{key}}={text!r}: holds a null character; expected a path: correct it")
    return os.path.expanduser(text)


# marks texts that are paths: another path to the same file is no change of the key
NAMES_A_FILE = "names a file"
# path of a file or a directory; replaces `~` by the user's home directory, which a shell does not do within a word
FilePath = Annotated[str, AfterValidator(_as_path), NAMES_A_FILE]
# the interpreter of an environment: those of different environments may be links to the same file
Interpreter = Annotated[str, AfterValidator(_as_path)]

# ranks, stages and layers of a parallel layout
Size = Annotated[int, Field(ge=1, description="at least 1; choose 1 or more")]
# the probability mass that sampling keeps
ProbabilityMass = Annotated[float, Field(gt=0, le=1, description="a number in (0, 1]; choose one, 1 for all")]
# the part of a GPU's memory that a server takes
Share = Annotated[float, Field(gt=0, lt=1, description="a number in (0, 1); choose e.g. 0.4")]
# the decay of an exponential moving average: at 1 the average would never change
Decay = Annotated[float, Field(ge=0, lt=1, description="a number in [0, 1); choose e.g. 0.9 or 0.999")]
Fraction = Annotated[float, Field(ge=0, le=1, description="a number in [0, 1]; choose one")]
# a part of the responses that is set aside, once for testing and once for choosing the rank
HeldOut = Annotated[float, Field(gt=0, lt=0.5, description="a number in (0, 0.5); choose e.g. 0.1")]
# a part of the training prompts that becomes a validation set
SetAside = Annotated[float, Field(ge=0, lt=0.5, description="a number in [0, 0.5); choose e.g. 0.02, or 0 for none")]
# `rollout.correction`; YAML reads a bare `off` as false
CorrectionMode = Annotated[
    Literal["off", "truncate", "mask"], BeforeValidator(lambda value: "off" if value is False else value)
]
