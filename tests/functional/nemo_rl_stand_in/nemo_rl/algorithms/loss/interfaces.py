"""What a loss function declares."""

from __future__ import annotations

import enum
from typing import Any, Protocol


class LossType(enum.Enum):
    """What a loss is a sum over."""

    TOKEN_LEVEL = "token_level"
    SEQUENCE_LEVEL = "sequence_level"


class LossInputType(enum.Enum):
    """What a loss is given."""

    LOGIT = "logit"
    LOGPROB = "logprob"
    DISTILLATION = "distillation"
    DISTILLATION_CROSS_TOKENIZER = "distillation_cross_tokenizer"
    DRAFT = "draft"


class LossFunction(Protocol):
    """A loss: its kinds, and a call that returns (loss, metrics)."""

    loss_type: LossType
    input_type: LossInputType

    def __call__(self, data: Any, global_valid_seqs: Any, global_valid_toks: Any, **kwargs: Any) -> Any: ...
