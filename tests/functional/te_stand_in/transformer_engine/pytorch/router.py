"""Names that Megatron-core imports for experts."""


def _absent(*args: object, **kwargs: object) -> None:
    raise NotImplementedError("the stand-in has no experts")


fused_compute_score_for_moe_aux_loss = fused_moe_aux_loss = fused_topk_with_score_function = _absent
