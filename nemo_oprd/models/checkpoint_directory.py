"""Checks the directory of a torch_dist checkpoint, and finds its config.json, both without torch.

A path leads to one checkpoint, or to a directory of checkpoints, as training runs and Megatron-Bridge write it, whose
tracker file names one. `megatron/weights/torch_dist.py` reads the tensors. Megatron-core can read metadata.json, too,
but importing it takes seconds, and a wrong path is reported before that.
"""

from __future__ import annotations

from pathlib import Path

from nemo_oprd.models import Family, read_model_spec
from nemo_oprd.models.megatron_bridge_config import check_run_config, named_hf_directory, read_run_config
from nemo_oprd.runtime.files import read_json

# holds the number of the newest checkpoint beside it; Megatron-LM's and Megatron-Bridge's name, too
LATEST = "latest_checkpointed_iteration.txt"

# the keys of Megatron-core's CheckpointingConfig
_KEYS = {"sharded_backend", "sharded_backend_version", "common_backend", "common_backend_version"}


def checkpoint_directory(path: Path) -> Path:
    """Returns `path`, or the checkpoint in it that its tracker file names, or, without such a file, the only one.

    Raises:
        ValueError: the tracker file names no checkpoint there, or there are several checkpoints and no tracker file.
    """
    if not path.is_dir() or (path / "metadata.json").is_file():
        return path
    inside = sorted(file.parent for file in path.glob("iter_*/metadata.json"))
    if not (path / LATEST).is_file():
        if len(inside) > 1:
            raise ValueError(
                f"{path}: {len(inside)} checkpoints and no {LATEST}; expected one checkpoint: name it, for example "
                f"{inside[-1]}"
            )
        return inside[0] if inside else path
    text = (path / LATEST).read_text(errors="replace").strip()
    number = text.isascii() and text.isdigit()
    named = path / (f"iter_{int(text):07d}" if number else "release")
    if not (number or text == "release") or not named.is_dir():
        there = ", ".join(directory.name for directory in inside) or "none"
        raise ValueError(
            f"{path / LATEST} names the checkpoint {text[:40]!r}; expected one of those beside it ({there}): correct "
            "the number, or name a checkpoint's own directory"
        )
    return named


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


def hf_directory(path: Path, hf_path: Path | None = None, family: Family | None = None) -> Path:
    """Returns the directory that holds the config.json and the tokenizer of a torch_dist checkpoint's model.

    A checkpoint of this project has them in `hf`. For one of Megatron-Bridge they are in `hf_path`, whose weights are
    not read, or in a local directory that its run_config.yaml names. `path` is as for `checkpoint_directory`, `family`
    as for `read_model_spec`.

    Raises:
        ValueError: as `checkpoint_directory` and `check_torch_dist`; there is no config.json; `hf_path` is set although
            the checkpoint has `hf`; or run_config.yaml describes another model.
    """
    path = checkpoint_directory(path)
    check_torch_dist(path)
    own = path / "hf"
    if (own / "config.json").is_file():
        if hf_path is not None:
            raise ValueError(
                f"hf_path={hf_path} for the checkpoint {path}, which has a config.json and a tokenizer of its own, in "
                "hf; expected one of the two: set hf_path to null"
            )
        return own
    content = read_run_config(path)
    named, names = (None, []) if content is None else named_hf_directory(content)
    found = hf_path or named
    if found is None:
        note = f" (run_config.yaml names {' and '.join(names)}, no such directory here)" if names else ""
        raise ValueError(
            f"{path}: no hf/config.json there; copy config.json and the tokenizer files of the model's source into "
            f"{own}, or set hf_path= to a directory with both{note}"
        )
    if content is not None:
        check_run_config(path, content, read_model_spec(found, family), found)
    return found


def _sharded_backend(file: Path) -> object:
    """Returns the format of the tensors according to a checkpoint's metadata.json."""
    content = read_json(file, "an object with sharded_backend", "copy the checkpoint again")
    if "sharded_backend" not in content or set(content) - _KEYS:
        raise ValueError(
            f"{file}: holds {content!r}, expected sharded_backend and at most {sorted(_KEYS - {'sharded_backend'})}; "
            "copy the checkpoint again"
        )
    return content["sharded_backend"]
