"""The driver's side of a model."""

from __future__ import annotations

from typing import Any


class Policy:
    """Remembers what it was given; there are no workers."""

    def __init__(
        self,
        cluster: Any,
        config: Any,
        tokenizer: Any,
        name_prefix: str = "lm_policy",
        workers_per_node: Any = None,
        init_optimizer: bool = True,
        weights_path: Any = None,
        optimizer_path: Any = None,
        init_reference_model: bool = True,
        processor: Any = None,
        worker_extension_cls_fqn: str | None = None,
    ) -> None:
        self.cfg, self.name_prefix, self.worker = config, name_prefix, worker_extension_cls_fqn

    def train(
        self,
        data: Any,
        loss_fn: Any,
        eval_mode: bool = False,
        gbs: int | None = None,
        mbs: int | None = None,
        timer: Any = None,
        check_dim_skip_keys: Any = None,
    ) -> dict[str, Any]:
        """What would be sent to the workers."""
        return {"data": data, "loss_fn": loss_fn, "gbs": gbs, "mbs": mbs}
