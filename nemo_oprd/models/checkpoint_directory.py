"""Checks of a torch_dist checkpoint's directory that do not need torch, and the place of its config.json.

`weights/torch_dist.py` reads the tensors. Megatron-core can read metadata.json, too, but importing it takes seconds,
and a wrong path is reported before that.
"""

from __future__ import annotations

from pathlib import Path

from nemo_oprd.fault_tolerance.files import read_json

# the keys of Megatron-core's CheckpointingConfig
_KEYS = {"sharded_backend", "sharded_backend_version", "common_backend", "common_backend_version"}


def check_torch_dist(path: Path) -> None:
    """Raises ValueError unless `path` looks like a complete torch_dist checkpoint; reads metadata.json only."""
    if not path.is_dir():
        raise ValueError(f"{path}: no such directory; expected a torch_dist checkpoint")
    if not ((path / "metadata.json").is_file() and (path / ".metadata").is_file()):
        inside = sorted(file.parent.name for file in path.glob("*/metadata.json"))
        hint = f"did you mean {path / inside[-1]}?" if inside else "was its writing interrupted?"
        if (path / "config.json").is_file():
            hint = "this is a Hugging Face model: set hf_path= to it, or convert it with hf_to_megatron.py"
        raise ValueError(f"{path}: no metadata.json and .metadata there; expected a torch_dist checkpoint: {hint}")
    backend = _sharded_backend(path / "metadata.json")
    if backend != "torch_dist":
        raise ValueError(
            f"{path}: a checkpoint of format {backend!r}; expected 'torch_dist': save it again with Megatron's "
            "--ckpt-format torch_dist"
        )


def hf_directory(path: Path) -> Path:
    """The directory in a torch_dist checkpoint that holds its model's config.json and tokenizer.

    Raises:
        ValueError: as `check_torch_dist`, or there is no config.json.
    """
    check_torch_dist(path)
    if not (path / "hf" / "config.json").is_file():
        raise ValueError(
            f"{path}: no hf/config.json there; copy config.json and the tokenizer files of the model's source into "
            f"{path / 'hf'}"
        )
    return path / "hf"


def _sharded_backend(file: Path) -> object:
    """The format of the tensors according to a checkpoint's metadata.json."""
    content = read_json(file, "an object with sharded_backend", "copy the checkpoint again")
    if "sharded_backend" not in content or set(content) - _KEYS:
        raise ValueError(
            f"{file}: holds {content!r}, expected sharded_backend and at most {sorted(_KEYS - {'sharded_backend'})}; "
            "copy the checkpoint again"
        )
    return content["sharded_backend"]
