"""Optimizers and functions on lists of tensors, which look for a driver when they are used, as the package's do."""

from typing import Any


def _without_a_driver(*_: Any, **__: Any) -> Any:
    raise RuntimeError("Found no NVIDIA driver on your system (the stand-in for transformer_engine.pytorch.optimizers)")


class FusedAdam:
    """AdamW on a GPU."""

    __init__ = _without_a_driver


class FusedSGD:
    """SGD on a GPU."""

    __init__ = _without_a_driver


multi_tensor_applier = multi_tensor_l2norm = multi_tensor_scale = multi_tensor_scale_tensor = _without_a_driver
