"""`nemo-oprd` with a teacher that misreads the student's responses, to measure the value of the alignment.

    python -m studies.wrong_reading shuffled train --config-name ...
    python -m studies.wrong_reading raw train --config-name ...

`shuffled`: the sequences are correct, but each token has the partner of another token. `raw`: the teacher reads the
student's ids, which stand for other text in the teacher's vocabulary; the plain command rejects that.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from unittest import mock

import numpy as np

from nemo_oprd.batch.types import Rollout
from nemo_oprd.rollout.engine import Request
from nemo_oprd.rollout.teacher_inputs import TextInputs

_correct_add = TextInputs.add_to


def shuffled(inputs: TextInputs, rollouts: list[Rollout], requests: list[Request]) -> list[Rollout]:
    """Replaces `TextInputs.add_to`; a response always gets the same permutation."""
    aligned = _correct_add(inputs, rollouts, requests)
    mixed = []
    for rollout in aligned:
        index = rollout.teacher_index
        assert index is not None
        draw = np.random.default_rng(rollout.response_ids)
        mixed.append(replace(rollout, teacher_index=draw.permutation(index)))
    return mixed


def raw(reader: TextInputs, rollouts: list[Rollout], requests: list[Request]) -> list[Rollout]:
    """Replaces `TextInputs.add_to`; the teacher reads the student's ids."""
    return [
        replace(
            rollout,
            teacher_prompt_ids=rollout.prompt_ids,
            teacher_response_ids=rollout.response_ids,
            teacher_index=np.arange(len(rollout.response_ids)),
        )
        for rollout in rollouts
    ]


def main() -> None:
    """Command line."""
    from nemo_oprd.cli import main as command

    wrong = {"shuffled": shuffled, "raw": raw}[sys.argv.pop(1)]
    with mock.patch.object(TextInputs, "add_to", wrong):
        command()


if __name__ == "__main__":
    main()
