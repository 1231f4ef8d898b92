"""From the statistics of all layer pairs to a bridge: the fit, the choice of the rank, the report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

from nemo_oprd.bridge.adamw import fit_adamw
from nemo_oprd.bridge.covariance import PairStatistics
from nemo_oprd.bridge.fit import PairFit, fit_ridge
from nemo_oprd.bridge.maps import Bridge, CapturePoint, LayerBridge, ModelIdentity
from nemo_oprd.bridge.rank import choose_rank, crossing_rank, layer_report, normalized_curve, optimal_rank


def build_bridge(
    statistics: Sequence[PairStatistics],
    student: ModelIdentity,
    teacher: ModelIdentity,
    capture: CapturePoint,
    *,
    rank: int | Literal["auto"],
    fit: Literal["ridge", "adamw"] = "ridge",
    center_student: bool = False,
    seed: int = 0,
    progress: Callable[[str], None] | None = None,
) -> Bridge:
    """Fits every pair; `save_bridge` writes the result.

    Args:
        statistics: one per layer pair, reduced over all ranks.
        rank: "auto" takes `rank.choose_rank`, from the ridge fits whatever `fit` says.
        progress: called with a line of text after each pair and, with AdamW, after each epoch.

    Raises:
        ValueError: a rank that some pair can't have (all are looked at before any AdamW runs), parts without rows,
            states that don't vary.
    """

    def say(line: str) -> None:
        if progress is not None:
            progress(line)

    ridge = [fit_ridge(stats, center_student=center_student) for stats in statistics]
    for each in ridge:
        say(f"{each.pair.key}: r* {optimal_rank(each)}, rho^2 crosses 1/2 after {crossing_rank(each)}")
    chosen = choose_rank([normalized_curve(each) for each in ridge]) if rank == "auto" else rank
    for each in ridge:
        each.check_rank(chosen)
    pairs, layers = {}, {}
    for stats, whole in zip(statistics, ridge, strict=True):
        pairs[stats.pair], layers[stats.pair.key] = finish_pair(stats, whole, chosen, fit=fit, seed=seed, say=say)
    report = {"fit": fit, "center_student": center_student, "rank_asked_for": rank, "layers": layers}
    return Bridge(chosen, pairs, student, teacher, capture, report)


def finish_pair(
    statistics: PairStatistics,
    ridge: PairFit,
    rank: int,
    *,
    fit: Literal["ridge", "adamw"],
    seed: int,
    say: Callable[[str], None],
) -> tuple[LayerBridge, dict[str, Any]]:
    """The maps of one layer pair at the chosen rank, and what the manifest says of them."""
    key, final = statistics.pair.key, ridge
    if fit == "adamw":
        final = fit_adamw(statistics, ridge, rank, seed=seed, progress=partial(_say_epoch, say, key))
    report = layer_report(final, ridge, statistics, rank, seed)
    say(f"{key}: rank {rank}, held-out cosine {report['held_out_cosine']:.4f}")
    return final.bridge(rank), report


def _say_epoch(say: Callable[[str], None], key: str, epoch: int, cosine: float) -> None:
    say(f"{key}: epoch {epoch}, selection cosine {cosine:.4f}")
