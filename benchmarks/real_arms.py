"""The runs of the study on a real language model: students, losses and settings. `real_study.py` runs them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

STEPS = 30
RATES = (3e-4, 1e-4, 1e-3)
SEEDS = (0, 1, 2)

HIDDEN = ("loss.representation.positions=all",)
OUTPUT = ("loss.representation.layers=none", "loss.output.weight=1")
COSINE = (*HIDDEN, "loss.representation.kind=cosine")

# the losses whose best rates are searched; each name is a column of the study's tables
LOSSES: dict[str, tuple[str, ...]] = {
    "mse": HIDDEN,
    "cosine": COSINE,
    "relative_mse": (*HIDDEN, "loss.representation.kind=benchmarks.real_losses:relative_mse"),
    "standardized": (*HIDDEN, "bridge=standardized"),
    "without_outliers": (*HIDDEN, "bridge=without_outliers"),
    "mse_last": (*HIDDEN, "loss.representation.layers=last"),
    "sampled_token": (*OUTPUT, "loss.output.kind=sampled_token"),
    "full_vocab": (*OUTPUT, "loss.output.kind=full_vocab"),
    "forward_kl": (*OUTPUT, "loss.output.kind=forward_kl"),
    "cosine_full_vocab": (*COSINE, "loss.representation.weight=10", *OUTPUT[1:], "loss.output.kind=full_vocab"),
}


@dataclass(frozen=True)
class Arm:
    """One run: the student that it starts from, its loss, the changes to that loss's settings, rate and seed.

    `layer_map` is one of `real_models.LAYER_MAPS`.
    """

    loss: str
    rate: float
    seed: int = 0
    student: str = "pruned"
    change: str = ""
    settings: tuple[str, ...] = ()
    layer_map: str = "kept"
    steps: int = STEPS

    @property
    def name(self) -> str:
        """The name of the run's result file."""
        parts = [self.student, self.loss, self.change, f"{self.rate:.0e}".replace("e-0", "e-"), f"seed{self.seed}"]
        return "-".join(part for part in parts if part)

    @property
    def all_settings(self) -> tuple[str, ...]:
        """The settings of the loss, and then the changes."""
        return (*LOSSES[self.loss], *self.settings)


def sweep(student: str, losses: Iterable[str]) -> Iterator[Arm]:
    """These losses at every rate, one rate after the other, so that an unfinished sweep compares all losses."""
    for rate in RATES:
        for loss in losses:
            yield Arm(loss, rate, student=student)


def seeds(best: Iterable[Arm]) -> Iterator[Arm]:
    """The same runs with other prompts and other samples."""
    for arm in best:
        for seed in SEEDS[1:]:
            yield replace(arm, seed=seed)


def changes(base: Arm) -> Iterator[Arm]:
    """Which tokens and which layers, for one loss on hidden states at its best rate."""
    third = "loss.representation.k=16"
    alternatives = {
        "first16": ("loss.representation.positions=first_k", third),
        "last16": ("loss.representation.positions=last_k", third),
        "adaptive_positions": ("loss.representation.adaptive.positions=true",),
        "last_layer": ("loss.representation.layers=last",),
        "even_layers": ("loss.representation.layers=even",),
        "predicting": ("loss.representation.position=predicting",),
    }
    for name, settings in alternatives.items():
        yield replace(base, change=name, settings=settings)
    for name in ("uniform", "next_input"):
        yield replace(base, change=f"map_{name}", layer_map=name)


def is_hidden(arm: Arm) -> bool:
    """Whether the loss compares hidden states only."""
    return "loss.output.weight=1" not in arm.all_settings
