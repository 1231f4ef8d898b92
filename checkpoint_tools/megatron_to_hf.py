"""Converts a Megatron torch_dist checkpoint (also a training checkpoint) to a Hugging Face model. Needs no torchrun.

python checkpoint_tools/megatron_to_hf.py --megatron-path CHECKPOINT --output MODEL [--dtype bfloat16]
"""

from __future__ import annotations

import argparse

from _command import add_provider, tool


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--megatron-path", required=True, metavar="DIR", help="the checkpoint, such as RUN/checkpoints/iter_0000050"
    )
    parser.add_argument("--output", required=True, metavar="DIR", help="the model; a missing or empty directory")
    parser.add_argument(
        "--hf-path",
        metavar="DIR",
        help="for a checkpoint of Megatron-Bridge: the directory with the model's config.json and tokenizer",
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="dtype of the written weights (default: the dtype in the checkpoint's hf/config.json)",
    )
    add_provider(parser)


def run(options: argparse.Namespace) -> None:
    from _convert import megatron_to_hf

    from nemo_oprd.run.provider import find_family

    family = find_family(options.provider, hf_path=options.hf_path, checkpoint=options.megatron_path)
    megatron_to_hf(options.megatron_path, options.output, hf_path=options.hf_path, dtype=options.dtype, family=family)
    print(f"{options.output}: Hugging Face model of {options.megatron_path}")


main = tool("Megatron torch_dist checkpoint -> Hugging Face model.", add_arguments, run)


if __name__ == "__main__":
    main()
