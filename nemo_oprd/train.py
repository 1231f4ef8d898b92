"""On-policy representation distillation, start to end: read `train` and you have read the system.

Left to others: how a step is made exact under any layout (`megatron/`, `teacher/`), where rollouts come from
(`rollout/`), what is measured on validation sets (`evaluation/`). Every rank runs this same loop.
"""

from __future__ import annotations

import dataclasses
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from nemo_oprd.config import Config
from nemo_oprd.data.prompts import load_prompts, prompt_order
from nemo_oprd.disk import check_output
from nemo_oprd.evaluation.sample import TRAINING_STREAM, Evaluator, before_and_after, table
from nemo_oprd.families import ModelSpec, read_model_spec
from nemo_oprd.megatron.checkpoint import check_checkpoint, latest_step, load_checkpoint, save_checkpoint
from nemo_oprd.megatron.export import export_hf
from nemo_oprd.rollout.base import Request, RolloutEngine, Sampling
from nemo_oprd.rollout.megatron import MegatronEngine
from nemo_oprd.rollout.replay import ReplayEngine, write_rollouts
from nemo_oprd.runlog import RunLog
from nemo_oprd.setup import check_vocabulary, make_system, model_directory, open_model
from nemo_oprd.tokens.tokenizer import Tokenizer
from nemo_oprd.types import Rollout


def train(config: Config) -> None:
    """Distils `config.student` on its own rollouts into the run directory `config.output` (docs/runs.md).

    Raises:
        ValueError: bad configuration, models or data; before anything expensive starts.
    """
    run = Run(config)
    student, clock = run.system.student, run.clock
    run.evaluate_before()
    for step in range(run.first_step, config.train.steps):
        with clock("generate"):
            rollouts = run.engine.generate(run.requests(step), run.sampling(step))
        with clock("teacher"):
            plan, targets = run.system.teach(rollouts)
        with clock("update"):
            measured = student.forward_backward(rollouts, plan, targets)
            updated = student.update(step)
        with clock("sync"):
            run.engine.update_weights(student)
        run.log_step(step + 1, rollouts, {**(measured.metrics() if measured else {}), **updated})
        run.evaluate_after(step + 1)
        run.save_after(step + 1)
    run.finish()


class Clock:
    """Seconds per phase of the current step."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds[phase] = time.perf_counter() - start


class Run:
    """What one run holds: system, engine, data, logs; and what happens around the steps."""

    def __init__(self, config: Config) -> None:
        self.config, self.clock = config, Clock()
        self.checkpoints = Path(config.output) / "checkpoints"
        check_output(config.output)
        self.source = model_directory(config.student)
        spec = read_model_spec(self.source)
        check_sources_stay(config)
        # data before models: a mistake in a file should not cost the loading of models
        self.first_step = latest_step(self.checkpoints) or 0
        if self.first_step:
            check_checkpoint(self.checkpoints, self.first_step, spec)
        self.tokenizer: Tokenizer | None = None
        self.evaluator: Evaluator | None = None
        self.prompts: list[Request] = []
        replay = config.rollout.replay
        check_replay(config)
        recorded = ReplayEngine(replay, spec.vocab_size, spec.max_positions) if replay is not None else None
        if recorded is None:
            if config.data.train is None:
                raise ValueError(
                    "data.train=null: expected a file of prompts; set data.train=FILE (or rollout.replay=FILE)"
                )
            self.tokenizer = Tokenizer.load(self.source)
            check_vocabulary(self.tokenizer, spec, self.source)
            check_tokenizers(self.tokenizer, model_directory(config.teacher))
            if config.evaluation.teacher:
                check_same_architecture(spec, read_model_spec(model_directory(config.teacher)))
            self.prompts = encode_prompts(config, self.tokenizer, spec.max_positions)
            if config.evaluation.every:
                self.evaluator = Evaluator(config, self.tokenizer, spec.max_positions)
        self.system = make_system(config)
        student = self.system.student
        eos_ids = self.tokenizer.eos_ids if self.tokenizer else ()
        self.engine: RolloutEngine = recorded or MegatronEngine(config, spec, student.role.layout, eos_ids)
        if self.first_step:
            load_checkpoint(self.checkpoints, self.first_step, student)
        self.log = RunLog(config, self.first_step)
        if self.first_step:
            self.log.say(f"resumed from {self.checkpoints} after {self.first_step} of {config.train.steps} steps")
        self.engine.update_weights(student)

    def requests(self, step: int) -> list[Request]:
        """The prompts of a step, each `rollout.per_prompt` times; a pure function of (seed, step)."""
        if not self.prompts:
            return []
        count = self.config.train.prompts_per_step
        chosen = prompt_order(len(self.prompts), self.config.seed, step * count, count)
        return [self.prompts[index] for index in chosen for _ in range(self.config.rollout.per_prompt)]

    def sampling(self, step: int) -> Sampling:
        """How the rollouts of a step are sampled."""
        rollout = self.config.rollout
        key = (self.config.seed, TRAINING_STREAM, step)
        return Sampling(rollout.temperature, rollout.top_p, rollout.max_new_tokens, key)

    def log_step(self, done: int, rollouts: list[Rollout], metrics: dict[str, float]) -> None:
        """Metrics, progress and, if asked for, the rollouts of update `done`."""
        seconds = self.clock.seconds
        tokens = sum(rollout.length for rollout in rollouts)
        lengths = [len(rollout.response_ids) for rollout in rollouts]
        metrics = {
            **metrics,
            "response_length/mean": sum(lengths) / len(lengths),
            "response_length/max": float(max(lengths)),
            "rollout/finished": sum(r.finish_reason == "stop" for r in rollouts) / len(rollouts),
            **{f"timing/{phase}_s": value for phase, value in seconds.items()},
            "perf/tokens_per_s": tokens / sum(seconds.values()),
            "perf/peak_memory_gb": _peak_memory_gb(),
        }
        self.log.write(done, metrics)
        self.log.progress(done, metrics)
        if self.config.rollout.save and dist.get_rank() == 0 and self.tokenizer is not None:
            texts = [self.tokenizer.decode(rollout.response_ids) for rollout in rollouts]
            named = [Rollout(**{**vars(r), "response": text}) for r, text in zip(rollouts, texts, strict=True)]
            write_rollouts(Path(self.config.output) / "rollouts" / f"step_{done:07d}.jsonl", named)

    def evaluate_before(self) -> None:
        """The student's start and, if asked for, the teacher on the validation sets; not again after a resume."""
        if self.evaluator is None or self.first_step:
            return
        self.log.say("evaluating the student before training")
        metrics = self.evaluator.evaluate(self.engine)
        if self.config.evaluation.teacher:
            self.log.say("evaluating the teacher")
            assert isinstance(self.engine, MegatronEngine)
            self.engine.load(open_model(self.config.teacher, self.system.objective.teacher), "teacher")
            metrics.update(self.evaluator.evaluate(self.engine, prefix="teacher/"))
            self.engine.update_weights(self.system.student)
        self.log.write(0, metrics)

    def evaluate_after(self, done: int) -> None:
        """The validation sets after update `done`, where it is due."""
        every, last = self.config.evaluation.every, done == self.config.train.steps
        if self.evaluator is None or not (last or done % every == 0):
            return
        metrics = self.evaluator.evaluate(self.engine)
        self.log.write(done, metrics)
        shown = [f"{name} {value:.3f}" for name, value in metrics.items() if "avg@" in name]
        self.log.say(f"step {done}/{self.config.train.steps}  " + "  ".join(shown))

    def save_after(self, done: int) -> None:
        """A checkpoint where it is due; the last step is always saved if any is."""
        every = self.config.train.save_every
        if every and (done % every == 0 or done == self.config.train.steps):
            save_checkpoint(
                self.checkpoints, done, self.system.student, self.source, self.config.train.keep_checkpoints
            )

    def finish(self) -> None:
        """HF export, the closing table, and the end of the logs."""
        if self.config.train.export_hf:
            target = Path(self.config.output) / "hf"
            export_hf(self.system.student, self.source, target)
            self.log.say(f"exported the student to {target}")
        if self.evaluator is not None and dist.get_rank() == 0:
            print(table(before_and_after(self.log.path), self.config.evaluation.samples), flush=True)
        self.log.close()


def check_replay(config: Config) -> None:
    """Raises ValueError for settings that recorded rollouts would silently leave without effect."""
    asked = {"evaluation.every": (config.evaluation.every, 0), "rollout.save": (config.rollout.save, False)}
    for key, (value, off) in asked.items():
        if config.rollout.replay is not None and value != off:
            raise ValueError(
                f"{key}={value} samples the student, which rollout.replay={config.rollout.replay} does not; expected "
                f"one of the two: set {key}={str(off).lower()}, or rollout.replay=null"
            )


def check_sources_stay(config: Config) -> None:
    """Raises ValueError where the export at the end would replace a model that the run reads."""
    for role, model in (("student", config.student), ("teacher", config.teacher)):
        target = Path(config.output) / "hf"
        if config.train.export_hf and model.hf_path and Path(model.hf_path).resolve() == target.resolve():
            raise ValueError(
                f"{role}.hf_path={model.hf_path} is where output={config.output} exports the student at the end; "
                "expected different directories: choose another output"
            )


def check_tokenizers(student: Tokenizer, teacher_directory: Path) -> None:
    """Raises ValueError unless the teacher's tokenizer is the student's: ids mean nothing to another one's model."""
    teacher = Tokenizer.load(teacher_directory)
    if teacher.fingerprint() != student.fingerprint():
        raise ValueError(
            f"the tokenizers of {student.path} and {teacher_directory} differ: the teacher would read other text than "
            "the student wrote; both models need the same tokenizer"
        )


def check_same_architecture(student: ModelSpec, teacher: ModelSpec) -> None:
    """Raises ValueError where the teacher can't be sampled in the student's engine."""
    differing = [
        f.name
        for f in dataclasses.fields(ModelSpec)
        if f.compare and f.name != "dtype" and getattr(student, f.name) != getattr(teacher, f.name)
    ]
    if differing:
        raise ValueError(
            f"evaluation.teacher=true samples the teacher in the student's engine, but they differ in {differing}; "
            "set evaluation.teacher=false and evaluate the teacher with `nemo-oprd evaluate`"
        )


def encode_prompts(config: Config, tokenizer: Tokenizer, max_positions: int) -> list[Request]:
    """The training prompts, tokenized once; those above `data.max_prompt_tokens` are left out.

    Raises:
        ValueError: the file can't be read, no prompt is short enough, or one leaves no room for a response.
    """
    limit = config.data.max_prompt_tokens
    requests = []
    for prompt in load_prompts(str(config.data.train)):
        try:
            ids = tokenizer.encode_prompt(list(prompt.messages))
        except ValueError as error:
            raise ValueError(f"data.train={config.data.train}: prompt {prompt.index}: {error}") from error
        if limit is not None and len(ids) > limit:
            continue
        if len(ids) >= max_positions:
            raise ValueError(
                f"data.train={config.data.train}: prompt {prompt.index} has {len(ids)} tokens and leaves no room in "
                f"the model's {max_positions} positions; set data.max_prompt_tokens"
            )
        requests.append(Request(ids, prompt.messages[-1]["content"], prompt.data_source, prompt.answer))
    if not requests:
        raise ValueError(
            f"data.train={config.data.train}: every prompt is longer than data.max_prompt_tokens={limit}; raise it"
        )
    return requests


def _peak_memory_gb() -> float:
    """Peak of this process: CUDA allocations, or resident memory on a machine without CUDA."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
