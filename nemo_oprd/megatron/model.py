"""Builds Megatron model chunks from a `ModelSpec` and a role: their config, layer spec and `GPTModel`.

The model's forward returns hidden states; the LM head runs only in `logits` (generation) and in the output-space
losses. Layers are either Transformer Engine's or Megatron's local layers with this project's RMSNorm and SDPA
attention; `layer_backend()` chooses.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    set_tensor_model_parallel_attributes,
)
from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules, get_transformer_layer_offset
from megatron.core.utils import make_tp_sharded_tensor_for_checkpoint

from nemo_oprd.losses.vocab_parallel import cap_, matmul
from nemo_oprd.megatron.attention import (
    RotatedSelfAttention,
    Rotation,
    SDPAttention,
    decoding_rotation,
    packed_rotation,
)
from nemo_oprd.megatron.experts import expert_block_spec, release_weights_after_forward, use_padded_all_gather
from nemo_oprd.megatron.kernels import apex_accumulates
from nemo_oprd.megatron.kv_cache import DecodeParams
from nemo_oprd.megatron.model_config import chunk_spans, chunk_training, transformer_config
from nemo_oprd.megatron.observed_layer import (
    ObservedLayer,
    ObservedSequences,
    observe_block_output,
    refuse_schedule_plan,
)
from nemo_oprd.megatron.parallel import Role, device
from nemo_oprd.megatron.param_names import mappings_by_name, named_parameters
from nemo_oprd.megatron.swiglu import use_swiglu
from nemo_oprd.models import ModelSpec

# the environment variable by which a user chooses the layers
LAYERS_VARIABLE = "NEMO_OPRD_LAYERS"


def layer_backend(dtype: torch.dtype) -> str:
    """Returns the layers that are built for weights of `dtype`: "transformer_engine" or "local".

    Transformer Engine is chosen where it is installed and CUDA is available, but not for float32: Transformer Engine
    multiplies float32 matrices in TF32, whose 10 bits of mantissa are too few for comparisons to 1e-5, and has no
    float32 attention kernel for context parallelism. The environment variable NEMO_OPRD_LAYERS=local|transformer_engine
    overrides the choice and must be equal on all ranks; use local layers on GPU machines with an incompatible version
    of Transformer Engine.

    Raises:
        ValueError: the variable has another value, or asks for Transformer Engine, which is not installed.
    """
    installed = importlib.util.find_spec("transformer_engine") is not None
    requested = os.environ.get(LAYERS_VARIABLE, "")
    if requested not in ("", "local", "transformer_engine"):
        raise ValueError(f"{LAYERS_VARIABLE}={requested!r}; expected 'local' or 'transformer_engine', or unset it")
    if requested == "transformer_engine" and not installed:
        raise ValueError(
            f"{LAYERS_VARIABLE}=transformer_engine, but the package transformer_engine is not installed; "
            f"install it with scripts/setup_gpu.sh, or set {LAYERS_VARIABLE}=local"
        )
    fits = installed and torch.cuda.is_available() and dtype != torch.float32
    return requested or ("transformer_engine" if fits else "local")


def lacks_transformer_engine(dtype: torch.dtype) -> str | None:
    """Returns a warning if layers of `dtype` on a GPU lack Transformer Engine and nobody asked for that; else None."""
    on_gpu = torch.cuda.is_available() and dtype != torch.float32
    if not on_gpu or os.environ.get(LAYERS_VARIABLE) or importlib.util.find_spec("transformer_engine") is not None:
        return None
    return (
        f"Transformer Engine is not installed in {sys.prefix}: layers are Megatron's local ones, which are slower and "
        f"take more memory; bash scripts/setup_gpu.sh installs it, {LAYERS_VARIABLE}=local says that this is meant"
    )


class RMSNorm(torch.nn.Module):
    """RMSNorm computed in float32, as in the HF models; marks its weight for Megatron's sequence-parallel gradient sum.

    Megatron's own fallback, `WrappedTorchNorm`, rejects sequence parallelism.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=device()))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Normalises [..., D]; keeps the shape."""
        # the weight is multiplied after rounding to the states' dtype, as in the HF models
        return self.weight * torch.nn.functional.rms_norm(hidden, hidden.shape[-1:], None, self.eps)


def _with_bias(row_parallel: type) -> type:
    """Returns `row_parallel` with a bias, for models whose MLP has no biases (Qwen3 with `attention_bias`)."""

    class RowParallelWithBias(row_parallel):  # type: ignore[misc, valid-type]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs["bias"] = True
            super().__init__(*args, **kwargs)

    return RowParallelWithBias


class NotBuilt(MegatronModule):
    """Placeholder without weights for a layer that a role does not need: a teacher's above the supervised ones."""

    def __init__(
        self, config: TransformerConfig, layer_number: int = 1, pg_collection: Any = None, vp_stage: int | None = None
    ) -> None:
        super().__init__(config=config)
        self.layer_number = layer_number + get_transformer_layer_offset(config, vp_stage, pg_collection.pp.rank())

    def forward(self, hidden_states: torch.Tensor, context: Any = None, **_: Any) -> tuple[torch.Tensor, Any]:
        """Returns its input."""
        return hidden_states, context

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """Returns an empty state."""
        return {}


def _layer_spec(spec: ModelSpec, backend: str, *, sparse: bool) -> ModuleSpec:
    if backend == "transformer_engine":
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec

        layer = get_gpt_layer_with_transformer_engine_spec(qk_layernorm=spec.qk_norm)
        if sparse:
            # the norm before the router is a module of its own, because no linear layer follows it directly
            from megatron.core.extensions.transformer_engine import TENorm

            assert spec.experts is not None
            layer.submodules.pre_mlp_layernorm = TENorm
            layer.submodules.mlp = expert_block_spec(spec.experts, backend)
            layer.submodules.sharded_state_dict_keys_map = {}
        layer.submodules.self_attention.module = RotatedSelfAttention
        if spec.proj_bias:
            attention = layer.submodules.self_attention.submodules
            attention.linear_proj = _with_bias(attention.linear_proj)
        return ModuleSpec(module=ObservedLayer, submodules=layer.submodules)
    norm = ModuleSpec(module=RMSNorm)
    # the names of Transformer Engine's fused layers, so that either kind of layer loads a checkpoint of the other
    names = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"}
    if sparse:
        assert spec.experts is not None
        mlp = expert_block_spec(spec.experts, backend)
    else:
        names["pre_mlp_layernorm."] = "mlp.linear_fc1.layer_norm_"
        linear = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
        mlp = ModuleSpec(module=MLP, submodules=linear)
    attention = SelfAttentionSubmodules(
        linear_qkv=ColumnParallelLinear,
        core_attention=SDPAttention,
        linear_proj=_with_bias(RowParallelLinear) if spec.proj_bias else RowParallelLinear,
        q_layernorm=norm if spec.qk_norm else IdentityOp,
        k_layernorm=norm if spec.qk_norm else IdentityOp,
    )
    causal = {"attn_mask_type": AttnMaskType.causal}
    submodules = TransformerLayerSubmodules(
        input_layernorm=norm,
        self_attention=ModuleSpec(module=RotatedSelfAttention, params=causal, submodules=attention),
        self_attn_bda=get_bias_dropout_add,
        pre_mlp_layernorm=norm,
        mlp=mlp,
        mlp_bda=get_bias_dropout_add,
        sharded_state_dict_keys_map=names,
    )
    return ModuleSpec(module=ObservedLayer, submodules=submodules)


# Transformer Engine's norms have an extra state for FP8 (empty here), which local layers and older versions lack.
_NORM_EXTRA_STATE = "norm._extra_state"


def norms_need_no_extra_state(model: torch.nn.Module, keys: Any) -> None:
    """Permits missing extra states of norms in strict mode; a hook after `load_state_dict`."""
    keys.missing_keys[:] = [key for key in keys.missing_keys if not key.endswith(_NORM_EXTRA_STATE)]


class ModelStage:
    """Methods that the chunks of all models add to Megatron's: a mixin before `GPTModel` or a subclass of it."""

    backend = "transformer_engine"  # what the layers are made of; or "local"
    own_attention = False  # whether the layers of Transformer Engine have an attention of this project
    output_cap: float | None = None  # see `losses.vocab_parallel.cap_`

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """Returns Megatron's sharded state dict without the norms' extra states, which checkpoints may lack."""
        state = super().sharded_state_dict(prefix, sharded_offsets, metadata)  # type: ignore[misc]
        return {key: value for key, value in state.items() if not key.endswith(_NORM_EXTRA_STATE)}

    def build_schedule_plan(self, *_: Any, **__: Any) -> None:
        """Raises ValueError: schedule plans are not supported."""
        refuse_schedule_plan()

    def output_weight(self: Any) -> torch.nn.Parameter:
        """Returns the LM head's weight [padded V / TP, D], which may be the embedding's. Only on the last stage."""
        if self.share_embeddings_and_output_weights:
            return self.shared_embedding_or_output_weight()
        return self.output_layer.weight

    def logits(self: Any, hidden: torch.Tensor) -> torch.Tensor:
        """[S, B, D] -> float32 [S, B, padded V], gathered over tensor ranks. Only on the last stage, without gradients.

        In bf16 the product is not rounded, as in the losses, so that the sampled policy is the policy that is trained.
        """
        product = cap_(matmul(hidden.flatten(0, 1), self.output_weight().T), self.output_cap)
        return gather_from_tensor_model_parallel_region(product, group=self.tp_group).view(*hidden.shape[:2], -1)

    def tie_embeddings_and_output_weights_state_dict(
        self: Any,
        sharded_state_dict: dict,
        output_layer_weight_key: str,
        first_stage_word_emb_key: str,
        metadata: dict,
    ) -> None:
        """Stores a tied head on another stage as a copy of the embedding. Megatron's method uses the global groups."""
        if not self.post_process or self.pre_process:
            return
        group = metadata["dp_cp_group"]
        sharded_state_dict[output_layer_weight_key] = make_tp_sharded_tensor_for_checkpoint(
            tensor=self.shared_embedding_or_output_weight(),
            key=first_stage_word_emb_key,
            replica_id=(1, 0, group.rank()),  # 1: a copy, which is not written
            allow_shape_mismatch=True,
            tp_group=self.tp_group,
            dp_cp_group=group,
        )


class DistillingModel(ModelStage, GPTModel):
    """One model chunk of a role. Its forward returns hidden states; `logits` applies the LM head."""

    def __init__(self, *args: Any, spec: ModelSpec, **kwargs: Any) -> None:
        # GPTModel's own rotary embedding is unused: see `attention.py`
        super().__init__(*args, position_embedding_type="rope", rotary_base=spec.rope.theta, **kwargs)
        frequencies = spec.rope.frequencies(spec.head_dim)
        self.frequencies = replace(frequencies, inv_freq=frequencies.inv_freq.to(device()))
        self.register_load_state_dict_post_hook(norms_need_no_extra_state)

    def forward(  # type: ignore[override]
        self, input_ids: torch.Tensor | None, sequences: ObservedSequences | DecodeParams
    ) -> torch.Tensor:
        """input_ids [B, S] (this context rank's tokens; ignored after the first stage) -> hidden states [S, B, D].

        The last stage returns the output of the final norm.
        """
        embedded = self.embedding(input_ids=input_ids, position_ids=None) if self.pre_process else None
        sequences = replace(sequences, rotation=self._rotation(sequences))
        hidden = self.decoder(hidden_states=embedded, attention_mask=None, packed_seq_params=sequences)
        return observe_block_output(self.decoder, hidden, sequences)

    def _rotation(self, sequences: ObservedSequences | DecodeParams) -> Rotation:
        dtype = self.config.params_dtype
        if isinstance(sequences, DecodeParams):
            cache = sequences.cache
            assert cache is not None and cache.positions is not None
            return decoding_rotation(self.frequencies, cache.positions, cache.lengths, dtype)
        assert sequences.positions is not None
        is_long = None
        if self.frequencies.switch is not None:
            assert sequences.sequence_lengths is not None
            is_long = sequences.sequence_lengths > self.frequencies.switch
        return packed_rotation(self.frequencies, sequences.positions, is_long, dtype)


def build_chunks(
    spec: ModelSpec,
    role: Role,
    dtype: torch.dtype,
    *,
    depth: int | None = None,
    head: bool = True,
    local_layers: bool = False,
    **training: Any,
) -> list[DistillingModel]:
    """Builds this rank's model chunks of a role, with uninitialised weights.

    Args:
        depth: build only layers 1..depth (a frozen teacher needs no deeper ones); None builds all.
        head: whether to build the LM head.
        local_layers: build Megatron's local layers even where Transformer Engine is available (decoding needs them for
            `KVCache`).
        training: recompute settings of Megatron's config, and `moe_router_dtype`.

    Raises:
        ValueError: the layout does not fit the model.
    """
    layout = role.layout
    spec.check_tensor_parallel(layout.tensor, f"{role.name}: tensor parallel size")
    spec.check_expert_parallel(layout.expert, layout.expert_tensor, f"{role.name}.parallel")
    layout.layers_per_stage(spec.num_layers)
    backend = "local" if local_layers else layer_backend(dtype)
    if backend == "transformer_engine":
        from megatron.core.extensions.transformer_engine import TENorm as final_norm
    else:
        final_norm = RMSNorm
    accumulates = backend == "local" and apex_accumulates(dtype)
    chunks = []
    for span in chunk_spans(spec, role):
        specs = _layer_specs(spec, backend, span.layers, spec.num_layers if depth is None else depth)
        settings = chunk_training(training, len(span.layers))
        model = DistillingModel(
            config=transformer_config(spec, role, dtype, accumulates=accumulates, **settings),
            transformer_layer_spec=TransformerBlockSubmodules(layer_specs=specs, layer_norm=final_norm),
            vocab_size=spec.padded_vocab(layout.tensor),
            max_sequence_length=spec.max_positions,
            pre_process=span.first,
            post_process=span.last,
            share_embeddings_and_output_weights=spec.tied_embeddings,
            spec=spec,
            pg_collection=role.groups,
            vp_stage=span.virtual_stage(layout),
        )
        model.vp_stage, model.backend = span.virtual_stage(layout), backend
        if span.last and not head:
            del model.output_layer
        if not span.last and isinstance(model.decoder.layers[-1], ObservedLayer):
            model.decoder.layers[-1].stage_ends = True
        if spec.experts is not None and layout.dispatcher == "allgather":
            use_padded_all_gather(model, role.groups)
        release_weights_after_forward(model)
        use_swiglu(model)
        chunks.append(model.to(device()))
    mark_parameters(chunks, spec)
    return chunks


def _layer_specs(spec: ModelSpec, backend: str, numbers: Sequence[int], depth: int) -> list[ModuleSpec]:
    """Returns the specs of a chunk's layers `numbers` (1-based), of which those above `depth` are not built."""
    layers = {sparse: _layer_spec(spec, backend, sparse=sparse) for sparse in {spec.is_sparse(i) for i in numbers}}
    missing = ModuleSpec(module=NotBuilt, params={})
    return [layers[spec.is_sparse(i)] if i <= depth else missing for i in numbers]


def mark_parameters(chunks: list[DistillingModel], spec: ModelSpec) -> None:
    """Marks the parameters that are split over tensor ranks, and those of experts.

    The gradient norm counts a parameter only once if it is not split. Megatron sets these marks when it draws random
    weights, which is turned off.
    """
    mappings = mappings_by_name(spec)
    for name, parameter in named_parameters(chunks).items():
        if name in mappings and mappings[name].expert is not None:
            # Megatron does so only for split experts; but gradients of whole ones are summed over another group, too
            parameter.allreduce = False  # type: ignore[attr-defined]
            # Megatron sets this mark on biases of Transformer Engine's experts that it makes on CPUs: their gradients
            # would be summed over tensor ranks after the sum over the ranks that hold copies
            parameter.sequence_parallel = False  # type: ignore[attr-defined]
        axis = mappings[name].form.axis if name in mappings else 0  # a tied head's copy of the embedding
        # Megatron has already marked the biases of column-parallel layers
        if axis is not None and not hasattr(parameter, "tensor_model_parallel"):
            set_tensor_model_parallel_attributes(parameter, True, axis, 1)
