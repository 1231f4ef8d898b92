"""Lists the places where a step makes the host wait for the device, with the reason for each.

A wait of a step at any other place is a mistake: on a GPU the host would fall behind. Nothing of this project that runs
per layer, microbatch, row or token is here.
"""

from __future__ import annotations

from typing import Any

_DISPATCHER = "how many tokens go to each expert, several times per layer with experts and microbatch"
_DELTA_NET = "checks of a pack's lengths, five times per layer with a delta net and microbatch"
# (file, function) of the innermost line, which differ little between versions -> what waits there, and how often
KNOWN_WAITS = {
    ("nemo_oprd/distillation/distiller.py", "resident_microbatches"): (
        "with teacher.resident_microbatches=auto, the number that all ranks agree on, once per step"
    ),
    ("nemo_oprd/distillation/metrics/step_metrics.py", "reduced"): "the sums of a step's metrics, once per step",
    ("megatron/core/optimizer/clip_grads.py", "get_grad_norm_fp32"): "the gradient's norm, twice per step",
    ("nemo_oprd/distillation/student.py", "optimizer_step"): (
        "the same, where Megatron leaves it on the device: whether it is finite, once per step"
    ),
    ("megatron/core/distributed/finalize_model_grads.py", "finalize_model_grads"): (
        "whether the number of tokens is zero, once per step"
    ),
    ("megatron/core/transformer/moe/moe_utils.py", "maybe_move_tensor_to_cpu"): _DISPATCHER,
    ("megatron/core/transformer/moe/moe_utils.py", "permute"): _DISPATCHER,
    ("megatron/core/transformer/moe/token_dispatcher.py", "_maybe_dtoh_and_synchronize"): _DISPATCHER,
    ("megatron/core/transformer/moe/token_dispatcher.py", "dispatch_postprocess"): _DISPATCHER,
    ("megatron/core/models/common/embeddings/rope_utils.py", "_apply_rotary_pos_emb_thd"): (
        "the lengths of a pack, several times per layer with attention and microbatch, where the rotation of "
        "Megatron-Bridge is not fused"
    ),
    ("megatron/core/fusions/fused_bias_geglu.py", "weighted_bias_quick_geglu_impl"): (
        "a constant of gpt-oss's activation, once per layer with experts and microbatch"
    ),
    ("megatron/core/ssm/gated_delta_net/common.py", "_resolve_cu_seqlens"): _DELTA_NET,
    ("megatron/core/ssm/gated_delta_net/gdn.py", "forward"): _DELTA_NET,
    ("megatron/core/pipeline_parallel/p2p_communication.py", "_communicate_shapes"): (
        "the shape of a pipeline message, twice per message"
    ),
    ("megatron/core/pipeline_parallel/p2p_communication.py", "_communicate"): "after a pipeline message, once",
}


def unknown_waits(waits: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One mistake for each place of `waits` that is not known."""
    return [
        {
            "code": "unknown-wait",
            "file": wait["file"],
            "line": wait["line"],
            "text": f"the host waits {wait['count']} times per step{_below(wait)}: {wait['what']}",
        }
        for wait in waits
        if tuple(wait["innermost"]) not in KNOWN_WAITS
    ]


def _below(wait: dict[str, Any]) -> str:
    return f" in {wait['below']}" if wait["below"] else ""
