"""`evaluate`: samples the student on the validation sets, grades the responses and prints a table."""

from __future__ import annotations

import json
from pathlib import Path

import torch.distributed as dist

from nemo_oprd.config.schema import Config
from nemo_oprd.evaluation.sample import Evaluator, table
from nemo_oprd.fault_tolerance.disk import check_output
from nemo_oprd.fault_tolerance.files import write_atomically
from nemo_oprd.layout import Layout
from nemo_oprd.megatron.parallel import init_distributed, seed_everything
from nemo_oprd.rollout.factory import check_on_device, make_engine
from nemo_oprd.setup.models import ModelFiles, world_size
from nemo_oprd.setup.preflight import check_evaluates, check_rollout_ranks, known_ids, trainer_ranks


def evaluate(config: Config) -> None:
    """Writes `output/evaluation.json` and prints the table. The layout is `rollout.tensor` times data parallelism.

    Raises:
        ValueError: there is no validation set, or the model or the data are wrong.
    """
    check_evaluates(config)
    model = ModelFiles(config.student)
    tokenizer, spec = model.tokenizer, model.spec
    check_output(config.output)
    model.check_vocabulary()
    evaluator = Evaluator(config, tokenizer, spec.max_positions)
    spec.check_tensor_parallel(config.rollout.tensor, "rollout.tensor")
    check_rollout_ranks(config, trainer_ranks(config, world_size()))
    check_on_device(config, spec)
    read = model.read
    init_distributed()
    ranks = Layout(data=trainer_ranks(config, dist.get_world_size()))
    limit = None
    if config.rollout.engine == "vllm" and config.rollout.vllm.endpoints:
        limit = known_ids(config)  # as the endpoint of a training run masks them
    engine = make_engine(config, spec, model.directory, ranks, tokenizer.eos_ids, limit)
    try:
        seed_everything(config.seed)
        engine.load(read, str(model.directory))
        metrics = evaluator.evaluate(engine)
    finally:
        engine.close()
    if dist.get_rank() == 0:
        output = Path(config.output)
        output.mkdir(parents=True, exist_ok=True)
        write_atomically(output / "evaluation.json", json.dumps(metrics, indent=1) + "\n")
        print(table({model.directory.name: metrics}, config.evaluation.samples))
