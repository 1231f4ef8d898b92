"""FP8 is always off."""

from contextlib import AbstractContextManager, nullcontext


class FP8GlobalStateManager:
    """Asked by Megatron whether FP8 is on."""

    @staticmethod
    def is_fp8_enabled() -> bool:
        return False


def fp8_autocast(enabled: bool = True, **_: object) -> AbstractContextManager:
    if enabled:
        raise NotImplementedError("the stand-in has no FP8")
    return nullcontext()


def fp8_model_init(enabled: bool = True, **_: object) -> AbstractContextManager:
    if enabled:
        raise NotImplementedError("the stand-in has no FP8")
    return nullcontext()
