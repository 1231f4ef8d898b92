"""Adapters to NeMo's programs and to other training loops of Megatron models, and recipes for them."""
