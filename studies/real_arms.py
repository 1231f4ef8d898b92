"""The runs of the study on a real language model: students, losses and settings. `real_study.py` runs them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

STEPS = 30
RATES = (3e-4, 1e-3, 1e-4)
SEEDS = (0, 1, 2)

HIDDEN = ("loss.representation.positions=all",)
OUTPUT = ("loss.representation.layers=none", "loss.output.weight=1")
COSINE = (*HIDDEN, "loss.representation.kind=cosine")

# each name is a row of the study's tables
LOSSES: dict[str, tuple[str, ...]] = {
    "mse": HIDDEN,
    "cosine": COSINE,
    "relative_mse": (*HIDDEN, "loss.representation.kind=studies.real_losses:relative_mse"),
    "standardized": (*HIDDEN, "bridge=standardized"),
    "without_outliers": (*HIDDEN, "bridge=without_outliers"),
    "mse_last": (*HIDDEN, "loss.representation.layers=last"),
    "sampled_token": (*OUTPUT, "loss.output.kind=sampled_token"),
    "top_16": (*OUTPUT, "loss.output.kind=top_k", "loss.output.k=16"),
    "full_vocab": (*OUTPUT, "loss.output.kind=full_vocab"),
    "forward_kl": (*OUTPUT, "loss.output.kind=forward_kl"),
    "cosine_full_vocab": (*COSINE, "loss.representation.weight=10", *OUTPUT[1:], "loss.output.kind=full_vocab"),
}
# the losses that run at every rate; the others, at the first rate, are within the noise of mse or behind it
SEARCHED = ("mse", "cosine", "sampled_token", "full_vocab", "forward_kl", "cosine_full_vocab")


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


def sweep() -> Iterator[Arm]:
    """All losses at the first rate, then those of `SEARCHED` at the others: an unfinished sweep compares all losses."""
    for rate in RATES:
        for loss in LOSSES if rate == RATES[0] else SEARCHED:
            yield Arm(loss, rate)


def on_student(student: str, best: Iterable[Arm]) -> Iterator[Arm]:
    """The same losses on another student, at the rates that were best on the pruned one."""
    for arm in best:
        yield replace(arm, student=student)


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
        "even_layers": ("loss.representation.layers=even",),
    }
    for name, settings in alternatives.items():
        yield replace(base, change=name, settings=settings)
    for name in ("next_input", "uniform"):
        yield replace(base, change=f"map_{name}", layer_map=name)


def is_hidden(arm: Arm) -> bool:
    """Whether the loss compares hidden states only."""
    return "loss.output.weight=1" not in arm.all_settings
