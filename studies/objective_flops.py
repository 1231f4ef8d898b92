"""Counts the floating-point operations of one update per objective at the shape of R1-Distill-Qwen-1.5B.

    python -m studies.objective_flops

A step of the real code runs under torch's FlopCounterMode at the model's real width with 1 or 2 layers and 1,024 or
2,048 ids. The operations of matrix products are linear in both numbers, so the exact counts for 28 layers and 151,936
ids follow from three of these shapes; the fourth checks the linearity. Softmax and other elementwise operations are not
counted, nor is sampling, which is the same for all objectives. Responses are short (120 tokens after a prompt of 8);
longer attention would add the same amount to every row of the table.
"""

from __future__ import annotations

import itertools
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from benchmarks.gpu_parts.real_shape import R1_DISTILL_1P5B
from nemo_oprd.config.loading import load_config
from nemo_oprd.rollout.replay import read_rollouts
from nemo_oprd.run.models import distiller_for
from studies.toy_arms import objectives
from tests.support.operations import count_operations
from tests.support.random_pair import Shape, save_random_model, save_random_rollouts

PROMPT, RESPONSES = 8, (120, 120)
LAYERS, IDS = (1, 2), (1024, 2048)


@dataclass(frozen=True)
class Count:
    """Floating-point operations of one step: of the teacher, and of the student's forward and backward passes."""

    teacher: float
    update: float

    @staticmethod
    def extrapolate(counts: dict[tuple[int, int], Count], layers: int, ids: int) -> Count:
        """The count at another shape, from the plane through three of the counts, which are keyed by (layers, ids).

        Raises:
            ValueError: the fourth count is not on the plane, so the counts are not linear.
        """
        return Count(
            *(_plane({k: getattr(c, name) for k, c in counts.items()}, layers, ids) for name in ("teacher", "update"))
        )


def _plane(counts: dict[tuple[int, int], float], layers: int, ids: int) -> float:
    (low_l, high_l), (low_v, high_v) = LAYERS, IDS
    origin = counts[low_l, low_v]
    per_layer = (counts[high_l, low_v] - origin) / (high_l - low_l)
    per_id = (counts[low_l, high_v] - origin) / (high_v - low_v)

    def value(layers: int, ids: int) -> float:
        return origin + per_layer * (layers - low_l) + per_id * (ids - low_v)

    if value(high_l, high_v) != counts[high_l, high_v]:
        raise ValueError(f"counts {counts} are not linear in layers and ids")
    return value(layers, ids)


def count(shape: Shape, settings: tuple[str, ...]) -> Count:
    """Counts one step on a random pair of this shape."""
    with tempfile.TemporaryDirectory() as place:
        scratch = Path(place)
        for seed, role in enumerate(("student", "teacher")):
            save_random_model(scratch / role, shape, seed=seed, std=0.02, dtype=torch.bfloat16)
        save_random_rollouts(scratch / "rollouts.jsonl", shape, prompt=PROMPT, responses=list(RESPONSES))
        alone = ["loss.representation.layers=none"] if "loss.representation.weight=0" in settings else []
        config = load_config(
            "verify",
            [f"student.hf_path={scratch / 'student'}", f"teacher.hf_path={scratch / 'teacher'}", *settings, *alone,
             f"rollout.replay={scratch / 'rollouts.jsonl'}", "train.tokens_per_microbatch=512", "output=unused"],
        )  # fmt: skip
        distiller = distiller_for(config)
        rollouts = read_rollouts(str(config.rollout.replay), shape.vocab_size)
        with count_operations() as teacher:
            batch = distiller.batch(rollouts, distiller.objective_of(None))
            targets = distiller.targets(batch, batch.plan)
        accumulation = distiller.start(batch)
        with count_operations() as update:
            accumulation.forward_backward(batch.plan, targets)
        return Count(teacher.get_total_flops(), update.get_total_flops())


def main() -> None:
    """Prints the table."""
    tokens = sum(PROMPT + length for length in RESPONSES)
    real = R1_DISTILL_1P5B
    print(f"GFLOP per token, {real.num_hidden_layers} layers, {real.vocab_size:,} ids\n")
    print("| objective | teacher | student | together | relative to OPRD |\n" + "|---" * 5 + "|")
    found = {}
    for arm in objectives():
        if arm.method not in found:
            counts = {
                (layers, ids): count(replace(real, num_hidden_layers=layers, vocab_size=ids), arm.settings)
                for layers, ids in itertools.product(LAYERS, IDS)
            }
            found[arm.method] = Count.extrapolate(counts, real.num_hidden_layers, real.vocab_size)
    base = found["OPRD"].teacher + found["OPRD"].update
    for method, each in found.items():
        together = each.teacher + each.update
        cells = [f"{value / tokens / 1e9:.2f}" for value in (each.teacher, each.update, together)]
        print(f"| {method} | {' | '.join(cells)} | {together / base:.2f} |")


if __name__ == "__main__":
    main()
