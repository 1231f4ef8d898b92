"""Converts a Hugging Face model to a Megatron torch_dist checkpoint, which loads in any layout. Needs no torchrun.

python checkpoint_tools/hf_to_megatron.py --hf-path MODEL --output CHECKPOINT [--tensor 2 --pipeline 2]
"""

from __future__ import annotations

import argparse

from _command import add_model, add_provider, tool


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser, "the checkpoint; a missing or empty directory")
    parser.add_argument(
        "--tensor", type=int, default=1, metavar="N", help="split chunks for this tensor-parallel size (default 1)"
    )
    parser.add_argument(
        "--pipeline", type=int, default=1, metavar="N", help="write files for this many pipeline stages (default 1)"
    )
    add_provider(parser)


def run(options: argparse.Namespace) -> None:
    from _convert import hf_to_megatron

    from nemo_oprd.run.provider import find_family

    family = find_family(options.provider, hf_path=options.hf_path)
    hf_to_megatron(options.hf_path, options.output, tensor=options.tensor, pipeline=options.pipeline, family=family)
    print(f"{options.output}: torch_dist checkpoint of {options.hf_path}")


main = tool("Hugging Face model -> Megatron torch_dist checkpoint.", add_arguments, run)


if __name__ == "__main__":
    main()
