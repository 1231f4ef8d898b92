"""What test_quantized_families.py runs in Megatron-Bridge's environment: `python THIS_FILE CASE ARGUMENTS`.

The arguments are those of the function, as JSON. Models whose files are quantised, in this project's loop. torchrun
starts the ranks.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron_bridge_family_cases import EXPERT_FAMILIES, make_models, verify

from tests.support.scaled_formats import in_blocks, in_mxfp4

# blocks that neither the rows nor the columns of the models' matrices are multiples of
BLOCK = (20, 12)
QUANTIZATION: dict[str, dict[str, Any]] = {
    "gpt_oss": {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]},
    "deepseek_v3": {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": list(BLOCK),
    },
}  # fmt: skip


def make(directory: str) -> None:
    """DIRECTORY/FAMILY/{student,teacher} with quantised files, DIRECTORY/FAMILY/plain-{student,teacher} in bfloat16.

    The plain ones are dequantised by transformers where it does so, else one number at a time.
    """
    EXPERT_FAMILIES["gpt_oss"][1]["intermediate_size"] = 32  # a multiple of the 32 numbers that share a scale
    import megatron_bridge_family_cases as cases

    cases.SPECIAL_FAMILIES["gpt_oss"] = EXPERT_FAMILIES["gpt_oss"]
    make_models(directory, list(QUANTIZATION))
    for family, change in (("gpt_oss", _to_mxfp4), ("deepseek_v3", _to_fp8)):
        for role in ("student", "teacher"):
            _quantize(Path(directory) / family, role, QUANTIZATION[family], change)


def quantize_student(directory: str, family: str) -> None:
    """DIRECTORY/student gets quantised files; DIRECTORY/plain-student has what they stand for."""
    _quantize(Path(directory), "student", QUANTIZATION[family], {"gpt_oss": _to_mxfp4, "deepseek_v3": _to_fp8}[family])


def _quantize(root: Path, role: str, quantization: dict[str, Any], change: Any) -> None:
    from safetensors.torch import load_file, save_file

    quantised, plain = {}, {}
    for name, tensor in load_file(root / role / "model.safetensors").items():
        kept = tensor if name.endswith("e_score_correction_bias") else tensor.bfloat16()
        parts, stands_for = change(name, tensor)
        quantised |= parts or {name: kept}
        plain[name] = kept if stands_for is None else stands_for
    config = json.loads((root / role / "config.json").read_text()) | {"dtype": "bfloat16"}
    (root / f"plain-{role}").mkdir()
    (root / f"plain-{role}" / "config.json").write_text(json.dumps(config))
    save_file(plain, root / f"plain-{role}" / "model.safetensors", metadata={"format": "pt"})
    (root / role / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
    save_file(quantised, root / role / "model.safetensors", metadata={"format": "pt"})


def _to_mxfp4(name: str, tensor: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor | None]:
    """(The tensors of the file, what they stand for), of the experts' matrices [E, inputs, outputs]; random ones."""
    if not name.endswith(("gate_up_proj", "down_proj")):
        return {}, None
    parts, stands_for = in_mxfp4(tensor)
    return {f"{name}{suffix}": part for suffix, part in parts.items()}, stands_for


def _to_fp8(name: str, tensor: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor | None]:
    """As `_to_mxfp4`, of the layers' matrices [outputs, inputs]; transformers would refuse most of these blocks."""
    if not name.endswith("proj.weight") and "kv_a_proj" not in name:
        return {}, None
    parts, stands_for = in_blocks(tensor, BLOCK)
    return {f"{name}{suffix}": part for suffix, part in parts.items()}, stands_for


def compute(directory: str, runs: dict[str, list[str]]) -> None:
    """Makes the models, verifies with each list of settings, converts both ways, and proves the canary."""
    if dist.get_rank() == 0:
        make(directory)
    dist.barrier()
    verify(runs)
    prove(directory)
    if dist.get_rank() == 0:
        convert(directory)


def convert(directory: str) -> None:
    """DIRECTORY/FAMILY/back: the student, to a Megatron checkpoint and back."""
    from checkpoint_tools._convert import hf_to_megatron, megatron_to_hf
    from nemo_oprd.run.provider import find_family

    for family in QUANTIZATION:
        source, root = Path(directory) / family / "student", Path(directory) / family
        kind = find_family("bridge", hf_path=str(source))
        hf_to_megatron(source, root / "ours", tensor=2, family=kind, progress=False)
        megatron_to_hf(root / "ours", root / "back", family=kind, progress=False)


def prove(directory: str) -> None:
    """DIRECTORY/canary.json: FAMILY -> the canary's line of the student. Every rank calls this."""
    from nemo_oprd.canary.layer_by_layer import layered_states
    from nemo_oprd.config.loading import load_config
    from nemo_oprd.run import canary
    from nemo_oprd.run.models import build_distiller, make_plan
    from nemo_oprd.run.resolve import resolve

    os.environ["XDG_CACHE_HOME"] = f"{directory}/cache"
    canary.reference_states = functools.cache(
        lambda where, prompts, dtype: layered_states(Path(where), [list(ids) for ids in prompts], dtype)
    )
    theirs = canary.canary_prompts
    canary.canary_prompts = lambda *sizes: tuple(map(tuple, theirs(*sizes)))
    found = {}
    for family in QUANTIZATION:
        roles = [f"{role}.hf_path={directory}/{family}/{role}" for role in ("student", "teacher")]
        providers = ["student.provider=bridge", "teacher.provider=bridge"]
        replay = f"rollout.replay={Path(__file__).parent.parent}/golden/rollouts.jsonl"
        plan = make_plan(resolve(load_config("verify", [*roles, *providers, replay, "output=out"]), 2))
        distiller = build_distiller(plan)
        with torch.no_grad():
            found[family] = next(iter(canary.prove_models(plan, distiller))).line
    if dist.get_rank() == 0:
        Path(directory, "canary.json").write_text(json.dumps(found))


if __name__ == "__main__":
    torch.set_num_threads(1)
    from nemo_oprd.megatron.parallel import init_distributed

    init_distributed()
    globals()[sys.argv[1]](**json.loads(sys.argv[2]))
    dist.destroy_process_group()
