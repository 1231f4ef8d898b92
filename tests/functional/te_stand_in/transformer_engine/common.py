"""What Megatron-core names at import time of `transformer_engine.common`."""

from types import SimpleNamespace


class DelayedScaling:
    """Megatron derives a class from it."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        raise NotImplementedError("the stand-in has no FP8")


recipe = SimpleNamespace(DelayedScaling=DelayedScaling)
