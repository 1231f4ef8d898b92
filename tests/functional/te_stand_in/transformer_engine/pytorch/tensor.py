"""A class that Megatron-core asks parameters about."""


class QuantizedTensor:
    """No tensor is one."""
