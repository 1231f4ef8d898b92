"""The command `from-nemo-rl`: translates a distillation recipe of NeMo-RL to a configuration of this project."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from tempfile import TemporaryDirectory

import yaml

from nemo_oprd.config.loading import from_composed, load_config
from nemo_oprd.integrations.from_nemo_rl.keys import translate
from nemo_oprd.integrations.from_nemo_rl.models import ranks
from nemo_oprd.integrations.from_nemo_rl.recipe import load_recipe
from nemo_oprd.runtime.files import write_atomically
from nemo_oprd.runtime.output_directories import check_file


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", metavar="RECIPE.yaml", help="with the files that it inherits from in their places")
    parser.add_argument("--output", metavar="FILE", help="the configuration's file (default: printed)")
    parser.add_argument(
        "--models", default="models", metavar="DIR", help="directory of the Hugging Face models (default: %(default)s)"
    )
    parser.add_argument(
        "--oprd", action="store_true", help="with the hidden-state loss in place of the recipe's divergence"
    )


def run(options: argparse.Namespace) -> None:
    """Checks and writes the configuration; prints its path, the notes, and the next command.

    Without `--output`, it prints the configuration, with the notes as comments.

    Raises:
        ValueError: the recipe cannot be read, is no distillation, or has values that the configuration refuses; or
            `--output` is the recipe, does not end in .yaml, or is a file that this command did not write.
    """
    path, target = Path(options.recipe), Path(options.output) if options.output is not None else None
    if target is not None:
        _check_output(target, path)
    values = load_recipe(path)
    name = path.name.removesuffix(".yaml")
    made = translate(values, name, options.models)
    if options.oprd:
        made.config["loss"] = {"representation": {"kind": "mse", "weight": 1.0}}
        for key in ("correction", "correction_range"):  # these weigh sampled tokens, for which no loss is left
            made.config.get("rollout", {}).pop(key, None)
        made.note("loss_fn: the hidden-state loss takes its place; other widths need a bridge (docs/bridge.md)")
    needed = ranks(values, made)
    checked = from_composed(made.config, name)  # refuses what the configuration refuses, with the recipe's name
    lines = [f"Made of the recipe {path.name} of NeMo-RL. Without a counterpart, or not the same:", *made.notes]
    text = "".join(f"# {line}\n" for line in lines) + yaml.safe_dump(made.config, sort_keys=False)
    with TemporaryDirectory() as folder:
        (Path(folder) / "made.yaml").write_text(text)
        assert load_config("made", [], folder) == checked, "the notes have changed the configuration"
    if target is None:
        print(text, end="")
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(target, text)
    print(f"{target}: the configuration. Without a counterpart, or not the same:")
    for note in made.notes:
        print(f"- {note}")
    where = f"--config-dir {shlex.quote(str(target.parent))} --config-name {shlex.quote(target.stem)}"
    print(f"next: nemo-oprd plan {where} --ranks {needed}")


def _check_output(target: Path, recipe: Path) -> None:
    if target.suffix != ".yaml":
        raise ValueError(
            f"--output {target}: expected a name that ends in .yaml, because --config-name finds no other file: name "
            f"{target.with_suffix('.yaml') if target.name else 'FILE.yaml'}"
        )
    if target.exists() and recipe.exists() and target.samefile(recipe):
        raise ValueError(
            f"--output {target}: is the recipe itself, which would be lost; expected another file: name a new one"
        )
    check_file(target, "from-nemo-rl", "--output", "# Made of the recipe ")
