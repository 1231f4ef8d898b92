"""The quantised weights that can be read: `quantization_config` of a config.json. No torch.

Two formats are supported. Models in them are trained, distilled and exported in bfloat16, of the numbers that the
files stand for (`megatron/weights/dequantize.py`):

- mxfp4, of gpt-oss: matrices of experts as 4-bit numbers, with a power of two for 32 neighbours;
- fp8 with `weight_block_size`, of DeepSeek-V3 and models of Qwen: 8-bit matrices, with a factor for each block.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

KEY = "quantization_config"
MXFP4, FP8 = "mxfp4", "fp8"
NUMBERS_OF_A_BYTE = 2  # of mxfp4
_BLOCK = "weight_block_size"
# what else of fp8 is read; transformers takes these for keys that are absent, too
_FP8 = {"fmt": "e4m3", "activation_scheme": "dynamic", "expert_dtype": "fp8"}
_DTYPE = "bfloat16"  # of dequantised weights


@dataclass(frozen=True)
class Quantization:
    """The format of a model's files.

    Attributes:
        method: `MXFP4` or `FP8`.
        block: of fp8, the rows and columns of a matrix that share a factor.
    """

    method: str
    block: tuple[int, int] = (1, 1)

    def names(self, stored: Iterable[str], source: str) -> dict[str, tuple[str, str]]:
        """The name of each quantised tensor -> the stored tensors of (its numbers, its scales).

        Args:
            stored: the names of all tensors in the files.
            source: the beginning of messages.

        Raises:
            ValueError: one of the two is missing.
        """
        names, found = set(stored), {}
        numbers, scales = ("_blocks", "_scales") if self.method == MXFP4 else ("", "_scale_inv")
        for name in sorted(names):
            for own, other in ((numbers, scales), (scales, numbers)):
                whole = name.removesuffix(own)
                if not own or whole == name:
                    continue
                if whole + other not in names:
                    raise ValueError(
                        f"{source}: tensor {name!r} is there, but not {whole + other!r}; expected both, of weights in "
                        f"{self.method}: copy all files of the model from its source again"
                    )
                found[whole] = whole + numbers, whole + scales
        return found


def read_quantization(hf_config: dict, source: str) -> Quantization | None:
    """The format of the weights of `hf_config`, the contents of a config.json; None if they are stored as they are.

    Raises:
        ValueError: the format cannot be read.
    """
    settings = hf_config.get(KEY)
    found = known_quantization(hf_config)
    if not settings or found is not None:
        return found
    method, given = settings, ""
    if isinstance(settings, dict):
        method = settings.get("quant_method")
        named = [_BLOCK, *(key for key in _FP8 if key in settings)] if method == FP8 else []
        given = "".join(f", {key}={settings.get(key)!r}" for key in named)
    raise ValueError(
        f"{source}: {KEY} asks for {method!r} weights{given}, expected unquantized ones, mxfp4, or fp8 with "
        f"{_BLOCK}=[ROWS, COLUMNS] and {', '.join(f'{key}={value}' for key, value in _FP8.items())}; take the model's "
        "original (bfloat16 or float32) release"
    )


def known_quantization(hf_config: dict) -> Quantization | None:
    """As `read_quantization`, but None for a format that cannot be read: a server may compute such a teacher."""
    settings = hf_config.get(KEY)
    if not isinstance(settings, dict):
        return None
    if settings.get("quant_method") == MXFP4:
        return Quantization(MXFP4)
    block = settings.get(_BLOCK)
    differs = any(settings.get(key, value) != value for key, value in _FP8.items())
    if settings.get("quant_method") != FP8 or differs or not isinstance(block, list) or len(block) != 2:
        return None
    rows, columns = block
    return Quantization(FP8, (rows, columns)) if _is_size(rows) and _is_size(columns) else None


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def forget_quantization(config: Any) -> None:
    """Removes the setting from a config of transformers, and from that of the language model in it."""
    for each in (config, config.get_text_config()):
        if hasattr(each, KEY):
            delattr(each, KEY)


def unquantized(hf_config: dict) -> dict:
    """The config of the model with dequantised weights; another model's config is returned as it is."""
    if known_quantization(hf_config) is None:
        return hf_config
    keys = [key for key in ("torch_dtype", "dtype") if key in hf_config] or ["dtype"]
    return {name: value for name, value in hf_config.items() if name != KEY} | dict.fromkeys(keys, _DTYPE)
