"""A distillation recipe of NeMo-RL as this project's configuration, and the list of what has no counterpart.

Tables of rows hold what is translated key by key; functions hold what depends on several keys, and what is not the same
here and is said in a note. Everything else of the recipe is listed with a reason (`_WITHOUT_COUNTERPART`), or as
unknown.
"""

from __future__ import annotations

from itertools import count, takewhile
from typing import Any

from nemo_oprd.commands.from_nemo_rl.optimizer import translate_optimizer
from nemo_oprd.commands.from_nemo_rl.recipe import Recipe, Row, Translated, wrong
from nemo_oprd.config.schema import EvaluationConfig, TrainConfig
from nemo_oprd.config.secret_values import SECRET_KEY


def _one_or_more(recipe: Recipe, key: str) -> int:
    return int(recipe.count(key, 1))


def _size(recipe: Recipe, key: str) -> int | None:
    """A parallel size; None for 1, the default here."""
    return size if (size := _one_or_more(recipe, key)) > 1 else None


# below a model's megatron_cfg or dtensor_cfg -> below `student` or `teacher`
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
_STEP: tuple[Row, ...] = (
    ("distillation.num_prompts_per_step", "train.prompts_per_step", Recipe.count),
    ("distillation.num_generations_per_prompt", "rollout.per_prompt", _one_or_more),
    ("distillation.max_num_steps", "train.steps", Recipe.count),
    ("policy.generation.temperature", "rollout.temperature", Recipe.not_negative),
    ("policy.generation.top_p", "rollout.top_p", Recipe.not_negative),
)
_SERVERS: tuple[Row, ...] = (
    ("policy.generation.vllm_cfg.tensor_parallel_size", "rollout.vllm.tensor", _one_or_more),
    ("policy.generation.vllm_cfg.gpu_memory_utilization", "rollout.vllm.gpu_memory_utilization", Recipe.not_negative),
)
_TOKENIZER: tuple[Row, ...] = (
    ("policy.tokenizer.chat_template_kwargs", "data.chat_template_args", Recipe.get),
    ("policy.tokenizer.chat_template", "data.chat_template", Recipe.text),
)
# groups of more keys are counted, not listed
_SHOWN = 12
# prefix of keys -> why they have no counterpart; the longest one counts
_WITHOUT_COUNTERPART = {
    "policy.train_micro_batch_size": "microbatches are packs of train.tokens_per_microbatch tokens",
    "policy.dynamic_batching": "microbatches are packs of train.tokens_per_microbatch tokens",
    "policy.sequence_packing": "microbatches are packs of train.tokens_per_microbatch tokens",
    "policy.make_sequence_length_divisible_by": "packs are padded as the layout needs",
    "policy.logprob_batch_size": "there is no separate pass for log-probabilities",
    "policy.logprob_chunk_size": "logits are computed in chunks of loss.output.chunk_tokens",
    "policy.generation_batch_size": "rollout.max_batch and the memory of the engine limit a batch",
    "policy.offload_optimizer_for_logprob": "teacher.offload moves the teacher, the optimizer stays",
    "policy.tokenizer": "the tokenizer is the one in student.hf_path",
    "policy.generation.vllm_cfg": "further arguments of the server are rollout.vllm.flags",
    "policy.generation.vllm_kwargs": "further arguments of the server are rollout.vllm.flags",
    "policy.generation.mcore_generation_config": "the in-process engine has rollout.max_cache_tokens",
    "policy.generation.top_k": "there is top-p only",
    "policy.generation.stop_token_ids": "responses end with the model's end-of-sequence ids",
    "policy.generation.stop_strings": "responses end with the model's end-of-sequence ids",
    "policy.generation": "settings of NeMo-RL's engines and ports",
    "policy.megatron_cfg.peft": "all weights are trained; there is no LoRA",
    "policy.megatron_cfg.fp8_cfg": "there is no FP8",
    "policy.megatron_cfg.optimizer": "the optimizer is AdamW with float32 states on the device",
    "policy.megatron_cfg.scheduler": "there are the schedules constant and cosine, with a linear warm-up from 0",
    "policy.megatron_cfg.distributed_data_parallel_config": "gradients are reduced in float32",
    "policy.megatron_cfg": "settings of Megatron's kernels and of its experts",
    "policy.dtensor_cfg.lora_cfg": "all weights are trained; there is no LoRA",
    "policy.dtensor_cfg": "layouts are Megatron's; train.distributed_optimizer shards the optimizer",
    "policy.optimizer": "the optimizer is AdamW",
    "policy.scheduler": "there are the schedules constant and cosine, with a linear warm-up from 0",
    "policy.hf_config_overrides": "config.json is read as it is",
    "policy.draft": "there is no draft model",
    "policy.router_replay": "routes of experts are kept where layers are recomputed",
    "teacher": "the teacher is frozen and needs a model and a layout only",
    "teachers": "a teacher is frozen and needs a model and a layout only",
    "distillation.max_num_epochs": "train.steps ends the run",
    "distillation.max_rollout_turns": "a response has one turn",
    "distillation.val_at_start": "there are no validation sets in the recipe",
    "distillation.val_at_end": "there are no validation sets in the recipe",
    "distillation.val_period": "there are no validation sets in the recipe",
    "distillation.max_val_samples": "there are no validation sets in the recipe",
    "distillation.val_batch_size": "all problems of an evaluation are sampled together",
    "data.train": "prompts come from a file",
    "data.validation": "prompts come from a file",
    "data.default": "a prompt is the file's text and data.suffix; the data source chooses the grader",
    "data": "prompts come from files, in an order that the seed determines",
    "env": "graders are functions in this process (docs/evaluation.md)",
    "checkpointing": "checkpoints are in the run's directory, complete, in Megatron's format",
    "logger": "metrics are in the run's directory (docs/runs.md)",
    "cluster": "torchrun or Slurm starts the ranks",
    "distillation.topk_logits_k": "there is no divergence of next-token distributions",
    "loss_fn": "the divergence is one of loss.output.kind",
    "grpo": "there is no reward",
}


def translate(values: dict[str, Any], name: str, models: str) -> Translated:
    """Translates the loaded recipe `name`; its models are below the directory `models`, by their last names.

    Raises:
        ValueError: the recipe is not one of distillation, or has a value of the wrong type or out of range.
    """
    recipe, made = Recipe(values), Translated()
    if not recipe.has("policy.model_name") or not (recipe.has("teacher.model_name") or recipe.has("teachers.0")):
        raise ValueError(
            f"{name}: policy.model_name and teacher.model_name (or teachers) are not both there; expected a "
            "distillation recipe of NeMo-RL: name another file"
        )
    made.set("output", f"runs/{name}")
    made.set("seed", recipe.number("distillation.seed", whole=True, low=0))
    _models(recipe, made, models.rstrip("/"))
    for part in (_batch, _sampling, translate_optimizer, _loss, _data, _services, _left_over):
        part(recipe, made)
    return made


def _models(recipe: Recipe, made: Translated, models: str) -> None:
    made.choose(recipe, "policy.precision", "precision", {"bfloat16": "bf16", "float32": "fp32"})
    teacher = "teacher" if recipe.has("teacher.model_name") else "teachers.0"
    for role, prefix in (("student", "policy"), ("teacher", teacher)):
        model = _model_name(recipe, prefix)
        made.set(f"{role}.hf_path", f"{models}/{model.rstrip('/').rpartition('/')[2]}")
        made.note(f"{prefix}.model_name={model}: put this model into {made.get(f'{role}.hf_path')}")
        _layout(recipe, made, role, prefix)
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


def _model_name(recipe: Recipe, prefix: str) -> str:
    model: str | None = recipe.text(f"{prefix}.model_name")
    if model is None:  # one of several teachers may have none
        raise wrong(f"{prefix}.model_name", model, "the name of a model")
    return model


def _layout(recipe: Recipe, made: Translated, role: str, prefix: str) -> None:
    """Parallel sizes and recomputation, of the backend that is enabled."""
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
    """What sends tokens to the experts; Megatron's `flex` leaves that to a backend."""
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


def _batch(recipe: Recipe, made: Translated) -> None:
    made.take(recipe, _STEP)
    prompts, per_prompt = made.get("train.prompts_per_step"), made.get("rollout.per_prompt")
    size = recipe.count("policy.train_global_batch_size")
    if prompts and size and size != prompts * per_prompt:
        made.note(
            f"policy.train_global_batch_size={size}: NeMo-RL makes an update of every {size} of the "
            f"{prompts * per_prompt} responses of a step; here a step is one update on all of them"
        )


def _sampling(recipe: Recipe, made: Translated) -> None:
    key = "policy.generation"
    total = recipe.count("policy.max_total_sequence_length")
    new, prompt = recipe.count(f"{key}.max_new_tokens", total), recipe.count("data.max_input_seq_length", total)
    made.set("rollout.max_new_tokens", new)
    made.set("data.max_prompt_tokens", prompt)
    if new and prompt:
        made.set("train.tokens_per_microbatch", new + prompt)
        if total and new + prompt > total:
            made.note(
                f"policy.max_total_sequence_length={total}: limits prompt and response together; here "
                f"data.max_prompt_tokens={prompt} and rollout.max_new_tokens={new} are limits of their own, and a "
                "microbatch must hold their sum: lower both to what your data need"
            )
    if made.choose(recipe, f"{key}.backend", "rollout.engine", {"vllm": "vllm", "megatron": "megatron"}) == "vllm":
        made.take(recipe, _SERVERS)
        if not recipe.flag(f"{key}.colocated.enabled", default=True):
            gpus = _gpus(recipe, f"{key}.colocated.resources")
            made.set("rollout.vllm.placement", "dedicated")
            made.set("rollout.vllm.replicas", max(1, gpus // made.get("rollout.vllm.tensor")))
        if recipe.flag(f"{key}.vllm_cfg.enforce_eager"):
            made.set("rollout.vllm.flags", ["--enforce-eager"])
        return
    recipe.get(f"{key}.vllm_cfg")
    if not recipe.flag(f"{key}.colocated.enabled", default=True):
        recipe.get(f"{key}.colocated")
        made.note(f"{key}.colocated.enabled=false: rollout.engine=megatron samples on the ranks that train")


def _loss(recipe: Recipe, made: Translated) -> None:
    """NeMo-RL's KL on the teacher's most probable ids, averaged over the tokens of an update."""
    if made.get("teacher.reads") == "text":
        made.set("loss", {"representation": {}})
        made.note(
            "loss_fn: a divergence of next-token distributions needs one vocabulary; the hidden states are compared "
            "instead, through a bridge (docs/bridge.md)"
        )
        return
    kind = recipe.text("loss_fn.kl_type", "reverse")
    if kind not in ("forward", "reverse", "mixed"):
        raise wrong("loss_fn.kl_type", kind, "forward, reverse or mixed")
    outside = recipe.flag("loss_fn.zero_outside_topk")
    mixed = recipe.not_negative("loss_fn.mixed_kl_weight", 0.5)
    made.set("loss.representation", {"layers": "none", "weight": 0.0})
    made.set(
        "loss.output",
        {
            "kind": "top_k",
            "k": recipe.count("distillation.topk_logits_k", 64),
            "weight": 1.0,
            "support": "teacher",
            "support_weight": "teacher" if kind == "forward" else "student",
            "normalizer": "full" if outside else "renormalized",
            "aggregation": "token_mean",
        },
    )
    _loss_temperature(recipe, made)
    if kind == "mixed":
        made.note(
            f"loss_fn.kl_type=mixed (forward KL with weight {mixed}): a run has one divergence, and the reverse KL is "
            "taken; loss.output.support_weight=teacher is the forward KL, loss.output.kind=jsd lies between them"
        )
    if outside:
        term = "" if kind == "forward" else ", and adds a term for the ids outside"
        made.note(
            "loss_fn.zero_outside_topk=true: NeMo-RL takes the student's probabilities over the whole vocabulary and "
            f"the teacher's over its top-k ids only{term}; loss.output.normalizer=full takes both over the whole "
            f"vocabulary{term and ' and has no such term'}"
        )


def _loss_temperature(recipe: Recipe, made: Translated) -> None:
    """NeMo-RL divides the logits of each model by the temperature of that model's `generation`."""
    student = made.get("rollout.temperature", 1.0)
    if student == 0:
        made.note(
            "policy.generation.temperature=0: NeMo-RL divides logits by it; the loss has temperature 1 instead, and "
            "sampling is greedy"
        )
        return
    made.set("loss.output.temperature", student)
    teacher = recipe.not_negative("teacher.generation.temperature", 1.0)
    if teacher != student:
        made.note(
            f"teacher.generation.temperature={teacher}: NeMo-RL divides the teacher's logits by it; here "
            f"loss.output.temperature={student}, the student's, holds for both models"
        )


def _data(recipe: Recipe, made: Translated) -> None:
    for split in ("train", "validation"):
        key = f"data.{split}"
        prefix = f"{key}.0" if isinstance(recipe.peek(key), list) else key
        if not isinstance(recipe.peek(prefix), dict):
            continue
        name, path = recipe.text(f"{prefix}.dataset_name", split), recipe.text(f"{prefix}.data_path")
        label = name.rpartition("/")[2].lower()
        if path is None:
            path = f"data/{label}.jsonl"
            made.note(f"{prefix}.dataset_name={name}: write its prompts to a new file {path} (docs/data.md)")
        else:
            made.note(
                f"{prefix}.data_path={path} ({name}): this file is read as it is; if docs/data.md does not describe "
                f"its format, convert it into another file and name that in {key}"
            )
        if split == "train":
            made.set("data.train", path)
        else:
            made.set("data.validation", {"".join(c if c.isalnum() else "_" for c in label): path})
            _evaluation(recipe, made, prefix)
    if recipe.names("data.shuffle") and not recipe.flag("data.shuffle"):
        made.note("data.shuffle=false: the order of prompts is a permutation that the seed determines")
    made.take(recipe, _TOKENIZER)
    if recipe.peek("policy.tokenizer.name") == recipe.peek("policy.model_name"):
        recipe.get("policy.tokenizer.name")


def _evaluation(recipe: Recipe, made: Translated, prefix: str) -> None:
    """Validation of a set; here the first and the last step are always evaluated, or none is."""
    repeat, limit = recipe.count(f"{prefix}.repeat"), recipe.count("distillation.max_val_samples")
    made.set("evaluation.samples", repeat)
    made.set("evaluation.limit", limit)
    if limit and repeat and repeat > 1:
        made.note(
            f"distillation.max_val_samples={limit}: counts every one of the {repeat} samples of a problem; "
            "evaluation.limit counts problems"
        )
    for name in ("temperature", "top_p", "max_new_tokens"):
        made.set(f"evaluation.{name}", made.get(f"rollout.{name}"))
    period = max(0, recipe.number("distillation.val_period", 0, whole=True))
    first, last = (recipe.flag(f"distillation.val_at_{name}") for name in ("start", "end"))
    steps = made.get("train.steps", TrainConfig().steps)
    # without a period, a period of the whole run leaves the first and the last step
    every = period or (steps if first or last else 0)
    made.set("evaluation.every", every)
    if not every:
        made.note("distillation.val_period=0, val_at_start=false, val_at_end=false: evaluation.every=0, no evaluation")
    elif not (first and last):
        made.note(
            f"distillation.val_period={period}, val_at_start={str(first).lower()}, val_at_end={str(last).lower()}: "
            f"evaluation.every={every} also evaluates before the first and after the last step"
        )


def _services(recipe: Recipe, made: Translated) -> None:
    if recipe.flag("checkpointing.enabled"):
        made.set("train.save_every", recipe.count("checkpointing.save_period"))
        _kept_checkpoints(recipe, made)
    else:
        recipe.get("checkpointing")
    made.set("logging.tensorboard", recipe.flag("logger.tensorboard_enabled"))
    if recipe.flag("logger.wandb_enabled"):
        made.set("logging.wandb", recipe.text("logger.wandb.project"))
    for name in ("wandb", "swanlab", "mlflow", "tensorboard"):
        enabled, served = recipe.flag(f"logger.{name}_enabled"), name in ("wandb", "tensorboard")
        if not (enabled and served):
            recipe.get(f"logger.{name}")
        if enabled and not served:
            made.note(f"logger.{name}_enabled=true: metrics go to the run's directory, TensorBoard and W&B only")
    if not recipe.flag("logger.monitor_gpus"):
        recipe.get("logger.gpu_monitoring")


def _kept_checkpoints(recipe: Recipe, made: Translated) -> None:
    """NeMo-RL keeps the best checkpoints by a metric, or all; here the newest are kept, and one best."""
    kept = recipe.count("checkpointing.keep_top_k")
    made.set("train.keep_checkpoints", kept or 0)  # 0 keeps all
    metric = recipe.text("checkpointing.metric_name")
    if kept is None or metric is None:
        return
    higher = str(recipe.flag("checkpointing.higher_is_better", default=True)).lower()
    sets, samples = made.get("data.validation"), made.get("evaluation.samples", EvaluationConfig().samples)
    example = f", e.g. val/{next(iter(sets))}/avg@{samples}" if sets else ""
    made.note(
        f"checkpointing.keep_top_k={kept}: NeMo-RL keeps the best by metric_name={metric}, higher_is_better={higher}; "
        f"train.keep_checkpoints={kept} keeps the newest, and train.keep_best, which is not set, names a metric whose "
        f"best checkpoint is kept, too{example}"
    )


def ranks(values: dict[str, Any]) -> int:
    """The GPUs of the recipe's cluster. Raises ValueError for numbers that are none."""
    return _gpus(Recipe(values), "cluster")


def _gpus(recipe: Recipe, group: str) -> int:
    return _one_or_more(recipe, f"{group}.gpus_per_node") * _one_or_more(recipe, f"{group}.num_nodes")


def _left_over(recipe: Recipe, made: Translated) -> None:
    """One note per group of keys that nothing was made of, and then per unknown key."""
    groups: dict[str, list[str]] = {}
    unknown: list[str] = []
    for key, value in recipe.unread().items():
        shown = "(not shown)" if SECRET_KEY.search(key) else value
        prefixes = [prefix for prefix in _WITHOUT_COUNTERPART if f"{key}.".startswith(f"{prefix}.")]
        if prefixes:
            prefix = max(prefixes, key=len)
            groups.setdefault(prefix, []).append(f"{key.removeprefix(prefix).lstrip('.')}={shown}".lstrip("="))
        else:
            reason = "there is no quantization" if "quant" in key or "modelopt" in key else "unknown here"
            unknown.append(f"{key}={shown}: {reason}")
    for prefix, items in groups.items():
        listed = ", ".join(items) if len(items) <= _SHOWN else f"{len(items)} keys"
        made.note(f"{prefix} ({listed}): {_WITHOUT_COUNTERPART[prefix]}")
    for line in unknown:
        made.note(line)
