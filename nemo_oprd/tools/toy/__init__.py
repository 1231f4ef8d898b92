"""`toy`: makes a small student, a teacher and their prompts, which two CPU cores train in a minute or two.

`pair.py` defines the problems and their tokenizer, and trains the models. The toy does not use the training system,
which has no code for the toy: the output is ordinary Hugging Face model directories and ordinary prompt files.
"""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output", required=True, metavar="DIR")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--experts", type=int, default=0, metavar="N", help="a Qwen3-MoE with N experts per layer; 0 (default): a Qwen2"
    )
    parser.add_argument(
        "--family",
        default="",
        metavar="NAME",
        help="qwen3_5 or gpt_oss, whose models provider=bridge trains; default: a Qwen2",
    )


def run(options: argparse.Namespace) -> None:
    from nemo_oprd.tools.toy.pair import make_pair

    make_pair(Path(options.output), seed=options.seed, experts=options.experts, family=options.family)
