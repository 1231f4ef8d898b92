"""Finds the family of a model that only Megatron-Bridge has; refuses `provider=own` for such a model.

`find_family` returns None for a family of this project. Importing this module imports no torch.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from nemo_oprd.models import FAMILIES, Family, ModelSpec
from nemo_oprd.models.checkpoint_directory import checkpoint_directory
from nemo_oprd.models.megatron_bridge_config import named_hf_directory, read_run_config

OWN, BRIDGE = "own", "bridge"


def find_family(provider: str, *, hf_path: str | None, checkpoint: str | None = None) -> Family | None:
    """Returns the Megatron-Bridge family of a model; None for `own`, a family of this project, or no config.json.

    `hf_path` and `checkpoint` are the model's paths as in the configuration; at least one is set.

    Raises:
        ValueError: Megatron-Bridge is not installed, lacks the family, or has a feature that is not supported here.
    """
    if provider == OWN:
        return None
    if find_spec("megatron.bridge") is None:
        raise ValueError(
            f"provider={provider} needs Megatron-Bridge, which is not installed here; expected provider=own without "
            "it: use NVIDIA's container of NeMo, or the environment of scripts/setup_nemo_bridge.sh (docs/nemo.md)"
        )
    directory = _config_directory(hf_path, checkpoint)
    if directory is None:
        return None  # the reader of the model reports the missing file
    from nemo_oprd.megatron.megatron_bridge.family import bridge_family

    return bridge_family(directory)


def check_provider(provider: str, spec: ModelSpec, directory: Path) -> None:
    """Raises ValueError if this project is to build a model of a family that only Megatron-Bridge has."""
    if provider == OWN and not spec.family.own:
        raise ValueError(
            f"{directory}: provider=own for a {spec.model_type} model; expected one of {sorted(FAMILIES)}: set "
            "provider=bridge for this model, too (docs/nemo.md)"
        )


def _config_directory(hf_path: str | None, checkpoint: str | None) -> Path | None:
    """Returns the directory with config.json: `hf_path`, or a checkpoint's copy or source; None if it is missing."""
    found = Path(hf_path) if hf_path else None
    if checkpoint is not None and found is None:
        path = checkpoint_directory(Path(checkpoint))
        content = read_run_config(path)
        named = None if content is None else named_hf_directory(content)[0]
        found = path / "hf" if (path / "hf" / "config.json").is_file() else named
    return found if found is not None and (found / "config.json").is_file() else None
