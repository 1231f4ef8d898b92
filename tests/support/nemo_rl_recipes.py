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


def write_recipes(folder: Path) -> None:
    """Writes base.yaml, which trains with DTensor, and megatron.yaml, which inherits from it."""
    (folder / "base.yaml").write_text(BASE)
    (folder / "megatron.yaml").write_text(MEGATRON)


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
