"""Tiny random models of published configurations: fewer layers, smaller widths, the formats of their files.

`shrink` makes the config.json, `write` the files twice: as the maker publishes them (the names of a tower's parts, and
quantised), and as transformers saves the numbers that these stand for, without knowing anything of this project.
"""

from __future__ import annotations

import fnmatch
import functools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.support.scaled_formats import in_blocks, in_fp8, in_int4, in_mxfp4, in_nvfp4

QUANTIZATION, MODELOPT_FILE = "quantization_config", "hf_quant_config.json"
DEPTH = 3
# keys of a language model whose values are sizes; whatever they are, the model gets these
SIZES: dict[str, int] = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 64, "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 16, "num_attention_heads": 8, "swa_num_attention_heads": 8, "head_dim": 16,
    "swa_head_dim": 24, "v_head_dim": 16, "swa_v_head_dim": 16, "global_head_dim": 32, "q_lora_rank": 32,
    "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "rotary_dim": 8, "num_experts": 8,
    "num_local_experts": 8, "n_routed_experts": 8, "num_experts_per_tok": 2, "top_k_experts": 2,
    "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "sliding_window": 4, "sliding_window_size": 4, "vocab_size_per_layer_input": 61, "first_k_dense_replace": 1,
    "bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
# heads of keys and values, at the ratio to those of queries, as far as two tensor ranks can have them
HEADS = ("num_key_value_heads", "swa_num_key_value_heads", "num_global_key_value_heads")
# lists with an item for each layer
PER_LAYER = ("layer_types", "hybrid_layer_pattern", "moe_layer_freq", "mlp_layer_types", "attn_type_list")
# model_type -> how many layers have one of each kind
DEPTHS = {"qwen3_5_text": 4, "qwen3_5_moe_text": 4, "gemma4_text": 6, "mimo_v2_flash": 6}
WINDOWED = ("gpt_oss", "gemma4_text", "mimo_v2_flash")
# model_type -> that of the class of transformers for its language model, where it is another
CLASSES = {
    "kimi_k2": "deepseek_v3", "mimo": "qwen2", "qwen3_vl_text": "qwen3", "qwen3_vl_moe_text": "qwen3_moe",
}  # fmt: skip
# model_type of the whole -> what its makers call the parts of the language model
PREFIXES = {
    "qwen3_vl": "model.language_model.", "qwen3_vl_moe": "model.language_model.", "qwen3_5": "model.language_model.",
    "qwen3_5_moe": "model.language_model.", "gemma4": "model.language_model.", "kimi_k25": "language_model.model.",
}  # fmt: skip
Parts = tuple[dict[str, torch.Tensor], torch.Tensor]


def shrink(published: dict[str, Any]) -> dict[str, Any]:
    """The content of a config.json with small sizes; all other keys, such as quantization_config, are kept."""
    config = json.loads(json.dumps(published))
    text = language_model(config)
    kind, deep = text["model_type"], text["num_hidden_layers"]
    depth = DEPTHS.get(kind, DEPTH)
    queries = text["num_attention_heads"]
    for key in HEADS:
        if text.get(key) is not None:
            text[key] = max(2, SIZES["num_attention_heads"] * text[key] // queries)
    kept = () if kind in WINDOWED else ("sliding_window",)
    sizes = {key: value for key, value in SIZES.items() if text.get(key) is not None and key not in kept}
    if kind == "mimo_v2_flash":
        sizes |= {"head_dim": SIZES["swa_head_dim"], "swa_num_key_value_heads": 2 * text["num_key_value_heads"]}
    text.update(sizes, num_hidden_layers=depth)
    if config is not text:
        for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
            if config.get(key) is not None:
                config[key] = SIZES[key]
    if text.get("n_group", 1) > 1:
        text.update(n_group=4, topk_group=2)
    for key in PER_LAYER:
        if isinstance(text.get(key), list) and len(text[key]) == deep:
            text[key] = text[key][:depth]
    for key in ("rope_parameters", "rope_scaling"):
        if isinstance(text.get(key), dict) and "mrope_section" in text[key]:
            text[key]["mrope_section"] = [1, 1, 0]
    for each in (config, text):
        if each.get(QUANTIZATION, {}).get("weight_block_size"):
            each[QUANTIZATION]["weight_block_size"] = [20, 12]  # which do not divide the matrices
    return config


def language_model(config: dict[str, Any]) -> dict[str, Any]:
    """The config of the language model in the content of a config.json."""
    return config["text_config"] if isinstance(config.get("text_config"), dict) else config


def write(published: Path, root: Path, role: str, seed: int) -> None:
    """ROOT/ROLE as its makers would publish the shrunk model, and ROOT/plain-ROLE as transformers saves it.

    Args:
        published: a directory with config.json, and perhaps hf_quant_config.json.
        seed: of the weights.
    """
    from safetensors.torch import save_file

    config = shrink(json.loads((published / "config.json").read_text()))
    beside = published / MODELOPT_FILE
    found = json.loads(beside.read_text()) if beside.is_file() else {}
    text = language_model(config)
    settings = config.get(QUANTIZATION) or text.get(QUANTIZATION) or found.get("quantization", found)
    model = plain_model(text | _tied(config), seed)
    names = Names(config["model_type"], quantised=bool(settings))
    encode = encoder(settings)
    files: dict[str, torch.Tensor] = {}
    stands_for: dict[str, torch.Tensor] = {}
    for name, tensor in saved_tensors(model, root / f"plain-{role}"):
        wholes = []
        for stored, part in names.published(name, tensor):
            parts, whole = encode(stored, part)
            files |= parts
            wholes.append(whole)
        stands_for[name] = names.joined(wholes, tensor)
    save_file(stands_for, root / f"plain-{role}" / "model.safetensors", metadata={"format": "pt"})
    (root / role).mkdir()
    (root / role / "config.json").write_text(json.dumps(config))
    if found:
        (root / role / MODELOPT_FILE).write_text(json.dumps(found))
    save_file({name: each.contiguous() for name, each in files.items()}, root / role / "model.safetensors")


def _tied(config: dict[str, Any]) -> dict[str, Any]:
    """transformers makes the whole model, whose setting counts."""
    key = "tie_word_embeddings"
    return {key: config[key]} if key in config else {}


def plain_model(text: dict[str, Any], seed: int) -> Any:
    """transformers' language model in float32, with random weights that are numbers of bfloat16."""
    from transformers import AutoConfig, AutoModelForCausalLM

    kind = CLASSES.get(text["model_type"], text["model_type"])
    keys = {key: value for key, value in text.items() if key not in (QUANTIZATION, "auto_map", "architectures")}
    if "_vl_" in text["model_type"]:  # the axes of positions are alike in text
        keys["rope_scaling"] = keys["rope_parameters"] = None
    config = AutoConfig.for_model(**{**keys, "model_type": kind, "dtype": "bfloat16", "torch_dtype": "bfloat16"})
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    hybrid = kind.startswith("qwen3_5")  # delta nets with larger weights make so much of rounding that float32 fails
    around_one = not kind.startswith(("qwen3_5", "gemma"))
    for name, parameter in [*model.named_parameters(), *model.named_buffers()]:
        if not parameter.is_floating_point() or "inv_freq" in name or name.endswith("embed_scale"):
            continue
        torch.nn.init.normal_(parameter, std=0.15 if hybrid else 0.2)
        if ("norm" in name and (around_one or "linear_attn" in name)) or name.endswith(("scale", "layer_scalar")):
            parameter.data += 1
        if kind.startswith("gemma") and name.endswith(("o_proj.weight", "down_proj.weight")):
            parameter.data *= 0.03  # so that the epsilon of the norm behind it is not lost in rounding
        parameter.data = parameter.data.bfloat16().float()
    return model


def saved_tensors(model: Any, directory: Path) -> list[tuple[str, torch.Tensor]]:
    """Saves a model, and returns the tensors of its file as bfloat16, but for routers' biases."""
    from safetensors.torch import load_file

    model.save_pretrained(directory)
    config = json.loads((directory / "config.json").read_text()) | {"dtype": "bfloat16"}
    (directory / "config.json").write_text(json.dumps(config))
    read = load_file(directory / "model.safetensors")
    return [(name, each if name.endswith("correction_bias") else each.bfloat16()) for name, each in read.items()]


class Names:
    """What a model's makers call a tensor of transformers' file."""

    def __init__(self, kind: str, *, quantised: bool) -> None:
        """`kind`: the model_type of the whole."""
        self._prefix, self._kind, self._quantised = PREFIXES.get(kind), kind, quantised

    def published(self, name: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        """The tensors of the published file; ModelOpt takes the experts of a layer apart."""
        if self._prefix is not None:
            outer = "language_model." if self._kind == "kimi_k25" else ""
            name = self._prefix + name.removeprefix("model.") if name.startswith("model.") else outer + name
        if self._quantised and self._apart(name):
            block, _, matrix = name.rpartition(".")
            found = []
            for expert, each in enumerate(tensor):
                halves = each.chunk(2) if matrix == "gate_up_proj" else (each,)
                kinds = ("gate_proj", "up_proj") if matrix == "gate_up_proj" else ("down_proj",)
                found += [(f"{block}.{expert}.{k}.weight", half) for k, half in zip(kinds, halves, strict=True)]
            return found
        return [(name, tensor)]

    def joined(self, wholes: list[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
        """The inverse of `published`, of numbers."""
        return wholes[0] if len(wholes) == 1 else torch.cat(wholes).reshape(like.shape)

    def _apart(self, name: str) -> bool:
        return self._kind != "gpt_oss" and name.endswith(("experts.gate_up_proj", "experts.down_proj"))


def encoder(settings: dict[str, Any] | None) -> Callable[[str, torch.Tensor], Parts]:
    """A function of a tensor and its name that returns (the tensors of the file by name, what they stand for)."""
    chosen = _chosen(settings or {})

    def encode(name: str, tensor: torch.Tensor) -> Parts:
        form = chosen(name.removesuffix(".weight"), tensor)
        if form is None:
            return {name: tensor}, tensor
        parts, whole = form(tensor.float())
        return {_beside(name, suffix): part for suffix, part in parts.items()}, whole

    return encode


def _beside(name: str, suffix: str) -> str:
    return name.removesuffix(".weight") + ".input_scale" if suffix == "_input_scale" else name + suffix


def _chosen(settings: dict[str, Any]) -> Callable[[str, torch.Tensor], Callable[[torch.Tensor], Parts] | None]:
    """(module, its matrix) -> the format in which the settings of a config.json have it."""
    method = settings.get("quant_method", "modelopt" if "quant_algo" in settings else None)
    named = [*settings.get("ignore", []), *settings.get("exclude_modules", [])]
    named += settings.get("modules_to_not_convert") or []
    algorithms = {"FP8": in_fp8, "NVFP4": in_nvfp4, "W4A16_NVFP4": in_nvfp4}
    layers = {name: each["quant_algo"] for name, each in settings.get("quantized_layers", {}).items()}

    def choose(module: str, tensor: torch.Tensor) -> Callable[[torch.Tensor], Parts] | None:
        last = module.rpartition(".")[2]
        if method is None or any(_is_named(module, each) for each in named):
            return None
        if layers:  # the experts of a layer are named together
            found = next((algo for name, algo in layers.items() if f"{module}.".startswith(f"{name}.")), "")
            return algorithms.get(found)
        if method == "mxfp4":
            return in_mxfp4 if last in ("gate_up_proj", "down_proj") else None
        if "layers." not in module or tensor.dim() != 2 or last in ("gate", "shared_expert_gate"):
            return None
        if method == "fp8":
            return functools.partial(in_blocks, block=settings["weight_block_size"])
        return in_int4 if method == "compressed-tensors" else algorithms[settings["quant_algo"]]

    return choose


def _is_named(module: str, pattern: str) -> bool:
    """Whether a list of modules that are left as they are, of ModelOpt or compressed-tensors, names this one."""
    if pattern.startswith("re:"):
        return re.match(pattern[3:], module) is not None
    return fnmatch.fnmatchcase(module, pattern) or module.endswith("." + pattern)
