"""Makes a shallower student from a Hugging Face model: leaves out the layers that change their input least.

python checkpoint_tools/prune_layers.py --hf-path MODEL --output STUDENT --keep 20 --prompts FILE
python checkpoint_tools/prune_layers.py --hf-path MODEL --output STUDENT --layers 1,2,3,6,7,8

The last line is a setting for training: it compares each of the student's layers with the model's layer that it was.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from _command import add_model, student_of, tool


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser, "the student; an earlier one there is replaced")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--keep", type=int, metavar="N", help="keep the N layers of most influence on --prompts")
    which.add_argument("--layers", metavar="1,2,...", help="keep these layers, counted from 1")
    parser.add_argument("--prompts", metavar="FILE", help="prompts (.jsonl or .parquet) to measure influences on")
    parser.add_argument("--count", type=int, default=128, metavar="N", help="prompts to read (default: %(default)s)")


def run(options: argparse.Namespace) -> None:
    from _pruning import kept_map, prune_layers

    from nemo_oprd.models import read_model_spec

    source, target = student_of(options)
    kept = _given(options.layers) if options.layers is not None else _measured(source, options)
    spec = prune_layers(source, target, kept)
    print(f"{target}: {spec.num_layers} layers of {source}: {','.join(map(str, kept))}")
    print(kept_map(kept, read_model_spec(source).num_layers))


def _given(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"--layers {text!r}: expected numbers and commas, such as 1,2,5; correct it") from None


def _measured(source: Path, options: argparse.Namespace) -> list[int]:
    """The layers of most influence; prints all influences."""
    from _pruning import layer_influences, layers_to_keep

    from nemo_oprd.data.prompts import load_prompts
    from nemo_oprd.data.tokenizer import Tokenizer
    from nemo_oprd.models import read_model_spec

    spec = read_model_spec(source)
    if not 1 <= options.keep <= spec.num_layers:
        raise ValueError(f"--keep {options.keep}: expected 1 to {spec.num_layers}, the model's layers; choose another")
    if options.prompts is None:
        raise ValueError("--keep needs --prompts FILE, on which the layers' influence is measured; give a file")
    tokenizer = Tokenizer.load(source)
    prompts = load_prompts(options.prompts)[: options.count]
    ids = (tokenizer.encode_prompt(prompt.messages, prompt.tools)[: spec.max_positions] for prompt in prompts)
    influences = layer_influences(source, ids, spec.torch_dtype)
    kept = layers_to_keep(influences, options.keep)
    for layer, influence in enumerate(influences, 1):
        print(f"layer {layer:>3}  influence {influence:.4f}  {'' if layer in kept else 'left out'}".rstrip())
    return kept


main = tool("Hugging Face model -> the same with fewer layers.", add_arguments, run)


if __name__ == "__main__":
    main()
