"""Makes a damaged student from a Hugging Face model: the weights of its layers are rounded to a few bits.

python checkpoint_tools/round_weights.py --hf-path MODEL --output STUDENT --bits 2
"""

from __future__ import annotations

from pathlib import Path

from _command import Parser, run


def main() -> None:
    """Entry point."""
    parser = Parser(description="Hugging Face model -> the same with rounded weights.")
    parser.add_argument("--hf-path", required=True, metavar="DIR", help="the model: config.json and safetensors")
    parser.add_argument("--output", required=True, metavar="DIR", help="the student; an earlier one there is replaced")
    parser.add_argument("--bits", type=int, required=True, metavar="N", help="2^N values per group")
    parser.add_argument(
        "--group", type=int, default=32, metavar="N", help="weights of a row that share a range (default: %(default)s)"
    )
    options = parser.parse_args()

    def round_all() -> int:
        from nemo_oprd.models.weights.rounding import round_layers
        from nemo_oprd.runtime.output_directories import check_directory

        source, target = Path(options.hf_path), Path(options.output)
        if target.resolve() == source.resolve():
            raise ValueError(f"--output {target} is the model itself; expected another directory: choose one")
        check_directory(target, "export", "--output")
        spec = round_layers(source, target, options.bits, options.group)
        print(f"{target}: {spec.num_layers} layers rounded to {options.bits} bits in groups of {options.group}")
        return 0

    run(round_all)


if __name__ == "__main__":
    main()
