"""Whole runs whose sampling goes on while updates are computed, or over updates, and what finds faults in them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from cases import run_train

GENERATE = "/inference/v1/generate"
PATIENCE_S = 30.0
# an optimizer step of the tiny pair may take less than 1 ms, and the timeline leaves such intervals out
WRITTEN_S = 0.002
# of cumulative probabilities in float32
ROUNDING = 1e-5


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
    from nemo_oprd.run import engine_kinds

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
        time.sleep(WRITTEN_S)
        return optimizer(*args)

    with ExitStack() as patched:
        patched.enter_context(mock.patch.object(train, "accumulate_gradients", slowly))
        patched.enter_context(mock.patch.object(Student, "optimizer_step", step))
        # the heads of the tiny pair are smaller than those that real servers know on CPU
        patched.enter_context(mock.patch.object(engine_kinds, "check_head_size"))
        run_train(overrides=overrides, config="quickstart")
    dist.barrier()
    return noted


def picked_otherwise(
    rollouts: list[dict[str, Any]],
    step: int,
    parts: Callable[[int], list[tuple[int, int]]],
    read: Callable[[int], Any],
    tokens: int,
) -> int:
    """How many tokens are not those that their weights pick, by Hugging Face models and the definition of sampling.

    Args:
        rollouts: of a step, as the run has saved them; the temperature is 1, and the seed 0.
        parts: of a response with so many tokens (first token, version) of what was sampled at a time.
        read: a model by its version.
        tokens: `rollout.segment_tokens`.
    """
    wrong = 0
    for i, rollout in enumerate(rollouts):
        prompt, ids = rollout["prompt_ids"], rollout["response_ids"]
        for number, (start, version) in enumerate(found := parts(len(ids))):
            end = [*(first for first, _ in found[1:]), len(ids)][number]
            segment = [start // tokens] if start else []
            with torch.no_grad():
                logits = read(version)(torch.tensor([[*prompt, *ids[:end]]])).logits[0, len(prompt) + start - 1 : -1]
            cumulative = torch.softmax(logits.double(), -1).cumsum(-1)
            drawn = np.random.default_rng([0, 1, step, i, *segment]).random(end - start)
            for row, uniform, token in zip(cumulative, drawn, ids[start:end], strict=True):
                low = float(row[token - 1]) if token else 0.0
                wrong += not low - ROUNDING <= uniform * float(row[-1]) <= float(row[token]) + ROUNDING
    return wrong


def train_with_a_fault(overrides: list[str], fault: str) -> tuple[str | None, list[float]]:
    """Trains with an in-process engine that reports log-probabilities, as servers do, and has a fault.

    "stale": it names the weights of every update, and keeps the first ones; "stale replica": the last rank does;
    "stale prefix": it computes the tokens that it is given with the weights before the last update; "none".

    Returns:
        What ended the run, and the largest gaps that its check has seen.
    """
    from nemo_oprd.distillation import sampling_check
    from nemo_oprd.rollout import decoding, in_process_engine

    replica, seen = dist.get_rank() == dist.get_world_size() - 1, list[float]()
    load, compare, earlier = in_process_engine.load_stream, sampling_check.compare, list[dict[str, torch.Tensor]]()

    class Batch(decoding._Batch):
        """Notes the log-probabilities, by sequence."""

        def prefill(self) -> torch.Tensor:
            self.noted = torch.zeros(self.sampled.shape)
            if fault != "stale prefix" or len(earlier) < 2:
                return super().prefill()
            with using(self.model, earlier[-2]):
                return super().prefill()

        def sample(self, last: torch.Tensor, t: int, temperature: float, top_p: float) -> torch.Tensor:
            token = super().sample(last, t, temperature, top_p)
            logits = self.columns.of(self.model.logits(last)[0]).float() / temperature
            self.noted[self.alive, t] = logits.log_softmax(-1).gather(-1, token[:, None])[:, 0]
            return token

        def responses(self) -> list[Any]:
            found = super().responses()
            return [
                replace(one, logprobs=row[: len(one.ids)].numpy()) for one, row in zip(found, self.noted, strict=True)
            ]

    def load_or_not(models: list[Any], spec: Any, role: Any, stream: Any) -> None:
        if earlier and (fault == "stale" or (fault == "stale replica" and replica)):
            for _ in stream:  # which is made by all ranks together
                pass
        else:
            load(models, spec, role, stream)
        earlier.append({name: value.clone() for name, value in models[0].state_dict().items() if value is not None})

    def compared(*args: Any) -> dict[str, float]:
        found = compare(*args)
        seen.append(found["rollout/logprob_gap_max"])
        return found

    with ExitStack() as patched:
        patched.enter_context(mock.patch.object(decoding, "_Batch", Batch))
        patched.enter_context(mock.patch.object(in_process_engine, "load_stream", load_or_not))
        patched.enter_context(mock.patch.object(sampling_check, "compare", compared))
        try:
            run_train(overrides=overrides, config="quickstart")
        except ValueError as error:
            return str(error), seen
    return None, seen


@contextmanager
def using(model: torch.nn.Module, weights: dict[str, torch.Tensor]) -> Iterator[None]:
    """Lets the model compute with other weights in this context."""
    own = {name: value.clone() for name, value in model.state_dict().items() if value is not None}
    model.load_state_dict(weights, strict=False)
    try:
        yield
    finally:
        model.load_state_dict(own, strict=False)


def train(overrides: list[str]) -> None:
    """Trains the tiny pair, whose heads are smaller than those that real servers know on CPU."""
    from nemo_oprd.distillation.student import Student
    from nemo_oprd.run import engine_kinds

    optimizer = Student.optimizer_step

    def step(*args: Any) -> Any:
        time.sleep(WRITTEN_S)
        return optimizer(*args)

    with mock.patch.object(engine_kinds, "check_head_size"), mock.patch.object(Student, "optimizer_step", step):
        run_train(overrides=overrides, config="quickstart")


def train_until_graded(overrides: list[str]) -> bool:
    """Trains until the first evaluation that was sampled beside training is to be graded; whether that was reached."""
    from nemo_oprd.run.validation import Validation

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
