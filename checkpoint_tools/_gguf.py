"""A GGUF file as a Hugging Face model directory: transformers reads the file and dequantises its weights.

Needs the packages `gguf` and `accelerate` (the extra `smollm`).
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch

from nemo_oprd.models import ModelSpec, read_model_spec
from nemo_oprd.runtime.files import replacing_directory, why_no_file

_PACKAGES = ("gguf", "accelerate")


def gguf_to_hf(gguf_file: Path, target: Path) -> ModelSpec:
    """Writes the model in `gguf_file`, with its tokenizer, to `target` in float32; returns its architecture.

    Quantised weights become the float32 numbers that they stand for.

    Raises:
        ValueError: the file is missing or no GGUF file, its model belongs to no known family, or a package is missing.
    """
    if not gguf_file.is_file():
        raise ValueError(
            f"{gguf_file}: {why_no_file(gguf_file, '.gguf')}; expected a model in GGUF format: correct the path"
        )
    with gguf_file.open("rb") as stream:
        if stream.read(4) != b"GGUF":
            raise ValueError(f"{gguf_file}: not a GGUF file; expected one that begins with 'GGUF': copy it again")
    missing = [package for package in _PACKAGES if importlib.util.find_spec(package) is None]
    if missing:
        raise ValueError(
            f"{gguf_file}: reading GGUF needs the packages {', '.join(_PACKAGES)}, of which {', '.join(missing)} can't "
            "be found; install the extra: pip install 'nemo-oprd[smollm]'"
        )
    from transformers import AutoModelForCausalLM, AutoTokenizer  # seconds to import

    where = {"pretrained_model_name_or_path": str(gguf_file.parent), "gguf_file": gguf_file.name}
    model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32, local_files_only=True)
    # the weights are not quantised any more: with these two, save_pretrained would refuse to write them
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer = None
    with replacing_directory(target) as partial:
        model.save_pretrained(partial)
        AutoTokenizer.from_pretrained(**where, local_files_only=True).save_pretrained(partial)
        return read_model_spec(partial)
