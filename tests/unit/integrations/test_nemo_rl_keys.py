"""`from-nemo-rl`: every key that the translator asks for has an effect, on a table of unusual values."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
from nemo_rl_recipes import put, write_recipes

from nemo_oprd.integrations.from_nemo_rl.keys import translate
from nemo_oprd.integrations.from_nemo_rl.recipe import Recipe, load_recipe

SEVERAL = "several"
# (recipe, what else has to be so) of the keys below
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "dtensor": ("base.yaml", {}),
    "megatron": ("megatron.yaml", {}),
    "flex": ("megatron.yaml", {"policy.megatron_cfg.moe_token_dispatcher_type": "flex"}),
    "mixed": ("base.yaml", {"loss_fn.kl_type": "mixed"}),
    "dedicated": ("base.yaml", {"policy.generation.colocated.enabled": False}),
    "recompute": ("megatron.yaml", {"policy.megatron_cfg.activation_checkpointing": True}),
    "in process": ("base.yaml", {"policy.generation.backend": "megatron"}),
    "best": ("base.yaml", {"checkpointing.metric_name": "val:accuracy"}),
    "mopd": ("mopd.yaml", {}),
    SEVERAL: ("base.yaml", {"teacher": None, "teachers": [{"model_name": "a/B"}, {"model_name": "c/D"}]}),
}
_LAYOUT = {
    "context_parallel_size": 8,
    "sequence_parallel": True,
    "pipeline_model_parallel_size": 8,
    "virtual_pipeline_model_parallel_size": 8,
    "num_layers_in_first_pipeline_stage": 1,
    "num_layers_in_last_pipeline_stage": 1,
    "expert_model_parallel_size": 8,
    "expert_tensor_parallel_size": 8,
}
_TEACHERS = "on_policy_distillation.non_colocated_teachers.default_teacher_cfg"
_OF_MEGATRON = {**_LAYOUT, "sequence_parallel": False, "tensor_model_parallel_size": 16, "enabled": False}
# every key that the translator asks for -> an unusual value, by case
UNUSUAL: dict[str, dict[str, Any]] = {
    "dtensor": {
        **{f"policy.dtensor_cfg.{key}": value for key, value in _LAYOUT.items()},
        **{f"teacher.dtensor_cfg.{key}": value for key, value in _LAYOUT.items()},
        "policy.dtensor_cfg.tensor_parallel_size": 16,
        "teacher.dtensor_cfg.tensor_parallel_size": 16,
        "policy.dtensor_cfg.activation_checkpointing": False,
        "policy.dtensor_cfg.recompute_granularity": "selective",
        "policy.megatron_cfg.enabled": True,
        "teacher.megatron_cfg.enabled": True,
        "policy.model_name": "org/Odd",
        "teacher.model_name": "org/Odd",
        "policy.precision": "float16",
        "policy.train_global_batch_size": 3,
        "policy.max_total_sequence_length": 61,
        "policy.max_grad_norm": 0.123,
        "policy.tokenizer.name": "org/Odd",
        "policy.tokenizer.chat_template": "odd.jinja",
        "policy.tokenizer.chat_template_kwargs": {"odd": True},
        "policy.optimizer.name": "torch.optim.SGD",
        "policy.optimizer.kwargs.lr": 0.123,
        "policy.optimizer.kwargs.weight_decay": 0.123,
        "policy.optimizer.kwargs.eps": 0.123,
        "policy.optimizer.kwargs.betas": [0.1, 0.2],
        "policy.optimizer.kwargs.betas.0": 0.123,
        "policy.optimizer.kwargs.betas.1": 0.123,
        "policy.scheduler.0.name": "torch.optim.lr_scheduler.StepLR",
        "policy.scheduler.0.kwargs.start_factor": 0.123,
        "policy.scheduler.0.kwargs.end_factor": 0.123,
        "policy.scheduler.0.kwargs.total_iters": 3,
        "policy.scheduler.1.name": "torch.optim.lr_scheduler.StepLR",
        "policy.scheduler.1.kwargs.eta_min": 1.23e-6,
        "policy.scheduler.2.name": "torch.optim.lr_scheduler.StepLR",
        "policy.scheduler.2.milestones": [17],
        "policy.generation.backend": "sglang",
        "policy.generation.max_new_tokens": 17,
        "policy.generation.temperature": 0.123,
        "policy.generation.top_p": 0.123,
        "policy.generation.colocated.enabled": False,
        "policy.generation.vllm_cfg.tensor_parallel_size": 16,
        "policy.generation.vllm_cfg.gpu_memory_utilization": 0.123,
        "policy.generation.vllm_cfg.enforce_eager": True,
        "teacher.generation.temperature": 0.123,
        "distillation.seed": 17,
        "distillation.num_prompts_per_step": 17,
        "distillation.num_generations_per_prompt": 17,
        "distillation.max_num_steps": 17,
        "distillation.topk_logits_k": 17,
        "distillation.val_period": 17,
        "distillation.val_at_start": True,
        "distillation.val_at_end": True,
        "distillation.max_val_samples": 17,
        "loss_fn.kl_type": "forward",
        "loss_fn.zero_outside_topk": True,
        "data.shuffle": False,
        "data.max_input_seq_length": 17,
        "data.train.dataset_name": "odd",
        "data.train.data_path": "odd.jsonl",
        "data.validation.dataset_name": "odd",
        "data.validation.data_path": "odd.jsonl",
        "data.validation.repeat": 17,
        "checkpointing.enabled": False,
        "checkpointing.save_period": 17,
        "checkpointing.keep_top_k": 17,
        "logger.tensorboard_enabled": True,
        "logger.swanlab_enabled": True,
        "logger.mlflow_enabled": True,
        "logger.wandb_enabled": False,
        "logger.wandb.project": "odd",
    },
    "megatron": {
        **{f"policy.megatron_cfg.{key}": value for key, value in _OF_MEGATRON.items()},
        **{f"teacher.megatron_cfg.{key}": value for key, value in _OF_MEGATRON.items()},
        "policy.megatron_cfg.activation_checkpointing": True,
        "policy.megatron_cfg.moe_token_dispatcher_type": "odd",
        "teacher.megatron_cfg.moe_token_dispatcher_type": "odd",
        "policy.megatron_cfg.optimizer.optimizer": "sgd",
        **{f"policy.megatron_cfg.optimizer.{key}": 0.123 for key in ("lr", "min_lr", "weight_decay", "clip_grad")},
        **{f"policy.megatron_cfg.optimizer.adam_{key}": 0.123 for key in ("beta1", "beta2", "eps")},
        "policy.megatron_cfg.optimizer.use_distributed_optimizer": False,
        "policy.megatron_cfg.scheduler.lr_decay_style": "linear",
        "policy.megatron_cfg.scheduler.lr_warmup_iters": 17,
        "policy.max_grad_norm": 0.123,
    },
    "flex": {
        "policy.megatron_cfg.moe_enable_deepep": True,
        "policy.megatron_cfg.moe_flex_dispatcher_backend": "hybridep",
    },
    "recompute": {"policy.megatron_cfg.recompute_granularity": "selective"},
    "mixed": {"loss_fn.mixed_kl_weight": 0.123},
    "dedicated": {
        "policy.generation.colocated.resources.gpus_per_node": 16,
        "policy.generation.colocated.resources.num_nodes": 17,
    },
    "in process": {"policy.generation.colocated.enabled": False},
    "best": {"checkpointing.metric_name": "val:odd", "checkpointing.higher_is_better": False},
    "mopd": {
        **{f"{_TEACHERS}.{key}": value for key, value in _LAYOUT.items()},
        f"{_TEACHERS}.tensor_model_parallel_size": 16,
        f"{_TEACHERS}.megatron_cfg_overrides.moe_token_dispatcher_type": "odd",
        f"{_TEACHERS}.num_nodes": 17,
        f"{_TEACHERS}.gpus_per_node": 17,
        f"{_TEACHERS}.precision": "fp16",
        "on_policy_distillation.teacher_model_by_agent_name": {"default_agent": "org/Odd", "math_agent": "org/B"},
        "on_policy_distillation.default_teacher_alias": "math_agent",
        "on_policy_distillation.strict_agent_name_match": True,
        "on_policy_distillation.deduplicate_shared_teacher_checkpoints": False,
        "on_policy_distillation.non_colocated_teachers.enabled": False,
        "policy.is_vlm": True,
        "grpo.seed": 17,
        "grpo.num_prompts_per_step": 17,
        "grpo.num_generations_per_prompt": 17,
        "grpo.max_num_steps": 17,
        "grpo.adv_estimator.name": "grpo",
        "grpo.async_grpo.enabled": False,
        "grpo.async_grpo.max_trajectory_age_steps": 17,
        "grpo.async_grpo.in_flight_weight_updates": True,
        "loss_fn.token_level_loss": False,
        "loss_fn.use_importance_sampling_correction": False,
        "loss_fn.truncated_importance_sampling_type": "tis",
        "loss_fn.truncated_importance_sampling_ratio": 17.0,
        "loss_fn.truncated_importance_sampling_ratio_min": 0.123,
        "env.should_use_nemo_gym": False,
        "env.nemo_gym.policy_model.responses_api_models.vllm_model.chat_template_kwargs": {"odd": True},
        "env.nemo_gym.policy_model.responses_api_models.vllm_model.extra_body.chat_template_kwargs": {"odd": True},
        "env.nemo_gym.policy_model_reasoning_off.responses_api_models.vllm_model.chat_template_kwargs": {"odd": True},
    },
    SEVERAL: {"teachers.0.model_name": "org/Odd", "teachers.1.model_name": "org/Odd"},
}
# asked for to leave them out of the notes: groups of what is switched off, and of what a note was made of
_OFF = (
    *(f"{role}.{group}" for role in ("policy", "teacher") for group in ("megatron_cfg", "dtensor_cfg")),
    *(f"{role}.{group}" for role in ("policy", "teacher") for group in ("optimizer", "scheduler")),
    *(f"{role}.dtensor_cfg.enabled" for role in ("policy", "teacher")),
    *(f"logger.{name}" for name in ("wandb", "swanlab", "mlflow", "tensorboard", "gpu_monitoring", "monitor_gpus")),
    *(f"policy.generation.{name}" for name in ("vllm_cfg", "colocated")),
    "teachers.1",
    "data.validation",
    "on_policy_distillation.enabled",
    "checkpointing",
)


@pytest.mark.parametrize("case", CASES)
def test_every_key_has_an_effect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    """A key that is asked for changes the configuration or is in the notes; asking alone hides it from the notes."""
    write_recipes(tmp_path)
    name, others = CASES[case]
    read: set[str] = set()
    get = Recipe.get

    def recorded(self: Recipe, key: str, default: Any = None) -> Any:
        # the same keys
        read.add(re.sub(r"^grpo\.(?=(max_)?val_)", "distillation.", key.replace("teachers.0", "teacher")))
        return get(self, key, default)

    monkeypatch.setattr(Recipe, "get", recorded)
    loaded = load_recipe(tmp_path / name)

    def made(key: str | None = None, value: Any = None) -> Any:
        values = copy.deepcopy(loaded)
        for given, other in (others | ({} if key is None else {key: value})).items():
            put(values, given, copy.deepcopy(other))
        return translate(values, "r", "models")

    plain = made()
    for key, value in UNUSUAL[case].items():
        other = made(key, value)
        told = [note for note in other.notes if note not in plain.notes]
        shown = str(value).lower() if isinstance(value, bool) else str(value)
        assert other.config != plain.config or any(shown in note for note in told), f"{key}={value} has no effect"
    listed = {key for keys in UNUSUAL.values() for key in keys}
    assert {key for key in read if key not in listed and key not in _OFF} == set()
