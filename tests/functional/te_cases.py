"""What workers run that have the stand-in for Transformer Engine on their path (te_stand_in/)."""

from __future__ import annotations

import importlib
import inspect
import os
from enum import Enum
from typing import Any

import torch


def with_layers(layers: str, function: str, **kwargs: Any) -> Any:
    """Calls `function` ("module:name") with NEMO_OPRD_LAYERS=layers."""
    from megatron.core.extensions.transformer_engine import HAVE_TE, TEDotProductAttention

    from nemo_oprd.megatron.model import LAYERS_VARIABLE, layer_backend

    assert HAVE_TE, "the stand-in is not on the path, or Megatron was imported before it was put there"
    TEDotProductAttention.cp_stream = "in place of a CUDA stream, which Megatron makes when there is none"
    os.environ[LAYERS_VARIABLE] = layers
    assert {layer_backend(dtype) for dtype in (torch.float32, torch.bfloat16)} == {layers}
    module, name = function.split(":")
    return getattr(importlib.import_module(module), name)(**kwargs)


def modules_that_found_it(modules: list[str]) -> dict[str, bool]:
    """HAVE_TE of each of these modules."""
    return {module: importlib.import_module(module).HAVE_TE for module in modules}


def signatures() -> dict[str, Any]:
    """The version that the stand-in claims -> the parameters of its classes, spelled as in te_signatures.json."""
    import transformer_engine as te

    found: dict[str, list[str]] = {}
    for name in ("Linear", "LayerNormLinear", "RMSNorm", "DotProductAttention"):
        for method in ("__init__", "forward", "set_context_parallel_group"):
            function = getattr(getattr(te.pytorch, name), method, None)
            if function is not None:
                parameters = list(inspect.signature(function).parameters.values())[1:]
                found[f"{name}.{method}"] = [_spelled(parameter) for parameter in parameters]
    return {te.__version__: found}


def _spelled(parameter: inspect.Parameter) -> str:
    star = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
    default = str(parameter.default) if isinstance(parameter.default, Enum) else repr(parameter.default)
    return star + parameter.name + ("" if parameter.default is parameter.empty else f"={default}")


def parameters(hf_path: str, layout: dict[str, Any]) -> dict[str, tuple]:
    """Rule name -> (Megatron's name, shape, tensor-parallel axis or None, whether sequence parallelism splits it)."""
    import torch.distributed as dist

    from nemo_oprd.batch.layout import Layout
    from nemo_oprd.megatron.model import build_chunks
    from nemo_oprd.megatron.parallel import init_distributed, make_role
    from nemo_oprd.megatron.param_names import local_name
    from nemo_oprd.models import read_model_spec

    init_distributed()
    role = make_role("student", Layout(**layout))
    chunks = build_chunks(read_model_spec(hf_path), role, torch.float32)
    described = {
        local_name(chunk, name): (
            name,
            tuple(parameter.shape),
            parameter.partition_dim if getattr(parameter, "tensor_model_parallel", False) else None,
            bool(getattr(parameter, "sequence_parallel", False)),
        )
        for chunk in chunks
        for name, parameter in chunk.named_parameters()
    }
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, described)
    return {rule: values for stage in everywhere for rule, values in stage.items()}


def module_classes(hf_path: str) -> dict[str, str]:
    """Which classes a layer and the final norm are built of: where in the model -> package and class."""
    from nemo_oprd.batch.layout import Layout
    from nemo_oprd.megatron.model import build_chunks
    from nemo_oprd.megatron.parallel import init_distributed, make_role
    from nemo_oprd.models import read_model_spec

    init_distributed()
    (chunk,) = build_chunks(read_model_spec(hf_path), make_role("student", Layout()), torch.float32)
    layer = chunk.decoder.layers[0]
    named = {
        "": layer,
        "qkv": layer.self_attention.linear_qkv,
        "attention": layer.self_attention.core_attention,
        "proj": layer.self_attention.linear_proj,
        "q norm": layer.self_attention.q_layernorm,
        "k norm": layer.self_attention.k_layernorm,
        "fc1": layer.mlp.linear_fc1,
        "fc2": layer.mlp.linear_fc2,
        "final norm": chunk.decoder.final_layernorm,
    }
    return {
        where: f"{type(module).__module__.split('.')[0]}.{type(module).__name__}" for where, module in named.items()
    }


def sample_after_refit(hf_path: str, prompts: list[list[int]], steps: int) -> list[list[int]]:
    """Greedy responses of the in-process engine (local layers, one rank each) with a TP2 student's weights."""
    from nemo_oprd.batch.layout import Layout
    from nemo_oprd.config.loading import load_config
    from nemo_oprd.megatron.model import build_chunks
    from nemo_oprd.megatron.parallel import init_distributed, make_role
    from nemo_oprd.megatron.weights.hf import HFCheckpoint, gather_hf, load_hf
    from nemo_oprd.models import read_model_spec
    from nemo_oprd.rollout.engine import Request, SamplingParams
    from nemo_oprd.rollout.in_process_engine import MegatronEngine

    init_distributed()
    spec = read_model_spec(hf_path)
    role = make_role("student", Layout(tensor=2))
    chunks = build_chunks(spec, role, torch.float32)
    load_hf(chunks, spec, role, HFCheckpoint(hf_path).__getitem__, hf_path)
    config = load_config("verify", ["student.hf_path=a", "teacher.hf_path=b", "output=c"])
    engine = MegatronEngine(config.rollout, spec, role.layout, eos_ids=(), precision=config.precision)
    engine.update_weights(lambda: gather_hf(chunks, spec, role), 0)
    requests = [Request(prompt) for prompt in prompts]
    rollouts = engine.generate(requests, SamplingParams(0.0, 1.0, steps, (1, 1, 0)))
    return [rollout.response_ids.tolist() for rollout in rollouts]


def load_into_megatrons_own_model(checkpoint: str, hf_path: str) -> list[str]:
    """Strictly loads a checkpoint into Megatron's GPTModel of its TE layers; returns the parameters left unset."""
    from megatron.core import dist_checkpointing
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
    from megatron.core.models.gpt.gpt_model import GPTModel

    from nemo_oprd.batch.layout import Layout
    from nemo_oprd.megatron.model_config import transformer_config
    from nemo_oprd.megatron.parallel import init_distributed, make_role
    from nemo_oprd.models import read_model_spec

    init_distributed()
    spec = read_model_spec(hf_path)
    role = make_role("student", Layout(tensor=2))
    model = GPTModel(
        config=transformer_config(spec, role, torch.float32),
        transformer_layer_spec=get_gpt_layer_with_transformer_engine_spec(qk_layernorm=spec.qk_norm),
        vocab_size=spec.padded_vocab(2),
        max_sequence_length=spec.max_positions,
        share_embeddings_and_output_weights=spec.tied_embeddings,
        position_embedding_type="rope",
        rotary_base=spec.rope.theta,
        pg_collection=role.groups,  # type: ignore[arg-type]
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    state = model.sharded_state_dict(metadata={"dp_cp_group": role.groups.dp_cp})  # type: ignore[attr-defined]
    assert any("norm._extra_state" in key for key in state)
    loaded = dist_checkpointing.load(state, checkpoint)
    del loaded["content_metadata"]  # what is not sharded comes back, too; Megatron's programs take it out
    model.load_state_dict(loaded)
    return [name for name, parameter in model.named_parameters() if not bool(parameter.isfinite().all())]


def products_with_accumulation(overrides: list[str]) -> dict[str, Any]:
    """`verify`: the products that added to the gradient buffer themselves, and the kernels that were chosen."""
    from transformer_engine.pytorch.modules import _AccumulatingLinear

    from nemo_oprd.config.loading import load_config
    from nemo_oprd.rollout.replay import read_rollouts
    from nemo_oprd.run.models import distiller_for
    from nemo_oprd.train import accumulate_gradients

    config = load_config("verify", overrides)
    distiller = distiller_for(config)
    before = _AccumulatingLinear.products
    rollouts = read_rollouts(str(config.rollout.replay), distiller.student.spec.vocab_size)
    batch = distiller.batch(rollouts, distiller.objective_of(0, watch=False))
    accumulate_gradients(distiller, batch)
    return {
        "products": _AccumulatingLinear.products - before,
        "microbatches": len(batch.plan.taught_by),
        "layers": distiller.student.spec.num_layers,
        "kernels": distiller.student.kernels(),
    }
