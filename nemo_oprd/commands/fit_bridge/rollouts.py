"""The rollouts that `fit-bridge` runs both models over: recorded ones, or sampled ones that an interrupted fit keeps.

Sampled rollouts are written to `output/rollouts`, one file per step of `train.prompts_per_step` prompts, beside
`about.json`, which says how they were sampled. The command started again reads the files that exist.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist

from nemo_oprd.batch.types import Rollout
from nemo_oprd.config.schema import Config
from nemo_oprd.distillation.distiller import Distiller
from nemo_oprd.models.megatron.parallel import first_ranks
from nemo_oprd.rollout.engine import Request, RolloutEngine
from nemo_oprd.rollout.engine_kinds import ENGINES, make_engine
from nemo_oprd.rollout.replay import read_rollouts, write_rollouts
from nemo_oprd.rollout.schedule import training_requests, training_sampling
from nemo_oprd.rollout.shared_rollouts import first_ranks_rollouts
from nemo_oprd.runtime.files import read_json, write_atomically
from nemo_oprd.setup.data import read_prompts, recorded_rollouts
from nemo_oprd.setup.models import RunFiles
from nemo_oprd.setup.resolve import RunSpec

logger = logging.getLogger(__name__)

DIRECTORY = "rollouts"


class RecordedRollouts:
    """The rollouts of `rollout.replay`.

    Attributes:
        count: responses in all batches together.
        student_tokenizer, teacher_tokenizer: None, because recorded rollouts need no tokenizer.
    """

    student_tokenizer = teacher_tokenizer = None

    def __init__(self, config: Config, rollouts: list[Rollout]) -> None:
        self.config, self.rollouts, self.count = config, rollouts, len(rollouts)

    def batches(self, distiller: Distiller) -> Iterator[list[Rollout]]:
        """All rollouts, as many at a time as `SampledRollouts` samples in a step."""
        size = _batch_size(self.config)
        yield from (self.rollouts[start : start + size] for start in range(0, self.count, size))


class SampledRollouts:
    """The student's responses to the prompts of `data.train`, sampled step by step and kept.

    Attributes:
        count: responses in all batches together.
        student_tokenizer, teacher_tokenizer: fingerprints.
    """

    def __init__(self, spec: RunSpec, files: RunFiles) -> None:
        self.config = config = spec.config
        self.student, self.files = files.student, files
        ENGINES[config.rollout.engine].check_device(config.rollout, files.student.spec)
        prompts, (self.teacher_inputs,) = read_prompts(config, files, spec.models.routing)
        self.prompts = prompts.training
        for line in prompts.report.lines:
            logger.info(line)
        tokenizer = files.student.tokenizer
        self.student_tokenizer = tokenizer.fingerprint()
        self.teacher_tokenizer = files.teachers[0].tokenizer.fingerprint()
        self.count = config.bridge.prompts * config.rollout.per_prompt

    def batches(self, distiller: Distiller) -> Iterator[list[Rollout]]:
        """All rollouts, `train.prompts_per_step` prompts at a time; the same on every rank."""
        self._claim_directory()
        size, engine = _batch_size(self.config), None
        try:
            for step, start in enumerate(range(0, self.count, size)):
                file = Path(self.config.output) / DIRECTORY / f"step_{step + 1:07d}.jsonl"
                requests = self._requests(start, min(size, self.count - start))
                rollouts = _read_kept(file, requests, self.student.spec.vocab_size)
                if rollouts is None:
                    engine = engine or self._engine(distiller)
                    rollouts = engine.generate(requests, training_sampling(self.config, step))
                    if dist.get_rank() == 0:
                        write_rollouts(file, rollouts)
                yield rollouts if self.teacher_inputs is None else self.teacher_inputs.add_to(rollouts, requests)
        finally:
            if engine is not None:
                engine.close()

    def _engine(self, distiller: Distiller) -> RolloutEngine:
        """The engine, with the student's weights; not made unless something has to be sampled."""
        files, layout, sampled = self.student, distiller.student.role.layout, self.files.sampled_ids
        engine = make_engine(self.config, files.spec, files.directory, layout, files.tokenizer.eos_ids, sampled)
        engine.update_weights(distiller.student.hf_weights, 0)
        return engine

    def _claim_directory(self) -> None:
        """Records how the rollouts are sampled; refuses a directory of those that were sampled in another way."""
        file, settings = Path(self.config.output) / DIRECTORY / "about.json", self.config.rollout
        about = {
            "student": str(self.student.directory),
            "precision": self.config.precision,
            "seed": self.config.seed,
            "per_prompt": settings.per_prompt,
            "sampling": [settings.temperature, settings.top_p, settings.max_new_tokens],
        }
        about |= ENGINES[settings.engine].sampled_with
        problem = None
        if dist.get_rank() == 0:
            file.parent.mkdir(parents=True, exist_ok=True)
            problem = self._other_settings(file, about)
            if problem is None:
                write_atomically(file, json.dumps(about) + "\n")
        problem = first_ranks(problem)
        if problem is not None:
            raise ValueError(problem)

    @staticmethod
    def _other_settings(file: Path, about: dict[str, Any]) -> str | None:
        """What is wrong with an existing about.json; None if there is none, or if it holds `about`."""
        fix = "remove that directory, or choose another output"
        try:
            existing = read_json(file, "how these rollouts were sampled", fix) if file.exists() else about
        except ValueError as error:
            return str(error)
        if existing == about:
            return None
        return (
            f"{file.parent} holds rollouts that were sampled with {json.dumps(existing)}, expected "
            f"{json.dumps(about)}; {fix}"
        )

    def _requests(self, start: int, count: int) -> list[Request]:
        per_prompt = self.config.rollout.per_prompt
        return training_requests(self.prompts, self.config, start // per_prompt, count // per_prompt)


def rollout_source(spec: RunSpec, files: RunFiles) -> RecordedRollouts | SampledRollouts:
    """The rollouts that the configuration asks for.

    Raises:
        ValueError: the recorded rollouts, the prompts, the tokenizers or `data.train` are wrong.
    """
    recorded = recorded_rollouts(spec.config, spec.models)
    return SampledRollouts(spec, files) if recorded is None else RecordedRollouts(spec.config, recorded)


def _batch_size(config: Config) -> int:
    return config.train.prompts_per_step * config.rollout.per_prompt


def _read_kept(file: Path, requests: list[Request], vocab_size: int) -> list[Rollout] | None:
    """The rollouts of these requests that an earlier start kept in `file`, or None; the same on every rank."""
    kept: list[Rollout] = []
    if dist.get_rank() == 0 and file.is_file():
        rollouts = read_rollouts(file, vocab_size)
        if [r.prompt_ids.tolist() for r in rollouts] == [request.prompt_ids for request in requests]:
            kept = rollouts
    return [*first_ranks_rollouts(dict(enumerate(kept))).values()] or None
