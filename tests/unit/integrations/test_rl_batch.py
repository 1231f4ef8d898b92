"""The weights of the supervised tokens in NeMo-RL's training data, and the settings of its workers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nemo_oprd.config.schema import LossConfig, OutputLossConfig, RepresentationLossConfig
from nemo_oprd.integrations.rl_batch import HIDDEN_WEIGHT, OUTPUT_WEIGHT, Settings, rollouts_of, with_weights


def data() -> dict[str, Any]:
    """Four responses: an ordinary one, one with a turn of the user inside, one left out, and one without tokens."""
    mask = torch.tensor([[0, 1, 1, 0, 0], [0, 1, 0, 1, 0], [0, 0, 1, 1, 1], [0, 0, 0, 0, 0]], dtype=torch.float32)
    return {
        "input_ids": torch.arange(20).view(4, 5),
        "input_lengths": torch.tensor([3, 4, 5, 2]),
        "token_mask": mask,
        "sample_mask": torch.tensor([1.0, 1.0, 0.0, 1.0]),
    }


def test_rollouts() -> None:
    found = rollouts_of(data())
    assert [tuple(map(list, (r.prompt_ids, r.response_ids, r.response_mask))) for r in found] == [
        ([0], [1, 2], [1, 1]),
        ([5], [6, 7, 8], [1, 0, 1]),
        ([10, 11, 12, 13, 14], [], []),
        ([15, 16], [], []),
    ]


def test_weights_are_of_whole_updates() -> None:
    loss = LossConfig(RepresentationLossConfig(k=1), OutputLossConfig(kind="full_vocab", weight=1.0))
    whole = with_weights(data(), loss, 4)
    assert whole[HIDDEN_WEIGHT].tolist()[:2] == [[0, 0, 0.5, 0, 0], [0, 0, 0, 0.5, 0]]
    # the positions that predict the tokens, with a mean per response
    assert whole[OUTPUT_WEIGHT].tolist()[:2] == [[0.25, 0.25, 0, 0, 0], [0.25, 0, 0.25, 0, 0]]
    assert not whole[HIDDEN_WEIGHT][2:].any() and not whole[OUTPUT_WEIGHT][2:].any()
    first = {name: values[:2] for name, values in data().items()}
    alone = {name: values[:1] for name, values in data().items()}
    assert with_weights(first, loss, 1)[HIDDEN_WEIGHT][0].tolist() == [0, 0, 1, 0, 0]
    assert OUTPUT_WEIGHT not in with_weights(alone, LossConfig(), 1)


def test_refused_data() -> None:
    with pytest.raises(ValueError, match="4 responses per step with train_global_batch_size=3; expected a multiple"):
        with_weights(data(), LossConfig(), 3)
    with pytest.raises(ValueError, match="none of the 2 responses has a supervised token"):
        with_weights(data(), LossConfig(), 2)
    with pytest.raises(ValueError, match="has mtp_loss_mask already, for multi-token prediction; .*mtp_num_layers=0"):
        with_weights({**data(), HIDDEN_WEIGHT: torch.zeros(4, 5)}, LossConfig(), 4)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (None, "policy.oprd.teacher=None: expected the teacher's model; set it"),
        ({"representation": {}}, "policy.oprd.teacher=None: expected"),
        ({"teacher": "t", "representation": {"kid": "mse"}}, "kid"),
        (
            {"teacher": "t", "representation": {"weight": [{"weight": 1.0}]}},
            "policy.oprd.representation.weight is a sch",
        ),
        (
            {"teacher": "t", "representation": {"layers": "none"}, "output": {"kind": "jsd", "weight": 1.0}},
            "layers=none",
        ),
        (
            {"teacher": "t", "output": {"kind": "sampled_token", "weight": 1.0, "clip": 0.2}},
            "clip=0.2: .*expected null",
        ),
    ],
)
def test_refused_settings(section: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        Settings.read({"oprd": section})
    assert "\n" not in str(error.value)


def test_settings() -> None:
    found = Settings.read({"oprd": {"teacher": "t", "representation": {"k": 3}}})
    assert (found.teacher, found.loss.representation.k, found.loss.output.kind) == ("t", 3, "none")
