"""Dequantises tensors of a model's files: computes the numbers that they stand for, as bfloat16 tensors.

At most one matrix (an expert's, or a layer's) is computed in float32 at a time; of fp8 in blocks, one row of blocks.

Shapes: E experts, O rows of a stored matrix, I columns, G groups of 32 (mxfp4), 16 (nvfp4) or any number
(int4) of columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from nemo_oprd.models.quantization import FP8, INT4, MXFP4, NVFP4, SCALED, Quantization

# OCP Microscaling Formats 1.0: e2m1, whose fourth bit is the sign, and e8m0, whose last value is no number
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_NIBBLES = (*_E2M1, *(-value for value in _E2M1))
_GROUP, _BIAS, _NO_NUMBER = 32, 127, 255
_GROUP_OF_NVFP4 = 16
_INTEGERS_OF_A_WORD = 8
_FLOATS = ("F32", "BF16", "F16")
# as safetensors calls them; the factors of a block are powers of two in some models of DeepSeek
_OF_NUMBERS = {MXFP4: "U8", FP8: "F8_E4M3", SCALED: "F8_E4M3", NVFP4: "U8", INT4: "I32"}
_OF_SCALES = {MXFP4: ("U8",), FP8: (*_FLOATS, "F8_E8M0"), SCALED: _FLOATS, NVFP4: ("F8_E4M3",), INT4: _FLOATS}
# types of tensors that stand for themselves
PLAIN_DTYPES = ("F64", "F32", "F16", "BF16", "I64", "I32", "BOOL")


def dequantize_mxfp4(blocks_OG16: torch.Tensor, scales_OG: torch.Tensor) -> torch.Tensor:
    """Makes bfloat16 [O, 32 G] of uint8 [O, G, 16] and [O, G]; a byte's lower half is the first of its two numbers.

    A result is the value of its four bits times 2^(scale - 127), exactly; above bfloat16's range it is infinite.
    """
    pairs = torch.tensor([(_NIBBLES[byte & 15], _NIBBLES[byte >> 4]) for byte in range(256)])
    factors = torch.tensor([2.0 ** (scale - _BIAS) for scale in range(_NO_NUMBER)])
    numbers = pairs[blocks_OG16.int()].flatten(2).mul_(factors[scales_OG.int()].unsqueeze(-1))
    return numbers.to(torch.bfloat16).flatten(1)


def dequantize_fp8(weight_OI: torch.Tensor, scales: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """Makes bfloat16 [O, I] of float8 [O, I] and a factor for each block of rows and columns.

    The products are float32, as in the models' own programs, and are then rounded. The last blocks may have fewer rows
    and columns.
    """
    (rows, columns), (size, width) = weight_OI.shape, block
    found = torch.empty(rows, columns, dtype=torch.bfloat16)
    for number, start in enumerate(range(0, rows, size)):
        factors_I = scales[number].float().repeat_interleave(width)[:columns]
        found[start : start + size] = weight_OI[start : start + size].float() * factors_I
    return found


def dequantize_scaled(weight_OI: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Makes bfloat16 [O, I] of float8 [O, I] and one factor, or one per row; the products are float32, then rounded."""
    factor = scale.float().reshape(-1, 1)
    return (weight_OI.float() * factor).to(torch.bfloat16)


def dequantize_nvfp4(packed: torch.Tensor, scales_OG: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """Makes bfloat16 [O, I] of uint8 [O, I / 2], float8 [O, G] and one float32 number.

    A byte's lower half is the first of its two numbers. A number times the scale of its group is exact in float32; its
    product with `factor` is rounded to float32, and then to bfloat16.
    """
    pairs = torch.tensor([(_NIBBLES[byte & 15], _NIBBLES[byte >> 4]) for byte in range(256)])
    numbers = pairs[packed.int()].flatten(1).unflatten(1, (-1, _GROUP_OF_NVFP4))
    exact = numbers.mul_(scales_OG.float().unsqueeze(-1)).flatten(1)
    return exact.mul_(factor.float().reshape(())).to(torch.bfloat16)


def dequantize_int4(packed: torch.Tensor, scales_OG: torch.Tensor) -> torch.Tensor:
    """Makes bfloat16 [O, I] of int32 [O, I / 8] and factors [O, G]; a group is I / G columns one after the other.

    The lowest four bits of a word are the first of its numbers, which are stored with 8 added. The products are
    float32, then rounded.
    """
    shifts = torch.arange(0, 32, 4, dtype=torch.int32)
    numbers = (packed.unsqueeze(-1) >> shifts).bitwise_and_(15).sub_(8).flatten(1)
    groups = numbers.unflatten(1, (scales_OG.shape[1], -1)).float()
    return groups.mul_(scales_OG.float().unsqueeze(-1)).flatten(1).to(torch.bfloat16)


class StoredTensors:
    """The tensors of a model's files, by the names that they have in an unquantised model: `names`."""

    def __init__(self, stored: Iterable[str], quantization: Quantization | None, source: str) -> None:
        """Maps the names in the files; messages begin with `source`. Raises ValueError as `Quantization.names`."""
        stored = set(stored)
        self._source, self._quantization = source, quantization
        self._parts = {} if quantization is None else quantization.names(stored, source)
        parts = {part for each in self._parts.values() for part in each}
        parts |= set() if quantization is None else quantization.unused(stored)
        self.names = (stored - parts) | self._parts.keys()

    def slice(self, name: str, stored_slice: Callable[[str], Any]) -> Any:
        """Returns one tensor as a slice, without reading it.

        Args:
            stored_slice: gives a slice of safetensors by its name in the files.

        Raises:
            ValueError: as `QuantizedSlice`.
        """
        if self._quantization is None or name not in self._parts:
            return stored_slice(name)
        values, *scales = map(stored_slice, self._parts[name])
        return QuantizedSlice(f"{self._source}: tensor {name!r}", values, scales, self._quantization)


class QuantizedSlice:
    """A quantised tensor in the place of a slice of safetensors: its shape, and its numbers when they are asked for."""

    def __init__(self, where: str, values: Any, scales: Sequence[Any], quantization: Quantization) -> None:
        """Takes slices of a tensor's numbers and of its scales; messages begin with `where`.

        Raises:
            ValueError: they are not of the format, or do not fit each other.
        """
        self._where, self._values, self._scales, self._block = where, values, scales[0], quantization.block
        self._factor = scales[1] if len(scales) > 1 else None
        self._method = NVFP4 if self._factor is not None else quantization.method
        if values.get_dtype() == _OF_NUMBERS[INT4]:
            self._method = INT4
        kinds, shape = (values.get_dtype(), scales[0].get_dtype()), list(values.get_shape())
        wanted, given = self._shapes_of_scales(shape), list(scales[0].get_shape())
        fits = given in wanted and kinds[0] == _OF_NUMBERS[self._method] and kinds[1] in _OF_SCALES[self._method]
        if self._factor is not None:
            fits = fits and self._factor.get_dtype() in _FLOATS and math.prod(self._factor.get_shape()) == 1
        if not fits:
            expected = f"scales {'/'.join(_OF_SCALES[self._method])} {wanted[-1]}" if wanted else "another shape"
            raise ValueError(
                f"{where} has {self._method} numbers {kinds[0]} {shape} and scales {kinds[1]} {given}; expected "
                f"numbers {_OF_NUMBERS[self._method]} and {expected}: copy the model's files from its source again"
            )

    def _shapes_of_scales(self, shape: list[int]) -> list[list[int]]:
        """Returns the shapes that the scales may have; none: the numbers' shape is wrong for the format."""
        if self._method == MXFP4:
            return [shape[:3]] if len(shape) == 4 and shape[3] * 2 == _GROUP else []
        if self._method == SCALED:
            return [[], [shape[0]], [shape[0], 1], [1]] if len(shape) == 2 else []
        if self._method == NVFP4:
            even = len(shape) == 2 and shape[1] * 2 % _GROUP_OF_NVFP4 == 0
            return [[shape[0], shape[1] * 2 // _GROUP_OF_NVFP4]] if even else []
        if self._method == INT4:
            given = self._scales.get_shape()
            columns = shape[1] * _INTEGERS_OF_A_WORD if len(shape) == 2 else 0
            groups = given[1] if len(given) == 2 and given[1] and columns % given[1] == 0 else 1
            return [[shape[0], groups]] if columns else []
        if len(shape) not in (2, 3):
            return []
        sizes = zip(shape[-2:], self._block, strict=True)
        return [[*shape[:-2], *(-(-count // size) for count, size in sizes)]]

    def get_shape(self) -> list[int]:
        """Returns the tensor's shape; for gpt-oss's experts [E, I, O], the transpose of what the files hold."""
        shape = list(self._values.get_shape())
        if self._method in (NVFP4, INT4):
            return [shape[0], shape[1] * (2 if self._method == NVFP4 else _INTEGERS_OF_A_WORD)]
        return [shape[0], shape[2] * _GROUP, shape[1]] if self._method == MXFP4 else shape

    def get_dtype(self) -> str:
        """Returns the name of bfloat16 in safetensors."""
        return "BF16"

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Returns bfloat16 values: all for `...`, one expert, or (expert, more indices) for a part of one.

        Raises:
            ValueError: a scale of mxfp4 is NaN (255). Scales of other formats are not checked: NaN gives NaN.
        """
        first, *more = index if isinstance(index, tuple) else (index,)
        shape = self.get_shape()
        if first is not Ellipsis:
            assert len(shape) == 3 and isinstance(first, int), f"{self._where}: {index}"
            return self._matrix(first)[tuple(more)]
        if len(shape) == 2:
            return self._whole_matrix()
        found = torch.empty(shape, dtype=torch.bfloat16)
        for expert in range(shape[0]):
            found[expert] = self._matrix(expert)
        return found

    def _whole_matrix(self) -> torch.Tensor:
        values, scales = self._values[:], self._scales[...]
        if self._method == FP8:
            return dequantize_fp8(values, scales, self._block)
        if self._method == INT4:
            return dequantize_int4(values, scales)
        if self._factor is None:
            return dequantize_scaled(values, scales)
        return dequantize_nvfp4(values, scales, self._factor[...])

    def _matrix(self, expert: int) -> torch.Tensor:
        values, scales = self._values[expert], self._scales[expert]
        if self._method == FP8:
            return dequantize_fp8(values, scales, self._block)
        if (scales == _NO_NUMBER).any():
            raise ValueError(
                f"{self._where} has a scale of {_NO_NUMBER} in expert {expert}, which is no number; expected at most "
                f"{_NO_NUMBER - 1}: copy the model's files from its source again"
            )
        return dequantize_mxfp4(values, scales).T
