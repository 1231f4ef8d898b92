"""`from-nemo-rl`: a distillation recipe of NeMo-RL as a configuration of this project."""

from __future__ import annotations

from pathlib import Path

import yaml

from nemo_oprd.config.loading import from_composed
from nemo_oprd.config.nemo_rl_keys import ranks, translate
from nemo_oprd.config.nemo_rl_recipe import load_recipe
from nemo_oprd.fault_tolerance.files import write_atomically


def from_nemo_rl(recipe: str, output: str | None, models: str, *, oprd: bool) -> None:
    """Writes the configuration, and prints where it is, what has no counterpart, and what to run next.

    Args:
        recipe: a YAML file, with the files that it inherits from beside it.
        output: a YAML file; None prints the configuration, with the notes as comments.
        models: the directory of the Hugging Face models.
        oprd: whether the hidden-state loss takes the place of the recipe's divergence.

    Raises:
        ValueError: the recipe cannot be read, is none of distillation, or has values that the configuration refuses.
    """
    path = Path(recipe)
    values = load_recipe(path)
    name = path.name.removesuffix(".yaml")
    made = translate(values, name, models)
    if oprd:
        made.config["loss"] = {"representation": {"kind": "mse", "weight": 1.0}}
        made.notes.append("loss_fn: the hidden-state loss takes its place; other widths need a bridge (docs/bridge.md)")
    from_composed(made.config, name)  # refuses what the configuration refuses, before anything is written
    lines = [f"Made of the recipe {path.name} of NeMo-RL. Without a counterpart, or not the same:", *made.notes]
    text = "".join(f"# {line}\n" for line in lines) + yaml.safe_dump(made.config, sort_keys=False)
    if output is None:
        print(text, end="")
        return
    target = Path(output)
    target.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(target, text)
    print(f"{target}: the configuration. Without a counterpart, or not the same:")
    for note in made.notes:
        print(f"- {note}")
    where = f"--config-dir {target.parent} --config-name {target.stem}"
    print(f"next: nemo-oprd plan {where} --ranks {ranks(values)}")
