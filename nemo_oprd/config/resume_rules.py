"""Which keys a run may change when it is started again, and what differs between two configurations.

Every key of the schema is in one of three lists: `FREE` keys change nothing that is learned (layout, logging, saving,
evaluation, memory), `LEARNED` keys do and need leave (`train.allow_changes`), and no checkpoint can be continued with
other values of the `FIXED` keys. Two of the `LEARNED` keys need leave only where something depends on them, see
`_matters`. Compares configurations only: that a model is the same in another place is found out in `setup/resume.py`.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, Literal

from nemo_oprd.config.schema import Config, TeacherSource

Rule = Literal["free", "learned", "fixed"]

# `{role}` stands for student and teacher, `.*` for all keys of a group
FIXED = ("seed", "precision", "train.distributed_optimizer")
FREE = (
    *("output", "{role}.parallel.*", "logging.*", "evaluation.*"),
    *("student.recompute", "student.recompute_method", "student.recompute_num_layers"),
    *("teacher.placement", "teacher.ranks", "teacher.resident_microbatches", "teacher.offload", "teachers.name"),
    # of fit-bridge alone
    *("bridge.rank", "bridge.fit", "bridge.center_student", "bridge.held_out", "bridge.prompts", "bridge.baselines"),
    *("alignment.min_coverage", "loss.output.chunk_tokens"),
    *("rollout.save", "rollout.tensor", "rollout.expert", "rollout.max_batch", "rollout.max_cache_tokens"),
    *("rollout.vllm.python", "rollout.vllm.endpoints", "rollout.vllm.placement", "rollout.vllm.replicas"),
    *("rollout.vllm.tensor", "rollout.vllm.gpu_memory_utilization", "rollout.vllm.transport"),
    *("rollout.vllm.check_tokens", "rollout.vllm.start_timeout", "rollout.vllm.request_timeout"),
    *("rollout.vllm.max_restarts", "rollout.vllm.repeat"),
    *("train.tokens_per_microbatch", "train.save_every", "train.save_minutes", "train.keep_checkpoints"),
    *("train.keep_best", "train.stop_after_skipped", "train.export_hf", "train.allow_changes"),
)
LEARNED = (
    *("{role}.hf_path", "{role}.checkpoint", "{role}.provider"),
    *("student.router_aux_loss", "student.router_z_loss", "student.router_dtype", "student.router_replay"),
    *("teacher.reads", "teacher.prompt", "teacher.weights", "teacher.ema_decay"),
    *("teachers.hf_path", "teachers.checkpoint", "teachers.provider", "teachers.data_sources", "teachers.weight"),
    *("teachers", "teachers.bridge", "bridge.path", "bridge.train", "alignment.exact"),
    "loss.representation.*",
    *("loss.output.weight", "loss.output.kind", "loss.output.k", "loss.output.aggregation", "loss.output.temperature"),
    *("loss.output.support", "loss.output.normalizer", "loss.output.support_weight", "loss.output.jsd_beta"),
    "loss.output.clip",
    *("rollout.engine", "rollout.temperature", "rollout.top_p", "rollout.max_new_tokens", "rollout.per_prompt"),
    *("rollout.replay", "rollout.correction", "rollout.correction_range", "rollout.vllm.flags"),
    "data.*",
    *("train.steps", "train.prompts_per_step", "train.updates_per_rollout", "train.lr", "train.min_lr"),
    *("train.schedule", "train.warmup_fraction", "train.weight_decay", "train.betas", "train.adam_eps"),
    "train.clip_grad",
)
# keys whose texts are paths: another way to write the same path is no change
_PATHS = re.compile(
    r"output|(student|teacher|teachers)\.(hf_path|checkpoint)|teachers\.bridge|bridge\.path|rollout\.replay|"
    r"data\.(train|validation|chat_template)"
)
_SHOWN = 100  # characters of a value in a message


@dataclass(frozen=True)
class Change:
    """A key with another value than before.

    Attributes:
        key: dotted; one of several teachers has its number, e.g. "teachers.0.weight".
        before, after: texts of the values.
        rule: what the change may do without leave.
    """

    key: str
    before: str
    after: str
    rule: Rule

    def __str__(self) -> str:
        return f"{self.key}: {self.before} -> {self.after}"


def rule_of(key: str) -> Rule:
    """The rule of a key of the schema. Raises KeyError for a key that is in no list, or in two."""
    found = [name for name, keys in _LISTS.items() if any(_covers(pattern, key) for pattern in keys)]
    if len(found) != 1:
        raise KeyError(f"{key} is in {len(found)} lists of resume_rules.py, expected one")
    return found[0]


def changes(before: Mapping[str, Any], after: Mapping[str, Any], started_in: str = "") -> list[Change]:
    """What differs between two complete configurations (as in config.yaml), in the order of the schema.

    A key that `before` lacks had its default: it is of a later version. `train.allow_changes` is left out: it says
    what one start may change, and nothing about the run.

    Args:
        started_in: the working directory to which relative paths of `before` belong; "": the present one.
    """
    found: list[Change] = []
    for key in schema_keys():
        if key == "train.allow_changes" or key.startswith("teachers."):
            continue
        old, new = _value(before, key), _value(after, key)
        if key == "teachers" and len(old) == len(new):
            for number, (mine, theirs) in enumerate(zip(old, new, strict=True)):
                for name, default in _defaults_of_a_teacher().items():
                    values = mine.get(name, default), theirs.get(name, default)
                    found += _change(f"teachers.{number}.{name}", *values, before, after, started_in)
        else:
            found += _change(key, old, new, before, after, started_in)
    return found


def allowed(change: Change, allow: Sequence[str]) -> bool:
    """Whether `train.allow_changes` names the key of a change, or a group that it is in."""
    names = {change.key, plain_key(change.key)}
    return any(name == entry or name.startswith(f"{entry}.") for name in names for entry in allow)


def shown(value: Any) -> str:
    """A value in a message: as in JSON, without quotes around texts, cut where it is long."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def plain_key(key: str) -> str:
    """Example: teachers.0.weight -> teachers.weight."""
    return re.sub(r"\.\d+(?=\.)", "", key)


@cache
def schema_keys() -> tuple[str, ...]:
    """Every key that holds a value, in the order of the schema; those of one of several teachers without a number."""
    from nemo_oprd.config.reference_page import keys_of_schema

    return tuple(key for key, _, _ in keys_of_schema())


def _change(
    key: str, old: Any, new: Any, before: Mapping[str, Any], after: Mapping[str, Any], started_in: str
) -> list[Change]:
    plain = plain_key(key)
    if plain == "data.train":  # one file may stand without its list
        old, new = ([value] if isinstance(value, str) else value for value in (old, new))
    if old == new or (_PATHS.fullmatch(plain) and _real(old, started_in) == _real(new)):
        return []
    rule = rule_of(plain)
    if rule == "learned" and not _matters(plain, before, after):
        rule = "free"
    if isinstance(old, dict) and isinstance(new, dict):  # names that are the user's
        names = [name for name in dict.fromkeys([*old, *new]) if old.get(name) != new.get(name)]
        return [Change(f"{key}.{name}", shown(old.get(name)), shown(new.get(name)), rule) for name in names]
    return [Change(key, shown(old), shown(new), rule)]


def _matters(key: str, *configs: Mapping[str, Any]) -> bool:
    """Whether a changed key changes what is learned, of the keys for which that depends on others."""
    if key == "train.steps":  # the rate of a step depends on it during warm-up and with a cosine schedule
        warmups = {math.ceil(_value(c, "train.warmup_fraction") * _value(c, "train.steps")) for c in configs}
        return len(warmups) > 1 or any(_value(c, "train.schedule") == "cosine" for c in configs)
    if key == "data.validation":
        return any(_value(c, "data.contamination") == "drop" for c in configs)
    return True


def _value(config: Mapping[str, Any], key: str) -> Any:
    value: Any = config
    for part in key.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return None if config is _defaults() else _value(_defaults(), key)
        value = value[part]
    return value


@cache
def _defaults() -> Mapping[str, Any]:
    import yaml

    from nemo_oprd.config.loading import to_yaml

    return yaml.safe_load(to_yaml(Config()))


@cache
def _defaults_of_a_teacher() -> Mapping[str, Any]:
    return {each.name: each.default for each in fields(TeacherSource)}


def _real(value: Any, started_in: str = "") -> Any:
    """`value` with every text as the path without links that it names from a working directory."""
    if isinstance(value, dict):
        return {_real(name, started_in): _real(item, started_in) for name, item in value.items()}
    if isinstance(value, list):
        return [_real(item, started_in) for item in value]
    return os.path.realpath(os.path.join(started_in, value)) if isinstance(value, str) else value


def _covers(pattern: str, key: str) -> bool:
    patterns = [pattern.replace("{role}", role) for role in ("student", "teacher")]
    return any(key == each or (each.endswith(".*") and key.startswith(each[:-1])) for each in patterns)


_LISTS: dict[Rule, tuple[str, ...]] = {"free": FREE, "learned": LEARNED, "fixed": FIXED}
