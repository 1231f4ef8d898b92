"""Translates a NeMo-RL recipe's models: student, teachers, their layouts, and each teacher's responses."""

from __future__ import annotations

import math
from itertools import count, takewhile
from typing import Any

from nemo_oprd.integrations.from_nemo_rl.recipe import Recipe, Row, Translated, wrong

# the keys of multi-teacher on-policy distillation (MOPD)
MOPD = "on_policy_distillation"


def one_or_more(recipe: Recipe, key: str) -> int:
    return int(recipe.count(key, 1))


def _size(recipe: Recipe, key: str) -> int | None:
    """Reads a parallel size; None for 1, the default here."""
    return size if (size := one_or_more(recipe, key)) > 1 else None


# keys below a model's megatron_cfg or dtensor_cfg -> below `student` or `teacher`
_LAYOUT: tuple[Row, ...] = (
    ("context_parallel_size", "parallel.context", _size),
    ("pipeline_model_parallel_size", "parallel.pipeline", _size),
    ("virtual_pipeline_model_parallel_size", "parallel.virtual_pipeline", _size),
    ("expert_model_parallel_size", "parallel.expert", _size),
    ("expert_tensor_parallel_size", "parallel.expert_tensor", _size),
    ("num_layers_in_first_pipeline_stage", "parallel.first_stage_layers", Recipe.count),
    ("num_layers_in_last_pipeline_stage", "parallel.last_stage_layers", Recipe.count),
    ("sequence_parallel", "parallel.sequence", lambda recipe, key: recipe.flag(key) or None),
)


def translate_models(recipe: Recipe, made: Translated, models: str) -> None:
    """Sets the student and its teachers, which are below the directory `models`, and their layouts.

    Raises:
        ValueError: a model has no name, or a key has a wrong value.
    """
    made.choose(recipe, "policy.precision", "precision", {"bfloat16": "bf16", "float32": "fp32"})
    if recipe.has("policy.model_name") or recipe.algorithm != "grpo":
        made.set("student.hf_path", _directory(made, models, "policy.model_name", _model_name(recipe, "policy")))
    else:
        made.set("student.hf_path", f"{models}/student")
        made.note(f"policy.model_name=null: NeMo-RL's launcher sets it; put the student into {models}/student")
    _layout(recipe, made, "student", "policy")
    if recipe.algorithm == "grpo":
        _teachers_by_agent(recipe, made, models)
        return
    teacher = "teacher" if recipe.has("teacher.model_name") else "teachers.0"
    made.set("teacher.hf_path", _directory(made, models, f"{teacher}.model_name", _model_name(recipe, teacher)))
    _layout(recipe, made, "teacher", teacher)
    if teacher != "teachers.0":
        return
    made.set("teacher.reads", "text")
    made.note(
        "teachers: another tokenizer is read as text and aligned by bytes (docs/tokenizers.md), and there is no "
        "projection between vocabularies; responses are sampled by the student, not read from data"
    )
    for other in takewhile(recipe.has, (f"teachers.{i}" for i in count(1))):
        model = _model_name(recipe, other)
        recipe.get(other)
        made.note(
            f"{other}={model}: left out, because a response has one teacher; data_sources may choose among several "
            "(docs/teachers.md)"
        )


def _directory(made: Translated, models: str, key: str, model: str, name: str | None = None) -> str:
    """Returns the directory for a model, named by the last part of the model's name or by `name`; adds a note."""
    directory = f"{models}/{name or model.rstrip('/').rpartition('/')[2]}"
    made.note(f"{key}={model}: put this model into {directory}")
    return directory


def _model_name(recipe: Recipe, prefix: str) -> str:
    model: str | None = recipe.text(f"{prefix}.model_name")
    if model is None:  # one of several teachers may have none
        raise wrong(f"{prefix}.model_name", model, "the name of a model")
    return model


def _layout(recipe: Recipe, made: Translated, role: str, prefix: str) -> None:
    """Translates parallel sizes and recomputation, of the enabled backend."""
    megatron = recipe.flag(f"{prefix}.megatron_cfg.enabled")
    used, *unused = (
        ("megatron_cfg", "dtensor_cfg", "optimizer", "scheduler") if megatron else ("dtensor_cfg", "megatron_cfg")
    )
    for name in unused:
        recipe.get(f"{prefix}.{name}")
    group = f"{prefix}.{used}"
    recipe.flag(f"{group}.enabled")
    tensor = "tensor_model_parallel_size" if megatron else "tensor_parallel_size"
    made.take(recipe, ((tensor, "parallel.tensor", _size), *_LAYOUT), f"{group}.", f"{role}.")
    if megatron:
        _dispatcher(recipe, made, role, group)
    if role == "student" and recipe.flag(f"{group}.activation_checkpointing"):
        made.set("student.recompute", recipe.text(f"{group}.recompute_granularity", "full"))


def _dispatcher(recipe: Recipe, made: Translated, role: str, group: str) -> None:
    """Translates the dispatcher of tokens to experts; Megatron's `flex` leaves the choice to a backend."""
    dispatcher = recipe.text(f"{group}.moe_token_dispatcher_type", "alltoall")
    if dispatcher == "flex":
        backend = recipe.text(f"{group}.moe_flex_dispatcher_backend", "not given")
        if recipe.flag(f"{group}.moe_enable_deepep") or backend == "deepep":
            made.set(f"{role}.parallel.dispatcher", "deepep")
            return
        dispatcher = f"flex (moe_flex_dispatcher_backend {backend})"
    if dispatcher == "allgather":
        made.set(f"{role}.parallel.dispatcher", dispatcher)
    elif dispatcher != "alltoall":
        made.note(
            f"{group}.moe_token_dispatcher_type={dispatcher}: alltoall is taken; {role}.parallel.dispatcher is "
            "alltoall, allgather or deepep"
        )


# --- multi-teacher on-policy distillation -----------------------------------------------------------------------------


def is_mopd(recipe: Recipe) -> bool:
    """Returns whether the teachers belong to agents of NeMo Gym, and the trainer is NeMo-RL's GRPO."""
    return recipe.flag(f"{MOPD}.enabled")


def _teachers_by_agent(recipe: Recipe, made: Translated, models: str) -> None:
    """Sets the teachers; of several, each has the NeMo Gym agents whose responses it teaches as its data sources."""
    key, default = f"{MOPD}.teacher_model_by_agent_name", recipe.text(f"{MOPD}.default_teacher_alias")
    given, is_strict = recipe.get(key), recipe.flag(f"{MOPD}.strict_agent_name_match")
    if (
        not isinstance(given, dict)
        or not given
        or not all(isinstance(m, str) and m.strip("/ ") for m in given.values())
    ):
        raise wrong(key, given, "names of agents, each with the model of its teacher")
    if not is_strict and default is not None and default not in given:
        raise wrong(f"{MOPD}.default_teacher_alias", default, f"one of {', '.join(map(str, given))}")
    agents: dict[str, list[str]] = {}
    for agent, model in given.items():
        agents.setdefault(model.rstrip("/"), []).append(str(agent))
    last = [model.rpartition("/")[2] for model in agents]
    names = [
        own if last.count(own) == 1 else model.strip("/").replace("/", "-")
        for own, model in zip(last, agents, strict=True)
    ]
    paths = [
        _directory(made, models, f"{key}.{own[0]}", model, name)
        for name, (model, own) in zip(names, agents.items(), strict=True)
    ]
    if len(agents) == 1:
        made.set("teacher.hf_path", paths[0])
    else:
        others = None if is_strict or default is None else given[default].rstrip("/")
        made.set("teachers", [
            {"name": name, "hf_path": path, "data_sources": None if model == others else own}
            for name, path, (model, own) in zip(names, paths, agents.items(), strict=True)
        ])  # fmt: skip
        made.note(
            f"{key}: the data source of a row chooses its teacher, and is the agent's name where the row has no other; "
            "leave agents without prompts in data.train out of data_sources"
        )
    if len(agents) < len(given) and not recipe.flag(f"{MOPD}.deduplicate_shared_teacher_checkpoints", default=True):
        made.note(
            f"{MOPD}.deduplicate_shared_teacher_checkpoints=false: a model that teaches several agents is held once"
        )
    elif len(agents) == 1 and is_strict:
        made.note(f"{MOPD}.strict_agent_name_match=true: the one teacher has the rows of all agents")
    recipe.get(f"{MOPD}.deduplicate_shared_teacher_checkpoints")
    _teacher_ranks(recipe, made)


def _teacher_ranks(recipe: Recipe, made: Translated) -> None:
    """Translates the layout and the GPUs of all teachers, if they have GPUs of their own."""
    group = f"{MOPD}.non_colocated_teachers"
    if not recipe.flag(f"{group}.enabled"):
        return
    layout, role = f"{group}.default_teacher_cfg", "teacher"
    made.take(recipe, (("tensor_model_parallel_size", "parallel.tensor", _size), *_LAYOUT), f"{layout}.", f"{role}.")
    _dispatcher(recipe, made, role, f"{layout}.megatron_cfg_overrides")
    made.set("teacher.placement", "dedicated")
    made.set("teacher.ranks", gpus_of(recipe, layout))
    precision, here = recipe.text(f"{layout}.precision", "bf16"), made.get("precision")
    if precision != here:
        made.note(f"{layout}.precision={precision}: teachers compute in precision={here}")
    if made.get("teachers"):
        made.note(
            f"{layout}: every teacher has GPUs of its own in NeMo-RL; here all are on the same teacher.ranks="
            f"{made.get('teacher.ranks')}; teacher.offload=true holds one of them in device memory at a time"
        )


# --- ranks -----------------------------------------------------------------------------------------------------------


def gpus_of(recipe: Recipe, group: str) -> int:
    """Returns the number of GPUs of a group of nodes."""
    return one_or_more(recipe, f"{group}.gpus_per_node") * one_or_more(recipe, f"{group}.num_nodes")


def ranks(values: dict[str, Any], made: Translated | None = None) -> int:
    """Returns the ranks of a run: the cluster's GPUs; with a dedicated teacher, without those that no role can use.

    Raises:
        ValueError: a value is no number.
    """
    total = gpus_of(Recipe(values), "cluster")
    if made is None or made.get("teacher.placement") != "dedicated":
        return total
    others = made.get("teacher.ranks")
    if made.get("rollout.vllm.placement") == "dedicated":
        others += made.get("rollout.vllm.replicas") * made.get("rollout.vllm.tensor")
    layout = [made.get(f"student.parallel.{name}", 1) for name in ("tensor", "pipeline", "context")]
    unit = math.prod(layout)
    return int(others + max(1, (total - others) // unit) * unit)
