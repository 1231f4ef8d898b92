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


GOOD = "policy: {model_name: a/B}\nteacher: {model_name: c/D}"


def case(name: str, what: str, says: str, recipe: str, *arguments: str) -> None:
    """A recipe with this content."""

    def write(content: str, place: Place) -> Any:
        (place.root / "recipe.yaml").write_text(content)

    category(name, what, says, command="from-nemo-rl", arguments=("{root}/recipe.yaml", *arguments), prepare=partial(write, recipe))


case("recipe of no distillation", "a recipe that is none of distillation", "recipe: policy.model_name and teacher.model_name (or teachers, or on_policy_distillation) are not both there | expected a distillation recipe | name another file", "policy: {model_name: a/B}")
case("recipe without its base", "a recipe whose `defaults` are not there", "base.yaml: no such file, which {root}/recipe.yaml names in its defaults | correct the path", "defaults: base.yaml")
case("recipe that is its own base", "a recipe that inherits from itself", "inherits from itself by way of recipe.yaml | expected no circle | correct the defaults", "defaults: recipe.yaml")
case("recipe with a wrong reference", "a reference in a recipe that leads nowhere", "recipe.yaml: Interpolation key 'b' not found | expected a recipe of NeMo-RL | correct the file", "a: ${b}")
case("recipe with a refused value", "a value of a recipe that the configuration refuses", "train.lr=0 | expected", WHOLE)
case("recipe with a text for a number", "a text where a recipe has a number", "distillation.max_num_steps='12': expected a whole number of at least 1, without quotes | correct the recipe", GOOD + "\ndistillation: {max_num_steps: '12'}")
case("recipe with servers of no GPU", "a number of a recipe out of range", "policy.generation.vllm_cfg.tensor_parallel_size=0: expected a whole number of at least 1 | correct the recipe", "policy: {model_name: a/B, generation: {vllm_cfg: {tensor_parallel_size: 0}, colocated: {enabled: false}}}\nteacher: {model_name: c/D}")
case("recipe with one beta", "one number where a recipe has a list", "policy.optimizer.kwargs.betas=3: expected a list of two numbers | correct the recipe", "policy: {model_name: a/B, optimizer: {kwargs: {betas: 3}}}\nteacher: {model_name: c/D}")
case("recipe with a list for a text", "a list where a recipe has a text", "policy.precision=[1]: expected a text | correct the recipe", "policy: {model_name: a/B, precision: [1]}\nteacher: {model_name: c/D}")
case("recipe with a text for a switch", "a text where a recipe has true or false", "data.shuffle='no': expected true or false, without quotes | correct the recipe", GOOD + "\ndata: {shuffle: 'no'}")
case("recipe with another divergence", "a divergence that NeMo-RL does not have", "loss_fn.kl_type='jeffreys': expected forward, reverse or mixed | correct the recipe", GOOD + "\nloss_fn: {kl_type: jeffreys}")
case("recipe with a nameless teacher", "a teacher of a recipe without a model", "teachers.1.model_name=None: expected the name of a model | correct the recipe", "policy: {model_name: a/B}\nteachers: [{model_name: c/D}, {top: 1}]")
case("recipe with an uncounted cluster", "a cluster of a recipe without a number of GPUs", "cluster.gpus_per_node='x': expected a whole number of at least 1 | correct the recipe", GOOD + "\ncluster: {gpus_per_node: x}", "--output", "{root}/made.yaml")
case("recipe as its own output", "`--output` names the recipe", "--output {root}/recipe.yaml: is the recipe itself, which would be lost | expected another file | name a new one", GOOD, "--output", "{root}/recipe.yaml")
case("output that is no .yaml", "`--output` without `.yaml`", "--output {root}/made.yml: expected a name that ends in .yaml, because --config-name finds no other file | name {root}/made.yaml", GOOD, "--output", "{root}/made.yml")
