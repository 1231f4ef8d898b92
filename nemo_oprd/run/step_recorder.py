"""Records each training step: metrics, progress line, loss spikes, values per token, and rollouts in the background."""

from __future__ import annotations

import codecs
import hashlib
import json
import logging
import math
import os
import resource
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
import torch.distributed as dist

from nemo_oprd.batch import types as weight_spans
from nemo_oprd.batch.types import Rollout
from nemo_oprd.config.schema import Config
from nemo_oprd.config.teacher_routing import Routing
from nemo_oprd.config.weight_schedule import weight_at
from nemo_oprd.data.token_bytes import byte_table
from nemo_oprd.data.tokenizer import Tokenizer
from nemo_oprd.distillation.metrics.step_metrics import StepMetrics
from nemo_oprd.distillation.metrics.token_metrics import TokenMetrics
from nemo_oprd.distillation.student import Update
from nemo_oprd.rollout.replay import write_json_lines
from nemo_oprd.rollout.teacher_inputs import alignment_metrics
from nemo_oprd.run.metrics_log import MetricsLog
from nemo_oprd.run.run_reader import remove_token_files, token_file
from nemo_oprd.runtime.background import BackgroundWriter
from nemo_oprd.runtime.files import replacing

# Loss spikes: steps whose loss is far above its usual size, or with a non-finite loss or gradient.


# A term is compared with the median size of its last WINDOW values, once there are MIN_VALUES of them.
WINDOW, MIN_VALUES = 50, 10
TERMS = ("rep/loss", "output/loss")


class LossSpikeDetector:
    """Compares each term of the loss with its own past values, because the weights of the terms may follow schedules.

    Args:
        factor: a term spikes if its absolute value exceeds `factor` times the median of its latest ones; 0 turns the
            detector off.
        history: term -> its values before a resume, the latest last.
    """

    def __init__(self, factor: float, history: Mapping[str, list[float]]) -> None:
        self._factor = factor
        self._recent = {name: list(history.get(name, ()))[-WINDOW:] for name in TERMS}

    def check(self, measured: StepMetrics) -> str | None:
        """Returns a text about a step's spike or non-finite loss or gradient, or None. Call it once per step."""
        spikes = []
        for name, loss in measured.trained_losses.items():
            recent = self._recent[name]
            # absolute values: an estimate of a divergence has either sign
            usual = statistics.median(map(abs, recent)) if len(recent) >= MIN_VALUES else None
            if usual is not None and not abs(loss) <= self._factor * usual:
                spikes.append(f"{name} is {loss:.4g}; its median size was {usual:.4g}")
            if math.isfinite(loss):
                self._recent[name] = [*recent, loss][-WINDOW:]
        if not self._factor or not (spikes or measured.nonfinite_reason):
            return None
        return "; ".join(spikes) or f"the loss is {measured.loss:.4g}"


# Values per token: the lines of `rollouts/token_metrics_*.jsonl`, for some responses of a step.
#
# One line per response (docs/report.md, "Values per token"). Token ids are the sampled ones; the text of a token is
# the text that it adds to the response.


_DIGITS = 6  # significant ones: float32 has seven


def token_records(
    done: int, rollouts: Sequence[Rollout], tokens: TokenMetrics, tokenizer: Tokenizer | None
) -> Iterator[dict[str, Any]]:
    """Yields a record per kept response of a step.

    Args:
        tokenizer: of the student; None (recorded rollouts): no texts.
    """
    for i, values in zip(tokens.responses, tokens.values, strict=True):
        rollout = rollouts[i]
        texts = {}
        if tokenizer is not None:
            prompt = tokenizer.decode(rollout.prompt_ids) if rollout.prompt is None else rollout.prompt
            response = tokenizer.decode(rollout.response_ids)
            tokens_text = token_texts(tokenizer, rollout.response_ids.tolist())
            texts = {"prompt": prompt, "response": response, "tokens": tokens_text}
        facts = {"data_source": rollout.data_source, "answer": rollout.answer, "finish_reason": rollout.finish_reason}
        yield {
            "step": done,
            "number": i,
            "prompt_id": prompt_id(rollout.prompt_ids.tolist()),
            **{name: value for name, value in facts.items() if value is not None},
            **texts,
            "token_ids": rollout.response_ids.tolist(),
            **{name: [_rounded(value) for value in column] for name, column in values.items()},
        }


def prompt_id(prompt_ids: Sequence[int]) -> str:
    """Returns 12 hexadecimal digits that are equal for equal prompts of one tokenizer, in any step and run."""
    return hashlib.sha256(",".join(map(str, prompt_ids)).encode()).hexdigest()[:12]


def token_texts(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """Returns the text that each token adds; for a special token, its name.

    A character that several tokens encode is the text of the last of them. If the bytes of the tokens can't be derived
    (`data/token_bytes.py`), each token is decoded by itself, which loses spaces and parts of characters.
    """
    try:
        table = byte_table(tokenizer)
    except ValueError:
        return [tokenizer.decode([i]) or _name(tokenizer, i) for i in ids]
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    texts = []
    for number, i in enumerate(ids):
        known = i < len(table.pieces) and table.is_text[i] and table.lengths[i] >= 0
        text = decoder.decode(table.pieces[i] if known else b"", final=not known or number + 1 == len(ids))
        texts.append(text if known else text + _name(tokenizer, i))
    return texts


def _name(tokenizer: Tokenizer, i: int) -> str:
    # a model's embedding may have more rows than its tokenizer has tokens
    return str(tokenizer.hf.convert_ids_to_tokens(i) or f"<{i}>") if i < tokenizer.vocab_size else f"<{i}>"


def _rounded(value: float | None) -> float | None:
    """Rounds a value to `_DIGITS` digits; returns None for NaN and infinities, which JSON lacks."""
    if value is None or value != value or value in (float("inf"), float("-inf")):
        return None
    return float(f"{value:.{_DIGITS}g}")


# Background writer of rollouts as JSON lines: a thread sends arrays to a process, which formats and writes them.


_WRITER = Path(__file__).with_name("rollout_lines.py")
# type codes of the standard library, by those of numpy
_CODES = {"int32": "i", "float32": "f", "int16": "h", "bool": "B"}


@dataclass(frozen=True)
class RolloutFile:
    """A file to write: `columns` are additional fields, a value per rollout."""

    path: Path
    rollouts: Sequence[Rollout]
    columns: Mapping[str, Sequence[Any]] = field(default_factory=dict)


class RolloutFiles:
    """Writes files as `rollout.replay.write_rollouts` does, byte for byte, while the run continues.

    Args:
        decode: makes the field `response`; None: the field is unchanged.
    """

    def __init__(self, decode: Callable[[np.ndarray], str] | None) -> None:
        self._decode = decode
        self._writer = BackgroundWriter("files of rollouts")

    def write(self, files: list[RolloutFile]) -> None:
        """Waits for the files of the previous call, then starts writing. Raises OSError if one of those failed."""
        self._writer.finish()
        if files:
            self._writer.start(lambda: self._write(files))

    def finish(self, *, failed: bool = False) -> None:
        """Waits until all files are complete; `failed`: another error is raised, see `BackgroundWriter.abandon`."""
        (self._writer.abandon if failed else self._writer.finish)()

    def _write(self, files: list[RolloutFile]) -> None:
        for file in files:
            self._write_one(file)

    def _write_one(self, file: RolloutFile) -> None:
        file.path.parent.mkdir(parents=True, exist_ok=True)
        # not flushed to disk, because a file is written in every step
        with replacing(file.path, durable=False) as partial, partial.open("wb") as target:
            command = [sys.executable, "-I", str(_WRITER)]
            with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=target, stderr=subprocess.PIPE) as writer:
                assert writer.stdin is not None and writer.stderr is not None
                try:
                    with suppress(BrokenPipeError), writer.stdin:
                        for i, rollout in enumerate(file.rollouts):
                            _send(writer.stdin, self._record(rollout) | {k: v[i] for k, v in file.columns.items()})
                    said = writer.stderr.read().decode(errors="replace").strip()
                except BaseException:
                    writer.kill()
                    raise
            if said.isdigit():
                raise OSError(int(said), os.strerror(int(said)), str(file.path))
            if writer.returncode:
                reason = said.splitlines()[-1] if said else "it was killed"
                raise RuntimeError(
                    f"{file.path} could not be written, its writer ended with {writer.returncode}: {reason}"
                )

    def _record(self, rollout: Rollout) -> dict[str, Any]:
        text = {} if self._decode is None else {"response": self._decode(rollout.response_ids)}
        spans = {} if rollout.weight_versions is None else weight_spans.as_json(rollout.weight_versions)
        told = vars(rollout) | spans | text
        return {name: value for name, value in told.items() if value is not None}


def _send(writer: IO[bytes], record: dict[str, Any]) -> None:
    """Sends one rollout in the form of `rollout_lines.py`."""
    arrays = {name: value for name, value in record.items() if isinstance(value, np.ndarray)}
    types = {name: [_CODES[value.dtype.name], value.shape] for name, value in arrays.items()}
    writer.write(json.dumps([record | dict.fromkeys(arrays), types]).encode() + b"\n")
    for value in arrays.values():
        writer.write(np.ascontiguousarray(value).data.cast("B") if value.size else b"")


logger = logging.getLogger(__name__)


class StepRecorder:
    """Writes the record of each step. Every rank builds one; the first rank writes.

    Args:
        tokenizer: decodes the responses of the written rollouts; None: only token ids are written.
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
        if log.writes:  # files of steps that this run has not reached (again)
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
            additional: additional metrics of the step, by name.
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
        """Waits for the background writer; `failed`: another error is being raised, see `BackgroundWriter.abandon`."""
        self._files.finish(failed=failed)

    def _metrics_per_teacher(self, rollouts: list[Rollout], metrics: StepMetrics) -> dict[str, float]:
        taught_by = self._routing.teachers_of([rollout.data_source for rollout in rollouts])
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
        """Returns the rollouts of a step with a loss spike, largest contribution first; none without a spike."""
        spike = self._spikes.check(metrics)
        if spike is None:
            return []
        losses = metrics.loss_per_response
        order = sorted(range(len(rollouts)), key=lambda i: (losses[i] == losses[i], -abs(losses[i])))  # NaN first
        file = self._directory / f"spike_{done:07d}.jsonl"
        logger.warning(f"step {done}: {spike}; its rollouts are in {file}")
        return [RolloutFile(file, [rollouts[i] for i in order], {"loss_share": [losses[i] for i in order]})]


def merge_updates(updates: list[tuple[StepMetrics | None, Update | None]]) -> tuple[StepMetrics | None, Update | None]:
    """Returns the (metrics, update) to log for the updates of one step; both None on ranks outside the student.

    Both are those of the first update with two exceptions: the probability ratio to the sampling weights comes from the
    last update, and the reason for a skip from the first skipped update.
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
    """Returns the peak, in GB, of CUDA memory since the last call; without CUDA, of the process's resident memory."""
    if torch.cuda.is_available():
        peak = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        return peak / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
