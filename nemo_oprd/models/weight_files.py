"""Finds the files that hold a Hugging Face model's weights: those that transformers would read. No torch.

A directory may hold more: shards and an index that a later save as one file has left behind, or the weights of an
adapter.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from nemo_oprd.runtime.files import kind_of, read_json, refuse_lfs_pointer
from nemo_oprd.runtime.messages import is_first_rank

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_ADAPTER, _ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model*"
# the key of config.json with which a model names its file of weights, or its index, itself
_NAMED = "transformers_weights"

logger = logging.getLogger(__name__)


def weight_files(directory: Path) -> list[Path]:
    """Returns the safetensors files of a model, chosen in transformers' order of precedence.

    They are the file, or the index's files, that config.json names; else model.safetensors; else the files of
    model.safetensors.index.json; else, which transformers refuses, all files that are not an adapter's.

    Raises:
        ValueError: files are missing, pipes or pointers of Git LFS; or config.json or an index is wrong.
    """
    for file in _of_models(directory, "*.safetensors"):  # before any is opened, which would wait for a pipe's writer
        if kind := kind_of(file):
            raise ValueError(f"{file}: is {kind}; expected a file of weights: copy it from the model's source")
    files = _chosen(directory)
    for file in files:
        refuse_lfs_pointer(file)
    left = _names(set(_of_models(directory, "*.safetensors")) - set(files))
    if left and len(files) == 1 and (directory / SINGLE) in files:
        beside = f" and {INDEX}" if (directory / INDEX).is_file() else ""
        _tell(f"{files[0]} is read, as transformers does; {_shown(left)}{beside} in the same directory are left out")
    if (directory / _ADAPTER).is_file():
        _tell(f"{directory}: the weights there are read without the adapter beside them ({_ADAPTER})")
    return files


def _chosen(directory: Path) -> list[Path]:
    named, index = _named(directory), directory / INDEX
    if named is not None:
        return _indexed(named) if named.suffix == ".json" else [named]
    if (directory / SINGLE).is_file():
        return [directory / SINGLE]
    return _indexed(index) if index.is_file() else _others(directory)


def refuse_adapter(directory: Path) -> None:
    """Raises ValueError if a directory holds an adapter and no model."""
    if not (directory / _ADAPTER).is_file() or _of_models(directory, "*.safetensors", "pytorch_model*"):
        return
    base = read_json(directory / _ADAPTER, "an adapter's settings", "copy it again").get("base_model_name_or_path")
    raise ValueError(
        f"{directory}: holds an adapter (peft, LoRA) of {base!r}, and no model; expected the weights of a model: merge "
        "the adapter into that model first, with peft's merge_and_unload() and save_pretrained()"
    )


def refuse_what_vllm_reads_differently(directory: Path) -> None:
    """Raises ValueError if vLLM would load other files of a model than transformers.

    To vLLM, the index counts before a single file, and without an index every file counts. Files in Mistral's own
    format (consolidated*.safetensors) name tensors differently; the canary checks that they hold the same weights.
    """
    files = [name for name in _names(directory.glob("*.safetensors")) if not name.startswith("consolidated")]
    if not files or not (directory / "config.json").is_file():
        return
    ours, index = _names(_chosen(directory)), directory / INDEX
    theirs = _names(_indexed(index)) if index.is_file() else files
    if theirs != ours:
        raise ValueError(
            f"{directory}: vLLM loads {_shown(theirs)} there, and transformers {_shown(ours)}; expected a directory of "
            "which both load the same: remove the files that are out of date"
            + (f", {INDEX} among them" if index.is_file() else "")
        )


def _named(directory: Path) -> Path | None:
    """Returns the file of weights, or the index of shards, that config.json names; None if it names none."""
    config = directory / "config.json"
    name = None
    if config.is_file():
        name = read_json(config, "an object with model_type", "copy it from the model's source again").get(_NAMED)
    if name is None:
        return None
    if not isinstance(name, str) or Path(name).name != name or not (directory / name).is_file():
        raise ValueError(
            f"{config}: {_NAMED}={name!r}; expected the name of a file in {directory}: copy that file from the model's "
            "source, or correct the key"
        )
    return directory / name


def _indexed(index: Path) -> list[Path]:
    """Returns the files that an index names; ValueError if it names none, or a file is not beside it."""
    expected, fix = "an object with weight_map", "copy it from the model's source again"
    weight_map = read_json(index, expected, fix).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{index}: weight_map is {weight_map!r:.80}, expected tensor names and files; {fix}")
    elsewhere = [name for name in weight_map.values() if not isinstance(name, str) or Path(name).name != name]
    if elsewhere:
        raise ValueError(f"{index}: names {elsewhere[0]!r}, expected a file in {index.parent}; correct the index")
    names = sorted(set(weight_map.values()))
    missing = [name for name in names if not (index.parent / name).is_file()]
    if missing:
        raise ValueError(
            f"{index.parent / missing[0]}: no such file, but {index.name} names it ({len(missing)} of "
            f"{len(names)} shards are missing); expected all shards: copy it from the model's source"
        )
    return [index.parent / name for name in names]


def _others(directory: Path) -> list[Path]:
    """Returns all safetensors files of a model; ValueError if there are none."""
    files = _of_models(directory, "*.safetensors")
    if files:
        return files
    refuse_adapter(directory)
    pickled = _names([*directory.glob("*.bin"), *directory.glob("*.pt*")])
    hint = ": copy its weights there"
    if pickled:
        hint = f"; {pickled[0]} is a pickle, which is never opened: save_pretrained with transformers once"
    raise ValueError(f"{directory}: no *.safetensors files; expected a Hugging Face model saved as safetensors{hint}")


def _of_models(directory: Path, *patterns: str) -> list[Path]:
    """Returns the files in a directory that match the patterns and are not an adapter's."""
    found = {file for pattern in patterns for file in directory.glob(pattern)}
    return sorted(found - set(directory.glob(_ADAPTER_WEIGHTS)))


@cache
def _tell(line: str) -> None:
    """Warns once in a process, on the first rank."""
    if is_first_rank():
        logger.warning(line)


def _names(files: Iterable[Path]) -> list[str]:
    return sorted(file.name for file in files)


def _shown(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
