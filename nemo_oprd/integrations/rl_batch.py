"""NeMo-RL's training data with the weights of the supervised tokens, which the driver computes for whole updates.

A row's weight contains 1 / counts of its whole update. The driver computes it, because it has all responses of the
update in one batch, and adds it to the token ids. So NeMo-RL may sort, shard and pack the responses in any way. This
module does not import NeMo-RL.

B responses, S tokens of the padded sequences.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from nemo_oprd.batch.types import Rollout
from nemo_oprd.config.messages import build
from nemo_oprd.config.schema import LossConfig, RepresentationLossConfig
from nemo_oprd.integrations.hidden_states import row_weights

# The weights of the hidden-state loss have the name of NeMo-RL's mask for multi-token prediction: that is the only
# tensor that its workers pad, pack and shard exactly like the token ids, and pass to the model. `adopt` refuses models
# with multi-token prediction.
HIDDEN_WEIGHT = "mtp_loss_mask"
OUTPUT_WEIGHT = "oprd_output_weight"
# the section of a policy's config that `Settings` reads
SECTION = "oprd"


@dataclass(frozen=True)
class Settings:
    """Settings of the workers beside NeMo-RL's own configuration: the teacher's model, and the keys below `loss`."""

    teacher: str
    loss: LossConfig

    @staticmethod
    def read(policy: Mapping[str, Any]) -> Settings:
        """Reads the section `oprd` of a policy's config: `teacher`, `representation`, `output`.

        Raises:
            ValueError: the teacher is missing, a key or value is wrong, or NeMo-RL's loop does not support a term.
        """
        section = dict(policy.get(SECTION) or {})
        teacher = section.pop("teacher", None)
        if not teacher:
            raise ValueError(
                f"policy.{SECTION}.teacher={teacher}: expected the teacher's model; set it to the directory of a "
                "Hugging Face model, such as teacher.model_name"
            )
        loss = build(LossConfig, section)
        for name in ("representation", "output"):
            if isinstance(getattr(loss, name).weight, list):
                raise ValueError(
                    f"policy.{SECTION}.{name}.weight is a schedule; expected a number: use nemo-oprd train for stages"
                )
        if loss.representation.layers == "none":
            raise ValueError(
                f"policy.{SECTION}.representation.layers=none: expected layers, because nothing else needs a worker of "
                "this project; choose some, or train with NeMo-RL's own distillation"
            )
        if loss.output.clip is not None:
            raise ValueError(
                f"policy.{SECTION}.output.clip={loss.output.clip}: the old log-probabilities are not recorded here; "
                "expected null: set it"
            )
        return Settings(str(teacher), loss)


def rollouts_of(data: Mapping[str, Any]) -> list[Rollout]:
    """Returns the responses in NeMo-RL's training data.

    A response begins at the first token with `token_mask` 1. Later tokens with 0, such as another turn of the user, are
    part of it without supervision. A response with `sample_mask` 0 has no supervision at all.

    Args:
        data: `input_ids` int64 [B, S], `input_lengths` [B], `token_mask` [B, S], `sample_mask` [B].
    """
    rollouts = []
    for i, length in enumerate(torch.as_tensor(data["input_lengths"]).tolist()):
        ids, taught = data["input_ids"][i, :length].numpy(), (data["token_mask"][i, :length] != 0).numpy()
        flags = taught if float(data["sample_mask"][i]) else np.zeros_like(taught)
        start = int(flags.argmax()) if flags.any() else length
        rollouts.append(Rollout(ids[:start], ids[start:], flags[start:]))
    return rollouts


def with_weights(data: Any, loss: LossConfig, batch_size: int) -> Any:
    """Adds the weights of both losses to NeMo-RL's training data, in place; returns it.

    Args:
        data: as in `rollouts_of`.
        batch_size: responses of one update, `policy.train_global_batch_size`, which are consecutive rows of `data`.

    Raises:
        ValueError: the responses are no whole updates, the data has weights already, or as `row_weights`.
    """
    if HIDDEN_WEIGHT in data:
        raise ValueError(
            f"the training data has {HIDDEN_WEIGHT} already, for multi-token prediction; expected a model without it: "
            "set policy.megatron_cfg.mtp_num_layers=0"
        )
    rollouts, length = rollouts_of(data), data["input_ids"].shape[1]
    if not rollouts or len(rollouts) % batch_size:
        raise ValueError(
            f"{len(rollouts)} responses per step with train_global_batch_size={batch_size}; expected a multiple of it: "
            "choose policy.train_global_batch_size that divides num_prompts_per_step * num_generations_per_prompt"
        )
    terms = {HIDDEN_WEIGHT: loss.representation}
    if not loss.output.is_off:
        # every response token, at the position that predicts it
        rows = RepresentationLossConfig(positions="all", position="predicting")
        terms[OUTPUT_WEIGHT] = replace(rows, aggregation=loss.output.aggregation)
    updates = [rollouts[first : first + batch_size] for first in range(0, len(rollouts), batch_size)]
    for name, term in terms.items():
        data[name] = torch.cat([row_weights(update, length, term) for update in updates])
    return data
