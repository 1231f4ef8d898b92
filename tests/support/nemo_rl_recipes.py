"""Small recipes in the shape of NeMo-RL's, for the tests of `from-nemo-rl`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

BASE = """
distillation: {num_prompts_per_step: 8, num_generations_per_prompt: 2, max_num_steps: 40, val_period: 5, seed: 7,
               topk_logits_k: 32, max_num_epochs: 1}
loss_fn: {kl_type: reverse, zero_outside_topk: false}
policy: &POLICY
  model_name: org/Small
  train_global_batch_size: 16
  max_total_sequence_length: 64
  precision: float32
  max_grad_norm: 0.5
  tokenizer: {name: "${..model_name}"}
  dtensor_cfg: {enabled: true, tensor_parallel_size: 2, context_parallel_size: 2, activation_checkpointing: true}
  megatron_cfg:
    enabled: false
    tensor_model_parallel_size: 4
    pipeline_model_parallel_size: 2
    context_parallel_size: 1
    sequence_parallel: true
    optimizer: {lr: 1.0e-5, min_lr: 1.0e-6, weight_decay: 0.1, adam_beta1: 0.9, adam_beta2: 0.95, adam_eps: 1.0e-6}
    scheduler: {lr_decay_style: cosine, lr_warmup_iters: 4}
    fp8_cfg: {enabled: false, fp8: e4m3}
  sequence_packing: {enabled: true, train_mb_tokens: "${mul:${..max_total_sequence_length}, 2}"}
  optimizer: {name: torch.optim.AdamW, kwargs: {lr: 2.0e-5, weight_decay: 0.01, betas: [0.9, 0.999], eps: 1.0e-8}}
  scheduler:
    - {name: torch.optim.lr_scheduler.LinearLR, kwargs: {total_iters: 10}}
    - {name: torch.optim.lr_scheduler.CosineAnnealingLR, kwargs: {T_max: 30, eta_min: 1.0e-6}}
    - milestones: [10]
  generation:
    backend: vllm
    max_new_tokens: 48
    temperature: 0.8
    top_p: 0.95
    vllm_cfg: {tensor_parallel_size: 2, gpu_memory_utilization: 0.5}
    colocated: {enabled: true, resources: {gpus_per_node: null, num_nodes: null}}
teacher:
  <<: *POLICY
  model_name: org/Large
data:
  max_input_seq_length: 16
  train: {dataset_name: Sums}
  validation: {dataset_name: Sums-2024, repeat: 3}
checkpointing: {enabled: true, save_period: 10, keep_top_k: 3}
logger: {wandb_enabled: true, tensorboard_enabled: false, wandb: {project: mine}, tensorboard: {log_dir: tb}}
cluster: {gpus_per_node: 8, num_nodes: 2}
"""
MEGATRON = """
defaults: base.yaml
policy:
  dtensor_cfg: {enabled: false}
  megatron_cfg: {enabled: true}
  made_up: 3
teacher:
  dtensor_cfg: {enabled: false}
  megatron_cfg: {enabled: true, tensor_model_parallel_size: 8}
"""
# in the shape of NeMo-RL's recipes of multi-teacher distillation, which inherit from those of GRPO
MOPD = """
defaults: megatron.yaml
distillation: null
teacher: null
grpo: {num_prompts_per_step: 8, num_generations_per_prompt: 2, max_num_steps: 40, val_period: 5, seed: 7,
       overlong_filtering: true, advantage_clip_low: -20, adv_estimator: {name: opd},
       async_grpo: {enabled: true, max_trajectory_age_steps: 2, in_flight_weight_updates: false}}
loss_fn: {_override_: true, use_importance_sampling_correction: true, truncated_importance_sampling_type: icepop,
          truncated_importance_sampling_ratio: 5.0, truncated_importance_sampling_ratio_min: 0.2,
          token_level_loss: true, ratio_clip_max: 0.28}
policy:
  tokenizer: {chat_template: "${policy.model_name}/chat_template.jinja",
              chat_template_kwargs: {truncate_history_thinking: false}}
  generation: {top_p: 1.0, colocated: {enabled: false, resources: {gpus_per_node: 4, num_nodes: 1}}}
data:
  train: {_override_: true, data_path: gym/train.jsonl}
  validation: {_override_: true, data_path: gym/validation.jsonl}
  default: {dataset_name: NemoGymDataset}
env:
  should_use_nemo_gym: true
  nemo_gym:
    config_paths: [resources_servers/mcqa/configs/mcqa.yaml]
    num_groups: "${add:${grpo.async_grpo.max_trajectory_age_steps}, 1}"
    policy_model: {responses_api_models: {vllm_model: {extra_body: {chat_template_kwargs: {enable_thinking: true}}}}}
    policy_model_reasoning_off:
      responses_api_models: {vllm_model: {chat_template_kwargs: {enable_thinking: false}}}
_teachers: {general: /path/to/general, math: org/a/math}
on_policy_distillation:
  enabled: true
  teacher_model_by_agent_name:
    default_agent: ${_teachers.general}
    math_agent: ${_teachers.math}
    mcqa_agent: ${_teachers.math}
    proof_agent: org/b/math
  default_teacher_alias: default_agent
  strict_agent_name_match: false
  deduplicate_shared_teacher_checkpoints: true
  non_colocated_teachers:
    enabled: true
    default_teacher_cfg: {tensor_model_parallel_size: 2, expert_model_parallel_size: 4, num_nodes: 2, gpus_per_node: 4,
                          precision: bf16, micro_batch_size: 1,
                          megatron_cfg_overrides: {moe_token_dispatcher_type: allgather}}
cluster: {gpus_per_node: 8, num_nodes: 4}
"""


def write_recipes(folder: Path) -> None:
    """Writes base.yaml, which trains with DTensor, and megatron.yaml and mopd.yaml, which inherit from it."""
    (folder / "base.yaml").write_text(BASE)
    (folder / "megatron.yaml").write_text(MEGATRON)
    (folder / "mopd.yaml").write_text(MOPD)


def put(values: dict[str, Any], key: str, value: Any) -> None:
    """Sets a key such as `policy.scheduler.0.name`; groups that are not there are made."""
    *groups, last = key.split(".")
    place: Any = values
    for group in groups:
        if isinstance(place, list):
            place = place[int(group)]
        else:
            place[group] = {} if place.get(group) is None else place[group]
            place = place[group]
    place[int(last) if isinstance(place, list) else last] = value
