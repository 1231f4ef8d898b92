"""Evaluations with an engine that answers from a list; run in the workers of `pool.py`."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from nemo_oprd.batch.types import Rollout
from nemo_oprd.config.loading import load_config
from nemo_oprd.rollout.engine import GenerationCancelled, Keep, Request, SamplingParams

MODEL = {"directory": "somewhere", "name": "somewhere@0"}


class Characters:
    """A tokenizer with one id per character."""

    eos_ids = (0,)

    def encode_prompt(self, messages: list[dict[str, str]], tools: Any = ()) -> list[int]:
        return [ord(letter) for letter in messages[-1]["content"]]

    def reads_clock(self, messages: Any, tools: Any) -> bool:
        return False

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(i) for i in ids if i)


class Answers:
    """Answers request i with `texts[i]`, ranks in turn; cancelled after `until` responses of a rank.

    Attributes:
        asked: the requests that this rank answered.
    """

    def __init__(self, texts: list[str], until: int | None = None) -> None:
        self.texts, self.until, self.asked = texts, until, list[int]()

    def generate(
        self,
        requests: list[Request],
        sampling: SamplingParams,
        should_cancel: Callable[[], bool] | None = None,
        done: dict[int, Rollout] | None = None,
        keep: Keep | None = None,
    ) -> list[Rollout]:
        import torch.distributed as dist

        assert keep is not None and done is not None
        own = [i for i in range(dist.get_rank(), len(requests), dist.get_world_size()) if i not in done]
        for i in own[: self.until]:
            keep({i: self.rollout(i, requests[i])})
            self.asked.append(i)
        dist.barrier()
        if self.until is not None:
            raise GenerationCancelled
        return [done.get(i) or self.rollout(i, request) for i, request in enumerate(requests)]

    def rollout(self, index: int, request: Request) -> Rollout:
        ids = [*map(ord, self.texts[index]), 0]
        logprobs = [-0.5] * len(ids)
        return Rollout(request.prompt_ids, ids, answer=request.answer, finish_reason="stop", logprobs=logprobs)


def evaluate(directory: str, texts: list[str], untils: list[int | None]) -> dict[str, Any]:
    """One evaluation per entry of `untils`, cancelled after that many responses per rank; None: not cancelled.

    Returns:
        Per evaluation, the metrics or None, all requests that were answered, and what the first rank said, with a line
        of progress per response; and the metrics of one more evaluation, which has no engine.
    """
    import torch.distributed as dist

    from nemo_oprd.evaluation import evaluator as progress
    from nemo_oprd.evaluation.evaluator import Evaluator
    from nemo_oprd.megatron.parallel import init_distributed

    init_distributed()
    problems = Path(directory) / "problems.jsonl"
    overrides = ["student.hf_path=a", "teacher.hf_path=b", f"data.validation.sums={problems}", "evaluation.samples=2"]
    evaluator = Evaluator(load_config("verify", overrides), Characters(), 100)  # type: ignore[arg-type]
    place = evaluator.generations(Path(directory) / "run", MODEL)
    found: list[Any] = []
    for until in untils:
        engine, metrics = Answers(texts, until), None
        if dist.get_rank() == 0:
            place.begin(afresh=False)
        said = io.StringIO()
        with (
            mock.patch.object(progress, "EVERY_S", 0.0),
            contextlib.redirect_stderr(said),
            contextlib.suppress(GenerationCancelled),
        ):
            metrics = evaluator.evaluate(lambda engine=engine: engine, place)  # type: ignore[misc]
        asked: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(asked, engine.asked)
        found.append({"metrics": metrics, "asked": sorted(sum(asked, [])), "said": said.getvalue().splitlines()})

    def none() -> Any:
        raise AssertionError("nothing is missing")

    again = evaluator.evaluate(none, place, prefix="teacher/")
    return {"evaluations": found, "again": again}


class TwoModels(Answers):
    """Answers as the student, until the teacher's weights are loaded, and again from the next update on."""

    def __init__(self, student: list[str], teacher: list[str]) -> None:
        super().__init__(student)
        self.student, self.teacher = student, teacher

    def load(self, read: Any, source: str) -> None:
        assert source == "teacher"
        self.texts = self.teacher

    def update_weights(self, weights: Any, step: int) -> None:
        self.texts = self.student


def before_training(directory: str, student: list[str], teacher: list[str], overrides: list[str]) -> list[str]:
    """What is said while both models are evaluated before training."""
    from types import SimpleNamespace

    from messages import messages

    from nemo_oprd.evaluation.evaluator import Evaluator
    from nemo_oprd.megatron.parallel import init_distributed
    from nemo_oprd.run.validation import SourceModels, Validation

    init_distributed()
    paths = {"output": directory, "student.hf_path": "a", "data.validation.sums": f"{directory}/problems.jsonl"}
    given = [f"{key}={value}" for key, value in paths.items()]
    settings = ["evaluation.samples=2", "evaluation.teacher=true", "teacher.hf_path=b"]
    config = load_config("verify", [*given, *settings, *overrides])
    models: Any = SourceModels(Path("a"), Path("b"), lambda: None)  # type: ignore[arg-type, return-value]
    log: Any = SimpleNamespace(write=lambda step, metrics: None)
    evaluator = Evaluator(config, Characters(), 100)  # type: ignore[arg-type]
    signals: Any = SimpleNamespace(stop_requested=False)
    engine: Any = TwoModels(student, teacher)
    validation = Validation(config, evaluator, engine, models, log, Path(directory), 0, signals)
    with messages() as said:
        validation.before_training(SimpleNamespace(hf_weights=None))  # type: ignore[arg-type]
    return said


def cache_budgets(hf_path: str, tensor: int, free: list[int]) -> list[int]:
    """What `auto` chooses on each rank, if ranks have `free` bytes."""
    import torch
    import torch.distributed as dist

    from nemo_oprd.batch.layout import Layout
    from nemo_oprd.megatron.parallel import init_distributed, make_role
    from nemo_oprd.models import read_model_spec
    from nemo_oprd.rollout import in_process_engine as engine

    init_distributed()
    role = make_role("rollout", Layout(tensor=tensor, data=dist.get_world_size() // tensor))
    with mock.patch.object(engine, "free_bytes", return_value=free[dist.get_rank()]):
        own = engine.cache_budget(read_model_spec(hf_path), role, torch.float32)
    budgets: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(budgets, own)
    return budgets


def write_problems(directory: Path, answers: list[str]) -> None:
    rows = [{"prompt": f"{number}?", "answer": answer} for number, answer in enumerate(answers)]
    (directory / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
