"""Builds models with Megatron-Bridge for this project's loop: `provider=` of a model in the configuration.

`build_from_provider` does for a provider what `build_chunks` does for a `ModelSpec`: it returns this rank's chunks,
whose forward takes a microbatch and returns hidden states. The layers, the norms and the rotary embedding are those
that the provider builds (Transformer Engine's), adopted as in `megatron/adopt.py`. The layout, the precision and the
recomputation are those of the configuration; the weights come from this project's loader (`megatron/weights/hf.py`).
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec

from nemo_oprd.batch.layout import Layout
from nemo_oprd.losses.import_path import import_function
from nemo_oprd.megatron.adopt import adopt
from nemo_oprd.megatron.attention import CappedAttention, NormOfAllHeads, ReplicatedKVAttention
from nemo_oprd.megatron.delta_net import use_torch_kernels
from nemo_oprd.megatron.experts import (
    Router,
    expert_settings,
    release_weights_after_forward,
    use_padded_all_gather,
    use_routing_of,
)
from nemo_oprd.megatron.megatron_bridge import gemma
from nemo_oprd.megatron.megatron_bridge.family import bridge_model, import_bridge
from nemo_oprd.megatron.megatron_bridge.provider_fields import KERNELS, OFF, is_ours
from nemo_oprd.megatron.megatron_bridge.special_models import special
from nemo_oprd.megatron.model import LAYERS_VARIABLE, ModelStage, NotBuilt, mark_parameters, norms_need_no_extra_state
from nemo_oprd.megatron.model_config import PLAIN_KERNELS, ChunkSpan, chunk_spans, chunk_training, layout_settings
from nemo_oprd.megatron.observed_layer import ObservedSequences
from nemo_oprd.megatron.parallel import Role, device
from nemo_oprd.megatron.param_names import mappings_by_name, named_weights
from nemo_oprd.megatron.refusals import check_rope_of
from nemo_oprd.megatron.swiglu import use_swiglu
from nemo_oprd.models import ModelSpec, read_hf_config
from nemo_oprd.models.architecture import LatentAttention

# Multi-latent attention: what Megatron-core does not take from its settings (DeepSeek-V3, GLM 4.7 Flash, Moonlight).
#
# With norms of the narrow states, Megatron-core 0.19 also norms the input of queries that are projected without a
# narrow state (`q_lora_rank=null`, as in Moonlight), which the layer's norm has normed; the models don't.


class DirectQueries(MLASelfAttention):
    """Latent attention whose queries are projected from the layer's normed input."""

    def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
        # Megatron gives this projection no group, so that it would ask the global ones
        chosen = ModuleSpec(submodules.linear_q_proj, params={"tp_group": self.pg_collection.tp})
        return {**super()._resolve_qk_norm_config(submodules), "linear_q_proj": chosen}


def with_direct_queries(block: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a provider's `transformer_layer_spec` whose latent attention is `DirectQueries`."""

    @functools.wraps(block)  # Megatron-Bridge looks at its parameters
    def made(*args: Any, **kwargs: Any) -> Any:
        found = block(*args, **kwargs)
        layers = [_with_direct_queries(layer) for layer in found.layer_specs]
        return dataclasses.replace(found, layer_specs=layers)

    return made


def _with_direct_queries(layer: Any) -> Any:
    attention = layer.submodules.self_attention
    if attention.module is not MLASelfAttention:
        raise ValueError(
            f"Megatron-Bridge builds latent attention as {attention.module.__name__}; expected MLASelfAttention: use "
            "the version of Megatron-Bridge that docs/nemo.md names"
        )
    chosen = dataclasses.replace(attention, module=DirectQueries)
    return dataclasses.replace(layer, submodules=dataclasses.replace(layer.submodules, self_attention=chosen))


def prepare(model: Any, latent: LatentAttention, role: Role) -> None:
    """Sets the epsilon and the groups of a chunk's latent attention.

    The norms of the narrow states get their epsilon: Megatron has one for all norms. The projections to the narrow
    states, which every tensor rank holds, get the ranks' group, by which a checkpoint tells the copies apart.

    Raises:
        ValueError: the softmax's scale is not transformers'.
    """
    for layer in model.decoder.layers:
        scale = layer.self_attention.softmax_scale
        if not math.isclose(scale, latent.scale, rel_tol=1e-6):
            raise ValueError(
                f"Megatron-Bridge multiplies the products of queries and keys by {scale:g}, transformers by "
                f"{latent.scale:g}; expected the same: choose a model with other RoPE settings"
            )
        for name in ("q", "kv"):
            down, up = (getattr(layer.self_attention, f"linear_{name}_{way}_proj", None) for way in ("down", "up"))
            if down is not None:
                down._tp_group = role.member_groups.tp
            if up is not None and hasattr(up, "layer_norm_weight"):
                up.eps = latent.norm_eps


# the first cuDNN whose attention has a learned term in the softmax of packs, according to Transformer Engine 2.20
NEEDED_CUDNN = (9, 18, 0)
# Megatron sets Transformer Engine's choice for the whole process, which may hold models of two families
_OFF = {**OFF, "attention_backend": AttnBackend.auto}


class ProvidedModel(ModelStage):
    """A mixin for a chunk that a provider has built. Its forward returns hidden states, as `DistillingModel`'s."""

    def forward(self: Any, input_ids: torch.Tensor | None, sequences: ObservedSequences) -> torch.Tensor:
        """input_ids [B, S] (this context rank's tokens; ignored after the first stage) -> hidden states [S, B, D].

        The last stage returns the output of the final norm.
        """
        prepared = self._preprocess(input_ids=input_ids, position_ids=None, packed_seq_params=sequences)
        embedded, rotary = prepared[:2]
        if isinstance(rotary, tuple):  # Gemma 4's angles of two kinds of layers have different numbers of channels
            by_token = rotary[0].device.type == "cpu" and not self.config.apply_rope_fusion
            sequences.rotations = tuple(
                _of_every_token(each, sequences.cu_seqlens_q) if by_token else each for each in rotary
            )
            rotary = None
        # Gemma 3 has those of two kinds of layers, in a further dimension; with CUDA, Megatron would wait for the
        # device once per sequence and layer to use them
        one_rotation = rotary is not None and rotary.dim() == 4 and not self.config.apply_rope_fusion
        if one_rotation and rotary.device.type == "cpu":
            rotary = _of_every_token(rotary, sequences.cu_seqlens_q)
        return self.decoder(
            hidden_states=embedded, attention_mask=None, rotary_pos_emb=rotary, packed_seq_params=sequences
        )


def _of_every_token(rotary: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """Turns angles by position [longest, 1, 1, C] into angles of all tokens of a whole pack [S, 1, 1, C].

    With as many rows as tokens, Megatron rotates all sequences at once, otherwise one after the other. Its fused
    kernels need angles by position.
    """
    places = torch.arange(int(cu_seqlens[-1]), device=rotary.device)
    return rotary[places - cu_seqlens[:-1].repeat_interleave(cu_seqlens.diff())]


@functools.cache
def _provided(cls: type) -> type:
    return type(f"Provided{cls.__name__}", (ProvidedModel, cls), {"__module__": __name__})


def make_provider(key: str, provider: str, directory: Path) -> Any:
    """Makes the provider of the HF model in `directory`, without loading weights.

    Args:
        key: for messages, for example "student.provider".
        provider: "bridge" for Megatron-Bridge's own, or MODULE:FUNCTION for a function that returns a provider, or a
            recipe's configuration with one as `model`. The function gets `hf_path` if it has such a parameter.

    Raises:
        ValueError: there is no such function, or its provider is not of the model in `directory`.
    """
    if os.environ.get(LAYERS_VARIABLE) == "local":
        raise ValueError(
            f"{LAYERS_VARIABLE}=local with {key}={provider}: Megatron-Bridge builds Transformer Engine's layers; "
            f"expected transformer_engine: unset {LAYERS_VARIABLE}, or set {key}=own"
        )
    import_bridge(f"{key}={provider}")
    own = bridge_model(read_hf_config(directory), str(directory / "config.json")).provider
    if provider == "bridge":
        return own
    from megatron.bridge.models.gpt_provider import GPTModelProvider

    made = _recipe_provider(f"{key}={provider}", import_function(key, provider, "docs/nemo.md"), directory)
    if not isinstance(made, GPTModelProvider):
        raise ValueError(
            f"{key}={provider} returns a {type(made).__name__}; expected a GPTModelProvider of Megatron-Bridge, or a "
            "recipe's configuration with one as `model`"
        )
    for field in dataclasses.fields(GPTModelProvider):
        name, given, expected = field.name, getattr(made, field.name), getattr(own, field.name)
        if not (name in KERNELS or is_ours(name) or _same(given, expected, own, name)):
            shown, asked = (getattr(value, "__name__", None) or repr(value) for value in (given, expected))
            raise ValueError(
                f"{key}={provider}: {name}={shown}, but {directory / 'config.json'} asks for {asked}; "
                "expected the same model: name the recipe of this model, or another hf_path"
            )
    chosen = copy.copy(own)
    for name in KERNELS:
        if hasattr(made, name):
            setattr(chosen, name, getattr(made, name))
    return chosen


def _recipe_provider(key: str, function: Callable[..., Any], directory: Path) -> Any:
    """Returns the result of a recipe's function, or the `model` of the configuration that it returns."""
    accepts = "hf_path" in inspect.signature(function).parameters
    try:
        made = function(hf_path=str(directory)) if accepts else function()
    except (OSError, ImportError, ValueError) as error:  # a model that is not in the Hub's cache, a missing package
        first = str(error).strip().splitlines()[:1]
        raise ValueError(
            f"{key} failed ({type(error).__name__}: {''.join(first):.160}); expected a provider: the recipes of "
            "Megatron-Bridge read their model's config from the Hugging Face Hub and need all of its packages "
            "(docs/nemo.md)"
        ) from error
    if getattr(made, "peft", None) is not None:
        raise ValueError(
            f"{key}: a recipe with peft={type(made.peft).__name__}, but all weights are trained here; expected a "
            "recipe without adapters: name that of full fine-tuning"
        )
    return getattr(made, "model", made)


def _same(given: Any, expected: Any, own: Any, name: str) -> bool:
    defaults = {
        "kv_channels": own.hidden_size // own.num_attention_heads,
        "num_query_groups": own.num_attention_heads,
        "softmax_scale": (own.kv_channels or own.hidden_size // own.num_attention_heads) ** -0.5,
    }
    if name in defaults:
        given, expected = (defaults[name] if value is None else value for value in (given, expected))
    if name == "linear_attention_freq" and isinstance(given, int) and isinstance(expected, list):
        given = [int((i + 1) % given != 0) for i in range(len(expected))]  # as Megatron reads a number
    if name == "activation_func" and callable(given):  # several modules of Megatron-Bridge define the same one
        points = torch.linspace(-3, 3, 13)
        return torch.equal(given(points), expected(points))
    return bool(given == expected) or (not given and not expected)


def build_from_provider(
    provider: Any,
    spec: ModelSpec,
    role: Role,
    dtype: torch.dtype,
    *,
    depth: int | None = None,
    head: bool = True,
    **training: Any,
) -> list[Any]:
    """Builds this rank's chunks of the model of a `GPTModelProvider`, adopted, with uninitialised weights.

    Args:
        provider: of `spec`'s model; it is copied, not changed.
        depth: keep only layers 1..depth (a frozen teacher needs no deeper ones); None keeps all. All layers are built
            first, so the memory of the deeper ones is needed for a moment.
        head: whether to keep the LM head.
        training: recompute settings of Megatron's config.

    Returns:
        Chunks with the interface of `DistillingModel`, without decoding.

    Raises:
        ValueError: the layout does not fit the model, or the provider builds what this project does not handle.
    """
    layout = role.layout
    spec.check_tensor_parallel(layout.tensor, f"{role.name}: tensor parallel size")
    spec.check_attention_parallel(layout.tensor, layout.context, f"{role.name}.parallel")
    spec.check_expert_parallel(layout.expert, layout.expert_tensor, f"{role.name}.parallel")
    layout.layers_per_stage(spec.num_layers)
    if spec.delta is not None:
        use_torch_kernels()
    if spec.sinks and torch.cuda.is_available():
        _check_fused_attention()
    chunks = []
    for span in chunk_spans(spec, role):
        model = _build_chunk(provider, spec, role, dtype, span, training)
        if span.last and not head:
            del model.output_layer
        _prepare_special_parts(model, spec, role, special(provider).router)
        use_swiglu(model)
        chunks.append(model.to(device()))
    adopt(chunks)
    for span, chunk in zip(chunk_spans(spec, role), chunks, strict=True):
        check_rope_of(chunk, spec)
        for index, number in enumerate(span.layers):
            if depth is not None and number > depth:
                chunk.decoder.layers[index] = NotBuilt(chunk.config, index + 1, role.groups, chunk.vp_stage)
        chunk.register_load_state_dict_post_hook(norms_need_no_extra_state)
        cls: Any = type(chunk)
        chunk.__class__ = _provided(cls)
        chunk.own_attention, chunk.output_cap = spec.attention_cap is not None, spec.output_cap
    _check_parameters(chunks, spec, role, depth)
    mark_parameters(chunks, spec)
    return chunks


def _build_chunk(
    provider: Any, spec: ModelSpec, role: Role, dtype: torch.dtype, span: ChunkSpan, training: dict[str, Any]
) -> Any:
    """Builds the chunk of `span` by the provider, with the settings of this run."""
    layout, made = role.layout, copy.copy(provider)
    settings = {
        **_OFF,
        **layout_settings(spec, role, dtype),
        **({} if torch.cuda.is_available() else PLAIN_KERNELS),
        **_expert_settings(spec, layout),
        **chunk_training({name: value for name, value in training.items() if value is not None}, len(span.layers)),
        "vocab_size": spec.padded_vocab(layout.tensor),
        "seq_length": spec.max_positions,
        # layers of several shapes are stored one by one
        **({"hetereogenous_dist_checkpoint": True} if spec.layer_heads else {}),
    }
    for name, value in settings.items():
        if hasattr(made, name):
            setattr(made, name, value)
    made._pg_collection = role.groups
    block = made.transformer_layer_spec
    if callable(block) and "pp_rank" in inspect.signature(block).parameters:
        # it would ask Megatron's global groups for the stage
        made.transformer_layer_spec = functools.partial(block, pp_rank=role.member_groups.pp.rank())
    chosen = special(provider)
    if chosen.layer_spec is not None:
        made.transformer_layer_spec = chosen.layer_spec(role.member_groups.pp.rank())
    if spec.latent is not None and not spec.latent.query_rank:
        made.transformer_layer_spec = with_direct_queries(made.transformer_layer_spec)
    made.finalize()
    where = span.first, span.last, span.virtual_stage(layout)
    model = made.provide(*where) if chosen.provide is None else chosen.provide(made, role, *where)
    _check_attention(model, type(made).__name__)
    model.vp_stage = span.virtual_stage(layout)
    return model


def _expert_settings(spec: ModelSpec, layout: Layout) -> dict[str, Any]:
    """Returns the fields of a provider that say how a model's experts are split and trained; empty without experts."""
    if spec.experts is None:
        return {}
    float32 = {"moe_router_dtype": "fp32"} if spec.experts.score == "sigmoid" else {"moe_router_dtype": None}
    return {
        # without moe_router_pre_softmax: `Router` routes, and Megatron would check that field against unused ones
        **{name: value for name, value in expert_settings(spec.experts, layout).items() if "router_pre" not in name},
        # computes all experts of a layer in one product, for which the stand-in on CPUs has no kernel
        "moe_grouped_gemm": torch.cuda.is_available(),
        "moe_permute_fusion": torch.cuda.is_available(),
        "moe_router_fusion": False,
        "moe_shared_expert_overlap": False,
        "moe_router_bias_update_rate": 0.0,
        "moe_z_loss_coeff": None,
        "moe_input_jitter_eps": None,
        "moe_expert_capacity_factor": None,
        **float32,
    }


def _prepare_special_parts(model: Any, spec: ModelSpec, role: Role, router: type[Router]) -> None:
    """Makes a chunk's special parts compute as in transformers, and in the groups of `role`. Raises as `prepare`."""
    if spec.latent is not None:
        prepare(model, spec.latent, role)
    if spec.delta is not None:
        _prepare_delta_nets(model, role)
    if spec.whole_qk_norm:
        _norm_all_heads(model, spec, role)
    if spec.num_kv_heads < role.layout.tensor:
        _replicate_kv_heads(model)
    if spec.post_norms:
        gemma.set_epsilon_of_post_norms(model)
    if spec.experts is not None:
        use_routing_of(model, spec.experts, router)
        if role.layout.dispatcher == "allgather":
            use_padded_all_gather(model, role.groups)
        release_weights_after_forward(model)


def _norm_all_heads(model: Any, spec: ModelSpec, role: Role) -> None:
    """Exchanges the norms of queries and keys for those that sum over the tensor ranks of their own role.

    Megatron-Bridge 0.6.2 sums in the process's global group without a gradient (MiniMax M2), or has no norm over ranks
    (OLMoE, by an attention class of its own that nothing else needs).
    """
    for layer in model.decoder.layers:
        attention: Any = layer.self_attention
        for name, heads in (("q_layernorm", spec.num_heads), ("k_layernorm", spec.num_kv_heads)):
            norm = NormOfAllHeads(heads, getattr(attention, name), spec.norm_eps, spec.head_dim, role.member_groups.tp)
            setattr(attention, name, norm)
        attention.__class__ = SelfAttention


def _replicate_kv_heads(model: Any) -> None:
    """Lets attention with fewer key/value heads than ranks gather in its own role's group (`ReplicatedKVAttention`)."""
    for layer in model.decoder.layers:
        attention = layer.self_attention
        if isinstance(attention, SelfAttention):
            assert type(attention).get_query_key_value_tensors is SelfAttention.get_query_key_value_tensors
            cls: Any = type(attention)
            attention.__class__ = _replicated(cls)


@functools.cache
def _replicated(cls: Any) -> Any:
    return type(
        cls.__name__, (ReplicatedKVAttention, cls) if cls is not SelfAttention else (ReplicatedKVAttention,), {}
    )


def _prepare_delta_nets(model: Any, role: Role) -> None:
    """Makes delta nets' norms multiply by the stored weight, as transformers' do, and sum gradients over tensor ranks.

    Every tensor rank norms its own heads by the same weight. Megatron sums that weight's gradients over the ranks only
    with sequence parallelism; without it, a hook does.
    """
    layout, group = role.layout, role.member_groups.tp
    for layer in model.decoder.layers:
        norm = getattr(layer.self_attention, "out_norm", None)
        if norm is None:
            continue
        norm.zero_centered_gamma = False
        if layout.tensor > 1 and not layout.sequence:
            norm.weight.register_hook(functools.partial(_sum_over, group))


def _sum_over(group: dist.ProcessGroup, gradient: torch.Tensor) -> torch.Tensor:
    total = gradient.clone()
    dist.all_reduce(total, group=group)
    return total


def _check_fused_attention() -> None:
    """Raises ValueError if a learned term in the softmax would make attention build the products of all tokens."""
    from transformer_engine.pytorch.utils import get_cudnn_version

    found = get_cudnn_version()
    if found < NEEDED_CUDNN:
        version, needed = (".".join(map(str, each)) for each in (found, NEEDED_CUDNN))
        raise ValueError(
            f"cuDNN {version}, whose attention has no learned term in the softmax of packed sequences: Transformer "
            f"Engine would build a matrix of all products of tokens; expected cuDNN {needed} or later: use a newer "
            "container, or teacher.engine=vllm for a teacher"
        )


def _check_attention(model: Any, provider: str) -> None:
    """Raises ValueError unless the model is a `GPTModel` whose attention reads packed sequences."""
    from megatron.core.extensions.transformer_engine import TEDotProductAttention

    if not isinstance(model, GPTModel):
        raise ValueError(f"{provider} builds a {type(model).__name__}; expected Megatron-core's GPTModel")
    for layer in model.decoder.layers:
        attention = getattr(layer, "self_attention", None)
        if type(attention).__name__ == "GatedDeltaNet":  # Megatron-core's, which reads packed sequences
            continue
        core = getattr(attention, "core_attention", None)
        if not isinstance(core, TEDotProductAttention | CappedAttention):
            raise ValueError(
                f"layer {layer.layer_number} of {provider} has the attention {type(core).__name__}, which does not "
                "read packed sequences; expected TEDotProductAttention: build the model with Transformer Engine's "
                "layers (attention_backend other than local), or choose another model"
            )


def _check_parameters(chunks: list[Any], spec: ModelSpec, role: Role, depth: int | None) -> None:
    """Raises ValueError unless the weight mappings and the parameters that were built have the same names."""
    mappings, built = mappings_by_name(spec), named_weights(chunks)
    here = {layer.layer_number - 1 for chunk in chunks for layer in chunk.decoder.layers}
    local = spec.experts.count // role.layout.expert if spec.experts is not None else 0
    first = local * role.member_groups.ep.rank() if local else 0
    expected = {
        name
        for name, mapping in mappings.items()
        if mapping.layer in here
        and (depth is None or mapping.layer is None or mapping.layer < depth)
        and (mapping.expert is None or first <= mapping.expert < first + local)
    }
    unknown = sorted(set(built) - set(mappings) - {"output_layer.weight"})  # a tied head's copy
    missing = sorted(expected - set(built))
    for found, what in ((unknown, "has parameters without a weight mapping"), (missing, "lacks parameters")):
        if found:
            raise ValueError(
                f"the model that Megatron-Bridge builds {what}, such as {found[0]!r}; expected those of its own "
                f"mappings for {spec.model_type}: use the version of Megatron-Bridge that docs/nemo.md names"
            )
