"""Checkpoints of families that only Megatron-Bridge has, in Megatron-Bridge's own hands; runs in its environment.

Megatron-Bridge builds the model by the checkpoint's run_config.yaml, loads its weights and saves them as it does. What
this project reads from that is compared with the HF model by the test. Forms of weights are those of this project on
both ways, so the loaded model is also compared with the one that Megatron-Bridge makes of the HF model itself.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any
from unittest import mock

import torch

# what differs between two ways of making a model, and is not the model
OF_THE_MAKING = {
    "perform_initialization", "use_cpu_initialization", "make_vocab_size_divisible_by", "hf_model_id", "autocast_dtype",
    "cross_entropy_loss_fusion", "cross_entropy_fusion_impl", "mtp_loss_scaling_factor", "should_pad_vocab",
    "moe_router_load_balancing_type", "moe_aux_loss_coeff",
}  # fmt: skip


# of families that this project builds itself; Megatron-Bridge reads the last one's layers without experts as others
OWN_EXPERTS: dict[str, dict[str, Any]] = {
    "mixtral": {}, "qwen3_moe": {"mlp_only_layers": []}, "qwen3_moe_of_two_kinds": {"mlp_only_layers": [0, 5]},
}  # fmt: skip


def own_experts_through_megatron_bridge(directory: str) -> None:
    """DIRECTORY/NAME/hf, /circle of `OWN_EXPERTS`; DIRECTORY/own.json: in what the second one differs from its own."""
    import layout_cases

    from checkpoint_tools._convert import hf_to_megatron, megatron_to_hf

    with mock.patch("torch.cuda.current_device", return_value=torch.device("cpu")):
        for name, changes in OWN_EXPERTS.items():
            root, family = Path(directory) / name, name.removesuffix("_of_two_kinds")
            with mock.patch.dict(layout_cases.MODELS, {name: layout_cases.MODELS[family] | changes}):
                layout_cases.save_model(root / "hf", name, 0)
            hf_to_megatron(root / "hf", root / "ours", tensor=2, progress=False)
            loaded = _load_and_save(root / "ours", root / "theirs")
            megatron_to_hf(root / "theirs", root / "circle", hf_path=root / "hf", progress=False)
            if name == "qwen3_moe":
                found = _other_than_its_own(loaded, root / "hf")
    (Path(directory) / "own.json").write_text(json.dumps(found))


def through_megatron_bridge(models: str, directory: str, families: list[str], trained: tuple[str, str]) -> None:
    """DIRECTORY/FAMILY/circle, HF models, of DIRECTORY/FAMILY/ours; DIRECTORY/loaded.json: in what they differ.

    `trained` is a family and a checkpoint of a run, which becomes DIRECTORY/trained/circle and, by
    this project alone, DIRECTORY/trained/direct.
    """
    import nemo_bridge_cases as bridge_cases

    from checkpoint_tools._convert import megatron_to_hf
    from nemo_oprd.run.provider import find_family

    bridge_cases.prepare()
    found = {}
    with mock.patch("torch.cuda.current_device", return_value=torch.device("cpu")):
        of_family = [(family, Path(directory) / family, Path(directory) / family / "ours") for family in families]
        for family, root, checkpoint in [*of_family, (trained[0], Path(directory) / "trained", Path(trained[1]))]:
            source = Path(models) / family / "student"
            loaded, kind = _load_and_save(checkpoint, root / "theirs"), find_family("bridge", hf_path=str(source))
            megatron_to_hf(root / "theirs", root / "circle", hf_path=source, family=kind, progress=False)
            if checkpoint != root / "ours":
                megatron_to_hf(checkpoint, root / "direct", family=kind, progress=False)
            else:
                found[family] = _other_than_its_own(loaded, source)
    (Path(directory) / "loaded.json").write_text(json.dumps(found))


def _settings() -> dict[str, Any]:
    """Without kernels of CUDA, for one rank; the kind of attention is that of all models of the process."""
    import nemo_bridge_cases as bridge_cases
    from megatron.core.transformer.enums import AttnBackend

    from nemo_oprd.batch.layout import Layout

    names = ("moe_permute_fusion", "moe_grouped_gemm", "moe_router_fusion", "moe_shared_expert_overlap", "bf16")
    off = dict.fromkeys(names, False)
    mine = {"params_dtype": torch.float32, "attention_backend": AttnBackend.auto}
    return {**bridge_cases.settings(Layout()), **off, **mine}


def _load_and_save(checkpoint: Path, target: Path) -> Any:
    from megatron.bridge.training.model_load_save import load_megatron_model, save_megatron_model
    from stock_models import megatron_groups

    from nemo_oprd.batch.layout import Layout

    options = {"use_cpu_init": True, "skip_temp_dist_context": True, "mp_overrides": _settings()}
    with megatron_groups(Layout()), torch.no_grad():
        loaded = load_megatron_model(str(checkpoint), **options)
        save_megatron_model(loaded, str(target))
    return loaded[0]


def _other_than_its_own(loaded: Any, source: Path) -> dict[str, Any]:
    """Field or parameter -> (value in the loaded model, in Megatron-Bridge's own of the HF model)."""
    import nemo_bridge_cases as bridge_cases
    from megatron.bridge import AutoBridge
    from stock_models import megatron_groups

    from nemo_oprd.batch.layout import Layout

    with megatron_groups(Layout()), torch.no_grad():
        bridge = AutoBridge.from_hf_pretrained(str(source), dtype=torch.float32)
        made = bridge.to_megatron_provider(load_weights=False)
        refusal = _refusal(made, source)
        for field, value in {**_settings(), "should_pad_vocab": False, "mtp_num_layers": None}.items():
            setattr(made, field, value)
        own = bridge_cases.provided(made, wrap_with_ddp=False)
        found: dict[str, Any] = {"refusal": refusal} if refusal else {}
        for field in dataclasses.fields(loaded.config):
            pair = _shown(getattr(loaded.config, field.name)), _shown(getattr(own[0].config, field.name))
            if field.name not in OF_THE_MAKING and pair[0] != pair[1]:
                found[field.name] = pair
        try:
            bridge.load_hf_weights(own)
        except AttributeError as error:  # it has no mapping of sequential experts in some families
            return found | {"weights": str(error)}
    ours, theirs = loaded.state_dict(), own[0].state_dict()
    different = [key for key in sorted({*ours, *theirs}) if not _same(ours.get(key), theirs.get(key))]
    return found | ({"parameters": different} if different else {})


def _refusal(made: Any, source: Path) -> str:
    """What is said of a checkpoint that Megatron-Bridge has made of the model in `source`; "" if it is read."""
    import yaml
    from megatron.bridge.training.utils.config_utils import _ConfigContainerBase
    from megatron.bridge.utils.yaml_utils import safe_yaml_representers

    from nemo_oprd.models import read_model_spec
    from nemo_oprd.models.megatron_bridge_config import check_run_config
    from nemo_oprd.run.provider import find_family

    with safe_yaml_representers():
        written = yaml.safe_dump({"model": _ConfigContainerBase._convert_value_to_dict(made)})
    spec = read_model_spec(source, find_family("bridge", hf_path=str(source)))
    try:
        check_run_config(Path("theirs"), yaml.safe_load(written), spec, source)
    except ValueError as error:
        return str(error)
    return ""


def _shown(value: Any) -> Any:
    if callable(value):
        return getattr(value, "__name__", None) or _shown(value.func)
    return list(value) if isinstance(value, tuple) else value if isinstance(value, int | float | list) else str(value)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    return not isinstance(one, torch.Tensor) and not isinstance(other, torch.Tensor)
