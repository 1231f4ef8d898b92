"""Distillation losses as pure functions of tensors, and their registry. Nothing here imports the configuration,
layouts or Megatron."""
