"""Evaluation by sampling: k responses per problem from a rollout engine, graded against the answers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from nemo_oprd.config.schema import Config
from nemo_oprd.data.prompts import Prompt, load_prompts
from nemo_oprd.evaluation.grade import is_correct
from nemo_oprd.evaluation.metrics import Sample, summarize
from nemo_oprd.rollout.engine import EVALUATION_STREAM, Request, RolloutEngine, SamplingParams
from nemo_oprd.tokenization.tokenizer import Tokenizer


class Evaluator:
    """Evaluates models on the validation sets of a configuration.

    All evaluations use the same random numbers, so their results differ by the weights alone.
    """

    def __init__(self, config: Config, tokenizer: Tokenizer, max_positions: int) -> None:
        """Reads and encodes the validation sets.

        Raises:
            ValueError: a set cannot be read, or a problem has no answer or leaves no room for a response.
        """
        self.config, self.tokenizer = config, tokenizer
        self.sets: dict[str, list[Prompt]] = {}
        self.ids: dict[str, list[list[int]]] = {}
        for name, path in config.data.validation.items():
            problems = load_prompts(Path(path))[: config.evaluation.limit]
            unanswered = [p.index for p in problems if p.answer is None]
            if unanswered:
                raise ValueError(
                    f"data.validation.{name}={path}: problem {unanswered[0]} has no answer to grade against; add "
                    "an answer to each, or remove those without"
                )
            self.sets[name] = problems
            self.ids[name] = [tokenizer.encode_prompt(list(p.messages)) for p in problems]
            long = [p.index for p, ids in zip(problems, self.ids[name], strict=True) if len(ids) >= max_positions]
            if long:
                raise ValueError(
                    f"data.validation.{name}={path}: problem {long[0]} leaves no room for a response in the model's "
                    f"{max_positions} positions; expected shorter ones: remove it"
                )

    def evaluate(
        self, engine: RolloutEngine, prefix: str = "", should_cancel: Callable[[], bool] | None = None
    ) -> dict[str, float]:
        """The metrics `val/<set>/<prefix>avg@k` etc., the same on every rank. Every rank calls this; rank 0 grades.

        Args:
            prefix: inserted between the set and the metric.
            should_cancel: see `RolloutEngine.generate`.

        Raises:
            GenerationCancelled: see `RolloutEngine.generate`.
        """
        settings, metrics = self.config.evaluation, {}
        for number, (name, problems) in enumerate(self.sets.items()):
            requests = [
                Request(ids, answer=p.answer)
                for p, ids in zip(problems, self.ids[name], strict=True)
                for _ in range(settings.samples)
            ]
            sampling = SamplingParams(
                settings.temperature,
                settings.top_p,
                settings.max_new_tokens or self.config.rollout.max_new_tokens,
                (self.config.seed, EVALUATION_STREAM, number),
            )
            rollouts = engine.generate(requests, sampling, should_cancel)
            summary: list[dict[str, float] | None] = [None]
            if dist.get_rank() == 0:
                samples = []
                for i, rollout in enumerate(rollouts):
                    text = self.tokenizer.decode(rollout.response_ids)
                    correct = is_correct(text, rollout.answer or "")
                    samples.append(Sample(i // settings.samples, text, correct, len(rollout.response_ids)))
                summary = [summarize(samples, settings.samples)]
            dist.broadcast_object_list(summary, src=0)
            assert summary[0] is not None
            metrics.update({f"val/{name}/{prefix}{key}": value for key, value in summary[0].items()})
        return metrics


def before_and_after(metrics_file: Path) -> dict[str, dict[str, float]]:
    """The rows of the final table from a run's metrics.jsonl: the first and the last evaluation, and the teacher's."""
    lines = [json.loads(line) for line in metrics_file.read_text().splitlines()]
    evaluated = [line for line in lines if any(name.startswith("val/") for name in line)]
    first, last = evaluated[0], evaluated[-1]

    def validation(line: dict, teacher: bool) -> dict[str, float]:
        chosen = {n: v for n, v in line.items() if n.startswith("val/") and ("/teacher/" in n) == teacher}
        return {name.replace("/teacher/", "/"): value for name, value in chosen.items()}

    rows = {"student before": validation(first, False), "student after": validation(last, False)}
    return {**rows, "teacher": validation(first, True)} if validation(first, True) else rows


def table(rows: dict[str, dict[str, float]], samples: int) -> str:
    """A text table with one line per set and model, from metrics such as `val/heldout/avg@4`.

    Args:
        rows: label of a model -> its metrics, without a prefix between set and metric.
        samples: responses per problem.
    """
    columns = [f"avg@{samples}", f"best@{samples}", "avg_len"]
    names = sorted({key.split("/")[1] for metrics in rows.values() for key in metrics})
    width = max(len(f"{name}  {label}") for name in names for label in rows)
    lines = [" " * width + "".join(f"{column:>12}" for column in columns)]
    for name in names:
        for label, metrics in rows.items():
            values = [metrics[f"val/{name}/{column}"] for column in columns]
            cells = [f"{100 * values[0]:>11.1f}%", f"{100 * values[1]:>11.1f}%", f"{values[2]:>12.1f}"]
            lines.append(f"{name + '  ' + label:<{width}}" + "".join(cells))
    return "\n".join(lines)
