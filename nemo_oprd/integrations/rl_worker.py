"""`OPRDWorker`: NeMo-RL's Megatron worker with a teacher in its process and the hidden-state loss in its updates.

`train` is NeMo-RL's own. Before a microbatch's forward pass, a hook of the model runs this stage of the teacher on it
and puts the observer into the `packed_seq_params`. The observer injects each layer's gradient in the backward pass. Any
loss function of NeMo-RL can be added to the hidden-state loss.

Importing this module imports NeMo-RL, with Ray and Megatron-Bridge. B sequences, S their tokens on this rank.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.utils import get_model_config
from nemo_rl.models.policy.workers.megatron_policy_worker import MegatronPolicyWorkerImpl

from nemo_oprd.integrations.colocated_teacher import ColocatedTeacher, after_backward, build_teacher, local_hf_config
from nemo_oprd.integrations.hidden_states import HiddenStateDistillation
from nemo_oprd.integrations.rl_batch import HIDDEN_WEIGHT, Settings
from nemo_oprd.integrations.rl_loss import OPRDOutputLoss
from nemo_oprd.megatron.adopt import adopt, observed, unwrapped


class OPRDWorker(MegatronPolicyWorkerImpl):
    """The worker of one rank; `rl_actor.py` makes it a Ray actor."""

    sampling_params: Any  # set by NeMo-RL's constructor

    def __init__(self, config: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Builds NeMo-RL's worker, and the teacher that `policy.oprd` names.

        Raises:
            ValueError: the settings are wrong (raised before it builds a model), or the models are not supported.
        """
        settings = Settings.read(config)
        if config["megatron_cfg"].get("use_linear_ce_fusion_loss", False):
            raise ValueError(
                "policy.megatron_cfg.use_linear_ce_fusion_loss=true: the model would return log-probabilities; "
                "expected logits: set it to false"
            )
        super().__init__(config, *args, **kwargs)
        from megatron.bridge import AutoBridge

        provider = AutoBridge.from_hf_pretrained(settings.teacher).to_megatron_provider()
        adopt([self.model], hf_config=local_hf_config(self.megatron_cfg.model))
        self.distil(build_teacher(self.megatron_cfg.model, provider, self.model), settings)

    def distil(self, teacher: ColocatedTeacher, settings: Settings) -> None:
        """Attaches the teacher to the worker's adopted model. Raises ValueError if the two cannot be compared."""
        self._teacher, self._settings = teacher, settings
        self._oprd = HiddenStateDistillation([self.model], [teacher.model], settings.loss.representation)
        self._loss_fn: Any = None
        self._updates: list[dict[str, float]] = []
        self._training = False
        self.model.register_forward_pre_hook(self._before_forward, with_kwargs=True)

    def train(
        self,
        data: Any,
        loss_fn: Any,
        eval_mode: bool = False,
        gbs: int | None = None,
        mbs: int | None = None,
        check_dim_skip_keys: Any = None,
    ) -> dict[str, Any]:
        """Calls NeMo-RL's `train`; adds the metrics of the hidden states to the result.

        `global_loss` has the weighted sum of both losses. `all_mb_metrics` has `rep/loss` and the metrics of the
        layers (docs/runs.md), as parts that sum up to the value over the data-parallel ranks.

        Raises:
            ValueError: `eval_mode`, for which there is no hidden-state loss, or data without the driver's weights.
            CaptureError: a layer did not receive its gradient; before the optimizer's step.
        """
        if eval_mode:
            raise ValueError(
                "eval_mode=True: OPRDWorker has no loss without updates; expected training: validate on responses"
            )
        if HIDDEN_WEIGHT not in data:
            raise ValueError(
                f"the training data has no {HIDDEN_WEIGHT}; expected the weights of the supervised tokens: let the "
                "driver call nemo_oprd.integrations.rl_batch.with_weights, as OPRDPolicy does"
            )
        self._loss_fn, self._updates, self._training = loss_fn, [], True
        sampling = self.sampling_params
        self._refuse_scaled_states(sampling)
        restore = after_backward(get_model_config(self.model), self._finish)
        try:
            if isinstance(loss_fn, OPRDOutputLoss):
                # NeMo-RL divides the output of every pipeline stage, also hidden states, by the sampling temperature
                self.sampling_params = None
            result = super().train(data, loss_fn, eval_mode, gbs, mbs, check_dim_skip_keys)
        finally:
            self.sampling_params, self._training = sampling, False
            restore()
        return self._with_metrics(result)

    def _refuse_scaled_states(self, sampling: Any) -> None:
        temperature = 1.0 if sampling is None else sampling.temperature
        stages = unwrapped(self.model).pg_collection.pp.size()
        if temperature != 1.0 and stages > 1 and not isinstance(self._loss_fn, OPRDOutputLoss):
            raise ValueError(
                f"policy.generation.temperature={temperature} with pipeline_model_parallel_size={stages}: NeMo-RL "
                "divides the hidden states between the stages by it; expected temperature 1, one stage, or "
                "OPRDOutputLoss: choose one"
            )

    def _finish(self) -> None:
        """Collects the metrics after the last backward pass of an update, on every rank."""
        self._teacher.wait()
        self._updates.append(self._oprd.finish())

    def _before_forward(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict] | None:
        """Runs the teacher's pass and puts the student's observer into `packed_seq_params`; a hook of the model."""
        if not self._training:
            return None
        kwargs = dict(kwargs)
        weight_BS = kwargs.pop("loss_mask")  # under this name NeMo-RL hands HIDDEN_WEIGHT to the model
        tokens_BS, packed = kwargs["input_ids"], kwargs.get("packed_seq_params")
        length = None if packed is not None else tokens_BS.shape[1]
        wants_logits = isinstance(self._loss_fn, OPRDOutputLoss) and self._loss_fn.needs_teacher
        capture = self._oprd.capture(weight_BS)
        logits = self._teacher.forward(
            tokens_BS,
            observed(packed, capture, sequence_length=length),
            kwargs.get("attention_mask"),
            logits=wants_logits,
        )
        if wants_logits:
            self._loss_fn.begin(logits, unwrapped(self.model).pg_collection)
        losses = self._oprd.losses(weight_BS, capture.captured)
        kwargs["packed_seq_params"] = observed(packed, losses, sequence_length=length)
        return args, kwargs

    def _with_metrics(self, result: dict[str, Any]) -> dict[str, Any]:
        """Adds the hidden states' metrics to those of NeMo-RL, which sums values over microbatches and workers."""
        weight = float(self._settings.loss.representation.weight)  # type: ignore[arg-type]
        # NeMo-RL divides the loss of an update by the number of updates, so that the sum over them is their mean
        losses = torch.tensor([weight * update["rep/loss"] / len(self._updates) for update in self._updates])
        result["global_loss"] = result["global_loss"] + losses.to(result["global_loss"])
        # the driver logs the sum of these over all microbatches and workers in place of `global_loss`
        parts = len(self._updates) * self.dp_size
        result["all_mb_metrics"].setdefault("loss", []).extend((losses / self.dp_size).tolist())
        for name in self._updates[0]:
            if name != "loss/total":  # without the loss function's part
                result["all_mb_metrics"][name] = [update[name] / parts for update in self._updates]
        return result

    def prepare_for_training(self, *args: Any, **kwargs: Any) -> None:
        """Calls NeMo-RL's method, and moves the teacher to the device, too."""
        super().prepare_for_training(*args, **kwargs)
        self._teacher.model.to("cuda")

    def offload_before_refit(self) -> None:
        """Calls NeMo-RL's method, and moves the teacher off the device, whose memory the generation may need."""
        self._teacher.model.to("cpu")
        super().offload_before_refit()
