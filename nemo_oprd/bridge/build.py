"""From the statistics of all layer pairs to a bridge: the fits, the choice of the rank, and the report."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

from nemo_oprd.bridge.adamw import fit_adamw
from nemo_oprd.bridge.covariance import LayerPair, PairStatistics
from nemo_oprd.bridge.fit import fit_ridge
from nemo_oprd.bridge.maps import Bridge, CapturePoint, LayerBridge, ModelIdentity
from nemo_oprd.bridge.rank import choose_rank, layer_report, normalized_curve
from nemo_oprd.runtime.messages import ANY_RANK, ON_STDOUT

logger = logging.getLogger(__name__)

# a pair is fitted by one rank, whichever that is
_OF_EVERY_PAIR = {**ON_STDOUT, **ANY_RANK}


def build_bridge(
    statistics: Sequence[PairStatistics],
    student: ModelIdentity,
    teacher: ModelIdentity,
    capture: CapturePoint,
    *,
    rank: int | Literal["auto"],
    fit: Literal["ridge", "adamw"],
    center_student: bool,
    baselines: bool,
    seed: int,
    gather: Callable[[Any], list[Any]],
) -> Bridge:
    """Fits every layer pair; the result is the same on every process.

    Args:
        statistics: the layer pairs that this process fits, one `PairStatistics` each, reduced over all ranks. Every
            pair belongs to one process; a process may have none.
        rank: "auto" takes `rank.choose_rank` of the ridge fits, whatever `fit` is.
        baselines: whether the report has the baselines of `rank.compare`.
        gather: the values of all processes for the value of this one, such as `all_gather_object`; with one process,
            `lambda value: [value]`. Every process calls it equally often.

    Raises:
        ValueError: a pair cannot have the rank (this is checked before any AdamW runs), a part has no rows, or states
            do not vary.
    """
    ridge_fits = [fit_ridge(stats, center_student=center_student) for stats in statistics]
    curves = _union(gather({each.pair: normalized_curve(each).cpu() for each in ridge_fits}))
    chosen = choose_rank([curves[pair] for pair in sorted(curves)]) if rank == "auto" else rank
    for each in ridge_fits:
        each.check_rank(chosen)
    pairs: dict[LayerPair, LayerBridge] = {}
    reports: dict[LayerPair, dict[str, Any]] = {}
    for stats, ridge in zip(statistics, ridge_fits, strict=True):
        final = ridge
        if fit == "adamw":
            final = fit_adamw(stats, ridge, chosen, seed=seed, progress=partial(_log_epoch, stats.pair.key))
        report = layer_report(final, ridge, stats, chosen, baselines=baselines, seed=seed)
        pairs[stats.pair], reports[stats.pair] = final.bridge(chosen), report
        cosine = report["held_out_cosine"]
        logger.info(f"{stats.pair.key}: rank {chosen}, held-out cosine {cosine:.4f}", extra=_OF_EVERY_PAIR)
    pairs, reports = _union(gather(pairs)), _union(gather(reports))
    layers = {pair.key: reports[pair] for pair in sorted(reports)}
    report = {"fit": fit, "center_student": center_student, "rank_asked_for": rank, "layers": layers}
    return Bridge(chosen, dict(sorted(pairs.items())), student, teacher, capture, report)


def _log_epoch(pair: str, epoch: int, cosine: float) -> None:
    logger.info(f"{pair}: epoch {epoch}, selection cosine {cosine:.4f}", extra=_OF_EVERY_PAIR)


def _union(parts: Sequence[dict[LayerPair, Any]]) -> dict[LayerPair, Any]:
    return {pair: value for part in parts for pair, value in part.items()}
