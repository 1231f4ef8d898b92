"""Computes the order in which training visits prompts, a pure function of (seed, position), even for weighted files.

There is no iterator whose state a checkpoint would have to save: a run that resumes at a position sees the prompts that
an uninterrupted run would have seen, for any sizes of its requests.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate

import numpy as np


def prompt_order(num_prompts: int, seed: int, start: int, count: int, stream: int = 0) -> list[int]:
    """Returns the prompts at positions start, ..., start+count-1 of an endless order; each epoch is a new permutation.

    Example: `prompt_order(3, 0, 0, 4) == prompt_order(3, 0, 0, 2) + prompt_order(3, 0, 2, 2)`.

    Args:
        stream: orders of other streams are independent; 0 or more.

    Raises:
        ValueError: `num_prompts` is not positive, or `seed`, `start` or `count` is negative.
    """
    if num_prompts < 1:
        raise ValueError(f"num_prompts is {num_prompts}, expected at least 1; check the training data file")
    for name, value in (("seed", seed), ("start", start), ("count", count)):
        if value < 0:
            raise ValueError(f"{name} is {value}, expected 0 or more; pass a non-negative integer")
    order: list[int] = []
    while len(order) < count:
        epoch, offset = divmod(start + len(order), num_prompts)
        order += _permutation(num_prompts, seed, epoch, stream)[offset : offset + count - len(order)].tolist()
    return order


def _permutation(size: int, seed: int, epoch: int, stream: int) -> np.ndarray:
    """Returns int64 [size], the order that sorts raw draws of the bit generator. Every version of numpy makes equal
    raw draws, unlike `Generator`'s methods, and a run may resume in another environment. A stable sort settles ties."""
    key = [seed, epoch, stream] if stream else [seed, epoch]
    draws = np.random.Generator(np.random.PCG64(key)).bit_generator.random_raw(size)
    return np.argsort(draws, kind="stable")


@dataclass(frozen=True)
class PromptOrder:
    """The visiting order of prompts that lie file by file in one list.

    Without weights, all files are one pool: each prompt is visited once per epoch. With weights, a file has its share
    of every stretch of positions, and visits its own prompts in epochs of its own, so a small file may be in its third
    epoch when a large one is in its first.

    The k-th visit of a file with weight w (k from 0) takes place at time (2k + 1) / (2w); positions are visits in order
    of their time, and at one time in order of the files. After p positions, a file with share s of all weights has had
    p * s visits to within the number of files.

    Attributes:
        sizes: prompts per file, each at least 1.
        weights: per file, above 0; None: no weights. One file has the same order with any weight as without.
    """

    sizes: tuple[int, ...]
    weights: tuple[Fraction, ...] | None = None

    def indices(self, seed: int, start: int, count: int) -> list[int]:
        """Returns the indices of the prompts at positions start, ..., start+count-1.

        Raises:
            ValueError: as `prompt_order`.
        """
        if self.weights is None:
            return prompt_order(sum(self.sizes), seed, start, count)
        before, files = self._files(start, count)
        offsets = [0, *accumulate(self.sizes)]
        own = [
            iter(prompt_order(size, seed, before[number], files.count(number), stream=number))
            for number, size in enumerate(self.sizes)
        ]
        return [offsets[number] + next(own[number]) for number in files]

    def _files(self, start: int, count: int) -> tuple[list[int], list[int]]:
        """Returns (visits of each file before `start`, the file at each of the positions)."""
        assert self.weights is not None
        total = sum(self.weights)
        # By this time at most `start` visits have taken place, with any rounding, and not many fewer.
        time = max(Fraction(0), Fraction(start - len(self.sizes)) / total)
        visits = [max(0, math.ceil(weight * time - Fraction(1, 2))) for weight in self.weights]
        skipped = start - sum(visits)
        assert 0 <= skipped <= 2 * len(self.sizes)
        next_visits = [
            ((2 * done + 1) / (2 * weight), number)
            for number, (done, weight) in enumerate(zip(visits, self.weights, strict=True))
        ]
        heapq.heapify(next_visits)
        files: list[int] = []
        for at in range(skipped + count):
            moment, number = next_visits[0]
            heapq.heapreplace(next_visits, (moment + 1 / self.weights[number], number))
            if at < skipped:
                visits[number] += 1
            else:
                files.append(number)
        return visits, files


def exact_weights(weights: Sequence[float]) -> tuple[Fraction, ...]:
    """Returns the weights as the fractions of their decimal notation: 0.1 is 1/10."""
    return tuple(Fraction(str(weight)) for weight in weights)
