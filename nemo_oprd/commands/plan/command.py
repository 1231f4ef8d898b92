"""`plan`: what a configuration needs on a number of GPUs, from its models' config.json alone."""

from __future__ import annotations

import json
from pathlib import Path

from nemo_oprd.commands.plan.alternatives import alternatives
from nemo_oprd.commands.plan.estimate import Lengths, estimate
from nemo_oprd.commands.plan.gpus import GPUS, Cluster
from nemo_oprd.commands.plan.report import as_json, lines
from nemo_oprd.config.schema import Config
from nemo_oprd.runtime.files import write_atomically
from nemo_oprd.runtime.output_directories import check_file
from nemo_oprd.setup.checks import check_trains
from nemo_oprd.setup.resolve import resolve


def plan(
    config: Config,
    name: str,
    ranks: int,
    gpu: str,
    lengths: Lengths,
    *,
    gpus_per_node: int = 8,
    json_file: str | None = None,
) -> bool:
    """Prints the estimate of a training run, and writes it to `json_file`.

    Args:
        name: the configuration's name.
        gpu: a key of `GPUS`.

    Returns:
        Whether the run fits.

    Raises:
        ValueError: the configuration, a model or the number of ranks is wrong.
    """
    check_trains(config)
    if json_file is not None:
        check_file(Path(json_file), "plan", "--json", r'\{\s*"ranks":')
    run = resolve(config, ranks)
    cluster = Cluster(ranks, GPUS[gpu], gpus_per_node, transformer_engine=config.precision == "bf16")
    found = estimate(run, cluster, lengths)
    near = alternatives(run, cluster, lengths) if found.problems else []
    for line in lines(found, near, name):
        print(line)
    if json_file is not None:
        write_atomically(Path(json_file), json.dumps(as_json(found, near), indent=1) + "\n")
    return not found.problems
