"""The quantised weights that can be read: `quantization_config` of a config.json, or hf_quant_config.json. No torch.

Models in these formats are trained, distilled and exported with the bfloat16 numbers that the files stand for
(`megatron/weights/dequantize.py`):

- mxfp4, of gpt-oss: matrices of experts as 4-bit numbers, with a power of two for 32 neighbours;
- fp8 with `weight_block_size`, of DeepSeek, Qwen and MiniMax: 8-bit matrices, with a factor for each block;
- modelopt, and compressed-tensors' `float-quantized`: 8-bit matrices with one factor, or one per row, and modelopt's
  NVFP4: 4-bit numbers with an 8-bit factor for 16 neighbours and one for the matrix;
- compressed-tensors' `pack-quantized`, of Kimi K2.5: 4-bit integers with a factor for neighbours in a row.

In the last two, the tensors beside a matrix say which format it has, and whether it is quantised.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nemo_oprd.runtime.files import read_json

KEY = "quantization_config"
# beside config.json; in some releases of ModelOpt, only this file says that they are quantised
MODELOPT_FILE = "hf_quant_config.json"
MXFP4, FP8, SCALED = "mxfp4", "fp8", "scaled"
NVFP4, INT4 = "nvfp4", "int4"  # of a matrix in a `SCALED` model, beside fp8
_BLOCK = "weight_block_size"
# the other settings of fp8 that can be read; transformers, too, assumes them for absent keys
_FP8 = {"fmt": "e4m3", "activation_scheme": "dynamic", "expert_dtype": "fp8"}
_SAME = {"float8_e4m3fn": "e4m3"}  # another name of a format
_MODELOPT, _COMPRESSED = "modelopt", "compressed-tensors"
_ALGORITHMS = ("FP8", "NVFP4", "W4A16_NVFP4")  # of ModelOpt; MIXED_PRECISION has one per layer
_DTYPE = "bfloat16"  # of dequantised weights
# tensors beside a `SCALED` matrix: its factors, and what only an engine that computes in these formats needs
_SCALES = ("_scale", "_scale_2")
_OF_WEIGHT = ".weight_scale"
_UNUSED = (".input_scale", ".output_scale", ".k_scale", ".v_scale", ".q_scale", "_shape")
# the end of the name of a matrix of 4-bit integers, eight in a number of 32 bits
_PACKED = "_packed"


@dataclass(frozen=True)
class Quantization:
    """The format of a model's files.

    Attributes:
        method: `MXFP4`, `FP8` or `SCALED`.
        block: of fp8, the rows and columns of a matrix that share a factor.
        label: the format in words, for messages.
    """

    method: str
    block: tuple[int, int] = (1, 1)
    label: str = field(default="", compare=False)

    def names(self, stored: Iterable[str], source: str) -> dict[str, tuple[str, ...]]:
        """Returns the name of each quantised tensor -> the stored tensors of (its numbers, its scales, ...).

        Args:
            stored: the names of all tensors in the files.
            source: the beginning of messages.

        Raises:
            ValueError: one of them is missing.
        """
        names = set(stored)
        if self.method == SCALED:
            return self._scaled(names, source)
        found: dict[str, tuple[str, ...]] = {}
        numbers, scales = ("_blocks", "_scales") if self.method == MXFP4 else ("", "_scale_inv")
        for name in sorted(names):
            for own, other in ((numbers, scales), (scales, numbers)):
                whole = name.removesuffix(own)
                if not own or whole == name:
                    continue
                if whole + other not in names:
                    raise self._missing(name, whole + other, source)
                found[whole] = whole + numbers, whole + scales
        return found

    def _scaled(self, names: set[str], source: str) -> dict[str, tuple[str, ...]]:
        """Returns what `names` does, for `SCALED`: the tensors beside a matrix say how it is quantised."""
        found: dict[str, tuple[str, ...]] = {}
        scale, factor = _SCALES
        for name in sorted(names):
            if name.endswith(factor) and (of_group := name.removesuffix(factor) + scale) not in names:
                raise self._missing(name, of_group, source)
            if name.endswith(_PACKED) and (of_group := name.removesuffix(_PACKED) + scale) not in names:
                raise self._missing(name, of_group, source)
            if name.endswith(scale) and not name.endswith(_UNUSED):
                whole = name.removesuffix(scale)
                if whole + _PACKED in names:
                    found[whole] = whole + _PACKED, name
                    continue
                if whole not in names:
                    if not name.endswith(_OF_WEIGHT):
                        continue  # a parameter of its own, such as the factors of Gemma 4's router
                    raise self._missing(name, whole, source)
                found[whole] = whole, name, *([whole + factor] if whole + factor in names else [])
        return found

    def numbers_of_a_unit(self, parts: Sequence[str]) -> int:
        """Returns how many numbers one element of `parts[0]` holds; `parts` are stored tensors as in `names`."""
        numbers, *scales = parts
        if numbers.endswith(_PACKED):
            return 8
        return 2 if len(scales) > 1 or self.method == MXFP4 else 1

    def unused(self, stored: Iterable[str]) -> set[str]:
        """Returns the stored tensors that dequantised weights do not need, such as the scales of activations."""
        return {name for name in stored if name.endswith(_UNUSED)} if self.method == SCALED else set()

    def _missing(self, name: str, other: str, source: str) -> ValueError:
        return ValueError(
            f"{source}: tensor {name!r} is there, but not {other!r}; expected both, of weights in "
            f"{self.label or self.method}: copy all files of the model from its source again"
        )


def with_modelopt_file(hf_config: dict, directory: Path) -> dict:
    """Returns the content of a config.json, completed by the format if only hf_quant_config.json beside it names one.

    Some releases name ModelOpt in config.json as the producer but not as `quant_method`, which is then added.

    Raises:
        ValueError: that file cannot be read.
    """
    file, given = directory / MODELOPT_FILE, hf_config.get(KEY)
    if isinstance(given, dict) and not given.get("quant_method"):
        producer = given.get("producer")
        if isinstance(producer, dict) and producer.get("name") == _MODELOPT:
            return {**hf_config, KEY: {**given, "quant_method": _MODELOPT}}
    if given or not file.is_file():
        return hf_config
    content = read_json(file, "an object with quantization", "copy the file from the model's source again")
    settings = content.get("quantization", content)
    if not isinstance(settings, dict):
        raise ValueError(f"{file}: quantization={settings!r}; expected an object: copy the file from its source again")
    return {**hf_config, KEY: {"quant_method": _MODELOPT, **settings}}


def read_quantization(hf_config: dict, source: str) -> Quantization | None:
    """Returns the format of the weights of `hf_config`, the contents of a config.json; None: they are unquantised.

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
        keys = [_BLOCK, *_FP8] if method == FP8 else ["quant_algo", "format"]
        given = "".join(f", {key}={settings.get(key)!r}" for key in keys if key in settings or key == _BLOCK == keys[0])
    raise ValueError(
        f"{source}: {KEY} asks for {method!r} weights{given}, expected unquantized ones, mxfp4, fp8 with "
        f"{_BLOCK}=[ROWS, COLUMNS] and {', '.join(f'{key}={value}' for key, value in _FP8.items())}, modelopt's "
        "quant_algo FP8, NVFP4 or a mixture of these, or compressed-tensors' float-quantized or 4-bit pack-quantized; "
        "take the model's "
        "original (bfloat16 or float32) release"
    )


def known_quantization(hf_config: dict) -> Quantization | None:
    """Returns what `read_quantization` does, but None for a format that only a server (vLLM) may be able to read."""
    settings = hf_config.get(KEY)
    if not isinstance(settings, dict):
        return None
    method = settings.get("quant_method")
    if method == MXFP4:
        return Quantization(MXFP4, label=MXFP4)
    if method == FP8 and "quant_algo" not in settings:
        return _blocks(settings)
    if method == _COMPRESSED:
        return _compressed(settings)
    return _modelopt(settings) if method == _MODELOPT else None


def _blocks(settings: dict) -> Quantization | None:
    block = settings.get(_BLOCK)
    given = {key: _SAME.get(str(settings.get(key, value)), settings.get(key, value)) for key, value in _FP8.items()}
    if given != _FP8 or not isinstance(block, list) or len(block) != 2:
        return None
    rows, columns = block
    if not (_is_size(rows) and _is_size(columns)):
        return None
    return Quantization(FP8, (rows, columns), label=f"fp8 in blocks of {rows} x {columns}")


def _modelopt(settings: dict) -> Quantization | None:
    """Returns the format of ModelOpt's settings; a mixture names the algorithm of each layer."""
    algorithm, layers = settings.get("quant_algo"), settings.get("quantized_layers")
    algorithms = {algorithm}
    if algorithm == "MIXED_PRECISION" and isinstance(layers, Mapping):
        algorithms = {each.get("quant_algo") for each in layers.values() if isinstance(each, Mapping)}
    if not algorithms or not algorithms <= set(_ALGORITHMS):
        return None
    return Quantization(SCALED, label=f"modelopt's {' and '.join(sorted(map(str, algorithms)))}")


# format of compressed-tensors -> (settings of a group's weights, their strategies, the format's name in labels)
_COMPRESSED_FORMATS = {
    "float-quantized": ({"num_bits": 8, "type": "float"}, ("tensor", "channel"), "FP8"),
    "pack-quantized": ({"num_bits": 4, "type": "int", "symmetric": True}, ("channel", "group"), "INT4"),
}

# orders of columns for which groups are neighbours
_ORDERED = (None, False, "weight", "static")


def _compressed(settings: dict) -> Quantization | None:
    """Returns the format of compressed-tensors, if it can be read for every group of layers; else None."""
    known, groups = _COMPRESSED_FORMATS.get(str(settings.get("format"))), settings.get("config_groups")
    if known is None or not isinstance(groups, Mapping) or not groups:
        return None
    rotations = settings.get("transform_config")
    if isinstance(rotations, Mapping) and rotations.get("config_groups"):
        return None  # the weights are rotated
    expected, strategies, label = known
    for group in groups.values():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if not isinstance(weights, Mapping) or any(weights.get(key) != value for key, value in expected.items()):
            return None
        if weights.get("strategy") not in strategies or weights.get("actorder") not in _ORDERED:
            return None
    return Quantization(SCALED, label=f"compressed-tensors' {label}")


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def forget_quantization(config: Any) -> None:
    """Removes `quantization_config` from a transformers config, and from its language model's."""
    for each in (config, config.get_text_config()):
        if hasattr(each, KEY):
            delattr(each, KEY)


def unquantized(hf_config: dict) -> dict:
    """Returns the config of the model with dequantised weights; another model's config is returned as it is."""
    if known_quantization(hf_config) is None:
        return hf_config
    keys = [key for key in ("torch_dtype", "dtype") if key in hf_config] or ["dtype"]
    return {name: value for name, value in hf_config.items() if name != KEY} | dict.fromkeys(keys, _DTYPE)
