"""The command line. Slow imports wait until a command runs, so `--help` is instant.

nemo-oprd toy --output DIR                                  a small model pair and its prompts
torchrun ... -m nemo_oprd doctor --config-name NAME [k=v]   what would make this run fail silently
torchrun ... -m nemo_oprd train --config-name NAME [k=v]    distil
torchrun ... -m nemo_oprd verify --config-name NAME [k=v]   losses and gradients on recorded rollouts
torchrun ... -m nemo_oprd fit-bridge --config-name NAME [k=v]  projectors between models of different shape
torchrun ... -m nemo_oprd evaluate --config-name NAME [k=v] sample and grade
nemo-oprd grade RUN_OR_FILE [...] [--against OTHER]         grade kept responses again, without a model
nemo-oprd serve --config-name NAME [--port P] [k=v]         a vLLM server for rollout.vllm.endpoints
nemo-oprd data --config-name NAME [k=v]                     what a run would do to its prompts, without a model
nemo-oprd plan --config-name NAME --ranks N [k=v]           memory, bytes and seconds of a run, before it is started
nemo-oprd report RUN [RUN ...] [--output FILE] [--follow]   one page of figures, tables and responses
nemo-oprd from-nemo-rl RECIPE.yaml [--output FILE]          a distillation recipe of NeMo-RL as a configuration
nemo-oprd compare --teacher DIR --prompts FILE --output DIR NAME=DIR ...   distance of students from their teacher
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from nemo_oprd import __version__
from nemo_oprd.commands.intermixed import IntermixedParser
from nemo_oprd.commands.parser import Parser, positive

if TYPE_CHECKING:
    from nemo_oprd.config.schema import Config

# Seconds that a rank other than rank 0 waits before it reports an error that another rank may report, too. Before the
# process group is joined, ranks differ by the time that imports take on a busy machine; afterwards they are in step. A
# rank with an unexpected error, which may follow from another rank's mistake, waits longer than one with a clear error.
_WAIT_BEFORE_JOINING_S, _WAIT_AFTER_JOINING_S, _WAIT_WITHOUT_REASON_S = 30, 3, 6

_CONFIGURED = {
    "doctor": "say in one line each what would make this run fail silently; exit code 1 if anything is wrong",
    "train": "distil the student on its own rollouts",
    "verify": "one training step on recorded rollouts, without the optimizer: losses.json and grads.safetensors",
    "fit-bridge": "make the frozen projectors between models of different shape (OPRD-Bridge, stage 1)",
    "evaluate": "sample the student on the validation sets and grade it",
    "serve": "a vLLM server for the student, for runs with rollout.vllm.endpoints",
    "data": "what a run would do to its prompts: suffix, held-out problems, duplicates, contamination; needs no model",
    "plan": "what a training run needs on a number of GPUs: memory, operations, bytes, seconds; config.json is enough",
}


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="nemo-oprd", description="On-policy representation distillation on Megatron-core.")
    parser.add_argument("--version", action="version", version=f"nemo-oprd {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=IntermixedParser)
    for name, text in _CONFIGURED.items():
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument(
            "--config-name", required=True, metavar="NAME", help="a YAML file in the configuration directory"
        )
        command.add_argument(
            "--config-dir", metavar="DIR", help="the configuration directory (default: the project's conf/)"
        )
        if name == "verify":
            command.add_argument(
                "--against",
                choices=["reference"],
                help="also compute the plain Hugging Face reference in one process and print the deviations",
            )
        if name == "doctor":
            command.add_argument("--prompts", type=int, default=16, help="prompts to sample (default: %(default)s)")
            command.add_argument("--problems", type=int, default=32, help="problems to grade (default: %(default)s)")
            command.add_argument("--max-new-tokens", type=int, default=512, help="per response (default: %(default)s)")
            command.add_argument("--json", metavar="FILE", help="also write all findings, with their numbers")
        if name == "data":
            command.add_argument("--json", metavar="FILE", help="also write the counts and examples")
        if name == "serve":
            command.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
            command.add_argument("--port", type=int, default=8000, help="default: %(default)s")
        if name == "plan":
            _add_plan_arguments(command)
        command.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="e.g. train.lr=1e-4 output=runs/a")
    toy = commands.add_parser("toy", help="make a small student-teacher pair and its prompts")
    toy.add_argument("--output", required=True, metavar="DIR")
    toy.add_argument("--seed", type=int, default=0)
    toy.add_argument(
        "--experts", type=int, default=0, metavar="N", help="a Qwen3-MoE with N experts per layer; 0 (default): a Qwen2"
    )
    report = commands.add_parser("report", help="one HTML page of curves from one or several runs")
    report.add_argument("runs", nargs="+", metavar="RUN")
    report.add_argument("--output", metavar="FILE", help="default: report.html in the first run")
    report.add_argument(
        "--follow",
        metavar="SECONDS",
        type=float,
        nargs="?",
        const=30.0,
        help="write the page anew every so many seconds (30) until the runs are finished; Ctrl-C ends it",
    )
    _add_compare(commands)
    _add_grade(commands)
    _add_from_nemo_rl(commands)
    return parser


def _add_from_nemo_rl(commands: argparse._SubParsersAction) -> None:
    text = "a distillation recipe of NeMo-RL as a configuration, with a list of what has no counterpart"
    command = commands.add_parser("from-nemo-rl", help=text, description=text)
    command.add_argument("recipe", metavar="RECIPE.yaml", help="with the files that it inherits from in their places")
    command.add_argument("--output", metavar="FILE", help="the configuration's file (default: printed)")
    command.add_argument(
        "--models", default="models", metavar="DIR", help="directory of the Hugging Face models (default: %(default)s)"
    )
    command.add_argument(
        "--oprd", action="store_true", help="with the hidden-state loss in place of the recipe's divergence"
    )


def _add_grade(commands: argparse._SubParsersAction) -> None:
    text = "grade kept responses again and print their metrics with intervals; needs no model"
    command = commands.add_parser("grade", help=text, description=text)
    command.add_argument(
        "targets",
        nargs="+",
        metavar="RUN_OR_FILE",
        help="an output of `evaluate`, a run, or a file generations/SET.jsonl",
    )
    command.add_argument(
        "--data", action="append", default=[], metavar="[SET=]FILE", help="take reference answers from this file"
    )
    command.add_argument(
        "--grader", action="append", default=[], metavar="[SET=]NAME", help="a built-in grader, or MODULE:FUNCTION"
    )
    command.add_argument("--judge", default="math_verify", metavar="NAME", help="math_verify (default) or text")
    command.add_argument("--against", metavar="RUN_OR_FILE", help="print paired differences from this evaluation")
    command.add_argument("--output", metavar="DIR", help="of one evaluation (default: beside its generations)")


def _add_compare(commands: argparse._SubParsersAction) -> None:
    text = "how far students' next-token distributions are from their teacher's, on its responses and on their own"
    command = commands.add_parser("compare", help=text, description=text)
    command.add_argument("students", nargs="+", metavar="NAME=DIR", help="Hugging Face models, with a name for each")
    command.add_argument("--teacher", required=True, metavar="DIR", help="a Hugging Face model")
    command.add_argument("--prompts", required=True, metavar="FILE", help="prompts (.jsonl or .parquet)")
    command.add_argument("--output", required=True, metavar="DIR", help="measurements there are used again")
    command.add_argument("--count", type=positive, default=64, metavar="N", help="prompts (default: %(default)s)")
    command.add_argument(
        "--max-new-tokens", type=positive, default=64, metavar="N", help="per response (default: %(default)s)"
    )
    command.add_argument("--temperature", type=float, default=1.0, help="0: most probable (default: %(default)s)")
    command.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    command.add_argument(
        "--batch", type=positive, default=64, metavar="N", help="sampled at once (default: %(default)s)"
    )
    command.add_argument(
        "--teacher-responses", metavar="FILE", help="recorded responses of the teacher, in place of new samples"
    )
    command.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="default: %(default)s")


def _add_plan_arguments(command: argparse.ArgumentParser) -> None:
    from nemo_oprd.commands.plan.gpus import GPUS

    command.add_argument("--ranks", type=positive, required=True, metavar="N", help="ranks of the job, one GPU each")
    command.add_argument("--gpus-per-node", type=positive, default=8, metavar="N", help="default: %(default)s")
    command.add_argument("--gpu", choices=sorted(GPUS), default="h100", help="default: %(default)s")
    command.add_argument(
        "--prompt-tokens", type=positive, metavar="N", help="default: data.max_prompt_tokens, else 256"
    )
    command.add_argument(
        "--response-tokens",
        type=positive,
        metavar="N",
        help="tokens of an average response, for seconds; memory is that of the longest (default: the longest)",
    )
    command.add_argument("--problems", type=positive, metavar="N", help="problems of one evaluation")
    command.add_argument("--json", metavar="FILE", help="also write all numbers there")


def main(arguments: list[str] | None = None, *, alone: bool | None = None) -> None:
    """Runs the command line `arguments` (None: that of this process), and exits with a nonzero code on failure.

    `alone` is that of `run_as_command`; by default it is whether the command line is that of this process.

    A user's mistake ends the command with one line on stderr, from one rank, and exit code 2. A run that a signal asked
    to stop ends with `STOPPED_EXIT_CODE` after it has saved, or with 130 after a second Ctrl-C. An unexpected error
    prints one traceback, from one rank, and ends the command with 1; the other ranks exit with 1 and print nothing.
    """
    options = _parser().parse_args(arguments)
    run_as_command(lambda: _run(options), alone=arguments is None if alone is None else alone)


def run_as_command(work: Callable[[], int], *, alone: bool = True) -> None:
    """Runs `work` and ends as a command of this project does, also in a program with a command line of its own.

    Args:
        work: returns the exit code.
        alone: this process does nothing else, so that its end may be a hard one.
    """
    # set before torch is imported: if a rank ends with an error, torch prints a warning with a stack on all others
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from nemo_oprd.runtime import watchdog

    watchdog.enabled = alone
    try:
        code = work()
        _leave()
    except Exception as error:
        code = _report(error)
    except KeyboardInterrupt:
        code = 130
    else:
        if code:
            sys.exit(code)
        return
    if watchdog.current() is None:
        sys.exit(code)
    # other ranks may have died in a collective, and closing the communicators would wait for them
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _users_mistake(error: Exception) -> str | None:
    """One line for an error that a user can fix: a ValueError, a file or the disk; None for all other errors."""
    from nemo_oprd.runtime.disk import describe, is_about_files, no_space

    if isinstance(error, ValueError):
        return " ".join(line.strip() for line in str(error).splitlines() if line.strip())
    if isinstance(error, OSError) and is_about_files(error):
        return describe(error)
    if no_space(error):
        return f"the disk is full ({' '.join(str(error).split())}); free some space, or choose another output"
    return None


def _report(error: Exception) -> int:
    """Reports the error that ended the command, from one rank, and returns the exit code.

    A mistake that all ranks find is reported by rank 0. A mistake that only another rank can find, such as one in a
    shard that this rank alone reads, is reported by that rank if no other rank has ended the job after some seconds.
    """
    from nemo_oprd.runtime import watchdog
    from nemo_oprd.runtime.signals import STOPPED_EXIT_CODE, Stopped

    rank, watch = os.environ.get("RANK", "0"), watchdog.current()
    if isinstance(error, Stopped):
        if rank == "0":
            print(error, file=sys.stderr, flush=True)
        _leave()
        return STOPPED_EXIT_CODE
    message = _users_mistake(error)
    if os.environ.get("NEMO_OPRD_TRACEBACK"):
        message = None

    def say() -> None:
        if message is None:
            traceback.print_exception(error)
        else:
            print(f"error: {'' if rank == '0' else f'rank {rank}: '}{message}", file=sys.stderr, flush=True)

    # a collective fails when another rank dies; that rank reports the reason, so this one waits for it
    wait_s = 0.0 if rank == "0" and message is not None else _wait_s(message is not None)
    if watch is not None:
        if watch.failure(wait_s) is not None:
            return 1
        watch.fail(message or repr(error), say)
    else:
        if rank != "0":
            time.sleep(wait_s)
        say()
    return 1 if message is None else 2


def _run(options: argparse.Namespace) -> int:
    """Runs the command; returns the exit code."""
    if getattr(options, "json", None) is not None:
        from nemo_oprd.runtime.disk import check_file

        check_file(options.json, "--json")
    if options.command == "toy":
        from nemo_oprd.commands.toy.pair import make_pair

        make_pair(Path(options.output), seed=options.seed, experts=options.experts)
    elif options.command == "report":
        from nemo_oprd.commands.report.command import report

        report(options.runs, options.output, options.follow)
    elif options.command == "doctor":
        return _run_doctor(options)
    elif options.command == "compare":
        _run_compare(options)
    elif options.command == "grade":
        _run_grade(options)
    elif options.command == "from-nemo-rl":
        from nemo_oprd.commands.from_nemo_rl.command import from_nemo_rl

        from_nemo_rl(options.recipe, options.output, options.models, oprd=options.oprd)
    else:
        _run_configured(options)
    return 0


def _run_compare(options: argparse.Namespace) -> None:
    from nemo_oprd.commands.compare import CompareOptions, compare, parse_students
    from nemo_oprd.evaluation.agreement import Sampling

    if not 0 <= options.temperature < math.inf:
        raise ValueError(f"--temperature {options.temperature}: expected 0 or more; correct it")
    compare(
        CompareOptions(
            teacher=Path(options.teacher),
            students=parse_students(options.students),
            prompts=Path(options.prompts),
            output=Path(options.output),
            count=options.count,
            dtype=options.dtype,
            teacher_responses=Path(options.teacher_responses) if options.teacher_responses else None,
            sampling=Sampling(options.max_new_tokens, options.temperature, options.seed, options.batch),
        )
    )


def _run_grade(options: argparse.Namespace) -> None:
    from nemo_oprd.commands.grade import GradeOptions, by_set, grade

    grade(
        GradeOptions(
            targets=tuple(Path(target) for target in options.targets),
            data={name: Path(file) for name, file in by_set("--data", options.data).items()},
            graders=by_set("--grader", options.grader),
            judge=options.judge,
            against=Path(options.against) if options.against else None,
            output=Path(options.output) if options.output else None,
        )
    )


def _run_doctor(options: argparse.Namespace) -> int:
    from nemo_oprd.commands.doctor.settings import Settings, for_diagnosis
    from nemo_oprd.config.loading import load_config
    from nemo_oprd.setup.preflight import preflight

    config = load_config(options.config_name, options.overrides, options.config_dir)
    settings = Settings(options.prompts, options.problems, options.max_new_tokens)
    preflight(for_diagnosis(config, settings), int(os.environ.get("WORLD_SIZE", "1")), "train")
    _quiet_megatron()
    from nemo_oprd.commands.doctor.command import doctor

    return int(doctor(config, settings, options.json))


def _run_configured(options: argparse.Namespace) -> None:
    from nemo_oprd.config.loading import load_config
    from nemo_oprd.setup.preflight import preflight

    config = load_config(options.config_name, options.overrides, options.config_dir)
    if options.command == "serve":
        from nemo_oprd.commands.serve import serve

        serve(config, options.host, options.port)
        return
    if options.command == "plan":
        _plan(config, options)
        return
    if options.command == "data":
        from nemo_oprd.commands.data import show_data

        show_data(config, options.json)
        return
    against_reference = options.command == "verify" and options.against == "reference"
    # mistakes that the configuration and the models' config.json show are reported before torch is imported (seconds)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    preflight(config, ranks, options.command, against_reference=against_reference)
    _quiet_megatron()
    if options.command == "train":
        from nemo_oprd.train import train

        train(config)
    elif options.command == "fit-bridge":
        from nemo_oprd.commands.fit_bridge.command import fit_bridge

        fit_bridge(config)
    elif options.command == "evaluate":
        from nemo_oprd.commands.evaluate import evaluate

        evaluate(config)
    else:
        from nemo_oprd.commands.verify import verify

        verify(config, against_reference=against_reference)


def _plan(config: Config, options: argparse.Namespace) -> None:
    """Runs `plan`; exits with 1 if the run does not fit."""
    from nemo_oprd.commands.plan.command import plan
    from nemo_oprd.commands.plan.estimate import Lengths

    fits = plan(
        config,
        options.config_name,
        options.ranks,
        options.gpu,
        Lengths(options.prompt_tokens, options.response_tokens, options.problems),
        gpus_per_node=options.gpus_per_node,
        json_file=options.json,
    )
    if not fits:
        sys.exit(1)


def _quiet_megatron() -> None:
    """Hides the warnings of Megatron, on every rank, that Apex and Transformer Engine are absent."""
    import warnings

    warnings.filterwarnings("ignore", module=r"megatron\.")


def _leave() -> None:
    """Leaves the process group together with the other ranks, if this process has joined one."""
    from nemo_oprd.runtime import watchdog

    watch = watchdog.current()
    if watch is not None:
        import torch.distributed as dist

        dist.barrier()  # while the watchdog runs, because another rank may still be working and may die
        watch.close()
        watch.wait_for_others()
    if _joined():
        sys.modules["torch.distributed"].destroy_process_group()


def _wait_s(explained: bool) -> float:
    """Seconds to wait for another rank's report; `explained`: whether this rank has a message for the user."""
    if not _joined():
        return _WAIT_BEFORE_JOINING_S
    return _WAIT_AFTER_JOINING_S if explained else _WAIT_WITHOUT_REASON_S


def _joined() -> bool:
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_available() and distributed.is_initialized()
