"""Names that other training programs give to what a configuration here calls otherwise, for "did you mean".

The names are those of transformers' and TRL's trainers, Megatron-LM's arguments, DeepSpeed, verl and NeMo-RL.
"""

from __future__ import annotations

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
