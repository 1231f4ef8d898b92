"""The arms of the studies on toy models: the compared methods and their settings. `toy_study.py` runs them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

STEPS = 100
RANKS = (2, 8, 32)

OPD = ("loss.representation.weight=0", "loss.output.weight=1")
SAMPLED = (*OPD, "loss.output.kind=sampled_token")
BRIDGE = (
    "loss.representation.kind=normalized_mse",
    "loss.representation.dim_reduction=sum",
    "loss.representation.weight=10",
)


@dataclass(frozen=True)
class Arm:
    """One method: its settings, the name of its bridge, and (`after`) the arm from whose student it continues."""

    name: str
    settings: tuple[str, ...]
    bridge: str | None = None
    after: str | None = None
    shown: bool = True
    reading: str = "right"  # or a wrong one of `studies/wrong_reading.py`
    method: str | None = None  # of several arms with the same method, only the best runs with the other seeds


def objectives() -> list[Arm]:
    """Same shape, same budget: every method at several learning rates, of which the best is an inner one."""
    methods = {
        "sampled token": (SAMPLED, (1e-4, 3e-4, 1e-3)),
        "top-16": ((*OPD, "loss.output.kind=top_k", "loss.output.k=16"), (1e-4, 3e-4, 1e-3, 3e-3)),
        "full vocabulary": ((*OPD, "loss.output.kind=full_vocab"), (1e-4, 3e-4, 1e-3)),
        "OPRD": ((), (2e-4, 5e-4, 1e-3)),
        "OPD + 1 OPRD": (("loss.output.weight=1", "loss.output.kind=sampled_token"), (1e-4, 3e-4, 1e-3)),
        "OPD + 10 OPRD": (
            ("loss.output.weight=1", "loss.output.kind=sampled_token", "loss.representation.weight=10"),
            (1e-4, 3e-4, 1e-3, 3e-3),
        ),
    }

    return [
        Arm(f"{name} lr={rate:g}", (*settings, f"train.lr={rate}"), method=name)
        for name, (settings, rates) in methods.items()
        for rate in rates
    ]


def ablation() -> list[Arm]:
    """Different layers, and different tokens of the response (of 29 or 30)."""
    tokens = {
        "last 8": ("last_k", 8, (5e-5, 1e-4, 2e-4, 5e-4)),
        "first 8": ("first_k", 8, (2e-4, 5e-4, 1e-3)),
        "all": ("all", 1, (2e-4, 5e-4, 1e-3)),
    }
    return [
        Arm(
            f"layers {layers}, tokens {name} lr={rate:g}",
            (f"loss.representation.layers={layers}", f"loss.representation.positions={positions}",
             f"loss.representation.k={k}", f"train.lr={rate}"),
            method=f"layers {layers}, tokens {name}",
        )
        for layers in ("all", "last", "even")
        for name, (positions, k, rates) in tokens.items()
        for rate in rates
    ]  # fmt: skip


def bridge() -> list[Arm]:
    """A wider and deeper teacher, through projections of several ranks, correct and wrong ones."""
    through = (*BRIDGE, "train.lr=5e-4")
    # without a bridge, hidden states of different widths cannot be compared
    opd = ("loss.representation.layers=none", "loss.output.weight=1", "loss.output.kind=sampled_token", "train.lr=1e-4")
    half = f"train.steps={STEPS // 2}"
    arms = [Arm(f"bridge r={rank}", through, f"rank {rank}") for rank in RANKS]
    arms += [
        Arm("bridge r=8, projectors trained too", (*through, "bridge.train=true"), "rank 8"),
        Arm("r=8, projectors of other layers", through, "other layers"),
        Arm("r=8, random projectors", through, "random"),
        Arm("OPD alone (sampled token)", opd),
        Arm("first half: bridge r=8", (*through, half), "rank 8", shown=False),
        Arm("bridge r=8, then OPD", (*opd, half), after="first half: bridge r=8"),
    ]
    return arms


def tokenizers() -> list[Arm]:
    """Character student, sentencepiece BPE teacher: correct and wrong alignments, each with its own bridge."""
    settings = ("teacher.reads=text", *BRIDGE, "train.lr=2e-4", "train.steps=60", "evaluation.every=30")
    exact = (*settings, "alignment.exact=true")
    return [
        Arm("tokens that end on the same byte (exact)", exact, "exact"),
        Arm("all tokens", settings, "all"),
        Arm("shuffled alignment", exact, "shuffled", reading="shuffled"),
        Arm("raw ids (forced)", settings, "raw", reading="raw"),
    ]


def merge() -> list[Arm]:
    """Two specialists teach one student both tasks; for comparison, one of them teaches alone."""
    opd = ("loss.representation.layers=none", "loss.output.weight=1", "train.lr=3e-4")
    return [
        Arm("OPRD", ("train.lr=5e-4",)),
        Arm("OPD, sampled token", (*opd, "loss.output.kind=sampled_token")),
        Arm("OPD, full vocabulary", (*opd, "loss.output.kind=full_vocab")),
        Arm("OPRD, the teacher of addition for all", ("train.lr=5e-4", *ONLY_ADDITION)),
    ]


def self_distillation() -> list[Arm]:
    """The student is its own teacher and is shown the solution: different weights and losses."""
    opd = ("loss.representation.layers=none", "loss.output.weight=1", "loss.output.kind=full_vocab", "train.lr=3e-4")
    hidden = ("loss.representation.positions=all", "train.lr=3e-4")
    composed = (*hidden, "loss.output.weight=1", "loss.output.kind=sampled_token")
    ema = ("teacher.weights=ema", "teacher.ema_decay=0.98")
    return [
        Arm("OPRD, initial weights", (*hidden, "teacher.weights=initial")),
        Arm("OPRD, moving average", (*hidden, *ema)),
        Arm("OPRD, current weights", (*hidden, "teacher.weights=student")),
        Arm("OPD, initial weights", (*opd, "teacher.weights=initial")),
        Arm("OPD, moving average", (*opd, *ema)),
        Arm("OPD, current weights", (*opd, "teacher.weights=student")),
        Arm("OPD + OPRD, initial weights", (*composed, "teacher.weights=initial")),
        *(
            Arm(f"{name}, current weights, lr={rate:g}", (*settings, "teacher.weights=student", f"train.lr={rate}"))
            for name, settings in (("OPRD", hidden), ("OPD", opd))
            for rate in (1e-4, 3e-5)
        ),
        Arm("OPD, initial weights, shown nothing new", (*opd, "teacher.weights=initial", "teacher.prompt='{prompt}'")),
    ]


STUDIES: dict[str, Callable[[], list[Arm]]] = {
    "objectives": objectives, "ablation": ablation, "bridge": bridge, "tokenizers": tokenizers, "merge": merge,
    "self": self_distillation,
}  # fmt: skip
TEACHERS = {"bridge": "wide/{seed}/teacher", "tokenizers": "bpe/{seed}"}
ONLY_ADDITION = ("teachers=[]", "teacher.hf_path=ROOT/merge_models/SEED/teacher_addition")
