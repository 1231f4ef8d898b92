"""Distillation losses as pure functions of tensors; they know nothing of configs, layouts or Megatron."""
