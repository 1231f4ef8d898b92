"""A distillation recipe of NeMo-RL as this project's configuration, and the list of what has no counterpart.

The batch, the models and layouts, the sampling, the optimizer, the loss, and the schedules of validation and
checkpoints are translated. Everything else of the recipe is listed with a reason (`_WITHOUT_COUNTERPART`), or as
unknown.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from nemo_oprd.config.nemo_rl_recipe import Recipe

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
    "distillation.val_at_start": "with validation sets, the first and the last step are always evaluated",
    "distillation.val_at_end": "with validation sets, the first and the last step are always evaluated",
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
    "loss_fn": "the divergence is one of loss.output.kind",
    "grpo": "there is no reward",
}


@dataclass
class Translated:
    """The configuration as nested keys, and the notes on what is not the same, in the recipe's order."""

    config: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def set(self, key: str, value: Any) -> None:
        """Sets a key such as `train.lr`; null leaves the default."""
        if value is None:
            return
        *groups, last = key.split(".")
        place = self.config
        for group in groups:
            place = place.setdefault(group, {})
        place[last] = value


def translate(values: dict[str, Any], name: str, models: str) -> Translated:
    """Translates a loaded recipe.

    Args:
        name: of the recipe, for the run's directory.
        models: the directory of the Hugging Face models; a model is below it under the last part of its name.

    Raises:
        ValueError: the recipe is not one of distillation.
    """
    recipe, made = Recipe(values), Translated()
    if not recipe.has("policy.model_name") or not (recipe.has("teacher.model_name") or recipe.has("teachers.0")):
        raise ValueError(
            f"{name}: policy.model_name and teacher.model_name (or teachers) are not both there; expected a "
            "distillation recipe of NeMo-RL: name another file"
        )
    made.set("output", f"runs/{name}")
    made.set("seed", recipe.get("distillation.seed"))
    _models(recipe, made, models.rstrip("/"))
    _batch(recipe, made)
    _sampling(recipe, made)
    _optimizer(recipe, made)
    _loss(recipe, made)
    _data(recipe, made)
    _services(recipe, made)
    made.notes += _left_over(recipe)
    return made


def _models(recipe: Recipe, made: Translated, models: str) -> None:
    precision = recipe.get("policy.precision", "bfloat16")
    made.set("precision", {"bfloat16": "bf16", "float32": "fp32"}.get(precision, "bf16"))
    if precision not in ("bfloat16", "float32"):
        made.notes.append(f"policy.precision={precision}: bf16 is taken")
    teacher = "teacher" if recipe.has("teacher.model_name") else "teachers.0"
    for role, prefix in (("student", "policy"), ("teacher", teacher)):
        model = str(recipe.get(f"{prefix}.model_name"))
        made.set(f"{role}.hf_path", f"{models}/{model.rstrip('/').rpartition('/')[2]}")
        made.notes.append(f"{prefix}.model_name={model}: put this model into {made.config[role]['hf_path']}")
        _layout(recipe, made, role, prefix)
    if teacher != "teachers.0":
        return
    made.set("teacher.reads", "text")
    made.notes.append(
        "teachers: another tokenizer is read as text and aligned by bytes (docs/tokenizers.md), and there is no "
        "projection between vocabularies; responses are sampled by the student, not read from data"
    )
    number = 1
    while recipe.has(f"teachers.{number}"):
        made.notes.append(
            f"teachers.{number}={recipe.get(f'teachers.{number}')['model_name']}: left out, because a response has one "
            "teacher; data_sources may choose among several (docs/teachers.md)"
        )
        number += 1


def _layout(recipe: Recipe, made: Translated, role: str, prefix: str) -> None:
    """Parallel sizes and recomputation, of the backend that is enabled."""
    megatron = bool(recipe.get(f"{prefix}.megatron_cfg.enabled", False))
    group, unused = ("megatron_cfg", "dtensor_cfg") if megatron else ("dtensor_cfg", "megatron_cfg")
    recipe.get(f"{prefix}.{unused}")
    for inactive in ("optimizer", "scheduler") if megatron else ():
        recipe.get(f"{prefix}.{inactive}")
    recipe.get(f"{prefix}.{group}.enabled")
    model = "_model" if megatron else ""
    names = {
        "tensor": f"tensor{model}_parallel_size",
        "context": "context_parallel_size",
        "sequence": "sequence_parallel",
        "pipeline": "pipeline_model_parallel_size",
        "virtual_pipeline": "virtual_pipeline_model_parallel_size",
        "first_stage_layers": "num_layers_in_first_pipeline_stage",
        "last_stage_layers": "num_layers_in_last_pipeline_stage",
        "expert": "expert_model_parallel_size",
        "expert_tensor": "expert_tensor_parallel_size",
    }
    for ours, theirs in names.items():
        value = recipe.get(f"{prefix}.{group}.{theirs}")
        if value is True or (value is not None and value is not False and value != 1):  # True == 1
            made.set(f"{role}.parallel.{ours}", value)
    dispatcher = recipe.get(f"{prefix}.{group}.moe_token_dispatcher_type", "alltoall")
    if dispatcher == "allgather":
        made.set(f"{role}.parallel.dispatcher", dispatcher)
    if role == "student" and recipe.get(f"{prefix}.{group}.activation_checkpointing", False):
        granularity = recipe.get(f"{prefix}.{group}.recompute_granularity", "full")
        made.set("student.recompute", granularity)


def _batch(recipe: Recipe, made: Translated) -> None:
    prompts = recipe.get("distillation.num_prompts_per_step")
    per_prompt = recipe.get("distillation.num_generations_per_prompt", 1)
    made.set("train.prompts_per_step", prompts)
    made.set("rollout.per_prompt", per_prompt)
    made.set("train.steps", recipe.get("distillation.max_num_steps"))
    size = recipe.get("policy.train_global_batch_size")
    if prompts and size and size != prompts * per_prompt:
        made.notes.append(
            f"policy.train_global_batch_size={size}: NeMo-RL makes an update of every {size} of the "
            f"{prompts * per_prompt} responses of a step; here a step is one update on all of them"
        )


def _sampling(recipe: Recipe, made: Translated) -> None:
    key = "policy.generation"
    made.set("rollout.temperature", recipe.get(f"{key}.temperature"))
    made.set("rollout.top_p", recipe.get(f"{key}.top_p"))
    total = recipe.get("policy.max_total_sequence_length")
    new, prompt = recipe.get(f"{key}.max_new_tokens", total), recipe.get("data.max_input_seq_length", total)
    made.set("rollout.max_new_tokens", new)
    made.set("data.max_prompt_tokens", prompt)
    if new and prompt:
        made.set("train.tokens_per_microbatch", new + prompt)
        if total and new + prompt > total:
            made.notes.append(
                f"policy.max_total_sequence_length={total}: limits prompt and response together; here "
                f"data.max_prompt_tokens={prompt} and rollout.max_new_tokens={new} are limits of their own, and a "
                "microbatch must hold their sum: lower both to what your data need"
            )
    backend = recipe.get(f"{key}.backend", "vllm")
    made.set("rollout.engine", "megatron" if backend == "megatron" else "vllm")
    if backend not in ("megatron", "vllm"):
        made.notes.append(f"{key}.backend={backend}: vllm is taken")
    tensor = recipe.get(f"{key}.vllm_cfg.tensor_parallel_size", 1)
    colocated = recipe.get(f"{key}.colocated.enabled", True)
    gpus, nodes = (recipe.get(f"{key}.colocated.resources.{name}", 1) for name in ("gpus_per_node", "num_nodes"))
    if backend != "megatron":
        made.set("rollout.vllm.tensor", tensor)
        made.set("rollout.vllm.gpu_memory_utilization", recipe.get(f"{key}.vllm_cfg.gpu_memory_utilization"))
        if not colocated:
            made.set("rollout.vllm.placement", "dedicated")
            made.set("rollout.vllm.replicas", max(1, gpus * nodes // tensor))
        if recipe.get(f"{key}.vllm_cfg.enforce_eager", False):
            made.set("rollout.vllm.flags", ["--enforce-eager"])


def _optimizer(recipe: Recipe, made: Translated) -> None:
    if recipe.get("policy.megatron_cfg.enabled", False):
        key = "policy.megatron_cfg.optimizer"
        for name in ("lr", "min_lr", "weight_decay", "adam_eps"):
            made.set(f"train.{name}", recipe.get(f"{key}.{name}"))
        betas = [recipe.get(f"{key}.adam_beta{number}") for number in (1, 2)]
        made.set("train.distributed_optimizer", recipe.get(f"{key}.use_distributed_optimizer"))
        recipe.get(f"{key}.clip_grad")
        style = recipe.get("policy.megatron_cfg.scheduler.lr_decay_style", "constant")
        warmup = recipe.get("policy.megatron_cfg.scheduler.lr_warmup_iters", 0)
    else:
        key = "policy.optimizer.kwargs"
        recipe.get("policy.optimizer.name")
        for ours, theirs in (("lr", "lr"), ("weight_decay", "weight_decay"), ("adam_eps", "eps")):
            made.set(f"train.{ours}", recipe.get(f"{key}.{theirs}"))
        betas = recipe.get(f"{key}.betas", [None])
        style, warmup = _torch_schedule(recipe, made)
    if None not in betas:
        made.set("train.betas", list(betas))
    made.set("train.clip_grad", recipe.get("policy.max_grad_norm"))
    made.set("train.schedule", style if style in ("constant", "cosine") else "constant")
    if style not in ("constant", "cosine"):
        made.notes.append(f"the schedule {style} of the learning rate: constant is taken")
    steps = made.config.get("train", {}).get("steps")
    if steps:
        made.set("train.warmup_fraction", round(min(1.0, warmup / steps), 6))


def _torch_schedule(recipe: Recipe, made: Translated) -> tuple[str, int]:
    """(Name of the schedule, steps of warm-up) of a list of torch's schedulers."""
    style, warmup = "constant", 0
    for number in range(len(recipe.peek("policy.scheduler") or [])):
        key = f"policy.scheduler.{number}"
        name = str(recipe.get(f"{key}.name", "")).rpartition(".")[2]
        if name == "LinearLR":
            warmup = recipe.get(f"{key}.kwargs.total_iters", 0)
        elif name == "CosineAnnealingLR":
            style = "cosine"
            made.set("train.min_lr", recipe.get(f"{key}.kwargs.eta_min"))
        elif name == "ConstantLR":
            recipe.get(f"{key}.kwargs")
        elif name:
            style = name
        recipe.get(f"{key}.milestones")
    return style, warmup


def _loss(recipe: Recipe, made: Translated) -> None:
    """NeMo-RL's KL on the teacher's most probable ids, averaged over the tokens of an update."""
    kind = recipe.get("loss_fn.kl_type", "reverse")
    outside = recipe.get("loss_fn.zero_outside_topk", False)
    mixed = recipe.get("loss_fn.mixed_kl_weight", 0.5)
    made.set("loss.representation", {"layers": "none", "weight": 0.0})
    output = {
        "kind": "top_k",
        "k": recipe.get("distillation.topk_logits_k", 64),
        "weight": 1.0,
        "support": "teacher",
        "support_weight": "teacher" if kind == "forward" else "student",
        "normalizer": "full" if outside else "renormalized",
        "aggregation": "token_mean",
    }
    if made.config["teacher"].get("reads") == "text":
        made.set("loss", {"representation": {}})
        made.notes.append(
            "loss_fn: a divergence of next-token distributions needs one vocabulary; the hidden states are compared "
            "instead, through a bridge (docs/bridge.md)"
        )
        return
    made.set("loss.output", output)
    if kind == "mixed":
        made.notes.append(
            f"loss_fn.kl_type=mixed (forward KL with weight {mixed}): a run has one divergence, and the reverse KL is "
            "taken; loss.output.support_weight=teacher is the forward KL, loss.output.kind=jsd lies between them"
        )
    if outside:
        made.notes.append(
            "loss_fn.zero_outside_topk=true: loss.output.normalizer=full takes the same terms of the sum, without "
            "NeMo-RL's correction for the ids outside"
        )


def _data(recipe: Recipe, made: Translated) -> None:
    for split, key in (("train", "data.train"), ("validation", "data.validation")):
        given = recipe.peek(key)
        given = given[0] if isinstance(given, list) and given else given
        if not isinstance(given, dict):
            continue
        prefix = f"{key}.0" if isinstance(recipe.peek(key), list) else key
        name = str(recipe.get(f"{prefix}.dataset_name", split))
        path = recipe.get(f"{prefix}.data_path") or f"data/{name.rpartition('/')[2].lower()}.jsonl"
        made.notes.append(f"{prefix}.dataset_name={name}: write its prompts to {path} (docs/data.md)")
        if split == "train":
            made.set("data.train", path)
            continue
        label = "".join(letter if letter.isalnum() else "_" for letter in name.rpartition("/")[2].lower())
        made.set("data.validation", {label: path})
        made.set("evaluation.samples", recipe.get(f"{prefix}.repeat"))
    if made.config.get("data", {}).get("validation"):
        made.set("evaluation.every", recipe.get("distillation.val_period"))
        made.set("evaluation.limit", recipe.get("distillation.max_val_samples"))
        for name in ("temperature", "top_p", "max_new_tokens"):
            made.set(f"evaluation.{name}", made.config["rollout"].get(name))
    made.set("data.chat_template_args", recipe.get("policy.tokenizer.chat_template_kwargs"))
    made.set("data.chat_template", recipe.get("policy.tokenizer.chat_template"))
    if recipe.peek("policy.tokenizer.name") == recipe.peek("policy.model_name"):
        recipe.get("policy.tokenizer.name")


def _services(recipe: Recipe, made: Translated) -> None:
    if recipe.get("checkpointing.enabled", False):
        made.set("train.save_every", recipe.get("checkpointing.save_period"))
        made.set("train.keep_checkpoints", recipe.get("checkpointing.keep_top_k"))
    else:
        recipe.get("checkpointing")
    made.set("logging.tensorboard", bool(recipe.get("logger.tensorboard_enabled", False)))
    if recipe.get("logger.wandb_enabled", False):
        made.set("logging.wandb", recipe.get("logger.wandb.project"))
    for name in ("wandb", "swanlab", "mlflow", "tensorboard"):
        if not recipe.get(f"logger.{name}_enabled", False):
            recipe.get(f"logger.{name}")
    if not recipe.peek("logger.monitor_gpus"):
        recipe.get("logger.gpu_monitoring")


def ranks(values: dict[str, Any]) -> int:
    """The GPUs of the recipe's cluster."""
    recipe = Recipe(values)
    return int(recipe.get("cluster.gpus_per_node", 1)) * int(recipe.get("cluster.num_nodes", 1))


def _left_over(recipe: Recipe) -> list[str]:
    """One line per group of keys that nothing was made of, and per unknown key."""
    groups: dict[str, list[str]] = {}
    unknown = []
    prefixes = sorted(_WITHOUT_COUNTERPART, key=len, reverse=True)
    for key, value in recipe.unread().items():
        prefix = next((prefix for prefix in prefixes if f"{key}.".startswith(f"{prefix}.")), None)
        if prefix is None:
            reason = "there is no quantization" if "quant" in key or "modelopt" in key else "unknown here"
            unknown.append(f"{key}={value}: {reason}")
        else:
            groups.setdefault(prefix, []).append(f"{key.removeprefix(prefix).lstrip('.')}={value}".lstrip("="))
    lines = []
    for prefix, items in groups.items():
        shown = ", ".join(items) if len(items) <= _SHOWN else f"{len(items)} keys"
        lines.append(f"{prefix} ({shown}): {_WITHOUT_COUNTERPART[prefix]}")
    return lines + unknown
