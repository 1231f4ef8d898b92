"""Quantised tensors of a model's files, dequantised: against float64, and against transformers' own programs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from nemo_oprd.config.loading import load_config
from nemo_oprd.data.token_ids import TokenIds
from nemo_oprd.megatron.weights.dequantize import dequantize_fp8, dequantize_mxfp4
from nemo_oprd.megatron.weights.hf import HFCheckpoint
from nemo_oprd.megatron.weights.hf_export import write_hf_model
from nemo_oprd.models import copy_hf_config, parse_model_spec, read_hf_config, read_model_spec
from nemo_oprd.models.quantization import Quantization, known_quantization, read_quantization
from nemo_oprd.vllm.launch import student_arguments

GOLDEN = Path(__file__).parents[2] / "golden"

MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
EXPERTS = "model.layers.0.mlp.experts."
# powers of two at both ends of bfloat16's range, where products are subnormal or infinite, and around 1
EDGES = torch.tensor([0, 1, 2, 126, 127, 128, 252, 253, 254], dtype=torch.uint8)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two bfloat16 tensors are equal, with the signs of zeros."""
    return one.dtype == other.dtype == torch.bfloat16 and torch.equal(one.view(torch.int16), other.view(torch.int16))


def write(directory: Path, tensors: dict[str, torch.Tensor], quantization: dict[str, Any] | None) -> HFCheckpoint:
    config = {"model_type": "gpt_oss", "torch_dtype": "bfloat16"}
    config |= {} if quantization is None else {"quantization_config": quantization}
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "model.safetensors")
    return HFCheckpoint(directory)


def draw_mxfp4() -> tuple[torch.Tensor, torch.Tensor]:
    """blocks [3, 8, 2, 16] with every byte, and scales [3, 8, 2] with the edges."""
    torch.manual_seed(0)
    blocks = torch.arange(3 * 8 * 2 * 16).remainder(256).to(torch.uint8).view(3, 8, 2, 16)
    scales = torch.randint(100, 150, (3, 8, 2), dtype=torch.uint8)
    scales.view(-1)[: len(EDGES)] = EDGES
    return blocks, scales


def e2m1(bits: int) -> float:
    """Of the format's definition: one bit of sign, two of exponent, one of mantissa."""
    sign, exponent, mantissa = bits >> 3, bits >> 1 & 3, bits & 1
    size = mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
    return -size if sign else size


def in_float64(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """[.., G, 16] and [.., G] -> [.., 32 G] in bfloat16, of one number at a time."""
    numbers = []
    for group, scale in zip(blocks.view(-1, 16).tolist(), scales.flatten().tolist(), strict=True):
        for byte in group:
            numbers += [e2m1(byte & 15) * 2.0 ** (scale - 127), e2m1(byte >> 4) * 2.0 ** (scale - 127)]
    return torch.tensor(numbers, dtype=torch.float64).to(torch.bfloat16).view(*blocks.shape[:-2], -1)


def test_mxfp4_is_what_the_format_and_transformers_say(tmp_path: Path) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks, scales = draw_mxfp4()
    checkpoint = write(tmp_path, {f"{EXPERTS}down_proj_blocks": blocks, f"{EXPERTS}down_proj_scales": scales}, MXFP4)
    assert checkpoint.keys() == [f"{EXPERTS}down_proj"]
    assert checkpoint.shape(f"{EXPERTS}down_proj") == (3, 64, 8)
    assert checkpoint.shape(f"{EXPERTS}down_proj[1]") == (64, 8)
    expected = in_float64(blocks, scales).transpose(1, 2)
    assert same_bits(checkpoint[f"{EXPERTS}down_proj"], expected)
    assert all(same_bits(checkpoint[f"{EXPERTS}down_proj[{expert}]"], expected[expert]) for expert in range(3))
    assert same_bits(convert_moe_packed_tensors(blocks, scales), expected)
    assert expected.isinf().any() and expected.abs()[expected != 0].min() == 2.0**-128, "the edges are there"
    swapped = (blocks >> 4) | (blocks << 4)
    assert not same_bits(dequantize_mxfp4(swapped[0], scales[0]).T, expected[0]), "the order of a byte's halves counts"


# shapes of matrices whose last blocks are partial, or not
@pytest.mark.parametrize("shape", [(256, 128), (128, 384), (192, 128), (576, 200), (1, 1), (3, 257)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu])
def test_fp8_is_the_product_with_the_factor_of_its_block(shape: tuple[int, int], dtype: torch.dtype) -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    torch.manual_seed(shape[0])
    weight = (torch.randn(shape) * 60).to(torch.float8_e4m3fn)
    weight.view(torch.uint8).view(-1)[:1] = 1  # the smallest subnormal
    scales = torch.rand(-(-shape[0] // 128), -(-shape[1] // 128)).mul(3e-3).to(dtype)
    found = dequantize_fp8(weight, scales, (128, 128))
    # exact in float64: 4 and 24 significant bits
    products = torch.tensor([
        [float(number) * float(scales[i // 128, j // 128].float()) for j, number in enumerate(row)]
        for i, row in enumerate(weight.float().tolist())
    ], dtype=torch.float64)  # fmt: skip
    assert same_bits(found, products.float().to(torch.bfloat16))
    if all(size % 128 == 0 for size in shape):  # transformers 5.23 divides a matrix into blocks of one size
        assert same_bits(Fp8Dequantize(None)._dequantize_one(weight, scales, torch.bfloat16), found)


def test_fp8_files_are_read_as_unquantised_ones(tmp_path: Path) -> None:
    torch.manual_seed(1)
    matrix, experts = (torch.randn(*size).to(torch.float8_e4m3fn) for size in ((130, 5), (2, 6, 5)))
    scales, of_experts = torch.rand(17, 2), torch.rand(2, 1, 2)
    plain = torch.randn(4)
    tensors = {
        "model.layers.0.self_attn.q_proj.weight": matrix, "model.layers.0.self_attn.q_proj.weight_scale_inv": scales,
        f"{EXPERTS}gate_up_proj": experts, f"{EXPERTS}gate_up_proj_scale_inv": of_experts,
        "model.norm.weight": plain,
    }  # fmt: skip
    checkpoint = write(tmp_path, tensors, {**FP8, "weight_block_size": [8, 4]})
    name = "model.layers.0.self_attn.q_proj.weight"
    assert checkpoint.keys() == [f"{EXPERTS}gate_up_proj", name, "model.norm.weight"]
    assert same_bits(checkpoint[name], dequantize_fp8(matrix, scales, (8, 4)))
    up = f"{EXPERTS}1.up_proj.weight"  # half of the rows of an expert
    assert checkpoint.shape(up) == (3, 5)
    assert same_bits(checkpoint[up], dequantize_fp8(experts[1], of_experts[1], (8, 4))[3:])
    assert torch.equal(checkpoint["model.norm.weight"], plain)


def test_what_is_written_is_not_quantised(tmp_path: Path) -> None:
    blocks, scales = draw_mxfp4()
    write(tmp_path, {"a_blocks": blocks, "a_scales": scales}, MXFP4)
    write_hf_model(iter({"a": torch.ones(2)}.items()), tmp_path, tmp_path / "out", torch.bfloat16)
    (tmp_path / "copy").mkdir()
    copy_hf_config(tmp_path, tmp_path / "copy")
    for place in ("out", "copy"):
        assert read_hf_config(tmp_path / place) == {"model_type": "gpt_oss", "torch_dtype": "bfloat16"}


def test_vllm_gets_dequantised_weights(tmp_path: Path) -> None:
    """Servers that sample would otherwise build quantised layers, into which no weights that arrive fit."""
    source = json.loads((GOLDEN / "student" / "config.json").read_text())
    paths = [f"{role}.hf_path={tmp_path}" for role in ("student", "teacher")]
    for quantization, overrides in ((None, []), (FP8, ["--hf-overrides", '{"quantization_config": null}'])):
        (tmp_path / "config.json").write_text(json.dumps({**source, "quantization_config": quantization}))
        config = load_config("verify", paths)
        arguments = student_arguments(config, read_model_spec(tmp_path), tmp_path, TokenIds(8), cuda=False)
        assert arguments[-len(overrides) :] == overrides if overrides else "--hf-overrides" not in arguments
    (tmp_path / "config.json").write_text(json.dumps(source))
    (tmp_path / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "FP8"}}')
    arguments = student_arguments(config, read_model_spec(tmp_path), tmp_path, TokenIds(8), cuda=False)
    assert arguments[-2:] == ["--hf-overrides", '{"quantization_config": null}']


def test_the_weights_of_a_quantised_model_are_bfloat16() -> None:
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    sizes |= {"vocab_size": 8, "num_key_value_heads": 1, "max_position_embeddings": 8, "rope_theta": 1e4}
    spec = parse_model_spec({"model_type": "qwen3", "hidden_act": "silu", **sizes, "quantization_config": FP8})
    assert spec.dtype == "bfloat16" and "quantization_config" not in spec.hf_config


def damaged(**changes: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """An MXFP4 tensor with other parts, or without one."""
    blocks, scales = draw_mxfp4()
    parts = {"blocks": blocks, "scales": scales, **changes}
    return {f"{EXPERTS}down_proj_{name}": part for name, part in parts.items() if part is not None}


F8 = torch.ones(4, 4).to(torch.float8_e4m3fn)
DAMAGED: dict[str, tuple[dict[str, torch.Tensor], dict[str, Any] | None, str]] = {
    "no scales": (damaged(scales=None), MXFP4, "down_proj_blocks' is there, but not '{E}down_proj_scales'; expected"),
    "no blocks": (damaged(blocks=None), MXFP4, "down_proj_scales' is there, but not '{E}down_proj_blocks'; expected"),
    "scales of another shape": (
        damaged(scales=torch.zeros(3, 8, 4, dtype=torch.uint8)),
        MXFP4,
        "'{E}down_proj' has mxfp4 numbers U8 [3, 8, 2, 16] and scales U8 [3, 8, 4]; expected numbers U8 and scales "
        "U8 [3, 8, 2]",
    ),
    "blocks of another shape": (
        damaged(blocks=torch.zeros(3, 8, 2, 8, dtype=torch.uint8)), MXFP4, "expected numbers U8 and another shape",
    ),
    "no number": (damaged(scales=torch.full((3, 8, 2), 255, dtype=torch.uint8)), MXFP4, "a scale of 255 in expert 0"),
    "no scales of fp8": ({"a": F8}, FP8, "tensor 'a' holds F8_E4M3 numbers without scales; expected F32"),
    "no config of fp8": ({"a": F8, "a_scale_inv": torch.ones(1, 1)}, None, "'a' holds F8_E4M3 numbers without scales"),
    "scales alone": ({"a_scale_inv": torch.ones(1, 1)}, FP8, "'a_scale_inv' is there, but not 'a'; expected both"),
    "fp8 scales of another shape": (
        {"a": F8, "a_scale_inv": torch.ones(2, 1)},
        FP8,
        "'a' has fp8 numbers F8_E4M3 [4, 4] and scales F32 [2, 1]; expected numbers F8_E4M3 and scales "
        "F32/BF16/F16/F8_E8M0 [1, 1]",
    ),
    "one scale": ({"a": F8, "a_scale_inv": torch.ones(())}, FP8, "scales F32 []; expected numbers F8_E4M3"),
    "scales of bf16 weights": ({"a": F8.bfloat16(), "a_scale_inv": torch.ones(1, 1)}, FP8, "numbers BF16 [4, 4]"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_files_are_refused_in_one_line(tmp_path: Path, name: str) -> None:
    tensors, quantization, says = DAMAGED[name]

    def read() -> None:
        checkpoint = write(tmp_path, tensors, quantization)
        checkpoint[checkpoint.keys()[0]]

    with pytest.raises(ValueError) as found:
        read()
    message = str(found.value)
    assert says.format(E=EXPERTS) in message and message.startswith(f"{tmp_path}: "), message
    assert "expected" in message and "copy" in message and "\n" not in message, message


OTHERS: dict[str, tuple[Any, str]] = {
    "gptq": ({"quant_method": "gptq", "bits": 4}, "asks for 'gptq' weights, expected"),
    "awq": ({"quant_method": "awq"}, "asks for 'awq' weights, expected"),
    "bitsandbytes": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "asks for 'bitsandbytes' weights, exp"),
    "another algorithm": (
        {"quant_method": "modelopt", "quant_algo": "W4A16_AWQ"}, "asks for 'modelopt' weights, quant_algo='W4A16_AWQ'"
    ),
    "a mixture with another": (
        {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": {"a": {"quant_algo": "W4"}}},
        "quant_algo='MIXED_PRECISION', expected",
    ),
    "4-bit integers": (
        {"quant_method": "compressed-tensors", "format": "pack-quantized"},
        "asks for 'compressed-tensors' weights, format='pack-quantized', expected",
    ),
    "fp8 per tensor": ({**FP8, "weight_block_size": None}, "'fp8' weights, weight_block_size=None, fmt='e4m3'"),
    "another fp8": ({**FP8, "fmt": "e5m2"}, "weight_block_size=[128, 128], fmt='e5m2'"),
    "static activations": ({**FP8, "activation_scheme": "static"}, "activation_scheme='static', expected"),
    "experts in fp4": ({**FP8, "expert_dtype": "fp4"}, "expert_dtype='fp4', expected"),
    "sizes": ({**FP8, "weight_block_size": [128, 0]}, "weight_block_size=[128, 0]"),
    "text": ("mxfp4", "asks for 'mxfp4' weights, expected"),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_other_formats_are_refused_in_one_line(name: str) -> None:
    settings, says = OTHERS[name]
    assert known_quantization({"quantization_config": settings}) is None
    with pytest.raises(ValueError) as found:
        read_quantization({"quantization_config": settings}, "config.json")
    message = str(found.value)
    assert says in message and message.startswith("config.json: quantization_config asks for"), message
    assert "take the model's original" in message and "\n" not in message, message


def test_formats_that_are_read() -> None:
    assert read_quantization({}, "config.json") is None
    assert read_quantization({"quantization_config": None}, "config.json") is None
    assert read_quantization({"quantization_config": MXFP4}, "config.json") == Quantization("mxfp4")
    assert read_quantization({"quantization_config": FP8}, "config.json") == Quantization("fp8", (128, 128))
