"""Makes a damaged student from a Hugging Face model: the weights of its layers are rounded to a few bits.

python checkpoint_tools/round_weights.py --hf-path MODEL --output STUDENT --bits 2
"""

from __future__ import annotations

import argparse

from _command import add_model, student_of, tool


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser, "the student; an earlier one there is replaced")
    parser.add_argument("--bits", type=int, required=True, metavar="N", help="2^N values per group")
    parser.add_argument(
        "--group", type=int, default=32, metavar="N", help="weights of a row that share a range (default: %(default)s)"
    )


def run(options: argparse.Namespace) -> None:
    from _rounding import round_layers

    source, target = student_of(options)
    spec = round_layers(source, target, options.bits, options.group)
    print(f"{target}: {spec.num_layers} layers rounded to {options.bits} bits in groups of {options.group}")


main = tool("Hugging Face model -> the same with rounded weights.", add_arguments, run)


if __name__ == "__main__":
    main()
