"""The driver's side in NeMo-RL: policies whose workers hold the teacher, for NeMo-RL's own distillation loop.

    settings = Settings.read(config.policy)
    with policies_of(distillation):
        student, teacher, *rest = distillation.setup(config, tokenizer, dataset, validation)

`setup` and `distillation_train` of `nemo_rl.algorithms.distillation` do the rest: data, generation, validation,
checkpoints, logging. Importing this module imports NeMo-RL.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from nemo_rl.models.policy.lm_policy import Policy

from nemo_oprd.integrations.rl_batch import HIDDEN_WEIGHT, OUTPUT_WEIGHT, Settings, with_weights

ACTOR = "nemo_oprd.integrations.rl_actor.OPRDActor"
# the keys under which the loop puts the results of `get_topk_logits`; here these are empty
_TEACHERS_OWN = ("teacher_topk_logits", "teacher_topk_indices")


class OPRDPolicy(Policy):
    """NeMo-RL's policy with `OPRDActor` as its worker and the settings in `policy.oprd`."""

    def __init__(self, *args: Any, config: dict[str, Any], **kwargs: Any) -> None:
        """Builds NeMo-RL's policy. Raises ValueError if the settings are wrong, or the backend is not Megatron's."""
        self._settings = Settings.read(config)
        if not config.get("megatron_cfg", {}).get("enabled", False):
            raise ValueError(
                "policy.megatron_cfg.enabled=false: the hidden states are those of Megatron's layers; expected true: "
                "set it, and policy.dtensor_cfg.enabled=false"
            )
        super().__init__(*args, config=config, worker_extension_cls_fqn=ACTOR, **kwargs)

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
        """Adds the weights of the supervised tokens and calls NeMo-RL's `train`; ValueError as `with_weights`."""
        for name in (*_TEACHERS_OWN, HIDDEN_WEIGHT, OUTPUT_WEIGHT):
            data.pop(name, None)
        with_weights(data, self._settings.loss, gbs or self.cfg["train_global_batch_size"])
        return super().train(data, loss_fn, eval_mode, gbs, mbs, timer, check_dim_skip_keys)


class TeacherInWorkers:
    """Replaces the loop's teacher policy: the student's workers hold the teacher."""

    def prepare_for_lp_inference(self) -> None:
        """Does nothing: there is no model to load."""

    def get_topk_logits(self, data: Any, k: int, **_: Any) -> dict[str, None]:
        """Returns empty entries, which `OPRDPolicy.train` removes from the data again."""
        return {"topk_logits": None, "topk_indices": None}

    def offload_after_refit(self) -> None:
        """Does nothing: there is no model to unload."""


@contextmanager
def policies_of(distillation: Any) -> Iterator[None]:
    """Makes `distillation.setup` build these policies in place of NeMo-RL's, within the context.

    Args:
        distillation: the module `nemo_rl.algorithms.distillation`, whose `setup` has no argument for the worker.
    """

    def make(*args: Any, name_prefix: str = "lm_policy", **kwargs: Any) -> Any:
        if name_prefix == "teacher":
            return TeacherInWorkers()
        return OPRDPolicy(*args, name_prefix=name_prefix, **kwargs)

    original = distillation.Policy
    distillation.Policy = make
    try:
        yield
    finally:
        distillation.Policy = original
