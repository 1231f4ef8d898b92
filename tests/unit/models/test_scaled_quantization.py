"""Files of ModelOpt and compressed-tensors, dequantised: each number against its definition in float64."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from nemo_oprd.megatron.weights.dequantize import dequantize_int4, dequantize_nvfp4, dequantize_scaled
from nemo_oprd.megatron.weights.hf import HFCheckpoint
from nemo_oprd.megatron.weights.hf_export import write_hf_model
from nemo_oprd.models import copy_hf_config, read_hf_config
from nemo_oprd.models.quantization import known_quantization, read_quantization
from nemo_oprd.models.served import read_served_spec
from nemo_oprd.tools.plan.workload import served_model
from tests.support.scaled_formats import e2m1, e4m3, in_int4, in_nvfp4, rounded

GOLDEN = Path(__file__).parents[2] / "golden"
PLAIN = "model.norm.weight"
ROW = {"num_bits": 8, "type": "float", "strategy": "channel"}
# settings as releases have them -> whether they stand in config.json, or in hf_quant_config.json alone
SETTINGS: dict[str, tuple[dict[str, Any], bool]] = {
    "modelopt FP8, its own file": ({"quant_algo": "FP8", "exclude_modules": ["lm_head"]}, False),
    "modelopt NVFP4, its own file": ({"quant_algo": "NVFP4", "group_size": 16}, False),
    "modelopt": ({"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}, True),
    "modelopt without its name": ({"quant_algo": "FP8", "producer": {"name": "modelopt", "version": "0.31.0"}}, True),
    "a mixture": (
        {
            "quant_method": "modelopt", "quant_algo": "MIXED_PRECISION",
            "quantized_layers": {"a": {"quant_algo": "FP8"}, "b": {"quant_algo": "W4A16_NVFP4", "group_size": 16}},
        },
        True,
    ),
    "compressed-tensors": (
        {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"g": {"weights": ROW}}},
        True,
    ),
}  # fmt: skip


def write(directory: Path, tensors: dict[str, torch.Tensor], name: str = "modelopt") -> HFCheckpoint:
    settings, inside = SETTINGS[name]
    config: dict[str, Any] = {"model_type": "qwen3", "torch_dtype": "bfloat16"}
    config |= {"quantization_config": settings} if inside else {}
    if not inside:
        (directory / "hf_quant_config.json").write_text(json.dumps({"producer": {}, "quantization": settings}))
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "model.safetensors")
    return HFCheckpoint(directory)


def draw_fp8(rows: int, columns: int) -> torch.Tensor:
    """Every byte but the two that are no numbers."""
    codes = torch.arange(rows * columns).remainder(256).to(torch.uint8)
    codes[(codes & 127) == 127] = 0
    return codes.view(rows, columns).view(torch.float8_e4m3fn)


@pytest.mark.parametrize("shape", [(), (1,), (24,), (24, 1)])
def test_one_factor_for_a_matrix_or_a_row(tmp_path: Path, shape: tuple[int, ...]) -> None:
    weight, scale = draw_fp8(24, 32), torch.rand(shape) * 3e-3
    checkpoint = write(tmp_path, {"a.weight": weight, "a.weight_scale": scale})
    factors = scale.flatten().tolist() * (24 if scale.numel() == 1 else 1)
    expected = rounded([
        [e4m3(code) * factor for code in row]
        for row, factor in zip(weight.view(torch.uint8).tolist(), factors, strict=True)
    ])  # fmt: skip
    assert checkpoint.shape("a.weight") == (24, 32)
    assert torch.equal(checkpoint["a.weight"], expected) and expected.dtype == torch.bfloat16
    assert torch.equal(dequantize_scaled(weight, scale), expected)


def draw_nvfp4() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Numbers [16, 64] in pairs with every byte, the factors of their groups [16, 4], and that of the matrix."""
    torch.manual_seed(0)
    packed = torch.arange(16 * 32).remainder(256).to(torch.uint8).view(16, 32)
    return packed, (torch.rand(16, 4) * 400).to(torch.float8_e4m3fn), torch.tensor(3.7e-4)


def test_nvfp4_is_what_the_format_says(tmp_path: Path) -> None:
    packed, scales, factor = draw_nvfp4()
    parts = {"a.weight": packed, "a.weight_scale": scales, "a.weight_scale_2": factor, "a.input_scale": torch.ones(())}
    checkpoint = write(tmp_path, {**parts, PLAIN: torch.ones(4)})
    assert checkpoint.keys() == ["a.weight", PLAIN] and checkpoint.shape("a.weight") == (16, 64)
    products = []
    for row, groups in zip(packed.tolist(), scales.view(torch.uint8).tolist(), strict=True):
        numbers = [e2m1(half) for byte in row for half in (byte & 15, byte >> 4)]
        products.append([number * e4m3(groups[i // 16]) * float(factor) for i, number in enumerate(numbers)])
    expected = rounded(products)
    assert torch.equal(checkpoint["a.weight"], expected)
    swapped = (packed >> 4) | (packed << 4)
    assert not torch.equal(dequantize_nvfp4(swapped, scales, factor), expected), "the order of the halves counts"


def gemma_experts(block: str, numbers: list[int]) -> tuple[dict[str, torch.Tensor], dict[int, list[torch.Tensor]]]:
    """Quantised tensors of experts [16, 64] that lie one by one, and (gate, up, down) that those of an expert are."""
    tensors, whole = {}, {}
    for number in numbers:
        whole[number] = []
        for row, matrix in enumerate(("gate", "up", "down")):
            parts, stands_for = in_nvfp4(torch.randn(16, 64) * (1 + number + 10 * row))
            name = f"model.language_model.layers.2.{block}.{number}.{matrix}_proj.weight"
            tensors |= {name + part: tensor for part, tensor in parts.items()}
            whole[number].append(stands_for)
    return tensors, whole


@pytest.mark.parametrize("block", ["experts", "moe.experts"])
def test_experts_one_by_one_are_read_together(tmp_path: Path, block: str) -> None:
    """Gemma 4's, whose other releases store them together; a factor of its router is no scale."""
    tensors, whole = gemma_experts(block, [0, 1, 2])
    of_router = "model.layers.2.router.per_expert_scale"
    checkpoint = write(tmp_path, {**tensors, of_router: torch.ones(3)})
    gate_up, down = (f"model.layers.2.experts.{name}" for name in ("gate_up_proj", "down_proj"))
    assert checkpoint.keys() == sorted([gate_up, down, of_router])
    assert checkpoint.shape(gate_up) == (3, 32, 64) and checkpoint.shape(f"{down}[1]") == (16, 64)
    expected = torch.stack([torch.cat(parts[:2]) for parts in whole.values()])
    assert torch.equal(checkpoint[gate_up], expected) and torch.equal(checkpoint[f"{gate_up}[2]"], expected[2])
    assert torch.equal(checkpoint[f"{down}[1]"], whole[1][2])


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    tensors, _ = gemma_experts("experts", [0, 2])
    with pytest.raises(
        ValueError, match=r"experts\.down_proj lacks matrices of expert\(s\) \[1\]; expected those of all 3"
    ):
        write(tmp_path, tensors)


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_of_releases_are_read(tmp_path: Path, name: str) -> None:
    """Of a mixture each matrix by what lies beside it; nothing that is written from it is quantised."""
    packed, scales, factor = draw_nvfp4()
    tensors = {
        "a.weight": draw_fp8(8, 16), "a.weight_scale": torch.tensor(0.5), "a.input_scale": torch.tensor(2.0),
        "b.weight": packed, "b.weight_scale": scales, "b.weight_scale_2": factor,
        "self_attn.k_proj.k_scale": torch.tensor(1.0), PLAIN: torch.randn(4),
    }  # fmt: skip
    checkpoint = write(tmp_path, tensors, name)
    assert checkpoint.keys() == ["a.weight", "b.weight", PLAIN]
    assert torch.equal(checkpoint["a.weight"], (tensors["a.weight"].double() * 0.5).to(torch.bfloat16))
    assert torch.equal(checkpoint[PLAIN], tensors[PLAIN])
    (tmp_path / "copy").mkdir()
    copy_hf_config(tmp_path, tmp_path / "copy")
    write_hf_model(((name, checkpoint[name]) for name in checkpoint.keys()), tmp_path, tmp_path / "out", torch.bfloat16)  # noqa: SIM118
    for place in ("copy", "out"):
        assert read_hf_config(tmp_path / place) == {"model_type": "qwen3", "torch_dtype": "bfloat16"}
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert set(written) == set(checkpoint.keys()) and torch.equal(written["b.weight"], checkpoint["b.weight"])


DAMAGED = {
    "no numbers": ({"a.weight_scale": torch.ones(())}, "is there, but not 'a.weight'; expected both"),
    "no scales of groups": (
        {"a.weight_scale_2": torch.ones(())}, "'a.weight_scale_2' is there, but not 'a.weight_scale'"
    ),
    "another number of rows": (
        {"a.weight": draw_fp8(4, 4), "a.weight_scale": torch.ones(3)}, "scales F32 [3]; expected numbers F8_E4M3",
    ),
    "groups of 32": (
        {
            "a.weight": draw_nvfp4()[0], "a.weight_scale": draw_nvfp4()[1][:, :2].contiguous(),
            "a.weight_scale_2": torch.ones(()),
        },
        "has nvfp4 numbers U8 [16, 32] and scales F8_E4M3 [16, 2]; expected numbers U8 and scales F8_E4M3 [16, 4]",
    ),
    "two factors": (
        {"a.weight": draw_nvfp4()[0], "a.weight_scale": draw_nvfp4()[1], "a.weight_scale_2": torch.ones(2)},
        "has nvfp4 numbers",
    ),
    "no scales of integers": (
        {"a.weight_packed": torch.zeros(4, 2, dtype=torch.int32)}, "is there, but not 'a.weight_scale'; expected both",
    ),
    "groups of 4-bit integers that do not fit": (
        {"a.weight_packed": torch.zeros(4, 2, dtype=torch.int32), "a.weight_scale": torch.ones(4, 3)},
        "has int4 numbers I32 [4, 2] and scales F32 [4, 3]; expected numbers I32 and scales",
    ),
    "no scale": ({"a.weight": draw_fp8(4, 4)}, "holds F8_E4M3 numbers without scales"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_files_are_refused_in_one_line(tmp_path: Path, name: str) -> None:
    tensors, says = DAMAGED[name]
    with pytest.raises(ValueError) as found:
        write(tmp_path, tensors)["a.weight"]
    message = str(found.value)
    assert says in message and message.startswith(f"{tmp_path}: ") and "copy" in message and "\n" not in message


def test_a_damaged_file_of_settings_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    for content, says in (("{", "hf_quant_config.json"), ('{"quantization": 4}', "quantization=4; expected an object")):
        (tmp_path / "hf_quant_config.json").write_text(content)
        with pytest.raises(ValueError, match=says):
            read_hf_config(tmp_path)


@pytest.mark.parametrize(
    "changes",
    [
        {"symmetric": False},
        {"actorder": "group"},
        {"actorder": True},
        {"actorder": "dynamic"},
        {"num_bits": 8},
        {"strategy": "tensor"},
        {"type": "float"},
    ],
)
def test_other_packed_weights_are_refused(changes: dict[str, Any]) -> None:
    def settings(weights: dict[str, Any]) -> dict[str, Any]:
        groups = {"g": {"weights": weights}}
        made = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}
        return {"model_type": "qwen3", "quantization_config": made}

    right = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "actorder": "weight"}
    assert read_quantization(settings(right), "config.json") is not None
    with pytest.raises(ValueError, match="format='pack-quantized'.*expected .*4-bit pack-quantized"):
        read_quantization(settings({**right, **changes}), "config.json")
    rotated = settings(right)
    rotated["quantization_config"]["transform_config"] = {"config_groups": {"u": {"type": "hadamard"}}}
    with pytest.raises(ValueError, match="format='pack-quantized'"):
        read_quantization(rotated, "config.json")


def test_integers_as_compressed_tensors_packs_them() -> None:
    """Two words of its `pack_to_int32`, version 0.17.0."""
    numbers = [4, 7, -3, -8, -5, 3, -5, -1, 1, -5, -3, -6, -4, -1, -2, 0]
    packed = torch.tensor([[1941112316, -2039208647]], dtype=torch.int32)
    scales = torch.tensor([[0.5, 2.0]], dtype=torch.bfloat16)
    expected = [0.5 * number for number in numbers[:8]] + [2.0 * number for number in numbers[8:]]
    assert dequantize_int4(packed, scales).tolist() == [expected]


def test_plan_counts_packed_integers(tmp_path: Path) -> None:
    config = json.loads((GOLDEN / "student" / "config.json").read_text())
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group"}
    format_ = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"g": {"weights": weights}},
    }
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": format_}))
    parts, _ = in_int4(torch.randn(16, 64))
    save_file({f"a.weight{part}": value for part, value in parts.items()}, tmp_path / "model.safetensors")
    found = served_model(tmp_path, read_served_spec(tmp_path))
    assert (found.parameters, found.quantized, found.quantized_bytes) == (16 * 64, 16 * 64, 16 * 64 // 2 + 16 * 8 * 2)


def test_plan_counts_numbers_and_bytes(tmp_path: Path) -> None:
    """A served teacher's numbers are those of the model, and its bytes those of the files."""
    config = json.loads((GOLDEN / "student" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": SETTINGS["modelopt"][0]}))
    packed, scales, factor = draw_nvfp4()
    tensors = {
        "a.weight": packed,
        "a.weight_scale": scales,
        "a.weight_scale_2": factor,
        "a.input_scale": torch.ones(()),
    }
    save_file({**tensors, PLAIN: torch.ones(4)}, tmp_path / "model.safetensors")
    found = served_model(tmp_path, read_served_spec(tmp_path))
    assert (found.parameters, found.quantized) == (16 * 64 + 4, 16 * 64)
    assert found.quantized_bytes == packed.numel() + scales.numel() + 4
    assert known_quantization(read_hf_config(tmp_path)) is not None
