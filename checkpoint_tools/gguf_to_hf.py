"""Writes a model in a GGUF file as a Hugging Face directory in float32, with its tokenizer.

python checkpoint_tools/gguf_to_hf.py --gguf FILE --output MODEL
"""

from __future__ import annotations

import argparse
from pathlib import Path

from _command import tool


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--gguf", required=True, metavar="FILE", help="the model in GGUF format")
    parser.add_argument("--output", required=True, metavar="DIR", help="the model; an earlier one there is replaced")


def run(options: argparse.Namespace) -> None:
    from _gguf import gguf_to_hf

    from nemo_oprd.runtime.output_directories import check_directory

    check_directory(Path(options.output), "export", "--output")
    spec = gguf_to_hf(Path(options.gguf), Path(options.output))
    print(f"{options.output}: {spec.num_layers} layers of width {spec.hidden_size}, from {options.gguf}")


main = tool("GGUF file -> Hugging Face model.", add_arguments, run)


if __name__ == "__main__":
    main()
