"""`plan`: estimates a run from its configuration and the models' config.json: memory, operations, bytes and seconds.

Everything here is arithmetic: no torch, no weights, no processes. The memory of small models is compared with counted
live bytes in `tests/functional/test_capacity.py`.
"""

from __future__ import annotations

import argparse
import json

from nemo_oprd.commands.options import add_config, config_of, json_file, origin, positive, rank_count
from nemo_oprd.run.preflight import preflight
from nemo_oprd.runtime.files import write_atomically
from nemo_oprd.tools.plan.alternatives import alternatives as find_alternatives
from nemo_oprd.tools.plan.estimate import Lengths
from nemo_oprd.tools.plan.estimate import estimate as estimate_run
from nemo_oprd.tools.plan.gpus import Cluster, Layers, add_gpus, gpu_of
from nemo_oprd.tools.plan.report import as_json, lines


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config(parser)
    parser.add_argument("--ranks", type=rank_count, required=True, metavar="N", help="ranks of the job, one GPU each")
    add_gpus(parser)
    parser.add_argument("--prompt-tokens", type=positive, metavar="N", help="default: data.max_prompt_tokens, or 256")
    parser.add_argument(
        "--response-tokens",
        type=positive,
        metavar="N",
        help="tokens of an average response, for seconds; memory is that of the longest (default: the longest)",
    )
    parser.add_argument("--problems", type=positive, metavar="N", help="problems of one evaluation")
    parser.add_argument("--json", metavar="FILE", help="also write all numbers there")


def run(options: argparse.Namespace) -> int:
    """Prints the estimate of a training run; returns 1 if the run does not fit, else 0.

    Raises:
        ValueError: the configuration, a model or the number of ranks is wrong.
    """
    file = json_file(options, r'\{\s*"ranks":')
    config = config_of(options)
    run_spec = preflight(config, options.ranks, "plan", origin=origin(options))
    layers: Layers = "transformer_engine" if config.precision == "bf16" else "local"
    cluster = Cluster(options.ranks, gpu_of(options), options.gpus_per_node, layers)
    lengths = Lengths(options.prompt_tokens, options.response_tokens, options.problems)
    found = estimate_run(run_spec, cluster, lengths)
    near = find_alternatives(run_spec, cluster, lengths) if found.problems else []
    for line in (*lines(found, near, options.config_name), *run_spec.models.notes):
        print(line)
    if file is not None:
        write_atomically(file, json.dumps(as_json(found, near), indent=1) + "\n")
    return 1 if found.problems else 0
