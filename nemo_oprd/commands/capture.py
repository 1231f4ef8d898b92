"""`capture`: writes hidden states of a vLLM server, checked against transformers, for other training programs."""

from __future__ import annotations

import argparse
from pathlib import Path

from nemo_oprd.commands.options import add_verbosity, positive


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, metavar="DIR", help="a Hugging Face model")
    parser.add_argument(
        "--prompts", required=True, metavar="FILE", help="prompts (.jsonl or .parquet), or recorded rollouts (.jsonl)"
    )
    parser.add_argument(
        "--layers",
        default="all",
        metavar="LIST",
        help="e.g. 2,14,final: the residual stream after so many blocks, and the state after the final norm "
        "(default: all of them)",
    )
    parser.add_argument("--output", required=True, metavar="DIR", help="earlier results there are replaced")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16", help="default: %(default)s")
    parser.add_argument("--tensor", type=positive, default=1, metavar="N", help="workers (default: %(default)s)")
    parser.add_argument("--python", metavar="FILE", help="interpreter of vLLM's environment (default: .venv-vllm)")
    add_verbosity(parser)


def run(options: argparse.Namespace) -> None:
    from nemo_oprd.run.capture import CaptureOptions, capture

    capture(
        CaptureOptions(
            model=Path(options.model),
            prompts=Path(options.prompts),
            layers=options.layers,
            output=Path(options.output),
            dtype=options.dtype,
            tensor=options.tensor,
            python=options.python,
        )
    )
