"""Refuses models of another program if hidden states would be missed, or gradients scaled wrongly."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding

from nemo_oprd.megatron.pipeline_schedule import refuse_layer_bypasses
from nemo_oprd.models import ModelSpec, parse_model_spec, read_model_spec
from nemo_oprd.models.rope import Frequencies, Rope

# float32 powers may be rounded differently; another base or scaling differs by far more
_SAME_FREQUENCY = 1e-5


def refuse_unservable(config: Any) -> None:
    """Raises ValueError for a Megatron `TransformerConfig` whose layers can't be observed."""
    refuse_layer_bypasses(config)
    depth = getattr(config, "mtp_num_layers", None)
    if depth:
        raise ValueError(
            f"mtp_num_layers={depth}: layers for multi-token prediction move the final norm to another place and count "
            "as further layers; expected none: build the model with mtp_num_layers=None"
        )


def refuse_freed_sends(config: Any) -> None:
    """Raises ValueError for a schedule that frees outputs before gloo has sent them: other bytes would arrive.

    Megatron's interleaved schedule does so. On CUDA the order of the streams protects the bytes.
    """
    if config.overlap_p2p_comm and config.deallocate_pipeline_outputs and not torch.cuda.is_available():
        raise ValueError(
            "overlap_p2p_comm=True with deallocate_pipeline_outputs=True and no CUDA: Megatron frees a stage's output "
            "while gloo sends it; expected outputs that are kept: set deallocate_pipeline_outputs=False"
        )


def refuse_rescaling_buffers(chunk: Any) -> None:
    """Raises ValueError for a chunk in a DDP wrapper that rescales gradients, whatever the config says by now.

    Megatron's DDP reads `calculate_per_token_loss` when it wraps the model.
    """
    is_ddp = isinstance(getattr(chunk, "buffers", None), list) and hasattr(chunk, "ddp_config")
    buffers = [*chunk.buffers, *getattr(chunk, "expert_parallel_buffers", [])] if is_ddp else []
    factors = {buffer.gradient_scaling_factor for buffer in buffers} - {1.0}
    if factors:
        raise ValueError(
            f"the model's DDP multiplies gradients by {min(factors):g}, because calculate_per_token_loss was False "
            "when DDP wrapped the model; expected 1: set calculate_per_token_loss=True before"
        )
    if buffers and chunk.ddp_config.average_in_collective:
        raise ValueError(
            "average_in_collective=True: data-parallel ranks would average injected gradients, which already contain "
            "1 / counts of the whole batch; expected False: set it in DistributedDataParallelConfig"
        )


def refuse_untrainable(config: Any) -> None:
    """Raises ValueError for a `TransformerConfig` under which Megatron would rescale injected gradients.

    Injected gradients already contain 1 / counts of the whole batch, and are added inside the backward pass.
    """
    if not config.calculate_per_token_loss:
        raise ValueError(
            "calculate_per_token_loss=False: Megatron would divide injected gradients by the number of microbatches "
            "and average them over data-parallel ranks; expected calculate_per_token_loss=True: set it before DDP "
            "wraps the model"
        )
    weights = getattr(config, "moe_aux_loss_coeff", None) or 0.0
    balancing = any(weights) if isinstance(weights, list) else bool(weights)
    if getattr(config, "num_moe_experts", None) and (balancing or getattr(config, "moe_z_loss_coeff", None)):
        raise ValueError(
            f"moe_aux_loss_coeff={config.moe_aux_loss_coeff}, moe_z_loss_coeff={config.moe_z_loss_coeff}: the routers' "
            "losses are multiplied by the number of tokens, by which nothing divides them here; expected none: set "
            "them to 0 and None"
        )
    if config.fp16:
        raise ValueError(
            "fp16=True: the optimizer would divide injected gradients by a loss scale that they do not have; expected "
            "fp16=False: train in bf16 or float32"
        )


def refuse_loss_scale(config: Any, device: torch.device) -> None:
    """Raises ValueError if the optimizer's `grad_scale_func` scales the loss (`OptimizerConfig.loss_scale`)."""
    if config.grad_scale_func is None:
        return
    scale = float(config.grad_scale_func(torch.ones((), device=device)))
    if scale != 1.0:
        raise ValueError(
            f"grad_scale_func multiplies losses by {scale:g}: the optimizer would divide injected gradients by a scale "
            "that they do not have; expected 1: set loss_scale=None in the optimizer's config and train in bf16 or "
            "float32"
        )


def check_rope(model: Any, hf_config: str | Path | dict) -> None:
    """Raises ValueError unless a `GPTModel` rotates by the frequencies of the Hugging Face config.

    The frequencies themselves are compared, because base, scaling and share can be set in several places of a model.
    A wrong base gives no error anywhere else: the model merely predicts worse.
    """
    check_rope_of(model, parse_model_spec(hf_config) if isinstance(hf_config, dict) else read_model_spec(hf_config))


def check_rope_of(model: Any, spec: ModelSpec) -> None:
    """Raises ValueError unless a `GPTModel` rotates by the frequencies of `spec`."""
    rotary: Any = getattr(model, "rotary_pos_emb", None)
    if spec.latent is not None and len(model.decoder.layers):  # each layer has its own
        rotary = model.decoder.layers[0].self_attention.rotary_pos_emb
    _check_frequencies(model, rotary, spec.rope, _rotated_channels(spec, windowed=False))
    if spec.local_rope is not None:
        _check_frequencies(model, rotary.rope_local, spec.local_rope, _rotated_channels(spec, windowed=True))


def _rotated_channels(spec: ModelSpec, *, windowed: bool) -> int:
    """Returns the number of a head's channels, in layers with or without windows, of which RoPE rotates its share."""
    if spec.layer_heads:
        return spec.layer_heads[spec.windowed.index(windowed)].channels
    return spec.rotary_dim


def _check_frequencies(model: Any, rotary: Any, rope: Rope, channels: int) -> None:
    """Raises ValueError unless `rotary`, a rotary embedding of `model`, has the frequencies of `rope`."""
    expected = rope.frequencies(channels)
    kind = getattr(model, "position_embedding_type", None)
    if expected.switch is not None or kind not in ("rope", "yarn") or getattr(rotary, "inv_freq", None) is None:
        raise ValueError(
            f"position_embedding_type={kind} cannot be compared with RoPE of type {rope.kind!r} in the HF config; "
            "expected 'rope' or 'yarn' and a type with one set of frequencies: leave out hf_config, and compare both "
            "models' logits"
        )
    built, factor = _built_rope(rotary, yarn=isinstance(rotary, YarnRotaryEmbedding)), rope.get("factor")
    if (
        built.inv_freq.shape != expected.inv_freq.shape
        or not torch.allclose(built.inv_freq, expected.inv_freq, rtol=_SAME_FREQUENCY, atol=0.0)
        or not math.isclose(built.scale, expected.scale, rel_tol=_SAME_FREQUENCY)
    ):
        scaled = "" if factor is None else f" (factor {factor:g})"
        raise ValueError(
            f"rotary_base={model.rotary_base} with {_describe(built)} is not the RoPE of the HF config, which has "
            f"rope_theta={rope.theta:g}, type {rope.kind!r}{scaled} and {_describe(expected)}; expected "
            "equal frequencies: build the model with the config's rotary_base, scaling and rotary_percent, or take a "
            "model for which Megatron-Bridge has them"
        )


def _built_rope(rotary: Any, *, yarn: bool) -> Frequencies:
    """Returns the frequencies that a `GPTModel`'s rotary embedding computes, on the CPU."""
    if not yarn:
        return Frequencies(rotary.inv_freq.detach().cpu()[None] / (rotary.seq_len_interpolation_factor or 1.0))
    angles, scale = rotary.get_emb(2)  # [2 positions, 1, 1, both halves of the channels]
    return Frequencies(angles[1, 0].chunk(2, dim=-1)[0].detach().cpu(), float(scale))


def _describe(frequencies: Frequencies) -> str:
    scaled = f" and cosines times {frequencies.scale:.4g}" if frequencies.scale != 1.0 else ""
    return f"{frequencies.inv_freq.shape[1]} frequencies down to {float(frequencies.inv_freq[0, -1]):.3g}{scaled}"
