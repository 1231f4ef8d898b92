"""Records each training step: its metrics, its progress line, and rollouts in files, which are written aside."""

from __future__ import annotations

import logging
import resource
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from nemo_oprd.batch.types import Rollout
from nemo_oprd.config.schema import Config
from nemo_oprd.config.teacher_routing import Routing
from nemo_oprd.config.weight_schedule import weight_at
from nemo_oprd.data.tokenization.tokenizer import Tokenizer
from nemo_oprd.distillation.metrics.step_metrics import StepMetrics
from nemo_oprd.distillation.student import Update
from nemo_oprd.observability.loss_spikes import TERMS, LossSpikeDetector
from nemo_oprd.observability.metrics_log import MetricsLog
from nemo_oprd.observability.rollout_files import RolloutFile, RolloutFiles
from nemo_oprd.observability.token_files import remove_token_files, token_file
from nemo_oprd.observability.token_records import token_records
from nemo_oprd.rollout.replay import write_json_lines
from nemo_oprd.rollout.teacher_inputs import alignment_metrics

logger = logging.getLogger(__name__)


class StepRecorder:
    """Writes the record of each step. Every rank builds one; the first rank writes.

    Args:
        tokenizer: decodes the responses of the rollouts that are written; None: only token ids are written.
    """

    def __init__(self, config: Config, routing: Routing, log: MetricsLog, tokenizer: Tokenizer | None) -> None:
        self._config, self._log, self._tokenizer, self._routing = config, log, tokenizer, routing
        self._directory = Path(config.output) / "rollouts"
        self._files = RolloutFiles(None if tokenizer is None else tokenizer.decode)
        weights = dict(zip(TERMS, (config.loss.representation.weight, config.loss.output.weight), strict=True))
        past = {  # losses of the steps in which the loss had a weight
            name: [value for done, value in log.history(name).items() if done and weight_at(weight, done - 1) > 0]
            for name, weight in weights.items()
        }
        self._spikes = LossSpikeDetector(config.logging.spike_factor, past)
        if log.writes:  # those of steps that this run has not reached (again)
            remove_token_files(self._directory, log.first_step)

    def record(
        self,
        done: int,
        rollouts: list[Rollout],
        updates: list[tuple[StepMetrics | None, Update | None]],
        seconds: dict[str, float],
        additional: dict[str, float],
    ) -> None:
        """Records step `done`, from 1. Raises OSError if the rollouts of an earlier step could not be written.

        Args:
            updates: (metrics, update) of each update on the rollouts, in order; both None on ranks outside the student.
            seconds: phase of the step -> its duration.
            additional: further metrics of the step, by name.
        """
        metrics, update = merge_updates(updates)
        tokens, lengths = sum(r.length for r in rollouts), [len(r.response_ids) for r in rollouts]
        reasons = [rollout.finish_reason for rollout in rollouts]  # a recorded rollout may have none
        named = {
            **(metrics.named if metrics else {}),
            **(self._metrics_per_teacher(rollouts, metrics) if self._config.teachers and metrics else {}),
            **(update.metrics() if update else {}),
            **additional,
            "response_length/mean": sum(lengths) / len(lengths),
            "response_length/max": float(max(lengths)),
            **alignment_metrics(rollouts),
            **({} if None in reasons else {"rollout/finished": reasons.count("stop") / len(reasons)}),
            **({"rollout/prefix": reasons.count("prefix") / len(reasons)} if self._config.rollout.stop_after else {}),
            **{f"timing/{phase}_s": value for phase, value in seconds.items()},
            "perf/tokens_per_s": tokens / sum(seconds.values()),
            "perf/peak_memory_gb": _peak_memory_gb(),
            "perf/targets_gb": metrics.targets_bytes / 1e9 if metrics else 0.0,
        }
        self._log.write(done, named)
        self._log.progress(done, named)
        if dist.get_rank() != 0:
            return
        files = []
        if self._config.rollout.save and self._config.rollout.replay is None:
            files.append(RolloutFile(self._directory / f"step_{done:07d}.jsonl", rollouts))
        if update is not None and update.nonfinite_reason:
            logger.warning(f"step {done}: this update was skipped: {update.nonfinite_reason}")
        if metrics is not None:
            files += self._spike_file(done, rollouts, metrics)
            if metrics.tokens is not None:
                records = token_records(done, rollouts, metrics.tokens, self._tokenizer)
                write_json_lines(token_file(self._directory, done), records)
        self._files.write(files)

    def finish(self, *, failed: bool = False) -> None:
        """Waits for the files that are being written; `failed`: another error is on its way, see `Aside.abandon`."""
        self._files.finish(failed=failed)

    def _metrics_per_teacher(self, rollouts: list[Rollout], metrics: StepMetrics) -> dict[str, float]:
        taught_by = self._routing.teachers_of(rollout.data_source for rollout in rollouts)
        hidden = ("rep_loss",) if self._config.loss.representation.adaptive.positions else ()
        losses = {name: found for name, found in metrics.per_teacher.items() if name not in hidden}
        named = {}
        for number, teacher in enumerate(self._config.teachers):
            named[f"teachers/{teacher.label}/responses"] = float(taught_by.count(number))
            for name, per_teacher in losses.items():
                if number in per_teacher:
                    named[f"teachers/{teacher.label}/{name}"] = per_teacher[number]
        return named

    def _spike_file(self, done: int, rollouts: list[Rollout], metrics: StepMetrics) -> list[RolloutFile]:
        """The rollouts of a step with a loss spike, those with the largest contribution first; none without a spike."""
        spike = self._spikes.check(metrics)
        if spike is None:
            return []
        losses = metrics.loss_per_response
        order = sorted(range(len(rollouts)), key=lambda i: (losses[i] == losses[i], -abs(losses[i])))  # NaN first
        file = self._directory / f"spike_{done:07d}.jsonl"
        logger.warning(f"step {done}: {spike}; its rollouts are in {file}")
        return [RolloutFile(file, [rollouts[i] for i in order], {"loss_share": [losses[i] for i in order]})]


def merge_updates(updates: list[tuple[StepMetrics | None, Update | None]]) -> tuple[StepMetrics | None, Update | None]:
    """The (metrics, update) to log for the updates of one step; both None on ranks outside the student.

    They are those of the first update with two exceptions: the probability ratio to the weights that sampled comes from
    the last update, and the reason for a skip from the first skipped update.
    """
    metrics, update = updates[0]
    last = updates[-1][0]
    if metrics is None or update is None or last is None:
        return None, None
    ratio = {name: value for name, value in last.named.items() if name in ("actor/ratio", "actor/clipped")}
    reasons = [one.nonfinite_reason for _, one in updates if one is not None and one.nonfinite_reason is not None]
    reason = reasons[0] if reasons else None
    return replace(metrics, named={**metrics.named, **ratio}), replace(update, nonfinite_reason=reason)


def _peak_memory_gb() -> float:
    """Peak of allocated CUDA memory since the last call; without CUDA, peak resident memory of this process."""
    if torch.cuda.is_available():
        peak = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        return peak / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
