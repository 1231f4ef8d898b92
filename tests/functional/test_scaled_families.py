"""Models in files of ModelOpt and compressed-tensors: the same as the bfloat16 model that they stand for.

Losses and all gradients at a split layout, and conversion both ways, bit for bit; the bfloat16 numbers come from the
formats' definitions (tests/support/scaled_formats.py), so that nothing of the reader is in what it is compared with.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from layout_cases import read_result
from pool import Pools
from safetensors.torch import load_file, save_file

from checkpoint_tools._convert import hf_to_megatron, megatron_to_hf
from tests.support.scaled_formats import in_fp8, in_int4, in_nvfp4

GOLDEN = Path(__file__).parent.parent / "golden"
# layers' matrices by name -> their format
FORMATS = {
    "FP8": lambda name: in_fp8,
    "NVFP4": lambda name: in_nvfp4,
    "INT4": lambda name: in_int4,
    "MIXED_PRECISION": lambda name: in_fp8 if "self_attn" in name else in_nvfp4,
}

PACKED = {
    "quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"g": {"weights": {
        "num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 8, "actorder": None,
    }}},
}  # fmt: skip


def make(root: Path, algorithm: str) -> None:
    """ROOT/{student,teacher} in ModelOpt's files, ROOT/plain-{student,teacher} with what they stand for."""
    for role in ("student", "teacher"):
        quantised, plain = {}, {}
        for name, tensor in load_file(GOLDEN / role / "model.safetensors").items():
            plain[name] = quantised[name] = tensor.bfloat16()
            if name.endswith("_proj.weight"):
                parts, plain[name] = FORMATS[algorithm](name)(tensor)
                del quantised[name]
                quantised |= {_name(name, part): value for part, value in parts.items()}
        config = json.loads((GOLDEN / role / "config.json").read_text()) | {"dtype": "bfloat16"}
        settings: dict[str, Any] = {"quant_algo": algorithm, "exclude_modules": ["lm_head"]}
        if algorithm == "MIXED_PRECISION":
            settings["quantized_layers"] = {"a": {"quant_algo": "FP8"}, "b": {"quant_algo": "NVFP4"}}
        if algorithm == "INT4":
            config["quantization_config"] = PACKED
        for kind, tensors in (("", quantised), ("plain-", plain)):
            (root / (kind + role)).mkdir()
            (root / (kind + role) / "config.json").write_text(json.dumps(config))
            save_file(tensors, root / (kind + role) / "model.safetensors", metadata={"format": "pt"})
        (root / f"plain-{role}" / "config.json").write_text(json.dumps(config | {"quantization_config": None}))
        if algorithm != "INT4":
            (root / role / "hf_quant_config.json").write_text(json.dumps({"quantization": settings}))


def _name(name: str, part: str) -> str:
    return name.removesuffix(".weight") + ".input_scale" if part == "_input_scale" else name + part


@pytest.mark.parametrize("algorithm", FORMATS)
def test_a_model_is_that_which_its_files_stand_for(pools: Pools, tmp_path: Path, algorithm: str) -> None:
    make(tmp_path, algorithm)
    layout = ["student.parallel.tensor=2", "student.parallel.sequence=true", "teacher.parallel.pipeline=2"]
    results = {}
    for kind in ("", "plain-"):
        models = [f"{role}.hf_path={tmp_path / (kind + role)}" for role in ("student", "teacher")]
        output = tmp_path / f"verified-{kind}"
        overrides = [*models, *layout, f"rollout.replay={GOLDEN / 'rollouts.jsonl'}", f"output={output}"]
        pools[2].run("layout_cases:run_verify", overrides=overrides)
        results[kind] = read_result(output)
    assert results[""][0] == results["plain-"][0]
    ours, theirs = results[""][1], results["plain-"][1]
    assert set(ours) == set(theirs) and all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert all(gradient.any() for name, gradient in theirs.items() if name.endswith("_proj.weight"))
    hf_to_megatron(tmp_path / "student", tmp_path / "megatron", tensor=2, progress=False)
    megatron_to_hf(tmp_path / "megatron", tmp_path / "back", progress=False)
    written, expected = (load_file(tmp_path / place / "model.safetensors") for place in ("back", "plain-student"))
    assert set(written) == set(expected) and all(torch.equal(written[name], expected[name]) for name in expected)
    assert "quantization_config" not in json.loads((tmp_path / "back" / "config.json").read_text())
    assert not (tmp_path / "back" / "hf_quant_config.json").exists()
