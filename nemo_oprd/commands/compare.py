"""`compare`: compares one or several students with their teacher, on the teacher's responses and on their own."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from nemo_oprd.commands.options import add_verbosity, positive


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("students", nargs="+", metavar="NAME=DIR", help="Hugging Face models, with a name for each")
    parser.add_argument("--teacher", required=True, metavar="DIR", help="a Hugging Face model")
    parser.add_argument("--prompts", required=True, metavar="FILE", help="prompts (.jsonl or .parquet)")
    parser.add_argument("--output", required=True, metavar="DIR", help="measurements there are used again")
    parser.add_argument("--count", type=positive, default=64, metavar="N", help="prompts (default: %(default)s)")
    parser.add_argument(
        "--max-new-tokens", type=positive, default=64, metavar="N", help="per response (default: %(default)s)"
    )
    parser.add_argument("--temperature", type=float, default=1.0, help="0: most probable (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument(
        "--batch", type=positive, default=64, metavar="N", help="sampled at once (default: %(default)s)"
    )
    parser.add_argument(
        "--teacher-responses", metavar="FILE", help="recorded responses of the teacher, in place of new samples"
    )
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="default: %(default)s")
    add_verbosity(parser)


def run(options: argparse.Namespace) -> None:
    from nemo_oprd.evaluation.agreement import SamplingSettings
    from nemo_oprd.evaluation.compare import CompareOptions, compare, parse_students

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
            sampling=SamplingSettings(options.max_new_tokens, options.temperature, options.seed, options.batch),
        )
    )
