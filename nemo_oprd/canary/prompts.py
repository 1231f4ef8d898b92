"""The prompts of a canary, the same for every engine and at every start, and the cache of verdicts that passed."""

from __future__ import annotations

import hashlib
import json
import random
from importlib import metadata
from pathlib import Path
from typing import Any

import nemo_oprd
from nemo_oprd.canary.verdict import CanaryVerdict
from nemo_oprd.models.checkpoint_directory import checkpoint_directory
from nemo_oprd.models.complete_config import text_config
from nemo_oprd.models.fingerprint import fingerprint
from nemo_oprd.runtime.files import cache_directory, write_atomically

# Cache of verdicts, so that a second start of the same model, layout and versions skips the comparison.
#
# A verdict is a JSON file in the user's cache, named by a digest of all that it depends on. Failures are not cached.


_FOLDER = "canary"
# format of cached verdicts: files of other numbers are not read
_FORMAT = 1
# packages that compute states on either side; a package that is not installed is absent from the key
_PACKAGES = ("torch", "transformers", "megatron-core", "megatron-bridge", "transformer-engine", "safetensors")


def canary_key(directory: Path, *, prompts: list[list[int]], layout: str, dtype: str, engine: str) -> str:
    """Returns a digest (hex) of all that a verdict depends on.

    Args:
        directory: the weights: a Hugging Face model, or a Megatron checkpoint.
        layout: how the engine divides the model, in any fixed words.
        engine: its name, version and settings that change numbers, in any fixed words.
    """
    versions = {"nemo-oprd": nemo_oprd.__version__}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    what = {
        "format": _FORMAT,
        "weights": fingerprint(Path(directory)),
        # a change in place of a few tensors can lie between the pieces that the fingerprint reads
        "files": _files(Path(directory)),
        "prompts": prompts,
        "layout": layout,
        "dtype": dtype,
        "engine": engine,
        "versions": versions,
    }
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()


def _files(directory: Path) -> list[tuple[str, int, int]]:
    """Lists name, size and time of the last change of every file of a model."""
    files = sorted(path for path in checkpoint_directory(directory).rglob("*") if path.is_file())
    return [(str(file.relative_to(directory)), file.stat().st_size, file.stat().st_mtime_ns) for file in files]


def kept_verdict(key: str) -> CanaryVerdict | None:
    """Reads the verdict that was kept under `key`; None if there is none, or its file is damaged."""
    try:
        return CanaryVerdict.from_json(json.loads(_file(key).read_text()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # it is computed again


def keep_verdict(key: str, verdict: CanaryVerdict) -> None:
    """Keeps a verdict under `key`.

    Raises:
        OSError: the cache can't be written; the error names the file.
    """
    file = _file(key)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, json.dumps(verdict.as_json(), indent=1))


def _file(key: str) -> Path:
    return cache_directory() / _FOLDER / f"{key}.json"


# lengths of the short prompts: one token, which attends to itself only, and lengths that are mostly no powers of two
LENGTHS = (7, 33, 1, 64, 18)
# tokens of the longest prompt beyond the window and the chunk; without either, the prompt has `_SHORTEST_LONG` tokens
BEYOND = 37
_SHORTEST_LONG = 129


def canary_prompts(vocab_size: int, window: int | None, chunk: int, limit: int | None = None) -> list[list[int]]:
    """Makes a ragged batch of token ids, drawn from the whole vocabulary.

    Args:
        window: the model's largest sliding window in tokens; None if it has none.
        chunk: tokens that the engine computes at a time; 0 if it computes sequences whole.
        limit: the largest number of tokens of a prompt, for models with fewer positions than window and chunk.

    Returns:
        Prompts of 1 to max(129, `window` + 37, `chunk` + 37) tokens, at most `limit`; the second one is the longest.

    Raises:
        ValueError: `limit` leaves no row beyond the window.
    """
    longest = max(_SHORTEST_LONG, (window or 0) + BEYOND, chunk + BEYOND if chunk else 0)
    if limit is not None:
        longest = min(longest, limit)
        if window is not None and longest <= window:
            raise ValueError(
                f"a canary of at most {limit} tokens does not exceed the sliding window of {window} tokens; expected "
                f"room for {window + 1}: raise the engine's longest sequence"
            )
    draw = random.Random(20)
    lengths = [LENGTHS[0], longest, *LENGTHS[1:]]
    return [[draw.randrange(vocab_size) for _ in range(min(length, limit or length))] for length in lengths]


def sliding_window(hf_config: dict[str, Any]) -> int | None:
    """Reads a model's sliding window in tokens from its config.json; None if no sequence of the model exceeds it."""
    text = text_config(hf_config)
    window = text.get("sliding_window")
    kinds = text.get("layer_types")
    used = text.get("use_sliding_window", True) and (kinds is None or "sliding_attention" in kinds)
    most = text.get("max_position_embeddings")
    return window if used and window and (most is None or window < most) else None
