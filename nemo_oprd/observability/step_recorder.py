"""The record of a training step: its metrics, its progress line, and the rollouts that are kept."""

from __future__ import annotations

import resource
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from nemo_oprd.batch.types import Rollout
from nemo_oprd.config.schema import Config
from nemo_oprd.config.weight_schedule import weight_at
from nemo_oprd.distillation.step_metrics import StepMetrics
from nemo_oprd.distillation.student import Update
from nemo_oprd.distillation.teacher_routing import Routing
from nemo_oprd.observability.loss_spikes import TERMS, LossSpikeDetector
from nemo_oprd.observability.metrics_log import MetricsLog
from nemo_oprd.rollout.replay import write_rollouts
from nemo_oprd.rollout.teacher_inputs import alignment_metrics
from nemo_oprd.tokenization.tokenizer import Tokenizer


class StepRecorder:
    """Writes the record of each step. Every rank has one; the first rank writes.

    Args:
        tokenizer: decodes the responses of the rollouts that are kept; None: they are kept as ids.
    """

    def __init__(self, config: Config, log: MetricsLog, tokenizer: Tokenizer | None) -> None:
        self._config, self._log, self._tokenizer = config, log, tokenizer
        self._routing = Routing(tuple(config.teacher_sources))
        self._directory = Path(config.output) / "rollouts"
        weights = dict(zip(TERMS, (config.loss.representation.weight, config.loss.output.weight), strict=True))
        past = {  # of the updates in which the term had a weight
            name: [value for done, value in log.history(name).items() if done and weight_at(weight, done - 1) > 0]
            for name, weight in weights.items()
        }
        self._spikes = LossSpikeDetector(config.logging.spike_factor, past)

    def record(
        self,
        done: int,
        rollouts: list[Rollout],
        updates: list[tuple[StepMetrics | None, Update | None]],
        seconds: dict[str, float],
        more: dict[str, float],
    ) -> None:
        """Records step `done`.

        Args:
            updates: made on the rollouts, in order; None and None on ranks outside the student.
            seconds: by phase of the step.
            more: metrics that were measured besides.
        """
        metrics, update = merge_updates(updates)
        tokens, lengths = sum(r.length for r in rollouts), [len(r.response_ids) for r in rollouts]
        named = {
            **(metrics.metrics() if metrics else {}),
            **(self._metrics_per_teacher(rollouts, metrics) if self._config.teachers and metrics else {}),
            **(update.metrics() if update else {}),
            **more,
            "response_length/mean": sum(lengths) / len(lengths),
            "response_length/max": float(max(lengths)),
            **alignment_metrics(rollouts),
            **_share_finished(rollouts),
            **{f"timing/{phase}_s": value for phase, value in seconds.items()},
            "perf/tokens_per_s": tokens / sum(seconds.values()),
            "perf/peak_memory_gb": _peak_memory_gb(),
            "perf/targets_gb": metrics.targets_bytes / 1e9 if metrics else 0.0,
        }
        self._log.write(done, named)
        self._log.progress(done, named)
        if dist.get_rank() != 0:
            return
        if self._config.rollout.save and self._config.rollout.replay is None:
            write_rollouts(self._directory / f"step_{done:07d}.jsonl", self._with_text(rollouts))
        if update is not None and update.nonfinite_reason:
            self._log.say(f"step {done}: this update was skipped: {update.nonfinite_reason}")
        if metrics is not None:
            self._keep_spikes(done, rollouts, metrics)

    def _metrics_per_teacher(self, rollouts: list[Rollout], metrics: StepMetrics) -> dict[str, float]:
        taught_by = self._routing.teachers_of(rollout.data_source for rollout in rollouts)
        losses = {"output_loss": metrics.output_loss_per_teacher}
        if not self._config.loss.representation.adaptive.positions:
            losses["rep_loss"] = metrics.rep_loss_per_teacher
        named = {}
        for number, teacher in enumerate(self._config.teachers):
            named[f"teachers/{teacher.label}/responses"] = float(taught_by.count(number))
            for name, per_teacher in losses.items():
                if number in per_teacher:
                    named[f"teachers/{teacher.label}/{name}"] = per_teacher[number]
        return named

    def _keep_spikes(self, done: int, rollouts: list[Rollout], metrics: StepMetrics) -> None:
        """Keeps the rollouts of a step whose loss stands out, those that contribute most first."""
        spike = self._spikes.check(metrics)
        if spike is None:
            return
        losses = metrics.loss_per_response
        order = sorted(range(len(rollouts)), key=lambda i: (losses[i] == losses[i], -abs(losses[i])))  # NaN first
        file = self._directory / f"spike_{done:07d}.jsonl"
        write_rollouts(file, self._with_text([rollouts[i] for i in order]), loss_share=[losses[i] for i in order])
        self._log.say(f"step {done}: {spike}; its rollouts are in {file}")

    def _with_text(self, rollouts: list[Rollout]) -> list[Rollout]:
        if self._tokenizer is None:
            return rollouts
        decode = self._tokenizer.decode
        return [Rollout(**{**vars(rollout), "response": decode(rollout.response_ids)}) for rollout in rollouts]


def merge_updates(
    updates: list[tuple[StepMetrics | None, Update | None]],
) -> tuple[StepMetrics | None, Update | None]:
    """What is logged of the updates of one step.

    It is the first update's, with the ratio to the student that sampled of the last one, and the first reason for which
    one was skipped. None and None on ranks outside the student.
    """
    metrics, update = updates[0]
    last = updates[-1][0]
    if metrics is None or update is None or last is None:
        return None, None
    ratio = {name: value for name, value in last.output_means.items() if name in ("ratio", "clipped")}
    skipped = [each for _, each in updates if each is not None and each.nonfinite_reason is not None]
    reason = skipped[0].nonfinite_reason if skipped else None
    return (
        replace(metrics, output_means={**metrics.output_means, **ratio}),
        replace(update, nonfinite_reason=reason),
    )


def _share_finished(rollouts: list[Rollout]) -> dict[str, float]:
    """Nothing for recorded rollouts that don't say how they ended."""
    reasons = [rollout.finish_reason for rollout in rollouts]
    return {} if None in reasons else {"rollout/finished": reasons.count("stop") / len(reasons)}


def _peak_memory_gb() -> float:
    """Peak of CUDA allocations since the last call; without CUDA, of this process's resident memory since its start."""
    if torch.cuda.is_available():
        peak = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        return peak / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
