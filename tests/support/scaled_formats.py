"""Numbers of 4 and 8 bits by their formats' definitions, and matrices in ModelOpt's files with what they stand for."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def e2m1(bits: int) -> float:
    """Of the format's definition: one bit of sign, two of exponent, one of mantissa."""
    sign, exponent, mantissa = bits >> 3, bits >> 1 & 3, bits & 1
    size = mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
    return -size if sign else size


def e4m3(bits: int) -> float:
    """Of the format's definition: one bit of sign, four of exponent, three of mantissa; no infinity."""
    sign, exponent, mantissa = bits >> 7, bits >> 3 & 15, bits & 7
    size = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -size if sign else size


def rounded(products: list[list[float]]) -> torch.Tensor:
    """float64 numbers, rounded to float32, as all programs compute them, and to bfloat16."""
    return torch.tensor(products, dtype=torch.float64).float().to(torch.bfloat16)


def in_fp8(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """(The tensors of a file by what is added to the name, the bfloat16 matrix that they stand for), of one factor."""
    scale = weight.abs().max() / 448
    codes = (weight / scale).to(torch.float8_e4m3fn)
    products = [[e4m3(code) * float(scale) for code in row] for row in codes.view(torch.uint8).tolist()]
    return {"": codes, "_scale": scale, "_input_scale": torch.ones(())}, rounded(products)


def in_nvfp4(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """As `in_fp8`, of random numbers of the size of `weight`; its columns are a multiple of 16."""
    rows, columns = weight.shape
    generator = torch.Generator().manual_seed(rows * columns)
    packed = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8, generator=generator)
    scales = torch.rand(rows, columns // 16, generator=generator).mul(300).add(10).to(torch.float8_e4m3fn)
    factor = weight.std() / 900
    products = []
    for row, groups in zip(packed.tolist(), scales.view(torch.uint8).tolist(), strict=True):
        numbers = [e2m1(half) for byte in row for half in (byte & 15, byte >> 4)]
        products.append([number * e4m3(groups[i // 16]) * float(factor) for i, number in enumerate(numbers)])
    return {"": packed, "_scale": scales, "_scale_2": factor}, rounded(products)


def in_int4(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """As `in_fp8`, in compressed-tensors' `pack-quantized` with groups of 8; its columns are a multiple of 8."""
    scales = weight.unflatten(1, (-1, 8)).abs().amax(-1).div(7).to(torch.bfloat16)
    words, products = [], []
    for row, factors in zip(weight.unflatten(1, (-1, 8)).tolist(), scales.tolist(), strict=True):
        groups = [
            [max(-8, min(7, round(value / factor))) for value in group]
            for group, factor in zip(row, factors, strict=True)
        ]
        unsigned = [sum((number + 8) << 4 * i for i, number in enumerate(group)) for group in groups]
        words.append([word - 2**32 if word >= 2**31 else word for word in unsigned])
        products.append([n * factor for group, factor in zip(groups, factors, strict=True) for n in group])
    packed = torch.tensor(words, dtype=torch.int32)
    return {"_packed": packed, "_scale": scales, "_shape": torch.tensor(weight.shape)}, rounded(products)


def in_blocks(weight: torch.Tensor, block: Sequence[int]) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """As `in_fp8`, with a random factor for each block of rows and columns; transformers would refuse most of them."""
    rows, columns = weight.shape
    generator = torch.Generator().manual_seed(rows * columns)
    scales = torch.rand(-(-rows // block[0]), -(-columns // block[1]), generator=generator) * 1e-2
    factors = scales.double()[torch.arange(rows)[:, None] // block[0], torch.arange(columns)[None] // block[1]]
    codes = (weight.double() / factors).clamp(-448, 448).to(torch.float8_e4m3fn)
    products = (codes.double() * factors).float()  # exact in float64
    return {"": codes, "_scale_inv": scales}, products.bfloat16()


def in_mxfp4(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """As `in_fp8`, of random numbers for the experts [E, inputs, outputs] of a layer, by transformers."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    experts, inputs, outputs = weight.shape
    generator = torch.Generator().manual_seed(inputs * outputs)
    shape = (experts, outputs, inputs // 32)
    blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(120, 126, shape, dtype=torch.uint8, generator=generator)
    return {"_blocks": blocks, "_scales": scales}, convert_moe_packed_tensors(blocks, scales)
