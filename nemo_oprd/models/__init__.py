"""Model families: a model's architecture, read from its HF `config.json`, and the mappings of its weights.

`read_model_spec(path)` is the entry point. A new family is one `Family` (see CONTRIBUTING.md). Callers pass families
that only Megatron-Bridge has (`find_family` in `run/provider.py`). A `ModelSpec` holds its family.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from nemo_oprd.models.architecture import Family, ModelSpec, check_counts, check_same_width
from nemo_oprd.models.complete_config import is_renamed, language_model_config, renamed_config
from nemo_oprd.models.families import LLAMA, MIXTRAL, PHI3, QWEN2, QWEN3, QWEN3_MOE
from nemo_oprd.models.megatron_bridge_families import KINDS, REFUSED_FAMILIES
from nemo_oprd.models.quantization import known_quantization, read_quantization, unquantized, with_modelopt_file
from nemo_oprd.models.weight_files import refuse_adapter
from nemo_oprd.runtime.files import kind_of, read_json

# this project's own, by `model_type`
FAMILIES: Mapping[str, Family] = MappingProxyType(
    {family.model_type: family for family in (LLAMA, MIXTRAL, PHI3, QWEN2, QWEN3, QWEN3_MOE)}
)

__all__ = [
    "FAMILIES",
    "Family",
    "ModelSpec",
    "check_same_width",
    "copy_hf_config",
    "has_other_name",
    "parse_model_spec",
    "read_hf_config",
    "read_model_spec",
    "transformers_config",
]


def parse_model_spec(hf_config: dict, source: str = "config.json", family: Family | None = None) -> ModelSpec:
    """Returns the architecture in `hf_config` (the contents of a `config.json`); quantised weights count as bfloat16.

    Args:
        family: one more family that the model may be of, besides `FAMILIES`.

    Raises:
        ValueError: the model type is unknown, a needed key is missing, or the config asks for something unsupported.
    """
    if not isinstance(hf_config, dict):
        raise ValueError(
            f"{source}: holds a {type(hf_config).__name__}, expected an object; copy the file from its source again"
        )
    model_type = hf_config.get("model_type")
    more = {} if family is None else {family.model_type: family}
    found = (more | dict(FAMILIES)).get(model_type) if isinstance(model_type, str) else None
    if found is None:
        raise ValueError(_unsupported(model_type, source))
    read_quantization(hf_config, source)
    return found.parse(found, unquantized(hf_config), source)


def _unsupported(model_type: object, source: str) -> str:
    """Returns the message about a family that this project does not have; it says who has it."""
    if model_type in KINDS:
        return (
            f"{source}: model_type {model_type!r} is not one of this project's own families; expected provider=bridge: "
            "set student.provider=bridge or teacher.provider=bridge, whose models Megatron-Bridge builds (docs/nemo.md)"
        )
    reason = f", because of {REFUSED_FAMILIES[model_type]}" if model_type in REFUSED_FAMILIES else ""
    return (
        f"{source}: model_type {model_type!r} is not supported{reason}; expected one of {sorted(FAMILIES)}, or with "
        "provider=bridge a family of Megatron-Bridge (docs/nemo.md): choose another model, or as a frozen teacher "
        "teacher.engine=vllm, where vLLM has this one (docs/teachers.md)"
    )


def read_model_spec(path: str | Path, family: Family | None = None) -> ModelSpec:
    """Returns the architecture in `path/config.json`; `family` is as for `parse_model_spec`.

    Raises:
        ValueError: as `read_hf_config` and `parse_model_spec`.
    """
    return parse_model_spec(read_hf_config(path), str(Path(path) / "config.json"), family)


def read_hf_config(path: str | Path) -> dict:
    """Returns the contents of `path/config.json`, as `language_model_config` returns them.

    If only hf_quant_config.json names a quantisation, `quantization_config` is read from there.

    Raises:
        ValueError: a config file is missing, damaged or contradictory, or the directory holds only an adapter.
    """
    file = Path(path) / "config.json"
    if Path(path).is_file():
        raise ValueError(f"{path}: is a file; expected the directory of a Hugging Face model: name the directory")
    if not Path(path).is_dir():
        found = f"is {kind_of(path)}" if kind_of(path) else "no such directory"
        raise ValueError(f"{path}: {found}; expected that of a Hugging Face model: download it first")
    refuse_adapter(Path(path))
    if not file.is_file():
        megatron = (Path(path) / ".metadata").is_file()
        hint = "; this is a Megatron checkpoint, which goes into checkpoint=" if megatron else ""
        raise ValueError(f"{path}: no config.json there; expected the directory of a Hugging Face model{hint}")
    content = read_json(file, "an object with model_type", "copy the file from the model's source again")
    check_counts(content, str(file))
    return with_modelopt_file(language_model_config(content, str(file)), Path(path))


def has_other_name(path: str | Path) -> bool:
    """Returns whether transformers knows the model in a directory under another name than its config.json has."""
    return is_renamed(read_json(Path(path) / "config.json", "an object with model_type", "copy it again"))


def transformers_config(path: str | Path) -> Any:
    """Returns transformers' config of the model in a directory; Python files beside the model are not run.

    Raises:
        ValueError: config.json can't be read, or transformers does not know its model type.
    """
    from transformers import AutoConfig  # takes seconds

    if has_other_name(path):
        return renamed_config(read_hf_config(path))
    return AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)


def copy_hf_config(source: Path, target: Path) -> None:
    """Copies config.json into the directory `target`, for dequantised weights beside it.

    Byte for byte, unless a quantisation is to be removed, or the name replaced by the one that transformers knows.

    Raises:
        ValueError: as `read_hf_config`.
    """
    hf_config = read_hf_config(source)
    if known_quantization(hf_config) is None and not has_other_name(source):
        shutil.copyfile(source / "config.json", target / "config.json")
    else:
        (target / "config.json").write_text(json.dumps(unquantized(hf_config), indent=2) + "\n")
