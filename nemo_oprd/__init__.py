"""nemo_oprd: on-policy representation distillation on Megatron-core."""

__version__ = "0.1.0"
