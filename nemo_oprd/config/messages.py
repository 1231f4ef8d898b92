"""Converts pydantic's errors to one line with the key, the value, the expected type and the fix; keeps out secrets."""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
import re
import types
import typing
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from nemo_oprd.config.keys import keys, plain_key, types_of

# Names of other training programs for keys of this configuration, for "did you mean".
#
# The names are those of transformers' and TRL's trainers, Megatron-LM's arguments, DeepSpeed, verl and NeMo-RL.

_NAMES = {
    "train.lr": "learning_rate",
    "train.min_lr": "min_learning_rate",
    "train.steps": "max_steps num_steps train_iters iterations total_training_steps",
    "train.prompts_per_step": "batch_size train_batch_size global_batch_size num_prompts_per_step",
    "train.tokens_per_microbatch": "per_device_train_batch_size micro_batch_size",
    "rollout.per_prompt": "num_generations num_generations_per_prompt num_return_sequences",
    "train.warmup_fraction": "warmup_ratio warmup_steps lr_warmup_fraction",
    "train.schedule": "lr_scheduler_type lr_decay_style",
    "train.clip_grad": "max_grad_norm gradient_clipping grad_clip",
    "train.weight_decay": "wd",
    "train.betas": "adam_beta1 adam_beta2 adam_betas",
    "train.adam_eps": "eps adam_epsilon",
    "train.save_every": "save_steps save_interval",
    "train.keep_checkpoints": "save_total_limit",
    "evaluation.every": "eval_steps eval_interval val_period",
    "logging.every": "logging_steps log_interval",
    "output": "output_dir save run_dir",
    "precision": "dtype bf16 mixed_precision",
    "student.hf_path": "model model_name model_name_or_path student_model student_path",
    "teacher.hf_path": "teacher_model teacher_path teacher_model_name_or_path",
    "student.checkpoint": "load",
    "student.parallel.tensor": "tp tp_size tensor_parallel_size tensor_model_parallel_size",
    "student.parallel.pipeline": "pp pp_size pipeline_parallel_size pipeline_model_parallel_size",
    "student.parallel.context": "cp cp_size context_parallel_size",
    "student.parallel.expert": "ep expert_parallel_size expert_model_parallel_size",
    "student.parallel.sequence": "sequence_parallel sp",
    "student.recompute": "gradient_checkpointing activation_checkpointing",
    "data.train": "dataset train_file train_files train_data prompts",
    "data.validation": "val_files validation_file eval_dataset",
    "data.max_prompt_tokens": "max_prompt_length",
    "rollout.max_new_tokens": "max_completion_length max_response_length max_tokens max_length",
    "rollout.engine": "backend use_vllm",
    "logging.wandb": "wandb_project report_to",
}
# name there -> key here
USUAL_NAMES = {name: key for key, names in _NAMES.items() for name in names.split()}


# Secrets: they are kept out of a configuration, which is saved with the run.

# Names of keys and of environment variables that hold secrets, and what the keys of Hugging Face and W&B look like. A
# W&B key must be the whole value: directories of a Hugging Face cache have commit hashes in their names.
SECRET_KEY = re.compile(r"(api_?key|(access|auth|hf)_?token|(^|\.)token|secret|passw(or)?d|credentials?)$", re.I)
_SECRET_VARIABLE = re.compile(r"(KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?)$", re.I)
_SECRET_VALUE = re.compile(r"hf_[A-Za-z0-9]{30,}|^[0-9a-f]{40}$")
# the part of an address before `@`, and an argument behind `?` with a name of secrets
_BEFORE_HOST = re.compile(r"[A-Za-z][\w+.-]*://[^/?#\s]*@")
_ARGUMENT = re.compile(r"([?&][\w-]*(?:key|token|secret|passw(?:or)?d|credentials?|auth)=)[^&#\s'\",\]]+", re.I)
# the part before `@` in a text; a password may hold any character but those that end the address
_QUOTED = re.compile(r"//[^\s'\"]*@")
# shorter values of environment variables (an empty or a dummy one) would be found in harmless text
_SECRET_LENGTH = 8


def without_secrets(message: str) -> str:
    """Returns a message without the user names, passwords and tokens in the addresses that it quotes."""
    return _ARGUMENT.sub(r"\1***", _QUOTED.sub("//***@", message))


def refuse_secrets(value: Any, key: str) -> None:
    """Raises ValueError, without the value in its message, where a secret would be saved in config.yaml.

    A secret gets into a configuration e.g. by `${oc.env:HF_TOKEN}`, or with the address of a server. Names of the
    user's choice, such as files in `data.train`, are checked, too.
    """
    if isinstance(value, dict | list):
        for name, item in value.items() if isinstance(value, dict) else enumerate(value):
            if isinstance(name, str):
                refuse_secrets(name, f"a key of {key}" if key else "a key")
            refuse_secrets(item, f"{key}.{name}" if key else str(name))
    elif isinstance(value, str) and _is_address_with_secret(value):
        raise ValueError(
            f"{key} holds an address with a user name, a password or a token (not shown); expected an address alone, "
            "because the configuration is saved with the run: leave it out; the token of a server is in the file that "
            "rollout.vllm.token_file or teacher.vllm.token_file names (docs/security.md)"
        )
    elif isinstance(value, str):
        secrets = [
            n for n, v in os.environ.items() if _SECRET_VARIABLE.search(n) and len(v) >= _SECRET_LENGTH and v in value
        ]
        if secrets or _SECRET_VALUE.search(value):
            what = f"the value of the environment variable {secrets[0]}" if secrets else "what looks like an access key"
            raise ValueError(
                f"{key} holds {what} (not shown); expected no secrets, because the configuration is saved with the "
                "run: remove it, programs read it from the environment"
            )


def _is_address_with_secret(value: str) -> bool:
    # a password with a slash counts, too, although no address may hold an unescaped slash there
    in_url = re.match(r"\s*https?:.*@", value, re.I) is not None
    return in_url or _BEFORE_HOST.search(value) is not None or _ARGUMENT.search(value) is not None


_UNKNOWN = "unexpected_keyword_argument"
# errors about the type of a value; all others are about values of the right type
_WRONG_TYPE = re.compile(r"_type$|^literal_error$|^missing$|^too_long$|^int_from_float$")


def build(root: type, value: dict) -> Any:
    """Converts `value` (nested dicts, lists and scalars, as in YAML) to an object of the pydantic dataclass `root`.

    Raises:
        ValueError: an unknown key (the nearest known one is named), a value of the wrong type or out of range, or
            values of one group that contradict each other.
    """
    text = json.dumps(value, default=_refuse_object)
    try:
        # JSON, because pydantic's strict mode takes its objects for groups of keys and its lists for tuples
        return TypeAdapter(root).validate_json(text)
    except ValidationError as error:
        raise ValueError(_message(root, json.loads(text), error.errors(include_url=False))) from error


def check_key(root: type, key: str, where: str) -> None:
    """Raises ValueError unless `key` is in the schema `root` (list items by number), or a name of the user's choice."""
    known = {each.name: each for each in keys(root)}
    group = known.get(key.rpartition(".")[0])
    if plain_key(key) not in known and not (group and group.takes_users_names):
        raise ValueError(_unknown_key(root, key, where))


def takes(root: type, key: str) -> tuple[bool, bool, bool]:
    """Returns whether a key of the schema (`check_key`) takes a text, whether it takes a list, and whether a group."""
    hint: Any = root
    for name in key.split("."):
        options = _options(hint)
        group = next((option for option in options if dataclasses.is_dataclass(option)), None)
        inner = next((option for option in options if typing.get_origin(option) in (list, dict)), None)
        if group is not None and name in types_of(typing.cast(type, group)):
            hint = types_of(typing.cast(type, group))[name]
        else:  # an item of a list, or a name of the user's choice
            hint = typing.get_args(inner)[-1] if inner is not None else Any
    plain = [typing.get_args(each)[0] if typing.get_origin(each) is Annotated else each for each in _options(hint)]
    is_group = any(typing.get_origin(each) is dict or dataclasses.is_dataclass(each) for each in plain)
    return str in plain, any(typing.get_origin(each) in (list, tuple) for each in plain), is_group


class _Location(NamedTuple):
    """The place of an error: the key, its type, and the given value.

    `specific` is False if the value fits none of several alternatives, and the error is about one alternative only.
    """

    key: str
    hint: Any
    value: Any
    specific: bool


def _message(root: type, value: dict, errors: list[ErrorDetails]) -> str:
    """Formats one line for the first mistake; a misspelt key comes first, as it may explain the others."""
    error = next((e for e in errors if e["type"] == _UNKNOWN), None)
    if error is not None:
        group = _locate(root, value, {**error, "loc": error["loc"][:-1]})
        return _unknown_key(root, f"{group.key}.{error['loc'][-1]}".removeprefix("."), "configuration")
    error, at = errors[0], _locate(root, value, errors[0])
    if not at.specific:
        others = [(e, _locate(root, value, e)) for e in errors[1:]]
        inside = (pair for pair in others if pair[1].specific and pair[1].key.startswith(at.key))
        error, at = next(inside, (error, at))
    return _describe_error(error, at)


def _locate(root: type, value: Any, error: ErrorDetails) -> _Location:
    """Locates an error by pydantic's path, which has the names of a union's alternatives between the keys."""
    key, hint, union = "", root, None
    about_a_group = error["type"] == "missing" and isinstance(error["loc"][-1], str)
    for part in error["loc"][:-1] if error["type"] == "missing" else error["loc"]:
        options = _options(hint)
        group: Any = next((option for option in options if dataclasses.is_dataclass(option)), None)
        if isinstance(part, int):
            items = [typing.get_args(option) for option in options if typing.get_origin(option) in (list, tuple)]
            key, hint, value = f"{key}[{part}]", items[0][part if len(items[0]) > part else 0], value[part]
        elif group is not None and part in types_of(group):
            key, hint, value = f"{key}.{part}".removeprefix("."), types_of(group)[part], value[part]
            about_a_group = about_a_group or union is not None
        elif isinstance(value, dict) and part in value:
            items = [typing.get_args(option) for option in options if typing.get_origin(option) is dict]
            key, hint, value = f"{key}.{part}", items[0][1], value[part]
        else:  # the name of an alternative
            union = _Location(key, hint, value, False)
    specific = union is None or about_a_group or not _WRONG_TYPE.search(error["type"])
    return _Location(key, hint, value, True) if specific or union is None else union


def _describe_error(error: ErrorDetails, at: _Location) -> str:
    """Formats KEY=VALUE, the expected value, and the fix."""
    key, value = at.key, at.value
    if error["type"] == "value_error":  # a rule of the schema, which has its own message
        return str(error["ctx"]["error"]).replace("{key}", key)
    if error["type"] == "finite_number":
        return f"{key}={value}: expected a finite number; choose one"
    if error["type"] == "dataclass_type":
        first = next(iter(types_of(_options(at.hint)[0])))
        return f"{key}={value!r}: expected a group of keys; give one of them, e.g. {key}.{first}"
    if error["type"] == "missing" and isinstance(error["loc"][-1], str):
        return f"{key}={value!r}: expected {_describe(at.hint)}; give {error['loc'][-1]}"
    if _WRONG_TYPE.search(error["type"]):
        return f"{key}={value!r}: expected {_describe(at.hint)}; give one"
    ranges = [pair for pair in map(_range, _options(at.hint)) if pair[1]]
    if not ranges:  # described by pydantic alone, such as text that is not Unicode
        return f"{key or 'configuration'}: {error['msg']}; expected another value: correct it"
    ranged, description = ranges[0]
    return f"{key}={float(value) if ranged is float else value}: expected {description}"


def _unknown_key(root: type, key: str, where: str) -> str:
    if SECRET_KEY.search(key):
        return (
            f"{where}: unknown key {key!r}; expected no secrets in a configuration, because it is saved with the run: "
            "set the environment variable that the program reads (WANDB_API_KEY, HF_TOKEN)"
        )
    known = [each.name for each in keys(root)]
    if key in known:  # YAML takes the dot for a letter
        group, _, name = key.rpartition(".")
        return f"{where}: unknown key {key!r}, with a dot in its name; expected {name} in the group {group}: nest it"
    near = " or ".join(map(repr, _meant(key, known)))
    hint = f"did you mean {near}?" if near else f"expected one of {', '.join(types_of(root))}, or a key in them"
    return f"{where}: unknown key {key!r}; {hint}"


def _meant(key: str, known: list[str]) -> list[str]:
    """Returns at most three likely keys: by `USUAL_NAMES`, else by spelling or the last part of the name."""
    group, _, name = key.replace("-", "_").rpartition(".")
    usual = USUAL_NAMES.get(name, "")
    of_teacher = usual.replace("student.", "teacher.", 1) if group.startswith("teacher") else usual
    if usual:
        return [of_teacher if of_teacher in known else usual]
    spelt = difflib.get_close_matches(key, known, n=1, cutoff=0.75)
    elsewhere = [each for each in known if each.rpartition(".")[2] == name]
    same_group = [each for each in elsewhere if each.split(".")[0] == group.split(".")[0]]
    if elsewhere and not spelt:
        return (same_group or elsewhere)[:3]
    in_group = {each.rpartition(".")[2]: each for each in known if each.rpartition(".")[0] == group}
    return spelt or [in_group[each] for each in difflib.get_close_matches(name, in_group, n=1, cutoff=0.6)]


def _refuse_object(value: Any) -> Any:
    raise ValueError(f"configuration: {value!r} is a {type(value).__name__}; expected text, numbers, lists and groups")


def _options(hint: Any) -> list[Any]:
    """Returns the alternatives of a union, or the type itself; `Annotated` around a list is removed."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return [option for each in typing.get_args(hint) for option in _options(each)]
    if typing.get_origin(hint) is Annotated and typing.get_origin(typing.get_args(hint)[0]) is list:
        return [typing.get_args(hint)[0]]
    return [hint]


def _range(hint: Any) -> tuple[Any, str]:
    """Returns the type inside `Annotated`, and the description of its range; "" without a range."""
    plain, *metadata = typing.get_args(hint) or (hint,)
    return plain, next((each.description for each in metadata if getattr(each, "description", None)), "")


def _describe(hint: Any) -> str:
    """Describes a type in words."""
    if len(_options(hint)) > 1:
        return " | ".join(map(_describe, _options(hint)))
    hint = _options(hint)[0]
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return _describe(arguments[0])
    if origin is Literal:
        return " | ".join(map(str, arguments))
    if dataclasses.is_dataclass(hint):
        return "{" + ", ".join(types_of(typing.cast(type, hint))) + "}"
    if origin is tuple:
        return "[" + ", ".join(map(_describe, arguments)) + "]"
    if origin in (list, dict):
        return f"{origin.__name__} of {_describe(arguments[-1])}"
    plain = {int: "an integer", float: "a number", str: "text", bool: "true or false", types.NoneType: "null"}
    return plain.get(hint, "values")
