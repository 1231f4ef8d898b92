"""A whole run whose sampling goes on while updates are computed, with servers of `vllm_stand_in.py`."""

from __future__ import annotations

import json
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist
from cases import run_train

GENERATE = "/inference/v1/generate"
PATIENCE_S = 30.0


def requests(root: str | Path) -> list[dict[str, Any]]:
    """The calls that the stand-in has got, in order."""
    file = Path(root) / "requests.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def train_beside_servers(overrides: list[str], root: str, batch: int, steps: int) -> list[dict[str, float]]:
    """Trains; an update waits for a request of the next batch, which comes only if that is sampled meanwhile.

    Args:
        batch: requests of a step.

    Returns:
        Per update, when its gradient began and when its optimizer began, in seconds since the epoch.
    """
    from nemo_oprd import train
    from nemo_oprd.distillation.student import Student
    from nemo_oprd.rollout import engine_kinds

    gradients, optimizer, noted = train.accumulate_gradients, Student.optimizer_step, list[dict[str, float]]()

    def slowly(*args: Any, **kwargs: Any) -> Any:
        number = len(noted) + 1
        if len(args) < 3:  # without a timer: the check of gradients before the first step
            return gradients(*args, **kwargs)
        noted.append({"began": time.time()})
        until, wanted = time.monotonic() + PATIENCE_S, batch * number + 1
        while number < steps and sum(line["call"] == GENERATE for line in requests(root)) < wanted:
            assert time.monotonic() < until, f"nothing of batch {number + 1} is sampled during update {number}"
            time.sleep(0.01)
        return gradients(*args, **kwargs)

    def step(*args: Any) -> Any:
        noted[-1]["optimizer"] = time.time()
        return optimizer(*args)

    with ExitStack() as patched:
        patched.enter_context(mock.patch.object(train, "accumulate_gradients", slowly))
        patched.enter_context(mock.patch.object(Student, "optimizer_step", step))
        # the heads of the tiny pair are smaller than those that real servers know on CPU
        patched.enter_context(mock.patch.object(engine_kinds, "check_head_size"))
        run_train(overrides=overrides, config="quickstart")
    dist.barrier()
    return noted


def train(overrides: list[str]) -> None:
    """Trains the tiny pair, whose heads are smaller than those that real servers know on CPU."""
    from nemo_oprd.rollout import engine_kinds

    with mock.patch.object(engine_kinds, "check_head_size"):
        run_train(overrides=overrides, config="quickstart")


def train_until_graded(overrides: list[str]) -> bool:
    """Trains until the first evaluation that was sampled beside training is to be graded; whether that was reached."""
    from nemo_oprd.evaluation.validation import Validation

    class Died(Exception):  # noqa: N818 - not an error
        """The run ends here, without saving."""

    settle = Validation.settle

    def die(validation: Validation) -> None:
        if validation._begun is not None:
            raise Died
        settle(validation)

    with mock.patch.object(Validation, "settle", die):
        try:
            train(overrides)
        except Died:
            return True
    return False
