"""Evaluates by sampling k responses per problem, which `grading/grade_sets.py` grades; `Progress` logs the sampling."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from nemo_oprd.batch.types import Rollout
from nemo_oprd.config.schema import Config
from nemo_oprd.data.preparation import DataReport, say_suffix
from nemo_oprd.data.prompts import HELD_OUT, Prompt, load_prompts
from nemo_oprd.data.template_use import template_notes
from nemo_oprd.data.text import with_suffix
from nemo_oprd.data.tokenizer import Tokenizer
from nemo_oprd.evaluation.generations import Generations, SetKey, digest
from nemo_oprd.evaluation.grading.grade_sets import GradedSet, finish, grade_set
from nemo_oprd.evaluation.grading.graders import GraderChoice
from nemo_oprd.evaluation.intervals import scalars
from nemo_oprd.evaluation.responses import FACTS, response_of
from nemo_oprd.megatron.parallel import first_ranks
from nemo_oprd.rollout.concurrent_evaluation import EvaluationRequests
from nemo_oprd.rollout.engine import EVALUATION_STREAM, Request, RolloutEngine, SamplingParams
from nemo_oprd.rollout.exchange import first_ranks_rollouts
from nemo_oprd.runtime.messages import hours_minutes_seconds

# Progress of an evaluation's sampling: the first rank logs the responses done and the time left every few seconds.

logger = logging.getLogger(__name__)

EVERY_S = 15.0

_numbers = itertools.count(1)


class Progress:
    """Counts the complete responses of all ranks in the job's key-value store; all ranks make one for each sampling.

    Only the first rank logs, and only when responses of its own are complete.

    Args:
        label: a name of the sampling.
        done: responses that existed at the start, of `total`.
    """

    def __init__(self, label: str, done: int, total: int) -> None:
        self._label, self._done, self._total = label, done, total
        # a connection of its own: while one waits, other users of it get no answer
        self._store: Any = _get_default_store().clone()  # type: ignore[attr-defined]
        self._key = f"nemo_oprd/evaluation/{next(_numbers)}"
        self._started = self._printed = time.monotonic()

    def add(self, count: int) -> None:
        """Adds `count` complete responses of this rank; any thread may call it."""
        new, now = self._store.add(self._key, count), time.monotonic()
        if dist.get_rank() == 0 and new and now - self._printed >= EVERY_S:
            self._printed = now
            done = min(self._done + new, self._total)
            left = hours_minutes_seconds((now - self._started) / new * (self._total - done))
            logger.info(f"evaluating {self._label}: {done}/{self._total} responses  left {left}")

    def close(self) -> None:
        """Deletes the count if this is the first rank; called when sampling has ended."""
        if dist.get_rank() == 0:
            self._store.delete_key(self._key)


class Evaluator:
    """Evaluates models on the validation sets of a configuration.

    All evaluations use the same random numbers, so their results differ by the weights alone.

    Attributes:
        notes: lines about the preparation of the problems, for the log.
    """

    def __init__(
        self, config: Config, tokenizer: Tokenizer, max_positions: int, held_out: Sequence[Prompt] = ()
    ) -> None:
        """Reads and encodes the validation sets.

        Args:
            held_out: the problems of the set that `data.held_out` makes.

        Raises:
            ValueError: a set cannot be read, a problem has no answer or leaves no room for a response, a grader cannot
                be imported, or it cannot compare with the answer of a problem.
        """
        self.config, self.tokenizer = config, tokenizer
        self.graders = GraderChoice(config.evaluation.graders, config.evaluation.judge)
        # an evaluation that was sampled together with other responses, and its responses by set
        self._concurrent: tuple[Generations, dict[str, dict[int, Rollout]]] | None = None
        self.sets: dict[str, list[Prompt]] = {}
        self.ids: dict[str, list[list[int]]] = {}
        report = DataReport()
        for name, where, problems in self._read_sets(held_out, report):
            unanswered = [p.index for p in problems if p.answer is None]
            if unanswered:
                raise ValueError(
                    f"{where}: problem {unanswered[0]} has no answer to grade against, expected text or a number (a "
                    "list or an object is none); add an answer to each, or remove those without"
                )
            for line in self.graders.read(name, ((p.data_source, p.answer or "") for p in problems)):
                report.say(line)
            for problem in problems:
                try:
                    self.graders.of(name, problem.data_source).check(problem.answer or "")
                except ValueError as error:
                    raise ValueError(f"{where}: problem {problem.index}: {error}") from error
            self.sets[name] = problems
            report.lines += template_notes(tokenizer, problems, where, "the model")
            self.ids[name] = [tokenizer.encode_prompt(p.messages, p.tools) for p in problems]
            long = [p.index for p, ids in zip(problems, self.ids[name], strict=True) if len(ids) >= max_positions]
            if long:
                raise ValueError(
                    f"{where}: problem {long[0]} leaves no room for a response in the model's "
                    f"{max_positions} positions; expected shorter ones: remove it"
                )

        self.notes = report.lines

    def _read_sets(self, held_out: Sequence[Prompt], report: DataReport) -> Iterator[tuple[str, str, list[Prompt]]]:
        """Yields (name, origin for messages, first `evaluation.limit` problems) of each set."""
        data, limit = self.config.data, self.config.evaluation.limit
        for name, path in data.validation.items():
            problems, counts = with_suffix(load_prompts(path), data.suffix)
            say_suffix(counts, f"data.validation.{name}", data.suffix, report)
            yield name, f"data.validation.{name}={path}", problems[:limit]
        if held_out:
            yield HELD_OUT, f"data.held_out={data.held_out} of data.train", list(held_out)[:limit]

    def generations(self, directory: Path, model: dict[str, Any]) -> Generations:
        """Returns the directory of an evaluation of `model`, an identity that `evaluation/generations.py` made."""
        settings = self.config.evaluation
        sets = {
            name: {"number": number, "problems": len(problems), "prompts": digest(self.ids[name])}
            for number, (name, problems) in enumerate(self.sets.items())
        }
        about = {
            "model": model,
            "engine": self.config.rollout.engine,
            "precision": self.config.precision,
            "seed": self.config.seed,
            "samples": settings.samples,
            "sampling": {
                "temperature": settings.temperature,
                "top_p": settings.top_p,
                "max_new_tokens": self._max_new_tokens,
                "stop_ids": list(self.tokenizer.eos_ids),
            },
            "sets": sets,
        }
        return Generations(directory, about)

    def evaluate(
        self,
        engine: Callable[[], RolloutEngine],
        generations: Generations,
        prefix: str = "",
        should_cancel: Callable[[], bool] | None = None,
    ) -> dict[str, float]:
        """Returns metrics `val/<set>/<prefix>avg@k` etc., the same on all ranks. All ranks call this; rank 0 grades.

        Intervals and the metrics of subjects and levels are in evaluation.json only.

        Samples only responses that `generations` lacks, and stores each new one there immediately.

        Args:
            engine: returns the engine with the weights to evaluate; called on every rank, if responses are missing.
            generations: the evaluation's directory, after `begin`.
            prefix: inserted between the set and the metric, but not in the files.
            should_cancel: see `RolloutEngine.generate`.

        Raises:
            GenerationCancelled: see `RolloutEngine.generate`; the complete responses are kept.
        """
        metrics, graded = dict[str, dict[str, float]](), list[GradedSet]()
        for name in self.sets:
            of = self._set_key(name, generations)
            rollouts, sampled = self._responses(engine, generations, of, prefix, should_cancel)
            summary: dict[str, float] = {}
            if dist.get_rank() == 0:
                texts = [self.tokenizer.decode(rollout.response_ids) for rollout in rollouts]
                if sampled or generations.has_parts(name) or not generations.is_current(of):
                    generations.finish(of, rollouts, texts)
                records = map(of.record, range(len(texts)), rollouts, texts)
                graded.append(grade_set(generations.directory, name, list(map(response_of, records)), self.graders))
                summary = scalars(graded[-1].metrics)
            metrics[name] = first_ranks(summary)
        if dist.get_rank() == 0:
            finish(generations.directory, graded, keep_others=False)
        return {f"val/{name}/{prefix}{key}": value for name, of in metrics.items() for key, value in of.items()}

    def is_complete(self, generations: Generations) -> bool:
        """Returns whether the directory has all responses, as this machine sees it."""
        for name in self.sets:
            of = self._set_key(name, generations)
            requests = self._requests(of)
            if len(generations.kept(of, requests)) < len(requests):
                return False
        return True

    def evaluation_requests(self, generations: Generations) -> EvaluationRequests:
        """Returns all requests of an evaluation, to sample them with others; `evaluate` then finds the responses.

        Args:
            generations: the evaluation's directory, after `begin`, without responses.
        """
        requests, places = list[Request](), list[tuple[SetKey, int]]()
        for name in self.sets:
            of = self._set_key(name, generations)
            sampling = self._sampling(of)
            for i, request in enumerate(self._requests(of)):
                requests.append(replace(request, sampled=(sampling, i)))
                places.append((of, i))

        def keep(found: dict[int, Rollout]) -> None:
            for index, rollout in found.items():
                of, i = places[index]
                generations.keep(of, dist.get_rank(), [(i, rollout, self.tokenizer.decode(rollout.response_ids))])

        def take(rollouts: list[Rollout]) -> None:
            taken: dict[str, dict[int, Rollout]] = {name: {} for name in self.sets}
            for (of, i), rollout in zip(places, rollouts, strict=True):
                taken[of.name][i] = rollout
            self._concurrent = generations, taken

        return EvaluationRequests(requests, keep, take)

    def _set_key(self, name: str, generations: Generations) -> SetKey:
        key = (self.config.seed, EVALUATION_STREAM, [*self.sets].index(name))
        samples, model = self.config.evaluation.samples, generations.about["model"]["name"]
        return SetKey(name, samples, key, model, self._facts(name))

    def _requests(self, of: SetKey) -> list[Request]:
        problems = zip(self.sets[of.name], self.ids[of.name], strict=True)
        return [Request(ids, answer=p.answer) for p, ids in problems for _ in range(of.samples)]

    def _sampling(self, of: SetKey) -> SamplingParams:
        settings = self.config.evaluation
        return SamplingParams(settings.temperature, settings.top_p, self._max_new_tokens, of.key)

    def _responses(
        self,
        engine: Callable[[], RolloutEngine],
        generations: Generations,
        of: SetKey,
        prefix: str,
        should_cancel: Callable[[], bool] | None,
    ) -> tuple[list[Rollout], bool]:
        """Returns (responses to a set in order, whether any was sampled); if none was, only the first rank has them."""
        requests = self._requests(of)
        taken = self._concurrent
        sampled = {} if taken is None or taken[0] is not generations else taken[1][of.name]
        # the files of other machines' ranks may appear late
        kept = (generations.kept(of, requests) | sampled) if dist.get_rank() == 0 else {}
        # the other ranks need no responses of a set that is complete
        is_complete = first_ranks(len(kept) == len(requests))
        if kept:
            how = "were sampled beside a step" if sampled else "are kept from an earlier start"
            logger.info(f"evaluating {prefix}{of.name}: {len(kept)} of {len(requests)} responses {how}")
        if is_complete:
            return [kept[i] for i in range(len(kept))], False
        done = first_ranks_rollouts(kept)
        progress = Progress(f"{prefix}{of.name}", len(done), len(requests))

        def keep(rollouts: dict[int, Rollout]) -> None:
            texts = [self.tokenizer.decode(rollout.response_ids) for rollout in rollouts.values()]
            generations.keep(of, dist.get_rank(), zip(rollouts, rollouts.values(), texts, strict=True))
            progress.add(len(rollouts.keys() - done.keys()))

        try:
            return engine().generate(requests, self._sampling(of), should_cancel, done, keep), True
        finally:
            progress.close()

    def _facts(self, name: str) -> list[dict[str, str]]:
        """Returns each problem's fields for its lines, so that `nemo-oprd grade` needs neither data nor a model."""
        grader = self.config.evaluation.graders.get(name)
        facts = ({**{fact: getattr(each, fact) for fact in FACTS}, "grader": grader} for each in self.sets[name])
        return [{fact: value for fact, value in each.items() if value is not None} for each in facts]

    @property
    def _max_new_tokens(self) -> int:
        return self.config.evaluation.max_new_tokens or self.config.rollout.max_new_tokens
