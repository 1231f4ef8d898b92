"""The configuration schema, and how a configuration is put together: schema <- YAML in conf/ <- command line.

Hydra composes the YAML (so `defaults:` lists and groups work) and parses overrides; after `load_config` everything is
plain dataclasses. Unknown keys and contradictory values are errors that name the key, before anything is loaded.
Checks that need a model (layers in range, sizes that divide) sit where the model is built.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import os
import re
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from nemo_oprd.layout import Layout


@dataclass
class ParallelConfig:
    """Parallel sizes of one role; data parallel is what is left of the role's ranks."""

    tensor: int = 1
    sequence: bool = False
    pipeline: int = 1
    virtual_pipeline: int = 1
    context: int = 1
    first_stage_layers: int | None = None
    last_stage_layers: int | None = None

    def layout(self, ranks: int, first_rank: int, role: str) -> Layout:
        """The role's layout on `ranks` consecutive ranks.

        Raises:
            ValueError: the sizes don't fit the ranks.
        """
        needed = self.tensor * self.pipeline * self.context
        if ranks % needed:
            raise ValueError(
                f"{role}.parallel: tensor={self.tensor} * pipeline={self.pipeline} * context={self.context} = {needed} "
                f"does not divide the {ranks} rank(s) of this role; start a multiple of {needed} ranks or change sizes"
            )
        return Layout(
            self.tensor,
            self.context,
            ranks // needed,
            self.pipeline,
            self.virtual_pipeline,
            self.sequence and self.tensor > 1,
            first_rank,
            self.first_stage_layers,
            self.last_stage_layers,
        )


@dataclass
class ModelConfig:
    """Where a model comes from: an HF directory, or a Megatron checkpoint made by checkpoint_tools. One of the two."""

    hf_path: str | None = None
    checkpoint: str | None = None
    parallel: ParallelConfig = field(default_factory=ParallelConfig)


@dataclass
class StudentConfig(ModelConfig):
    """The trained model."""

    recompute: Literal["none", "selective", "full"] = "none"
    recompute_method: Literal["uniform", "block"] = "uniform"
    recompute_num_layers: int = 1


@dataclass
class TeacherConfig(ModelConfig):
    """The frozen model. `dedicated` gives it the last `ranks` ranks for itself.

    `resident_microbatches` is how many of the student's microbatches have their targets in memory at a time (null: all
    of a step). `offload` keeps the weights in pinned host memory while the teacher isn't reading.
    """

    placement: Literal["colocated", "dedicated"] = "colocated"
    ranks: int | None = None
    resident_microbatches: int | None = None
    offload: bool = False


@dataclass
class RepresentationLossConfig:
    """The hidden-state term (DESIGN: loss semantics). `weight` is the paper's mu.

    `layers: none` leaves the term out altogether, measurement included, for runs on output-space terms alone.
    """

    weight: float = 1.0
    kind: Literal["mse", "normalized_mse", "cosine"] = "mse"
    layers: Literal["all", "last", "even", "odd", "none"] | list[int] = "all"
    positions: Literal["all", "last_k", "first_k"] = "last_k"
    k: int = 2000
    position: Literal["token", "predicting"] = "token"
    final_norm: bool = True
    aggregation: Literal["sequence_mean", "token_mean"] = "sequence_mean"
    dim_reduction: Literal["mean", "sum"] = "mean"


@dataclass
class OutputLossConfig:
    """The output-space term (DESIGN: loss semantics; `losses/output.py` has the equations). `weight` is the paper's
    weight of OPD in the composition.

    `k`, `support`, `normalizer` and `support_weight` are for top_k; for the other kinds but sampled_token, `k` is the
    size of the top sets whose overlap is measured. `chunk_tokens` bounds the rows whose logits exist at a time.
    """

    weight: float = 0.0
    kind: Literal["none", "sampled_token", "top_k", "full_vocab", "forward_kl", "jsd"] = "none"
    k: int = 16
    chunk_tokens: int = 1024
    aggregation: Literal["sequence_mean", "token_mean"] = "sequence_mean"
    temperature: float = 1.0
    support: Literal["student", "teacher", "union", "intersection"] = "student"
    normalizer: Literal["renormalized", "full"] = "renormalized"
    support_weight: Literal["student", "teacher"] = "student"
    jsd_beta: float = 0.5


@dataclass
class LossConfig:
    """The terms of the total loss."""

    representation: RepresentationLossConfig = field(default_factory=RepresentationLossConfig)
    output: OutputLossConfig = field(default_factory=OutputLossConfig)


@dataclass
class BridgeConfig:
    """The bridge between models of different shape or origin: `path` is a directory that `fit-bridge` made.

    The others are for fit-bridge: `prompts` are sampled (each `rollout.per_prompt` times), of whose responses
    `held_out` is kept for testing and as much for choices.
    """

    path: str = "none"
    rank: Literal["auto"] | int = 8
    fit: Literal["ridge", "adamw"] = "ridge"
    center_student: bool = False
    held_out: float = 0.1
    prompts: int = 512


@dataclass
class RolloutConfig:
    """How the student samples.

    `tensor` is the tensor-parallel size of the in-process engine; `max_batch` and `max_cache_tokens` bound how many
    sequences, and how many tokens of KV cache, one of its data-parallel ranks holds at a time.
    """

    engine: Literal["megatron", "vllm"] = "megatron"
    temperature: float = 1.0
    top_p: float = 1.0
    max_new_tokens: int = 1024
    per_prompt: int = 1
    replay: str | None = None
    save: bool = False
    tensor: int = 1
    max_batch: int = 256
    max_cache_tokens: int = 524288


@dataclass
class DataConfig:
    """Prompt files: one for training, any number of named sets for validation.

    Training prompts of more than `max_prompt_tokens` tokens are left out (null: all are kept).
    """

    train: str | None = None
    max_prompt_tokens: int | None = None
    validation: dict[str, str] = field(default_factory=dict)


@dataclass
class TrainConfig:
    """The optimization.

    The newest `keep_checkpoints` are kept (0: all), and besides the one with the highest `keep_best`, a validation
    metric such as val/heldout/avg@4. An update whose loss or gradient is not finite is skipped; `stop_after_skipped`
    of them in a row end the run.
    """

    steps: int = 500
    prompts_per_step: int = 8
    tokens_per_microbatch: int = 16384
    lr: float = 1e-5
    min_lr: float = 0.0
    schedule: Literal["constant", "cosine"] = "constant"
    warmup_fraction: float = 0.0
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.999)
    adam_eps: float = 1e-8
    clip_grad: float = 1.0
    distributed_optimizer: bool = True
    save_every: int = 0
    keep_checkpoints: int = 2
    keep_best: str | None = None
    stop_after_skipped: int = 3
    export_hf: bool = True


@dataclass
class EvaluationConfig:
    """Sampling on the validation sets every `every` steps (0: never), before the first and after the last step."""

    every: int = 0
    samples: int = 4
    temperature: float = 0.7
    top_p: float = 1.0
    max_new_tokens: int | None = None
    limit: int | None = None
    teacher: bool = False


@dataclass
class LoggingConfig:
    """Where metrics go besides metrics.jsonl and the progress line. `wandb` is a project name.

    A loss above `spike_factor` times the median of the last steps is reported, and its rollouts kept (0: never).
    """

    tensorboard: bool = True
    wandb: str | None = None
    every: int = 1
    spike_factor: float = 10.0


@dataclass
class Config:
    """A complete run."""

    output: str = "runs/run"
    precision: Literal["fp32", "bf16"] = "bf16"
    seed: int = 0
    student: StudentConfig = field(default_factory=StudentConfig)
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    teachers: list[str] = field(default_factory=list)
    bridge: BridgeConfig = field(default_factory=BridgeConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)


def default_config_dir() -> Path:
    """`conf/` of the source tree, or the copy that an installed wheel carries."""
    packaged = Path(__file__).parent / "_conf"
    return packaged if packaged.is_dir() else Path(__file__).parent.parent / "conf"


def load_config(name: str, overrides: list[str] | None = None, config_dir: str | Path | None = None) -> Config:
    """Composes configuration `name` with Hydra-style `overrides` (`train.lr=1e-4`, `loss=group_entry`) and checks it.

    Raises:
        ValueError: no such configuration, an unknown key (the nearest known one is named), a value of the wrong type,
            or values that contradict each other.
    """
    from hydra import compose, initialize_config_dir
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    directory = Path(config_dir or default_config_dir()).resolve()
    if not directory.is_dir():
        raise ValueError(f"--config-dir {config_dir}: no such directory; expected one with {name}.yaml in it")
    name = name.removesuffix(".yaml")
    if not (directory / f"{name}.yaml").is_file():
        known = sorted(file.stem for file in directory.glob("*.yaml"))
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        raise ValueError(
            f"--config-name {name}: no {name}.yaml in {directory}, expected one of {known}"
            + (f"; did you mean {near[0]!r}?" if near else "; choose one, or name its directory with --config-dir")
        )
    try:
        parsed = OverridesParser.create().parse_overrides(list(overrides or []))
        groups = [o for o in parsed if (directory / str(o.key_or_group)).is_dir()]
        with initialize_config_dir(version_base=None, config_dir=str(directory)):
            composed = compose(name, overrides=[str(o.input_line) for o in groups])
        merged: Any = OmegaConf.merge(OmegaConf.create(dataclasses.asdict(Config())), composed)
        for override in parsed:
            if override in groups:
                continue
            if override.is_delete() or override.is_sweep_override():
                raise ValueError(
                    f"{override.input_line}: expected key=value; deletions and sweeps are not supported: give one "
                    "value, or null"
                )
            _known_key(override.key_or_group, "command line")
            OmegaConf.update(merged, override.key_or_group, override.value(), merge=False, force_add=True)
        _replace_model_sources(merged, {str(override.key_or_group) for override in parsed})
        plain = OmegaConf.to_container(merged, resolve=True)
    except (HydraException, OmegaConfBaseException, YAMLError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"configuration {name}: {reason}; expected YAML in {name}.yaml and KEY=VALUE on the command line: "
            "correct it"
        ) from error
    if not isinstance(plain, dict):
        raise ValueError(f"configuration {name}: {name}.yaml holds a list, expected keys and values; correct it")
    _refuse_secrets(plain, "")
    config = _build(Config, plain, "")
    check(config)
    return config


def _replace_model_sources(merged: Any, overridden: set[str]) -> None:
    """A model named on the command line replaces the file's, also where the file names the other kind of source."""
    for role in ("student", "teacher"):
        for given, other in (("hf_path", "checkpoint"), ("checkpoint", "hf_path")):
            named = f"{role}.{given}" in overridden and merged[role][given] is not None
            if named and f"{role}.{other}" not in overridden:
                merged[role][other] = None


@functools.cache
def _fields(cls: type) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    return {f.name: hints[f.name] for f in dataclasses.fields(cls)}


def _all_keys(cls: type, prefix: str = "") -> list[str]:
    keys = []
    for name, hint in _fields(cls).items():
        keys.append(prefix + name)
        if dataclasses.is_dataclass(hint):
            keys += _all_keys(typing.cast(type, hint), f"{prefix}{name}.")
    return keys


def _unknown(key: str, where: str) -> ValueError:
    if _SECRET_KEY.search(key):
        return ValueError(
            f"{where}: unknown key {key!r}; expected no secrets in a configuration, because it is saved with the run: "
            "set the environment variable that the program reads (WANDB_API_KEY, HF_TOKEN)"
        )
    near = difflib.get_close_matches(key, _all_keys(Config), n=1, cutoff=0.5)
    hint = (
        f"; did you mean {near[0]!r}?" if near else f"; expected one of {', '.join(_fields(Config))}, or a key in them"
    )
    return ValueError(f"{where}: unknown key {key!r}{hint}")


# Names of keys and of environment variables that hold secrets, and what the keys of Hugging Face and W&B look like. A
# W&B key must be the whole value: directories of a Hugging Face cache have commit hashes in their names.
_SECRET_KEY = re.compile(r"(api_?key|(access|auth|hf)_?token|(^|\.)token|secret|passw(or)?d|credentials?)$", re.I)
_SECRET_VARIABLE = re.compile(r"(KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?)$", re.I)
_SECRET_VALUE = re.compile(r"hf_[A-Za-z0-9]{30,}|^[0-9a-f]{40}$")
# shorter values of environment variables (an empty or a dummy one) would be found in harmless text
_SECRET_LENGTH = 8


def _refuse_secrets(value: Any, key: str) -> None:
    """Raises ValueError, without saying the value, where one would end up in config.yaml, e.g. by "
    f"`${oc.env:HF_TOKEN}`."""
    if isinstance(value, dict | list):
        for name, item in value.items() if isinstance(value, dict) else enumerate(value):
            _refuse_secrets(item, f"{key}.{name}" if key else str(name))
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


def _known_key(key: str, where: str) -> None:
    known = _all_keys(Config)
    if key not in known and key.rsplit(".", 1)[0] != "data.validation":
        raise _unknown(key, where)


def _build(hint: Any, value: Any, key: str) -> Any:
    """`value` as an object of type `hint`; every mismatch is a ValueError that names `key`."""
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, dict):
            first = next(iter(_fields(typing.cast(type, hint))))
            raise ValueError(f"{key}={value!r}: expected a group of keys; give one of them, e.g. {key}.{first}")
        prefix = f"{key}." if key else ""
        for name in value:
            if name not in _fields(typing.cast(type, hint)):
                raise _unknown(prefix + str(name), "configuration")
        parts = {
            name: _build(inner, value[name], prefix + name) for name, inner in _fields(typing.cast(type, hint)).items()
        }
        return typing.cast(type, hint)(**parts)
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        for option in arguments:
            try:
                return _build(option, value, key)
            except ValueError:
                continue
        raise ValueError(f"{key}={value!r}: expected {_describe(hint)}; give one")
    if origin is Literal and isinstance(value, str) and value in arguments:
        return value
    if origin is list and isinstance(value, list):
        return [_build(arguments[0], item, f"{key}[{i}]") for i, item in enumerate(value)]
    if origin is tuple and isinstance(value, (list, tuple)) and len(value) == len(arguments):
        return tuple(_build(inner, item, key) for inner, item in zip(arguments, value, strict=True))
    if origin is dict and isinstance(value, dict):
        return {str(name): _build(arguments[1], item, f"{key}.{name}") for name, item in value.items()}
    if hint is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        if not math.isfinite(value):
            raise ValueError(f"{key}={value}: expected a finite number; choose one")
        return float(value)
    if hint in (int, str, bool, types.NoneType) and type(value) is hint:
        return value
    raise ValueError(f"{key}={value!r}: expected {_describe(hint)}; give one")


def _describe(hint: Any) -> str:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return " | ".join(map(str, arguments))
    if origin in (typing.Union, types.UnionType):
        return " | ".join(_describe(option) for option in arguments)
    if origin in (list, tuple, dict):
        return f"{origin.__name__} of {_describe(arguments[-1])}"
    return {types.NoneType: "null", int: "an integer", float: "a number", str: "text", bool: "true or false"}[hint]


def check(config: Config) -> None:
    """Raises ValueError for values that are out of range, contradict each other, or ask for what isn't there yet."""
    _check_there_yet(config)
    for role, model in (("student", config.student), ("teacher", config.teacher)):
        if (model.hf_path is None) == (model.checkpoint is None):
            raise ValueError(
                f"{role}.hf_path={model.hf_path} and {role}.checkpoint={model.checkpoint}: "
                "expected exactly one of the two; set the other to null"
            )
        for name in ("tensor", "pipeline", "virtual_pipeline", "context", "first_stage_layers", "last_stage_layers"):
            size = getattr(model.parallel, name)
            if size is not None and size < 1:
                raise ValueError(f"{role}.parallel.{name}={size}: expected at least 1; choose 1 or more")
        if model.parallel.virtual_pipeline > 1 and model.parallel.pipeline == 1:
            raise ValueError(
                f"{role}.parallel.virtual_pipeline={model.parallel.virtual_pipeline} needs {role}.parallel.pipeline "
                "> 1; raise that, or set it to 1"
            )
    if config.teacher.ranks is not None and config.teacher.ranks < 1:
        raise ValueError(f"teacher.ranks={config.teacher.ranks}: expected at least 1; choose more, or null")
    student = config.student
    if student.recompute != "full" and (student.recompute_num_layers, student.recompute_method) != (1, "uniform"):
        raise ValueError(
            f"student.recompute_num_layers={student.recompute_num_layers} and student.recompute_method="
            f"{student.recompute_method} are for student.recompute=full, but it is {student.recompute}; leave them out"
        )
    if config.teacher.placement == "colocated" and config.teacher.ranks is not None:
        raise ValueError(f"teacher.ranks={config.teacher.ranks} is for teacher.placement=dedicated; set it to null")
    resident = config.teacher.resident_microbatches
    positive = {
        "teacher.resident_microbatches": 1 if resident is None else resident,
        "loss.output.k": config.loss.output.k,
        "loss.output.chunk_tokens": config.loss.output.chunk_tokens,
        "loss.output.temperature": config.loss.output.temperature,
        "loss.representation.k": config.loss.representation.k,
        "rollout.max_new_tokens": config.rollout.max_new_tokens,
        "rollout.per_prompt": config.rollout.per_prompt,
        "bridge.prompts": config.bridge.prompts,
        "bridge.rank": 1 if config.bridge.rank == "auto" else config.bridge.rank,
        "train.stop_after_skipped": config.train.stop_after_skipped,
        "rollout.tensor": config.rollout.tensor,
        "rollout.max_batch": config.rollout.max_batch,
        "train.steps": config.train.steps,
        "train.prompts_per_step": config.train.prompts_per_step,
        "train.tokens_per_microbatch": config.train.tokens_per_microbatch,
        "train.lr": config.train.lr,
        "evaluation.samples": config.evaluation.samples,
        "student.recompute_num_layers": config.student.recompute_num_layers,
        "rollout.max_cache_tokens": config.rollout.max_cache_tokens,
        "logging.every": config.logging.every,
        "train.adam_eps": config.train.adam_eps,
        "evaluation.max_new_tokens": 1
        if config.evaluation.max_new_tokens is None
        else config.evaluation.max_new_tokens,
        "data.max_prompt_tokens": 1 if config.data.max_prompt_tokens is None else config.data.max_prompt_tokens,
        "evaluation.limit": 1 if config.evaluation.limit is None else config.evaluation.limit,
    }
    for key, value in positive.items():
        if value <= 0:
            raise ValueError(f"{key}={value}: expected more than 0; choose a larger number")
    fractions = {
        "rollout.top_p": config.rollout.top_p,
        "evaluation.top_p": config.evaluation.top_p,
    }
    for key, value in fractions.items():
        if not 0 < value <= 1:
            raise ValueError(f"{key}={value}: expected a number in (0, 1]; choose one, 1 for all")
    at_least_zero = {
        "loss.representation.weight": config.loss.representation.weight,
        "loss.output.weight": config.loss.output.weight,
        "rollout.temperature": config.rollout.temperature,
        "evaluation.temperature": config.evaluation.temperature,
        "train.weight_decay": config.train.weight_decay,
        "train.min_lr": config.train.min_lr,
        "train.clip_grad": config.train.clip_grad,
        "train.save_every": config.train.save_every,
        "train.keep_checkpoints": config.train.keep_checkpoints,
        "logging.spike_factor": config.logging.spike_factor,
        "evaluation.every": config.evaluation.every,
        "seed": config.seed,
    }
    for key, value in at_least_zero.items():
        if value < 0:
            raise ValueError(f"{key}={value}: expected 0 or more; choose another number")
    if not 0 <= config.train.warmup_fraction <= 1:
        raise ValueError(
            f"train.warmup_fraction={config.train.warmup_fraction}: expected a number in [0, 1]; choose one, "
            "such as 0.03"
        )
    output = config.loss.output
    if config.loss.representation.layers == "none" and output.kind == "none":
        raise ValueError(
            "loss.representation.layers=none and loss.output.kind=none: expected something to learn; choose layers or "
            "a kind"
        )
    if output.weight > 0 and output.kind == "none":
        raise ValueError(f"loss.output.weight={output.weight} with loss.output.kind=none; choose a kind, or weight 0")
    if not all(0 <= beta < 1 for beta in config.train.betas):
        raise ValueError(
            f"train.betas={list(config.train.betas)}: expected two numbers in [0, 1); choose e.g. [0.9,0.999]"
        )
    if config.train.min_lr > config.train.lr:
        raise ValueError(
            f"train.min_lr={config.train.min_lr} is above train.lr={config.train.lr}; expected at most that: lower it"
        )
    if config.train.keep_best is not None:
        k = config.evaluation.samples
        known = [f"val/{name}/{kind}@{k}" for name in config.data.validation for kind in ("avg", "best")]
        if config.train.keep_best not in known or not config.evaluation.every:
            raise ValueError(
                f"train.keep_best={config.train.keep_best}: expected null, or one of {known} together with "
                "evaluation.every > 0"
            )
    if config.evaluation.every and not config.data.validation:
        raise ValueError(
            f"evaluation.every={config.evaluation.every} needs at least one set in data.validation; "
            "add e.g. data.validation.aime24=FILE, or set evaluation.every=0"
        )


def _check_there_yet(config: Config) -> None:
    """Settings that have their place in the schema and no implementation in this version."""
    planned = {
        "teachers": (config.teachers, []),
        "rollout.engine": (config.rollout.engine, "megatron"),
    }
    for key, (value, only) in planned.items():
        if value != only:
            raise ValueError(f"{key}={value}: this version supports only {key}={only}; see README, what doesn't yet")


def to_yaml(config: Config) -> str:
    """The complete configuration as YAML; `load_config` reads it back."""
    import yaml

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: plain(item) for name, item in value.items()}
        return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value

    return yaml.safe_dump(plain(dataclasses.asdict(config)), sort_keys=False)
