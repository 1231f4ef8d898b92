"""`evaluate`: samples the student on the validation sets, grades the responses and prints a table."""

from __future__ import annotations

import json
import logging
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import torch.distributed as dist

from nemo_oprd.evaluation.evaluator import Evaluator
from nemo_oprd.evaluation.generations import Generations, model_identity
from nemo_oprd.evaluation.responses import METRICS
from nemo_oprd.evaluation.tables import details, table
from nemo_oprd.megatron.parallel import init_distributed, seed_everything
from nemo_oprd.rollout.engine import RolloutEngine
from nemo_oprd.run.checks import Check, check_output_directory, refusals, stop_at_first, wait_for_sampling_endpoints
from nemo_oprd.run.engine_kinds import ENGINES, make_engine
from nemo_oprd.run.models import ModelFiles, student_files
from nemo_oprd.run.prompt_files import held_out_problems
from nemo_oprd.run.resolve import SamplingSpec, servers_ids
from nemo_oprd.runtime.messages import is_first_rank
from nemo_oprd.runtime.output_directories import mark
from nemo_oprd.runtime.run_lock import RunLock

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EvaluationInputs:
    """The files that `evaluate` reads before it makes an engine, each once, when a check needs it first."""

    sampling: SamplingSpec

    @cached_property
    def model(self) -> ModelFiles:
        """Returns the files of the student."""
        return student_files(self.sampling.config, self.sampling.student)

    @cached_property
    def evaluator(self) -> Evaluator:
        """Returns the evaluator with the validation sets."""
        config = self.sampling.config
        return Evaluator(config, self.model.tokenizer, self.model.spec.max_positions, held_out_problems(config))

    @cached_property
    def generations(self) -> Generations:
        """Returns the directory of the responses."""
        identity = model_identity(self.model.weights_directory)
        return self.evaluator.generations(Path(self.sampling.config.output), identity)

    def check_sampling_device(self) -> None:
        """Raises ValueError unless the engine can sample from the student on this machine."""
        rollout = self.sampling.config.rollout
        ENGINES[rollout.engine].check_device(rollout, self.model.spec)


RESPONSES_FIT = Check[EvaluationInputs]("responses", lambda inputs: inputs.generations.check())
EVALUATION_CHECKS = (
    Check[EvaluationInputs]("output", lambda inputs: check_output_directory(inputs.sampling.config, "evaluate")),
    Check[EvaluationInputs]("vocabulary", lambda inputs: inputs.model.check_vocabulary()),
    Check[EvaluationInputs]("data", lambda inputs: inputs.evaluator),
    Check("sampling-device", EvaluationInputs.check_sampling_device),
    RESPONSES_FIT,
    Check[EvaluationInputs]("model-files", lambda inputs: inputs.model.read),
)


def evaluate(sampling: SamplingSpec) -> None:
    """Writes `output/evaluation.json` and prints the table. The layout is `rollout.tensor` times data parallelism.

    It writes responses to `output/generations` as they complete, and their grades to `output/grades`. The same command,
    started again, samples only missing responses; if none is missing, it makes no engine.

    Raises:
        ValueError: there is no validation set, the model or the data are wrong, another process uses the directory, or
            it holds the responses of another evaluation.
    """
    config, inputs = sampling.config, EvaluationInputs(sampling)
    stop_at_first(refusals(EVALUATION_CHECKS, inputs))
    model, tokenizer, spec = inputs.model, inputs.model.tokenizer, inputs.model.spec
    kind = ENGINES[config.rollout.engine]
    with ExitStack() as stack:
        if is_first_rank():
            stack.callback(RunLock(Path(config.output)).undo)
            # again under the lock: another process may have used the directory before
            stop_at_first(refusals((RESPONSES_FIT,), inputs))
            if not inputs.evaluator.is_complete(inputs.generations):
                wait_for_sampling_endpoints(config)
        init_distributed()
        model.check_files()

        @cache
        def engine() -> RolloutEngine:
            shared = kind.groups(config.rollout, sampling.ranks.size).placement == "elsewhere"
            # servers that a training run shares mask the ids that it masks
            sampled = servers_ids(config, sampling.student) if shared else tokenizer.ids(spec.vocab_size)
            made = make_engine(config, spec, model.directory, sampling.ranks, tokenizer.eos_ids, sampled)
            stack.callback(made.close)
            made.load(model.read, str(model.directory))
            return made

        seed_everything(config.seed)
        for note in (*sampling.student.notes, *inputs.evaluator.notes):
            logger.info(note)
        if dist.get_rank() == 0:
            mark(Path(config.output), "evaluate")
            inputs.generations.begin(afresh=False)
        inputs.evaluator.evaluate(engine, inputs.generations)
    if dist.get_rank() == 0:
        # with the intervals, which only the file has
        rows = {model.directory.name: json.loads((Path(config.output) / METRICS).read_text())}
        print("\n".join(filter(None, (table(rows), details(rows)))))
