"""The command line: a table of the commands. Each command's options and work are in the module that the table names.

    nemo-oprd toy --output DIR                                    a small model pair and its prompts
    torchrun ... -m nemo_oprd train --config-name NAME [k=v]      training on several GPUs

A command is a module in `commands/`, or a module or package in `tools/` or `integrations/`, which training never
imports. It has an entry in `COMMANDS`, and defines

    add_arguments(parser)          its options
    run(options) -> int | None     what it does; the exit code, 0 if None (`runtime/exits.py` has the others)

Only the module of the command that was called is imported. It imports slow packages inside `run`, so that `--help`
and mistakes show at once.
"""

from __future__ import annotations

import argparse

from nemo_oprd import __version__
from nemo_oprd.commands.parser import CommandParser, Parser
from nemo_oprd.runtime.exits import run_as_command
from nemo_oprd.runtime.messages import show

__all__ = ["COMMANDS", "main", "run_as_command"]

# name -> module of its options and its work, what it does
COMMANDS: dict[str, tuple[str, str]] = {
    "doctor": (
        "nemo_oprd.tools.doctor",
        "say in one line each what would make this run fail silently; exit code 1 if anything is wrong",
    ),
    "train": (
        "nemo_oprd.commands.train",
        "distil the student on its own rollouts",
    ),
    "verify": (
        "nemo_oprd.commands.verify",
        "one training step on recorded rollouts, without the optimizer: losses.json and grads.safetensors",
    ),
    "fit-bridge": (
        "nemo_oprd.commands.fit_bridge",
        "make the frozen projectors between models of different shape (OPRD-Bridge, stage 1)",
    ),
    "evaluate": (
        "nemo_oprd.commands.evaluate",
        "sample the student on the validation sets and grade it",
    ),
    "serve": (
        "nemo_oprd.commands.serve",
        "a vLLM server for the student or a teacher, for runs that name it in rollout.vllm or teacher.vllm",
    ),
    "data": (
        "nemo_oprd.commands.data",
        "what a run would do to its prompts: suffix, held-out problems, duplicates, contamination; needs no model",
    ),
    "plan": (
        "nemo_oprd.tools.plan",
        "what a training run needs on a number of GPUs: memory, operations, bytes, seconds; config.json is enough",
    ),
    "rehearse": (
        "nemo_oprd.tools.rehearse",
        "two steps of some ranks at full size on fake CUDA tensors: memory, waits, mistakes; needs no GPU",
    ),
    "families": (
        "nemo_oprd.tools.families",
        "which model families run, who builds them, with which layouts they were tried, what is refused",
    ),
    "toy": (
        "nemo_oprd.tools.toy",
        "make a small student-teacher pair and its prompts",
    ),
    "report": (
        "nemo_oprd.tools.report",
        "one HTML page of curves from one or several runs",
    ),
    "compare": (
        "nemo_oprd.commands.compare",
        "how far students' next-token distributions are from their teacher's, on its responses and on their own",
    ),
    "capture": (
        "nemo_oprd.commands.capture",
        "the hidden states of any model that vLLM runs, proven against transformers, as safetensors files",
    ),
    "grade": (
        "nemo_oprd.commands.grade",
        "grade kept responses again and print their metrics with intervals; needs no model",
    ),
    "from-nemo-rl": (
        "nemo_oprd.integrations.from_nemo_rl",
        "a distillation recipe of NeMo-RL as a configuration, with a list of what has no counterpart",
    ),
}


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of all commands."""
    parser = Parser(prog="nemo-oprd", description="On-policy representation distillation on Megatron-core.")
    parser.add_argument("--version", action="version", version=f"nemo-oprd {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=CommandParser)
    for name, (module, text) in COMMANDS.items():
        commands.add_parser(name, help=text, description=text, module=module)
    return parser


def main(arguments: list[str] | None = None, *, alone: bool | None = None) -> None:
    """Runs the command line `arguments` (None: those of this process), and exits with a nonzero code on failure.

    `alone` is passed to `run_as_command`; None: true if `arguments` is None.
    """
    options = make_parser().parse_args(arguments)

    def work() -> int:
        show(getattr(options, "verbosity", "usual"))
        return options.run(options) or 0

    run_as_command(work, alone=arguments is None if alone is None else alone)
