"""The part of `transformer_engine.pytorch` that Megatron-core's GPT layers are made of."""

from types import SimpleNamespace

from . import distributed, fp8, router, tensor  # noqa: F401
from .attention import DotProductAttention  # noqa: F401
from .modules import LayerNorm, LayerNormLinear, Linear, RMSNorm  # noqa: F401


class GroupedLinear:
    """Megatron derives a class from it, for experts."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        raise NotImplementedError("the stand-in has no experts")


# named in annotations of Megatron's
ops = SimpleNamespace(Sequential=None, FusibleOperation=None)
