"""The keys of `data`: the prompts for training and for validation."""

from __future__ import annotations

from dataclasses import field
from typing import Any, Literal

from pydantic import model_validator
from pydantic.dataclasses import dataclass

from nemo_oprd.config.types import STRICT, FilePath, PositiveFloat, PositiveInt, SetAside
from nemo_oprd.data.prompts import HELD_OUT


@dataclass(config=STRICT)
class DataConfig:
    """Prompt files: those for training, and any number of named sets for validation (docs/data.md)."""

    train: FilePath | list[FilePath] | dict[FilePath, PositiveFloat] | None = None
    """file of training prompts, several files as one pool, or files with weights

    A file's share of the prompts of every step is its share of the weights.
    """
    suffix: str | None = None
    """text at the end of the last message of every prompt that does not have it; null: none"""
    chat_template: FilePath | None = None
    """Jinja file in place of the chat template of the student's tokenizer; null: its own"""
    chat_template_args: dict[str, Any] = field(default_factory=dict)
    """variables for the chat templates, e.g. {enable_thinking: false}"""
    max_prompt_tokens: PositiveInt | None = None
    """largest number of tokens of a training prompt; null: any"""
    over_long: Literal["drop", "refuse", "truncate_left"] = "drop"
    """what happens to longer training prompts: left out, an error, or cut at the beginning"""
    deduplicate: bool = False
    """drop training prompts that repeat an earlier one"""
    held_out: SetAside = 0.0
    """share of the training problems that is set aside as the validation set `held_out`"""
    contamination: Literal["warn", "drop", "refuse"] = "warn"
    """what happens to training prompts that contain a problem of a validation set"""
    validation: dict[str, FilePath] = field(default_factory=dict)
    """name of a validation set -> its file"""

    @property
    def train_files(self) -> tuple[str, ...]:
        """The files with training prompts; none if `train` is null."""
        return (self.train,) if isinstance(self.train, str) else tuple(self.train or ())

    @property
    def sets(self) -> tuple[str, ...]:
        """The names of all validation sets, the held-out one last."""
        return (*self.validation, HELD_OUT) if self.held_out else tuple(self.validation)

    @model_validator(mode="after")
    def _check(self) -> DataConfig:
        if self.train == [] or self.train == {}:
            raise ValueError(
                f"data.train={self.train}: expected a file of prompts, or several; name one, or set it to null"
            )
        if self.suffix is not None and not self.suffix.strip():
            raise ValueError(f"data.suffix={self.suffix!r}: expected text that is not blank; write it, or set null")
        if self.over_long != "drop" and self.max_prompt_tokens is None:
            raise ValueError(
                f"data.over_long={self.over_long} without a limit: expected data.max_prompt_tokens; set it, or leave "
                "data.over_long at drop"
            )
        if self.held_out and HELD_OUT in self.validation:
            raise ValueError(
                f"data.validation.{HELD_OUT}={self.validation[HELD_OUT]}: data.held_out={self.held_out} makes a set of "
                "that name; expected another one: rename the set, or set data.held_out=0"
            )
        return self
