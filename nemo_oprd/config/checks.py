"""What a configuration may not say: values out of range, contradictions, what isn't there yet.

Checks that need a model (layers in range, sizes that divide) sit where the model is built. Every message names the key,
what was expected and the fix.
"""

from __future__ import annotations

from functools import reduce
from typing import Any

from nemo_oprd.config.schema import Config, ModelConfig, ModelSource, ParallelConfig
from nemo_oprd.config.weight_schedule import Weight, largest, vanishes, weight_at
from nemo_oprd.losses.registry import check_divergence, check_row_loss

# null counts as right where a key allows it
MORE_THAN_ZERO = (
    "bridge.prompts",
    "data.max_prompt_tokens",
    "evaluation.limit",
    "evaluation.max_new_tokens",
    "evaluation.samples",
    "logging.every",
    "logging.output_metrics_rows",
    "loss.output.chunk_tokens",
    "loss.output.k",
    "loss.output.temperature",
    "loss.representation.k",
    "rollout.max_batch",
    "rollout.max_cache_tokens",
    "rollout.max_new_tokens",
    "rollout.per_prompt",
    "rollout.tensor",
    "student.recompute_num_layers",
    "teacher.resident_microbatches",
    "train.adam_eps",
    "train.lr",
    "train.prompts_per_step",
    "train.steps",
    "train.stop_after_skipped",
    "train.tokens_per_microbatch",
    "train.updates_per_rollout",
)
ZERO_OR_MORE = (
    "evaluation.every",
    "evaluation.temperature",
    "logging.gradient_noise_every",
    "logging.output_metrics_every",
    "logging.spike_factor",
    "rollout.temperature",
    "seed",
    "train.clip_grad",
    "train.keep_checkpoints",
    "train.min_lr",
    "train.save_every",
    "train.weight_decay",
)
FRACTIONS = ("evaluation.top_p", "rollout.top_p")


def check(config: Config) -> None:
    """Raises ValueError for values that are out of range, contradict each other, or ask for what isn't there yet."""
    check_row_loss(config.loss.representation.kind, config.loss.representation.kind_args)
    check_divergence(config.loss.output.kind)
    _check_there_yet(config)
    _check_source("student", config.student)
    for role, model in (("student", config.student), ("teacher", config.teacher)):
        _check_parallel(role, model)
    _check_teachers(config)
    _check_self_distillation(config)
    _check_roles(config)
    _check_ranges(config)
    _check_losses(config)
    _check_bridge(config)
    _check_training(config)
    _check_evaluation(config)


def _value(config: Config, key: str) -> Any:
    return reduce(getattr, key.split("."), config)


def _check_ranges(config: Config) -> None:
    values = {key: _value(config, key) for key in MORE_THAN_ZERO}
    values["bridge.rank"] = None if config.bridge.rank == "auto" else config.bridge.rank
    for key, value in values.items():
        if value is not None and value <= 0:
            raise ValueError(f"{key}={value}: expected more than 0; choose a larger number")
    for key in FRACTIONS:
        if not 0 < _value(config, key) <= 1:
            raise ValueError(f"{key}={_value(config, key)}: expected a number in (0, 1]; choose one, 1 for all")
    for key in ZERO_OR_MORE:
        if _value(config, key) < 0:
            raise ValueError(f"{key}={_value(config, key)}: expected 0 or more; choose another number")


def _check_source(key: str, model: ModelSource) -> None:
    if (model.hf_path is None) == (model.checkpoint is None):
        raise ValueError(
            f"{key}.hf_path={model.hf_path} and {key}.checkpoint={model.checkpoint}: "
            "expected exactly one of the two; set the other to null"
        )


def _check_no_source(model: ModelSource, why: str) -> None:
    if model.hf_path is not None or model.checkpoint is not None:
        raise ValueError(
            f"teacher.hf_path={model.hf_path} and teacher.checkpoint={model.checkpoint} with {why}; expected neither: "
            "set both to null"
        )


def _check_parallel(role: str, model: ModelConfig) -> None:
    for name in ("tensor", "pipeline", "virtual_pipeline", "context", "first_stage_layers", "last_stage_layers"):
        size = getattr(model.parallel, name)
        if size is not None and size < 1:
            raise ValueError(f"{role}.parallel.{name}={size}: expected at least 1; choose 1 or more")
    if model.parallel.virtual_pipeline > 1 and model.parallel.pipeline == 1:
        raise ValueError(
            f"{role}.parallel.virtual_pipeline={model.parallel.virtual_pipeline} needs {role}.parallel.pipeline "
            "> 1; raise that, or set it to 1"
        )


def _check_teachers(config: Config) -> None:
    """Where the teachers come from, and which responses are whose."""
    teachers = config.teachers
    if not teachers:
        if config.teacher.weights == "own":
            _check_source("teacher", config.teacher)
        return
    _check_no_source(config.teacher, "a list of teachers")
    owner: dict[str | None, int] = {}
    labels: dict[str, int] = {}
    for i, teacher in enumerate(teachers):
        _check_source(f"teachers[{i}]", teacher)
        if teacher.weight <= 0:
            raise ValueError(f"teachers[{i}].weight={teacher.weight}: expected more than 0; leave out who shan't teach")
        if teacher.data_sources is not None and not teacher.data_sources:
            raise ValueError(
                f"teachers[{i}].data_sources=[]: expected names, or null for all that no other teacher has; give some"
            )
        if teacher.bridge == "full_width":
            raise ValueError(
                f"teachers[{i}].bridge=full_width is learned with the student, which several teachers rule out; "
                "expected the directory of a fitted bridge: run fit-bridge with this teacher and name its output"
            )
        sources: list[str | None] = [None] if teacher.data_sources is None else [*dict.fromkeys(teacher.data_sources)]
        for source in sources:
            what = "null, all that no other teacher has" if source is None else repr(source)
            if source in owner:
                raise ValueError(
                    f"teachers[{owner[source]}] and teachers[{i}] both have the data source {what}; expected one "
                    "teacher for each: take it from one of them"
                )
            owner[source] = i
        if labels.setdefault(teacher.label, i) != i:
            raise ValueError(
                f"teachers[{labels[teacher.label]}] and teachers[{i}] are both called {teacher.label!r} in metrics; "
                "expected different names: set teachers[i].name"
            )
    if config.bridge.path != "none" or config.bridge.train:
        raise ValueError(
            f"bridge.path={config.bridge.path} and bridge.train={str(config.bridge.train).lower()} with several "
            "teachers: each has a frozen bridge of its own; expected none and false: set teachers[i].bridge"
        )
    if config.evaluation.teacher:
        raise ValueError(
            "evaluation.teacher=true with several teachers; expected false: evaluate each with `nemo-oprd evaluate`"
        )


def _check_self_distillation(config: Config) -> None:
    """What a teacher that is the student, or reads another prompt than the student, rules out."""
    teacher, weights = config.teacher, config.teacher.weights
    if teacher.prompt is not None and "{prompt}" not in teacher.prompt:
        raise ValueError(
            f"teacher.prompt={teacher.prompt!r}: expected a text with {{prompt}}, which stands for what the student "
            "reads; put it in"
        )
    if not 0 <= teacher.ema_decay < 1:
        raise ValueError(f"teacher.ema_decay={teacher.ema_decay}: expected a number in [0, 1); choose e.g. 0.999")
    if weights == "own":
        return
    why = f"teacher.weights={weights}"
    if config.teachers:
        raise ValueError(f"{why} with a list of teachers; expected own: remove one of the two")
    _check_no_source(teacher, f"{why}, where the student is its own teacher")
    if teacher.prompt is None:
        raise ValueError(
            f"{why} with teacher.prompt=null: the student would be compared with itself on the same tokens; expected a "
            "template with privileged information: set e.g. teacher.prompt='{prompt} The answer is {answer}.'"
        )
    if teacher.reads == "text":
        raise ValueError(f"{why} with teacher.reads=text: the tokenizer is the same; expected ids: set it")
    if config.bridge.path != "none":
        raise ValueError(f"bridge.path={config.bridge.path} with {why}: both have one shape; expected none: set it")
    if config.evaluation.teacher:
        raise ValueError(
            f"evaluation.teacher=true with {why}: without what teacher.prompt tells it, the teacher is the student; "
            "expected false: set it"
        )
    if weights == "initial":
        return
    if teacher.placement == "dedicated" or teacher.parallel != ParallelConfig() or teacher.offload:
        raise ValueError(
            f"teacher.placement={teacher.placement}, offload={str(teacher.offload).lower()} or a parallel of its own "
            f"with {why}: such a teacher has the student's ranks and layout; expected them left out: remove them"
        )
    if config.train.updates_per_rollout > 1:
        raise ValueError(
            f"train.updates_per_rollout={config.train.updates_per_rollout} with {why}: the second update's teacher "
            "would be another than the first's; expected 1: set it, or use initial weights"
        )


def _check_roles(config: Config) -> None:
    student, teacher = config.student, config.teacher
    if teacher.ranks is not None and teacher.ranks < 1:
        raise ValueError(f"teacher.ranks={teacher.ranks}: expected at least 1; choose more, or null")
    if student.recompute != "full" and (student.recompute_num_layers, student.recompute_method) != (1, "uniform"):
        raise ValueError(
            f"student.recompute_num_layers={student.recompute_num_layers} and student.recompute_method="
            f"{student.recompute_method} are for student.recompute=full, but it is {student.recompute}; leave them out"
        )
    if teacher.reads == "text":
        _check_reading_text(config)
    if teacher.placement == "colocated" and teacher.ranks is not None:
        raise ValueError(f"teacher.ranks={teacher.ranks} is for teacher.placement=dedicated; set it to null")


def _check_reading_text(config: Config) -> None:
    if not 0 <= config.alignment.min_coverage <= 1:
        raise ValueError(
            f"alignment.min_coverage={config.alignment.min_coverage}: expected a share in [0, 1]; choose one"
        )
    if config.loss.output.kind != "none":
        raise ValueError(
            f"loss.output.kind={config.loss.output.kind} with teacher.reads=text: a probability of the student's token "
            "has no counterpart among the teacher's tokens; expected none: match hidden states, or take a teacher with "
            "the student's tokenizer and teacher.reads=ids"
        )
    if config.logging.output_metrics_every:
        raise ValueError(
            f"logging.output_metrics_every={config.logging.output_metrics_every} with teacher.reads=text: there are no "
            "two distributions over the same tokens to compare; expected 0: set it"
        )
    if config.evaluation.teacher:
        raise ValueError(
            "evaluation.teacher=true with teacher.reads=text: the teacher is sampled in the student's engine and "
            "tokens; expected false: evaluate the teacher with `nemo-oprd evaluate`"
        )


def _check_losses(config: Config) -> None:
    output = config.loss.output
    for key in ("loss.representation.weight", "loss.output.weight"):
        _check_weight(key, _value(config, key))
    weights = config.loss.representation.layer_weights or []
    for layer_weight in weights.values() if isinstance(weights, dict) else weights:
        if layer_weight <= 0:
            raise ValueError(
                f"loss.representation.layer_weights holds {layer_weight}: expected numbers above 0; leave a layer that "
                "shall not count out of loss.representation.layers"
            )
    decay = config.loss.representation.adaptive.decay
    if not 0 <= decay < 1:
        raise ValueError(f"loss.representation.adaptive.decay={decay}: expected a number in [0, 1); choose e.g. 0.9")
    adaptive = config.loss.representation.adaptive
    if config.loss.representation.layers == "none" and (adaptive.layers or adaptive.positions):
        raise ValueError(
            f"loss.representation.adaptive.layers={str(adaptive.layers).lower()} and positions="
            f"{str(adaptive.positions).lower()} with loss.representation.layers=none: nothing has weights to adapt; "
            "expected false: set both, or choose layers"
        )
    if config.loss.representation.layers == "none" and output.kind == "none":
        raise ValueError(
            "loss.representation.layers=none and loss.output.kind=none: expected something to learn; choose layers or "
            "a kind"
        )
    if largest(output.weight) > 0 and output.kind == "none":
        given = "a schedule" if isinstance(output.weight, list) else output.weight
        raise ValueError(f"loss.output.weight={given} with loss.output.kind=none; choose a kind, or weight 0")
    _check_schedules(config)
    _check_reuse(config)


def _check_reuse(config: Config) -> None:
    """Rollouts that are used for several updates, and the clipped ratio that belongs to it."""
    output, updates = config.loss.output, config.train.updates_per_rollout
    ratio = output.kind == "sampled_token" and updates > 1
    if output.clip is not None and not ratio:
        raise ValueError(
            f"loss.output.clip={output.clip} with loss.output.kind={output.kind} and train.updates_per_rollout="
            f"{updates}: expected kind sampled_token and more than one update, else there is no ratio to clip; set it "
            "to null"
        )
    low, high = output.clip if isinstance(output.clip, tuple) else (output.clip, output.clip)
    if low is not None and high is not None and not (0 < low <= 1 and high > 0):
        raise ValueError(
            f"loss.output.clip={output.clip}: expected a number in (0, 1], or [low, high] with low in (0, 1] and high "
            "above 0; choose e.g. 0.2"
        )
    rollout = config.rollout
    if output.kind != "sampled_token" or rollout.replay is not None:
        return
    if output.temperature != rollout.temperature or rollout.top_p != 1:
        raise ValueError(
            "loss.output.kind=sampled_token estimates a divergence at the tokens that the student samples, at rollout."
            f"temperature={rollout.temperature} and rollout.top_p={rollout.top_p}, but loss.output.temperature="
            f"{output.temperature}: expected one temperature and top_p=1, or the estimate is of nothing; set them, or "
            "take another kind"
        )


def _check_weight(key: str, weight: Weight) -> None:
    if not isinstance(weight, list):
        if weight < 0:
            raise ValueError(f"{key}={weight}: expected 0 or more; choose another number")
        return
    if not weight:
        raise ValueError(f"{key}=[]: expected a number, or at least one stage; give one")
    begin = 0
    for i, stage in enumerate(weight):
        if min(stage.weight, stage.start or 0.0) < 0:
            raise ValueError(f"{key}[{i}] has a weight below 0; expected 0 or more: choose another number")
        if stage.until is None and (i < len(weight) - 1 or stage.start is not None):
            raise ValueError(
                f"{key}[{i}] has no end; expected the number of its last update, which only a last stage of constant "
                "weight may leave out: give until"
            )
        if stage.until is not None and stage.until <= begin:
            raise ValueError(f"{key}[{i}].until={stage.until}: expected more than {begin}, where the stage begins")
        begin = stage.until or begin


def _check_schedules(config: Config) -> None:
    """A scheduled run trains something in every update."""
    representation, output = config.loss.representation, config.loss.output
    if not isinstance(representation.weight, list) and not isinstance(output.weight, list):
        return
    for step in range(config.train.steps):
        of_layers = 0.0 if representation.layers == "none" else weight_at(representation.weight, step)
        if of_layers == weight_at(output.weight, step) == 0:
            raise ValueError(
                f"loss.representation.weight and loss.output.weight are both 0 at update {step + 1}; expected "
                "something to learn in each of train.steps updates: change their schedules"
            )


def _check_bridge(config: Config) -> None:
    bridge, loss = config.bridge, config.loss.representation
    if bridge.path == "full_width" and not bridge.train:
        raise ValueError(
            "bridge.path=full_width with bridge.train=false would compare through frozen random matrices; expected "
            "bridge.train=true: set it, or fit a bridge and name its directory"
        )
    if not bridge.train:
        return
    if bridge.path == "none":
        raise ValueError(
            "bridge.train=true with bridge.path=none: expected a bridge to train; set bridge.path to a directory that "
            "fit-bridge made, or to full_width"
        )
    if loss.weight == 0 or loss.layers == "none":
        raise ValueError(
            f"bridge.train=true with loss.representation.weight={loss.weight} and layers={loss.layers}: no loss "
            "reaches the projectors; expected a weight above 0 and layers: set them, or bridge.train=false"
        )
    if isinstance(loss.weight, list) and vanishes(loss.weight):
        raise ValueError(
            "bridge.train=true with a loss.representation.weight of 0 in some updates: the projectors would drift "
            "where no loss reaches them; expected weights above 0: change the schedule, or set bridge.train=false"
        )
    if config.precision == "bf16" and not config.train.distributed_optimizer:
        raise ValueError(
            "bridge.train=true with precision=bf16 and train.distributed_optimizer=false: Megatron's plain bf16 "
            "optimizer can't save the projectors, which are float32; expected the distributed optimizer: set "
            "train.distributed_optimizer=true"
        )


def _check_training(config: Config) -> None:
    train = config.train
    if not 0 <= train.warmup_fraction <= 1:
        raise ValueError(
            f"train.warmup_fraction={train.warmup_fraction}: expected a number in [0, 1]; choose one, such as 0.03"
        )
    if not all(0 <= beta < 1 for beta in train.betas):
        raise ValueError(f"train.betas={list(train.betas)}: expected two numbers in [0, 1); choose e.g. [0.9,0.999]")
    if train.min_lr > train.lr:
        raise ValueError(f"train.min_lr={train.min_lr} is above train.lr={train.lr}; expected at most that: lower it")


def _check_evaluation(config: Config) -> None:
    if config.data.train == []:
        raise ValueError("data.train=[]: expected a file of prompts, or several; name one, or set it to null")
    evaluation, best = config.evaluation, config.train.keep_best
    if best is not None:
        names = config.data.validation
        known = [f"val/{name}/{kind}@{evaluation.samples}" for name in names for kind in ("avg", "best")]
        if best not in known or not evaluation.every:
            raise ValueError(
                f"train.keep_best={best}: expected null, or one of {known} together with evaluation.every > 0"
            )
    if evaluation.every and not config.data.validation:
        raise ValueError(
            f"evaluation.every={evaluation.every} needs at least one set in data.validation; "
            "add e.g. data.validation.aime24=FILE, or set evaluation.every=0"
        )


def _check_there_yet(config: Config) -> None:
    """Settings that have their place in the schema and no implementation in this version."""
    planned = {"rollout.engine": (config.rollout.engine, "megatron")}
    for key, (value, only) in planned.items():
        if value != only:
            raise ValueError(f"{key}={value}: this version supports only {key}={only}; see README, what doesn't yet")
