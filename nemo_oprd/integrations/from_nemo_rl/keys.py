"""Translates NeMo-RL's distillation recipes to this project's configuration, and lists keys without counterpart.

Tables translate single keys; functions translate groups of dependent keys, and note every difference in meaning. Each
other key of the recipe gets a note with the reason (`_WITHOUT_COUNTERPART`), or one that says that it is unknown.
The models are in `models.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nemo_oprd.config.messages import SECRET_KEY
from nemo_oprd.config.schema import EvaluationConfig, RolloutConfig, TrainConfig
from nemo_oprd.integrations.from_nemo_rl.models import MOPD, gpus_of, is_mopd, one_or_more, translate_models
from nemo_oprd.integrations.from_nemo_rl.recipe import Reader, Recipe, Row, Translated, wrong

# The optimizer and the learning-rate schedule of a recipe.


def _if_there(read: Callable[..., Any], default: Any) -> Reader:
    """Returns a reader like `read`, with `default` for null, and None, which sets nothing, for a missing key."""
    return lambda recipe, key: read(recipe, key, default=default) if recipe.names(key) else None


def _adam_betas(recipe: Recipe, key: str) -> list[float] | None:
    """Reads Megatron's two keys; the default of `train.betas` replaces one that is missing. None if both are."""
    betas = [recipe.number(f"{key}{number}") for number in (1, 2)]
    given = [default if beta is None else beta for beta, default in zip(betas, TrainConfig().betas, strict=True)]
    return None if betas == [None, None] else given


def _list_of_betas(recipe: Recipe, key: str) -> list[float] | None:
    betas = recipe.get(key)
    if betas is None:
        return None
    if not isinstance(betas, list) or len(betas) != 2:
        raise wrong(key, betas, "a list of two numbers")
    return [recipe.number(f"{key}.{number}") for number in (0, 1)]


_NO_CLIPPING_FOR_NULL = _if_there(Recipe.not_negative, default=0.0)
_MEGATRON = "policy.megatron_cfg.optimizer"
_MEGATRON_OPTIMIZER: tuple[Row, ...] = (
    *((f"{_MEGATRON}.{name}", f"train.{name}", Recipe.number) for name in ("lr", "min_lr", "weight_decay", "adam_eps")),
    (f"{_MEGATRON}.adam_beta", "train.betas", _adam_betas),
    (f"{_MEGATRON}.use_distributed_optimizer", "train.distributed_optimizer", _if_there(Recipe.flag, default=False)),
    # Megatron clips at its own key; without it, at 1, which is the default here, too
    (f"{_MEGATRON}.clip_grad", "train.clip_grad", _NO_CLIPPING_FOR_NULL),
)
_TORCH_OPTIMIZER: tuple[Row, ...] = (
    ("policy.optimizer.kwargs.lr", "train.lr", Recipe.number),
    ("policy.optimizer.kwargs.weight_decay", "train.weight_decay", Recipe.number),
    ("policy.optimizer.kwargs.eps", "train.adam_eps", Recipe.number),
    ("policy.optimizer.kwargs.betas", "train.betas", _list_of_betas),
    ("policy.max_grad_norm", "train.clip_grad", _NO_CLIPPING_FOR_NULL),
)
# whether Megatron trains -> (the key of the optimizer's name, AdamW's name, the optimizer's other keys)
_OPTIMIZERS: dict[bool, tuple[str, str, tuple[Row, ...]]] = {
    True: (f"{_MEGATRON}.optimizer", "adam", _MEGATRON_OPTIMIZER),
    False: ("policy.optimizer.name", "AdamW", _TORCH_OPTIMIZER),
}


def translate_optimizer(recipe: Recipe, made: Translated) -> None:
    """Sets the keys of optimizer and learning rate, after train.steps was set. Raises ValueError for a wrong value."""
    megatron = recipe.flag("policy.megatron_cfg.enabled")
    key, adam, rows = _OPTIMIZERS[megatron]
    name = recipe.text(key, adam)
    if name.rpartition(".")[2] != adam:
        made.note(f"{key}={name}: AdamW is taken, the one optimizer here")
    made.take(recipe, rows)
    style, warmup = _megatron_schedule(recipe, made) if megatron else _torch_schedule(recipe, made)
    made.set("train.schedule", style if style in ("constant", "cosine") else "constant")
    if style not in ("constant", "cosine"):
        made.note(f"the schedule {style} of the learning rate: constant is taken")
    steps = made.get("train.steps", TrainConfig().steps)
    made.set("train.warmup_fraction", round(min(1.0, warmup / steps), 6))
    if warmup > steps:
        made.note(
            f"the warm-up of {warmup} steps is longer than the run of {steps}: here the last step has the full "
            "learning rate"
        )


def _megatron_schedule(recipe: Recipe, made: Translated) -> tuple[str, int]:
    """Returns (name of the schedule, steps of warm-up); notes a gradient clipping that Megatron does not read."""
    taken, unused = made.get("train.clip_grad", TrainConfig().clip_grad), recipe.not_negative("policy.max_grad_norm")
    if unused is not None and unused != taken:
        made.note(
            f"policy.max_grad_norm={unused}: Megatron clips at {_MEGATRON}.clip_grad, here train.clip_grad={taken}"
        )
    style = recipe.text("policy.megatron_cfg.scheduler.lr_decay_style", "constant")
    return style, recipe.not_negative("policy.megatron_cfg.scheduler.lr_warmup_iters", 0, whole=True)


def _torch_schedule(recipe: Recipe, made: Translated) -> tuple[str, int]:
    """Returns (name of the schedule, steps of warm-up) of one of torch's schedulers, or of a list of them in a row."""
    given = recipe.peek("policy.scheduler")
    keys = ["policy.scheduler"] if isinstance(given, dict) else []
    if isinstance(given, list):
        keys = [f"policy.scheduler.{number}" for number in range(len(given))]
    style, warmup = "constant", 0
    for key in keys:
        name = recipe.text(f"{key}.name", "").rpartition(".")[2]
        if name == "LinearLR":
            warmup += _linear(recipe, made, key, first=key == keys[0])
        elif name == "CosineAnnealingLR":
            style = "cosine"
            made.set("train.min_lr", recipe.not_negative(f"{key}.kwargs.eta_min"))
        elif name == "ConstantLR":
            factor = recipe.number(f"{key}.kwargs.factor", 1 / 3)
            recipe.get(f"{key}.kwargs")
            if factor != 1:
                made.note(f"{key}=ConstantLR with factor={factor:.6g}: not taken, the learning rate stays train.lr")
        elif name:
            style = name
        if recipe.peek(f"{key}.milestones") == [warmup]:  # other milestones stay unread and get a note
            recipe.get(f"{key}.milestones")
    return style, warmup


def _linear(recipe: Recipe, made: Translated, key: str, *, first: bool) -> int:
    """Returns the steps of a linear warm-up, with torch's defaults; 0 for a LinearLR that is no warm-up."""
    kwargs = f"{key}.kwargs"
    start, end = recipe.number(f"{kwargs}.start_factor", 1 / 3), recipe.number(f"{kwargs}.end_factor", 1.0)
    steps = recipe.not_negative(f"{kwargs}.total_iters", 5, whole=True)
    what = f"{key}=LinearLR from start_factor={start:.6g} to end_factor={end:.6g} in total_iters={steps}"
    if not first or not start < end or end != 1:
        made.note(f"{what}: not taken; a linear schedule is a warm-up to train.lr at the start only")
        return 0
    if start != 0:
        made.note(f"{what}: the warm-up starts at 0 here")
    return int(steps)


# keys below `distillation` or `grpo`
_STEP: tuple[Row, ...] = (
    ("num_prompts_per_step", "train.prompts_per_step", Recipe.count),
    ("num_generations_per_prompt", "rollout.per_prompt", one_or_more),
    ("max_num_steps", "train.steps", Recipe.count),
)
_SAMPLING: tuple[Row, ...] = (
    ("policy.generation.temperature", "rollout.temperature", Recipe.not_negative),
    ("policy.generation.top_p", "rollout.top_p", Recipe.not_negative),
)
_SERVERS: tuple[Row, ...] = (
    ("policy.generation.vllm_cfg.tensor_parallel_size", "rollout.vllm.tensor", one_or_more),
    ("policy.generation.vllm_cfg.gpu_memory_utilization", "rollout.vllm.gpu_memory_utilization", Recipe.not_negative),
)
_TOKENIZER: tuple[Row, ...] = (
    ("policy.tokenizer.chat_template_kwargs", "data.chat_template_args", Recipe.get),
    ("policy.tokenizer.chat_template", "data.chat_template", Recipe.text),
)
# groups of more keys than this are counted, not listed
_SHOWN = 12
_VALIDATION = ("val_at_start", "val_at_end", "val_period", "max_val_samples")
# prefix of keys -> the reason why they have no counterpart; the longest prefix counts
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
    **{f"distillation.{name}": "there are no validation sets in the recipe" for name in _VALIDATION},
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
    **{f"grpo.{name}": "there are no validation sets in the recipe" for name in _VALIDATION},
    "grpo.val_batch_size": "all problems of an evaluation are sampled together",
    "grpo.max_num_epochs": "train.steps ends the run",
    "grpo.max_rollout_turns": "a response has one turn",
    "grpo.async_grpo": "rollout.max_lag is the age of responses; a request that fails is sent again",
    "grpo.overlong_filtering": "responses that are cut off at their limit are trained on, too",
    "grpo.seq_logprob_error_threshold": "the engine's probabilities are compared with the trainer's in every step",
    "loss_fn": "the divergence is one of loss.output.kind",
    "grpo": "there is no reward",
    "reward_penalties": "there is no reward",
    "data_plane": "there is no separate data plane",
    f"{MOPD}.non_colocated_teachers": "all teachers have the layout in teacher.parallel, and packs as the student's",
    MOPD: "the loss is the divergence from the teacher alone; there is no reward",
}
# the same, in a recipe of multi-teacher distillation
_OF_MOPD = {
    "loss_fn": "the loss is the log ratio of the student to the teacher: no clipped ratio, no reference policy",
    "env": "a response has one turn, and no tools or judges of NeMo Gym",
    "_teachers": "references to models",
    **{f"grpo.{name}": "NeMo Gym's verifiers grade validation sets" for name in _VALIDATION},
}


def translate(values: dict[str, Any], name: str, models: str) -> Translated:
    """Translates the loaded recipe `name`; its models are below the directory `models`, by the last part of each name.

    Raises:
        ValueError: the recipe is not one of distillation, or has a value of the wrong type or out of range.
    """
    recipe, made = Recipe(values), Translated()
    if is_mopd(recipe):
        recipe.algorithm = "grpo"
    elif not recipe.has("policy.model_name") or not (recipe.has("teacher.model_name") or recipe.has("teachers.0")):
        raise ValueError(
            f"{name}: policy.model_name and teacher.model_name (or teachers, or on_policy_distillation) are not both "
            "there; expected a distillation recipe of NeMo-RL: name another file"
        )
    made.set("output", f"runs/{name}")
    if recipe.flag("policy.is_vlm"):
        made.note("policy.is_vlm=true: models read text here; rows with images are refused (docs/data.md)")
    made.set("seed", recipe.number(f"{recipe.algorithm}.seed", whole=True, low=0))
    translate_models(recipe, made, models.rstrip("/"))
    for part in (_batch, _sampling, translate_optimizer, _loss, _data, _services, _left_over):
        part(recipe, made)
    return made


def _batch(recipe: Recipe, made: Translated) -> None:
    made.take(recipe, _STEP, f"{recipe.algorithm}.")
    made.take(recipe, _SAMPLING)
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
            gpus = gpus_of(recipe, f"{key}.colocated.resources")
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
    """Translates the loss: usually NeMo-RL's KL on the teacher's top-k ids, averaged over the tokens of an update."""
    if recipe.algorithm == "grpo":
        _sampled_token_loss(recipe, made)
        return
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
    """Sets the one loss temperature; NeMo-RL divides each model's logits by the temperature of its `generation`."""
    student = made.get("rollout.temperature", 1.0)
    if student == 0:
        made.note(
            "policy.generation.temperature=0: NeMo-RL divides logits by it; the loss has temperature 1 instead, and "
            "sampling is greedy"
        )
        return
    made.set("loss.output.temperature", student)
    if recipe.algorithm == "grpo":  # a teacher has the settings of the policy
        return
    teacher = recipe.not_negative("teacher.generation.temperature", 1.0)
    if teacher != student:
        made.note(
            f"teacher.generation.temperature={teacher}: NeMo-RL divides the teacher's logits by it; here "
            f"loss.output.temperature={student}, the student's, holds for both models"
        )


def _sampled_token_loss(recipe: Recipe, made: Translated) -> None:
    """Translates the loss on the log ratio of teacher to student at sampled tokens, and the weights of tokens."""
    if (name := recipe.text("grpo.adv_estimator.name", "opd")) != "opd":
        made.note(f"grpo.adv_estimator.name={name}: opd is taken, because there is no reward")
    tokens = recipe.flag("loss_fn.token_level_loss", default=True)
    made.set("loss.representation", {"layers": "none", "weight": 0.0})
    made.set(
        "loss.output",
        {"kind": "sampled_token", "weight": 1.0, "aggregation": "token_mean" if tokens else "sequence_mean"},
    )
    _loss_temperature(recipe, made)
    if recipe.flag("grpo.async_grpo.enabled"):
        made.set("rollout.max_lag", recipe.count("grpo.async_grpo.max_trajectory_age_steps", 1))
        if recipe.flag("grpo.async_grpo.in_flight_weight_updates"):
            made.note(
                "grpo.async_grpo.in_flight_weight_updates=true: here a response is sampled from one student; with "
                "rollout.mode=segments or stream, long ones go on over updates"
            )
    _correction(recipe, made)


def _correction(recipe: Recipe, made: Translated) -> None:
    """Translates the weight of a token by the ratio of the trainer's to the engine's probability."""
    key = "loss_fn.truncated_importance_sampling"
    used, lag = recipe.flag("loss_fn.use_importance_sampling_correction"), made.get("rollout.max_lag", 0)
    if made.get("rollout.engine") != "vllm":
        return
    kind = recipe.text(f"{key}_type")
    low, high = recipe.not_negative(f"{key}_ratio_min", 0.0), recipe.not_negative(f"{key}_ratio")
    if used and kind in ("tis", "icepop") and high is not None:
        made.set("rollout.correction", "truncate" if kind == "tis" else "mask")
        made.set("rollout.correction_range", [low, high])
    elif used or lag:
        made.set("rollout.correction", "truncate")
        bounds = RolloutConfig().correction_range
        made.note(
            f"loss_fn.use_importance_sampling_correction={str(used).lower()}, {key}_type={kind}, {key}_ratio={high}: "
            f"ratios of single tokens are moved into rollout.correction_range={[*bounds]}; rollout.correction=mask "
            "leaves out the tokens outside"
        )


def _data(recipe: Recipe, made: Translated) -> None:
    in_gym = recipe.flag("env.should_use_nemo_gym")
    if in_gym and recipe.has("data.validation"):
        recipe.get("data.validation")
        made.note(
            "data.validation: NeMo Gym's verifiers grade it, which have no counterpart; name a file of problems with "
            "answers in data.validation and set evaluation.every (docs/evaluation.md)"
        )
    for split in ("train",) if in_gym else ("train", "validation"):
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
    _template(recipe, made)
    if recipe.peek("policy.tokenizer.name") == recipe.peek("policy.model_name"):
        recipe.get("policy.tokenizer.name")


def _template(recipe: Recipe, made: Translated) -> None:
    """Translates the template of a model, and the variables with which NeMo Gym's servers write prompts."""
    template, model = made.get("data.chat_template"), recipe.peek("policy.model_name")
    if template is not None and model is not None and template.startswith(f"{model}/"):
        made.set("data.chat_template", f"{made.get('student.hf_path')}{template.removeprefix(model)}")
    servers = recipe.peek("env.nemo_gym")
    for name in servers if isinstance(servers, dict) else ():
        group = f"env.nemo_gym.{name}.responses_api_models.vllm_model"
        given: dict[str, Any] = {}
        for key in ("chat_template_kwargs", "extra_body.chat_template_kwargs"):
            if recipe.has(f"{group}.{key}") and str(name).startswith("policy_model"):
                value = recipe.get(f"{group}.{key}")
                if not isinstance(value, dict):
                    raise wrong(f"{group}.{key}", value, "variables of a chat template")
                given |= value
        if name == "policy_model" and given:
            made.set("data.chat_template_args", (made.get("data.chat_template_args") or {}) | given)
        elif given:
            made.note(
                f"env.nemo_gym.{name} has chat_template_kwargs={given}: data.chat_template_args holds for all of the "
                "student's prompts; give the rows of this server's agents a run of their own, or let their teacher "
                "alone read them so, by chat_template_args of its entry in teachers"
            )


def _evaluation(recipe: Recipe, made: Translated, prefix: str) -> None:
    """Translates a validation set's settings; here evaluations include the start and the end, or there are none."""
    repeat, limit = recipe.count(f"{prefix}.repeat"), recipe.count(f"{recipe.algorithm}.max_val_samples")
    made.set("evaluation.samples", repeat)
    made.set("evaluation.limit", limit)
    if limit and repeat and repeat > 1:
        made.note(
            f"{recipe.algorithm}.max_val_samples={limit}: counts every one of the {repeat} samples of a problem; "
            "evaluation.limit counts problems"
        )
    for name in ("temperature", "top_p", "max_new_tokens"):
        made.set(f"evaluation.{name}", made.get(f"rollout.{name}"))
    key = f"{recipe.algorithm}.val_period"
    period = max(0, recipe.number(key, 0, whole=True))
    first, last = (recipe.flag(f"{recipe.algorithm}.val_at_{name}") for name in ("start", "end"))
    steps = made.get("train.steps", TrainConfig().steps)
    # without a period, a period of the whole run leaves the first and the last step
    every = period or (steps if first or last else 0)
    made.set("evaluation.every", every)
    if not every:
        made.note(f"{key}=0, val_at_start=false, val_at_end=false: evaluation.every=0, no evaluation")
    elif not (first and last):
        made.note(
            f"{key}={period}, val_at_start={str(first).lower()}, val_at_end={str(last).lower()}: "
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
    """Translates the kept checkpoints: NeMo-RL's best by a metric, or all; here the newest, and one best."""
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


def _left_over(recipe: Recipe, made: Translated) -> None:
    """Notes each group of keys without translation, and then each unknown key."""
    reasons = _WITHOUT_COUNTERPART | (_OF_MOPD if recipe.algorithm == "grpo" else {})
    groups: dict[str, list[str]] = {}
    unknown: list[str] = []
    for key, value in recipe.unread().items():
        shown = "(not shown)" if SECRET_KEY.search(key) else value
        prefixes = [prefix for prefix in reasons if f"{key}.".startswith(f"{prefix}.")]
        if prefixes:
            prefix = max(prefixes, key=len)
            groups.setdefault(prefix, []).append(f"{key.removeprefix(prefix).lstrip('.')}={shown}".lstrip("="))
        else:
            reason = "there is no quantization" if "quant" in key or "modelopt" in key else "unknown here"
            unknown.append(f"{key}={shown}: {reason}")
    for prefix, items in groups.items():
        listed = ", ".join(items) if len(items) <= _SHOWN else f"{len(items)} keys"
        made.note(f"{prefix} ({listed}): {reasons[prefix]}")
    for line in unknown:
        made.note(line)
