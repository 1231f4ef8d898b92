"""NeMo's programs, and other loops that Megatron models are trained in: what they import, and recipes for them."""
