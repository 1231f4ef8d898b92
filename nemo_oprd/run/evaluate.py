"""`evaluate`: samples the student on the validation sets, grades the responses and prints a table."""

from __future__ import annotations

import json
import logging
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import torch.distributed as dist

from nemo_oprd.evaluation.evaluator import Evaluator
from nemo_oprd.evaluation.generations import model_identity
from nemo_oprd.evaluation.responses import METRICS
from nemo_oprd.evaluation.tables import details, table
from nemo_oprd.megatron.parallel import init_distributed, seed_everything
from nemo_oprd.rollout.engine import RolloutEngine
from nemo_oprd.run.checks import check_output_directory, wait_for_sampling_endpoints
from nemo_oprd.run.engine_kinds import ENGINES, make_engine
from nemo_oprd.run.models import student_files
from nemo_oprd.run.prompt_files import held_out_problems
from nemo_oprd.run.resolve import SamplingSpec, servers_ids
from nemo_oprd.runtime.messages import is_first_rank
from nemo_oprd.runtime.output_directories import mark
from nemo_oprd.runtime.run_lock import RunLock

logger = logging.getLogger(__name__)


def evaluate(sampling: SamplingSpec) -> None:
    """Writes `output/evaluation.json` and prints the table. The layout is `rollout.tensor` times data parallelism.

    It writes responses to `output/generations` as they complete, and their grades to `output/grades`. The same command,
    started again, samples only missing responses; if none is missing, it makes no engine.

    Raises:
        ValueError: there is no validation set, the model or the data are wrong, another process uses the directory, or
            it holds the responses of another evaluation.
    """
    config = sampling.config
    model = student_files(config, sampling.student)
    tokenizer, spec = model.tokenizer, model.spec
    check_output_directory(config, "evaluate")
    model.check_vocabulary()
    evaluator = Evaluator(config, tokenizer, spec.max_positions, held_out_problems(config))
    kind = ENGINES[config.rollout.engine]
    kind.check_device(config.rollout, spec)
    generations = evaluator.generations(Path(config.output), model_identity(model.weights_directory))
    generations.check()
    read = model.read
    with ExitStack() as stack:
        if is_first_rank():
            stack.callback(RunLock(Path(config.output)).undo)
            generations.check()  # again under the lock: another process may have used the directory before
            if not evaluator.is_complete(generations):
                wait_for_sampling_endpoints(config)
        init_distributed()
        model.check_files()

        @cache
        def engine() -> RolloutEngine:
            shared = kind.groups(config.rollout, sampling.ranks.size).placement == "elsewhere"
            # as a training run masks them
            sampled = servers_ids(config, sampling.student) if shared else tokenizer.ids(spec.vocab_size)
            made = make_engine(config, spec, model.directory, sampling.ranks, tokenizer.eos_ids, sampled)
            stack.callback(made.close)
            made.load(read, str(model.directory))
            return made

        seed_everything(config.seed)
        for note in (*sampling.student.notes, *evaluator.notes):
            logger.info(note)
        if dist.get_rank() == 0:
            mark(Path(config.output), "evaluate")
            generations.begin(afresh=False)
        evaluator.evaluate(engine, generations)
    if dist.get_rank() == 0:
        # with the intervals, which only the file has
        rows = {model.directory.name: json.loads((Path(config.output) / METRICS).read_text())}
        print("\n".join(filter(None, (table(rows), details(rows)))))
