"""Recipes of NeMo-RL."""

# One case per line, however long: a table.
# fmt: off
from __future__ import annotations

from functools import partial
from typing import Any

from bad_input_case import Category, Place

CATEGORIES: list[Category] = []

category = Category("Recipes of NeMo-RL")
CATEGORIES.append(category)
WHOLE = "policy: {model_name: a/B, megatron_cfg: {enabled: true, optimizer: {lr: 0}}}\nteacher: {model_name: c/D}\ndistillation: {max_num_steps: 3}"


def case(name: str, what: str, says: str, recipe: str) -> None:
    """A recipe with this content."""

    def write(content: str, place: Place) -> Any:
        (place.root / "recipe.yaml").write_text(content)

    category(name, what, says, command="from-nemo-rl", arguments=("{root}/recipe.yaml",), prepare=partial(write, recipe))


case("recipe of no distillation", "a recipe that is none of distillation", "recipe: policy.model_name and teacher.model_name (or teachers) are not both there | expected a distillation recipe | name another file", "policy: {model_name: a/B}")
case("recipe without its base", "a recipe whose `defaults` are not there", "base.yaml: no such file, which {root}/recipe.yaml names in its defaults | correct the path", "defaults: base.yaml")
case("recipe that is its own base", "a recipe that inherits from itself", "inherits from itself by way of recipe.yaml | expected no circle | correct the defaults", "defaults: recipe.yaml")
case("recipe with a wrong reference", "a reference in a recipe that leads nowhere", "recipe.yaml: Interpolation key 'b' not found | expected a recipe of NeMo-RL | correct the file", "a: ${b}")
case("recipe with a refused value", "a value of a recipe that the configuration refuses", "train.lr=0 | expected", WHOLE)
